"""Where a candidate runs: the sites of its runs in each measured phase, from its own declaration and the programs."""

from __future__ import annotations

from collections.abc import Sequence

from harness import messages as m
from harness.errors import ProgramError
from harness.judge import Judge
from harness.program import Call, Program
from harness.workload import Phase


class Placement:
    """A built candidate's sites in the baseline's program of every measured phase."""

    def __init__(self, judge: Judge, built: m.Built) -> None:
        """Raises ProgramError where a run goes through a choice or two of its runs cannot stand together."""
        self.judge = judge
        self.built = built
        self.programs: dict[str, Program] = {}
        for phase in judge.measured_phases():
            program = judge.model.program(phase)
            if self._applies(phase):
                program, _ = program.substitute(built.name, built.regions)
                for sub in program.substitutions:
                    check_choice(built.name, sub.calls)
            self.programs[phase.name] = program

    def _applies(self, phase: Phase) -> bool:
        low, high = self.built.tokens
        kind, dtype = phase.kind, self.judge.workload.dtype
        return low <= phase.tokens <= high and kind in self.built.phases and dtype in self.built.dtypes

    @property
    def target(self) -> str:
        """The deciding phase that must gain: the first of the kind the file names; empty where there is none."""
        found = [p.name for p in self.judge.measured_phases() if p.decides and p.kind == self.built.target]
        return found[0] if found else ""

    def sites(self, phase: str) -> tuple[m.Span, ...]:
        subs = self.programs[phase].sites(self.built.name)
        return tuple(m.Span(phase=phase, start=sub.start, stop=sub.stop) for sub in subs)

    def counts(self) -> dict[str, int]:
        return {phase: len(self.sites(phase)) for phase in self.programs}

    def changed(self) -> tuple[str, ...]:
        """Phases whose program the candidate changes: the only ones measured."""
        return tuple(phase for phase, count in self.counts().items() if count)

    def judged_spans(self, phase: str) -> tuple[m.Span, ...]:
        """The spans to judge in a phase: the first and the last of each kind of run.

        Two runs are of one kind where their regions are the same, and their attributes but a depth index.
        """
        groups: dict[str, list[m.Span]] = {}
        for span in self.sites(phase):
            calls = self.programs[phase].calls[span.start : span.stop]
            kind = [
                (
                    c.region.name,
                    c.layer - calls[0].layer,
                    sorted((k, v) for k, v in c.attrs.items() if k[-5:] != "index"),
                )
                for c in calls
            ]
            groups.setdefault(repr(kind), []).append(span)
        chosen = {(s.start, s.stop): s for group in groups.values() for s in (group[0], group[-1])}
        return tuple(chosen[key] for key in sorted(chosen))

    def complaint(self) -> str:
        """Why the candidate cannot be judged on this workload, with what would mend it; empty where it can."""
        built, workload = self.built, self.judge.workload
        if (kind := self.judge.device.split(":")[0]) not in built.devices:
            return f"{built.name} is for {', '.join(built.devices)}, and this is {kind}"
        regions = {call.region.name for program in self.programs.values() for call in program.calls}
        if unknown := {name.removeprefix("next.") for run in built.regions for name in run} - regions:
            return f"no region is named {', '.join(sorted(unknown))}; a step has {', '.join(sorted(regions))}"
        if not self.target:
            return f"target is {built.target!r}, and no measured phase of that kind decides"
        if workload.dtype not in built.dtypes:
            return f"When.dtype is {', '.join(built.dtypes)}, and {workload.name} is stored in {workload.dtype}"
        if not self.sites(self.target):
            return (
                f"its runs occur nowhere in {self.target}: a run lists regions in execution order, and When.tokens and "
                "When.phases must include the phase"
            )
        if "fp32" not in built.dtypes and not self._matmul():
            return "When.dtype must list fp32: a run without a matrix product is judged in FP32 too"
        return ""

    def _matmul(self) -> bool:
        spans = [span for phase in self.programs for span in self.sites(phase)]
        return any(call.region.matmul for s in spans for call in self.programs[s.phase].calls[s.start : s.stop])


def check_choice(name: str, calls: Sequence[Call]) -> None:
    """A choice inside a longer run could be neither forced nor judged: it must come last in its run."""
    for call in calls[:-1]:
        if call.region.decision is not None:
            raise ProgramError(
                f"{name}: a run may end with {call} or start after it, not run through it, because what follows is "
                "judged with the recorded choices"
            )
