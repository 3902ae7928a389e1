"""What the page's tables show: a run's records brought into rows, one table a function. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.ledger import kept_stack
from harness.report.palette import family
from harness.report.steps import Waterfall, climb
from harness.report.wording import Interval, finite
from harness.schema import (
    Attempt,
    Commit,
    Estimate,
    Gate,
    GateResult,
    Ladder,
    OutputError,
    Profile,
    RegionTime,
    RunConfig,
    Status,
)

LABELS: dict[Status, tuple[str, str, str]] = {
    Status.KEPT: ("\u2713", "kept", "good"),
    Status.REJECTED: ("\u2193", "rejected", "plain"),
    Status.INCONCLUSIVE: ("~", "inconclusive", "warn"),
    Status.WRONG: ("\u2260", "wrong", "bad"),
    Status.REFUSED: ("\u2298", "refused", "bad"),
    Status.BUILD_FAILED: ("\u2715", "build failed", "plain"),
    Status.CRASHED: ("!", "crashed", "bad"),
    Status.TIMED_OUT: ("\u2026", "timed out", "plain"),
    Status.NOT_ENGAGED: ("\u25cb", "not engaged", "bad"),
    Status.NO_CHANGE: ("=", "no change", "plain"),
}
"""Icon, word and tone of a status: the icon and the word say it, the tone only colours them."""


@dataclass(frozen=True)
class RunData:
    """All a report is made of. `sources` maps an attempt's file to its text; `notes` is what a reader must know first.

    `before` and `after` are the profiles of the baseline and of the kept stack, one a phase.
    """

    config: RunConfig
    attempts: tuple[Attempt, ...]
    commits: tuple[Commit, ...]
    ladders: tuple[Ladder, ...]
    before: tuple[Profile, ...]
    after: tuple[Profile, ...]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def kept(self) -> dict[str, Attempt]:
        """The kept stack, by name."""
        return kept_stack(self.attempts)

    def phases(self) -> tuple[str, ...]:
        """Phases that something was measured or tried in, those with a ladder first."""
        named = [
            *(ladder.phase for ladder in self.ladders),
            *(profile.phase for profile in self.before),
            *(attempt.target for attempt in self.attempts),
        ]
        return tuple(dict.fromkeys(filter(None, named)))

    def command(self, attempt: Attempt) -> str:
        """Judges the attempt's file again, through all gates, from inside the run directory."""
        words = ["optimize", "bench", attempt.file, "-w", self.config.workload]
        if self.config.workloads_file:
            words += ["--workloads", self.config.workloads_file]
        return shlex.join([*words, "--seed", str(self.config.seed)])


def log_interval(estimate: Estimate) -> Interval | None:
    """The estimate's log ratio; without ends where one process was measured, None where it is no number."""
    if not finite(estimate.log_ratio):
        return None
    if estimate.processes < 2 or not (finite(estimate.low) and finite(estimate.high)):
        return Interval(estimate.log_ratio)
    return Interval(estimate.log_ratio, estimate.low, estimate.high)


@dataclass(frozen=True)
class AttemptRow:
    """One line of the ledger as it is shown; `estimate` is the target phase's."""

    attempt: Attempt
    icon: str
    word: str
    tone: str
    family: str
    estimate: Estimate | None
    change: Interval | None
    commit: Commit | None
    command: str
    failures: tuple[OutputError, ...]
    unreached: tuple[Gate, ...]
    displaced_by: str | None
    """The later rung that lifted this kept one out, at some site."""

    @property
    def status(self) -> str:
        return self.attempt.decision.status.value

    @property
    def kept(self) -> bool:
        return self.attempt.decision.status is Status.KEPT


def attempt_rows(data: RunData) -> tuple[AttemptRow, ...]:
    commits = {commit.attempt: commit for commit in data.commits}
    displacers = {
        name: attempt.name
        for attempt in data.attempts
        if attempt.decision.status is Status.KEPT
        for name in attempt.displaced
    }
    rows = []
    for attempt in data.attempts:
        icon, word, tone = LABELS[attempt.decision.status]
        estimate = estimate_of(attempt, attempt.target)
        rows.append(
            AttemptRow(
                attempt=attempt,
                icon=icon,
                word=word,
                tone=tone,
                family=family(attempt.backend),
                estimate=estimate,
                change=log_interval(estimate) if estimate else None,
                commit=commits.get(attempt.attempt),
                command=data.command(attempt),
                failures=tuple(e for gate in attempt.gates for e in gate.errors if not gate.passed or not e.ok),
                unreached=unreached(attempt.gates),
                displaced_by=displacers.get(attempt.name) if attempt.decision.status is Status.KEPT else None,
            )
        )
    return tuple(rows)


def unreached(gates: Sequence[GateResult]) -> tuple[Gate, ...]:
    seen = {result.gate for result in gates}
    return tuple(gate for gate in Gate if gate not in seen)


def estimate_of(attempt: Attempt, phase: str) -> Estimate | None:
    return next((estimate for estimate in attempt.estimates if estimate.phase == phase), None)


def status_counts(attempts: Sequence[Attempt]) -> tuple[tuple[Status, int], ...]:
    """Statuses that occur, in the enum's order, with how often."""
    counts = Counter(attempt.decision.status for attempt in attempts)
    return tuple((status, counts[status]) for status in Status if counts[status])


def false_keeps(attempts: Sequence[Attempt]) -> float:
    """Keeps that chance alone is expected to have given: the sum of the alpha that every attempt spent."""
    return sum(attempt.decision.alpha_spent for attempt in attempts if finite(attempt.decision.alpha_spent))


@dataclass(frozen=True)
class Climb:
    """One ladder with what its steps are of: attempts by rung name, and the ms gained by each kind of change."""

    ladder: Ladder
    fall: Waterfall
    rungs: Mapping[str, Attempt]
    kinds: tuple[tuple[str, int, float], ...]
    """(kind, rungs, ms gained), kinds that occur."""
    foreign: bool
    """Measured on another workload than the run's."""

    def confirmed(self, name: str) -> Estimate | None:
        """What the rung brought when it was kept, measured then over the stack of that time."""
        return estimate_of(self.rungs[name], self.ladder.phase) if name in self.rungs else None


def climbs(data: RunData) -> tuple[Climb, ...]:
    """The ladders that hold a baseline, those of the run's own workload first."""
    kept = data.kept()
    found = []
    for ladder in data.ladders:
        fall = climb(ladder)
        if fall is None:
            continue
        rungs = {step.name: kept[step.name] for step in fall.steps if step.name in kept}
        sums: dict[str, tuple[int, float]] = {}
        for step in fall.steps:
            if step.gain is not None:
                kind = family(rungs[step.name].backend if step.name in rungs else None)
                count, gained = sums.get(kind, (0, 0.0))
                sums[kind] = (count + 1, gained + step.gain.mean)
        kinds = tuple((kind, *sums[kind]) for kind in sums)
        found.append(Climb(ladder, fall, rungs, kinds, ladder.workload != data.config.workload))
    return tuple(sorted(found, key=lambda made: made.foreign))


@dataclass(frozen=True)
class RegionRow:
    """A region, or a rewrite that took its place, before and after; None where it did not run.

    `mark` is `replaced` (no call left), `partly` (fewer calls), `rewrite`, or empty.
    """

    name: str
    run: str
    mark: str
    before: RegionTime | None
    after: RegionTime | None
    share_before: float | None
    share_after: float | None


@dataclass(frozen=True)
class RegionTable:
    """One phase's regions, in the order in which they run, and the two profiles they come from."""

    before: Profile
    after: Profile | None
    rows: tuple[RegionRow, ...]


def profiled_ms(profile: Profile) -> float:
    """The regions and what no region owns."""
    return sum(region.time_ms for region in profile.regions) + profile.unattributed_ms


def region_tables(data: RunData) -> tuple[RegionTable, ...]:
    after = {profile.phase: profile for profile in data.after}
    return tuple(region_table(profile, after.get(profile.phase)) for profile in data.before)


def region_table(before: Profile, after: Profile | None) -> RegionTable:
    """Regions matched by name; a rewrite's row (`name: region + region`) stands after the last region of its run."""
    left = {region.region: region for region in after.regions} if after else {}
    names = [region.region for region in before.regions]
    rewrites: dict[str, list[RegionTime]] = {}
    for name, region in left.items():
        if name not in names:
            run = [part.strip().removeprefix("next.") for part in name.partition(": ")[2].split("+")]
            place = next((part for part in reversed(run) if part in names), names[-1] if names else "")
            rewrites.setdefault(place, []).append(region)
    rows = []
    for region in before.regions:
        now = left.get(region.region)
        rows.append(_row(region.region, _mark(region, now, after), region, now, before, after))
        rows += [_row(made.region, "rewrite", None, made, before, after) for made in rewrites.get(region.region, ())]
    return RegionTable(before, after, tuple(rows))


def _mark(was: RegionTime, now: RegionTime | None, after: Profile | None) -> str:
    if after is None:
        return ""
    if now is None:
        return "replaced"
    return "partly" if now.calls < was.calls else ""


def _row(
    label: str, mark: str, was: RegionTime | None, now: RegionTime | None, before: Profile, after: Profile | None
) -> RegionRow:
    name, _, run = label.partition(": ") if mark == "rewrite" else (label, "", "")
    return RegionRow(name, run, mark, was, now, _share(was, before), _share(now, after))


def _share(region: RegionTime | None, profile: Profile | None) -> float | None:
    whole = profiled_ms(profile) if profile else 0.0
    return region.time_ms / whole if region and whole > 0 else None
