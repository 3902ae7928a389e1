"""One candidate through the gates, in order; the first that fails ends it.

Each gate is a method that returns a GateResult. The candidate runs in children only; this process draws the seeds,
holds the expected values and gives the verdict.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness import decide, engage, guard, stats
from harness import messages as m
from harness.casework import judge_cases, load_made, strip, taken
from harness.errors import DataError, ProgramError, WorkerError
from harness.gates import describe, failed, passed
from harness.judge import Judge, measure_launch
from harness.numerics import judge_step
from harness.placement import Placement
from harness.sandbox import Child
from harness.schema import Attempt, Decision, Gate, GateResult, Launch, OutputError, Status

FRESH_SEEDS = 5
STATUS_OF_ERROR = {
    "timed_out": Status.TIMED_OUT,
    "crashed": Status.CRASHED,
    "candidate": Status.CRASHED,
    "failed": Status.CRASHED,
    "build": Status.BUILD_FAILED,
}


@dataclass(frozen=True)
class Proposed:
    """What is to be judged: the file as copied into the run, its number, and who wrote it."""

    attempt: int
    file: Path
    relative: str
    agent: str
    model: str | None = None
    tokens: int = 0
    cost_usd: float = 0.0


class Evaluation:
    """One candidate on its way through the gates."""

    def __init__(self, judge: Judge, proposed: Proposed, stack: Mapping[str, str]) -> None:
        self.judge = judge
        self.proposed = proposed
        self.stack = dict(stack)
        """Kept rewrites: name to file, in order."""
        self.file = str(proposed.file)
        self.cache = f"{proposed.attempt:03d}"
        self.built: m.Built | None = None
        self.placement: Placement = None  # type: ignore[assignment]  # set by the build gate, before any reader
        self.displaced: tuple[str, ...] = ()
        self.launches: list[Launch] = []
        self.decision: Decision | None = None
        self.persistent_bytes = 0
        self._children: ExitStack
        self._site: Child | None = None
        self._step: Child | None = None

    def run(self, until: Gate = Gate.CONFIRM) -> tuple[GateResult, ...]:
        """Every gate up to `until`, stopping after the first that fails."""
        gates: dict[Gate, Callable[[], GateResult]] = {
            Gate.GUARD: self.guard,
            Gate.BUILD: self.build,
            Gate.NUMERICS: self.numerics,
            Gate.SCREEN: self.screen,
            Gate.ENGAGE: self.engage,
            Gate.STEP_NUMERICS: self.step_numerics,
            Gate.CONFIRM: self.confirm,
        }
        results: list[GateResult] = []
        with ExitStack() as self._children:
            for gate, check in gates.items():
                self.judge.said(f"{gate}")
                start = time.monotonic()
                try:
                    result = check()
                except WorkerError as error:
                    result = failed(gate, STATUS_OF_ERROR[error.kind], str(error))
                except DataError as error:
                    result = failed(gate, Status.INCONCLUSIVE, str(error))
                results.append(result.model_copy(update={"seconds": round(time.monotonic() - start, 3)}))
                if not result.passed or gate is until:
                    break
        return tuple(results)

    def guard(self) -> GateResult:
        complaints = guard.inspect(self.proposed.file)
        if complaints:
            return failed(Gate.GUARD, Status.REFUSED, "; ".join(map(str, complaints[:3])))
        return passed(Gate.GUARD)

    def build(self) -> GateResult:
        judge = self.judge
        built = self._site_child().ask(m.Build(file=self.file), m.Built, judge.limits.build_s)
        self.built = built
        try:
            self.placement = Placement(judge, built)
        except ProgramError as error:
            return failed(Gate.BUILD, Status.BUILD_FAILED, str(error))
        if complaint := self.placement.complaint():
            return failed(Gate.BUILD, Status.BUILD_FAILED, complaint)
        return passed(Gate.BUILD, evidence={"sites": self.placement.counts()})

    def numerics(self) -> GateResult:
        judge = self.judge
        built = self.built
        assert built is not None
        own = judge.workload.dtype
        storages: tuple[m.Storage, ...] = (own, "fp32") if own != "fp32" and "fp32" in built.dtypes else (own,)
        errors: list[OutputError] = []
        counted = 0
        for phase in self.placement.changed():
            spans = self.placement.judged_spans(phase)
            fresh = FRESH_SEEDS if phase == self.placement.target else 1
            decides = judge.workload.phase(phase).decides
            request = m.RecordSites(
                phase=phase,
                spans=spans,
                seeds=tuple(judge.draw("numerics", self.proposed.attempt, phase, i) for i in range(1 + fresh)),
                adversarial=decides,
                storages=storages if decides else storages[:1],
                directory=str(judge.scratch / "cases"),
            )
            recorded = judge.ask_oracle(request, m.Recorded, judge.limits.numerics_s)
            counted += len(recorded.cases)
            child, deadline_s = self._site_child(), judge.limits.numerics_s
            errors += judge_cases(child, self.file, self.placement, recorded.cases, deadline_s)
            shutil.rmtree(judge.scratch / "cases", ignore_errors=True)
            if any(not error.ok for error in errors):
                break
        bad = tuple(error for error in errors if not error.ok)
        evidence = {"cases": counted, "outputs_judged": len(errors), "storages": list(storages)}
        if bad:
            return failed(Gate.NUMERICS, Status.WRONG, describe(bad), errors=bad[:20], evidence=evidence)
        worst = max(errors, key=lambda e: (e.error or 0) / e.budget if e.budget else 0.0, default=None)
        return passed(Gate.NUMERICS, errors=(worst,) if worst else (), evidence=evidence)

    def _site_child(self) -> Child:
        """The child that builds the candidate and runs it at single sites; it never sees an expected value."""
        if self._site is None:
            self._site, _ = self._children.enter_context(self.judge.child({"A": ()}, "sites", self.cache))
        return self._site

    def _step_child(self) -> Child:
        """The child of the whole-step gates: arm A is the kept stack, B the stack with the candidate."""
        if self._step is None:
            self._close_children()
            self._step, opened = self._children.enter_context(self.judge.child(self.arms(), "step", self.cache))
            before = opened.displaced.get("A", ())
            self.displaced = tuple(name for name in opened.displaced.get("B", ()) if name not in before)
        return self._step

    def _close_children(self) -> None:
        self._children.close()
        self._site = self._step = None

    def arms(self) -> dict[str, tuple[str, ...]]:
        assert self.built is not None
        kept = {name: file for name, file in self.stack.items() if name != self.built.name}
        return {"A": tuple(self.stack.values()), "B": (*kept.values(), self.file)}

    def screen(self) -> GateResult:
        launch = self._launch(
            self._step_child(), 0, (self.placement.target,), self.judge.limits.screen_blocks, "screen"
        )
        verdict = decide.screen(launch, self.placement.target, self.judge.rule)
        evidence = {"median_log_ratio": verdict.median}
        if not verdict.passed:
            return failed(Gate.SCREEN, Status.REJECTED, verdict.reason, evidence=evidence)
        return passed(Gate.SCREEN, reason=verdict.reason, evidence=evidence)

    def engage(self) -> GateResult:
        assert self.built is not None
        return engage.prove(self.judge, self._step_child(), self.built, self.placement, self.proposed.attempt)

    def step_numerics(self) -> GateResult:
        judge = self.judge
        errors = []
        for phase in self.placement.changed():
            if not judge.workload.phase(phase).decides:
                continue
            path = judge.scratch / f"step-{phase}"
            seed = judge.draw("step", self.proposed.attempt, phase)
            judge.ask_oracle(m.RecordStep(phase=phase, seed=seed, path=str(path)), m.StepRun, judge.limits.step_s)
            expected = taken(f"{path}.expected")
            made = judge.scratch / "step" / "logits"
            request = m.RunStep(arm="B", phase=phase, seed=seed, path=str(made), forced=str(path))
            self._step_child().ask(request, m.StepRun, judge.limits.step_s)
            path.unlink(missing_ok=True)
            names = strip(expected, "ref.")
            logits = load_made(made, names)
            errors += [
                judge_step(logits[name], expected[f"ref.{name}"], expected[f"oracle.{name}"], phase=phase)
                for name in names
            ]
        bad = tuple(error for error in errors if not error.ok)
        if bad:
            return failed(Gate.STEP_NUMERICS, Status.WRONG, describe(bad), errors=bad)
        return passed(Gate.STEP_NUMERICS, errors=tuple(errors))

    def confirm(self) -> GateResult:
        judge = self.judge
        self._close_children()
        target = self.placement.target
        guards = [phase for phase in self.placement.changed() if phase != target]
        while self.decision is None:
            self._confirm_batch(decide.needed(self.launches, judge.rule), (target, *guards))
            self.decision = decide.confirm(self.launches, target, guards, judge.rule)
        if self.decision.status is Status.KEPT:
            return passed(Gate.CONFIRM, reason=self.decision.reason)
        return failed(Gate.CONFIRM, self.decision.status, self.decision.reason)

    def _confirm_batch(self, count: int, phases: Sequence[str]) -> None:
        """`count` fresh processes: they start side by side, then load, heat and measure one after the other."""
        judge = self.judge
        first = len(self.launches)
        with ExitStack() as stack:
            children = [stack.enter_context(judge.spawn(f"confirm-{first + i}", self.cache)) for i in range(count)]
            for child in children:
                child.wait_ready()
            for index, child in enumerate(children, start=first):
                judge.said(f"confirm {index + 1}/{first + count}")
                seed = judge.draw("confirm", self.proposed.attempt, index)
                child.ask(judge.opening(self.arms(), seed), m.Opened, judge.limits.build_s)
                blocks = judge.limits.confirm_blocks
                self.launches.append(self._launch(child, index, phases, blocks, "confirm"))
                child.close()

    def _launch(self, child: Child, index: int, phases: Sequence[str], blocks: int, label: str) -> Launch:
        launch, held = measure_launch(
            self.judge, child, phases, blocks=blocks, index=index, label=f"{label}/{self.proposed.attempt}"
        )
        self.persistent_bytes = max(self.persistent_bytes, held)
        return launch

    def attempt(
        self, results: tuple[GateResult, ...], *, parent: str | None, started: datetime, device: str, baseline_hash: str
    ) -> Attempt:
        """The ledger line."""
        last = results[-1]
        status = last.status or Status.KEPT
        decision = self.decision or Decision(status=status, reason=last.reason)
        built = self.built
        measured = tuple(self.launches[0].blocks) if self.launches else ()
        return Attempt(
            attempt=self.proposed.attempt,
            name=built.name if built else self.proposed.file.stem,
            regions=built.regions if built else (),
            backend=built.backend if built else "",
            target=self.placement.target if self.placement else "",
            file=self.proposed.relative,
            file_sha256=hashlib.sha256(self.proposed.file.read_bytes()).hexdigest(),
            parent=parent,
            agent=self.proposed.agent,
            model=self.proposed.model,
            tokens=self.proposed.tokens,
            cost_usd=self.proposed.cost_usd,
            summary=built.summary if built else "",
            started=started.astimezone(UTC).isoformat(timespec="seconds"),
            seconds=round((datetime.now(UTC) - started).total_seconds(), 3),
            gates=results,
            launches=tuple(self.launches),
            estimates=tuple(stats.estimate(self.launches, phase) for phase in measured),
            decision=decision,
            displaced=self.displaced,
            sites=self.placement.counts() if self.placement else {},
            persistent_bytes=self.persistent_bytes,
            device=device,
            baseline_hash=baseline_hash,
        )
