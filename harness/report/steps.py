"""A ladder as steps that add up: every rung's gain, the residual, the ends. Pure functions of records.

A gain is paired: slot i of an arm stands in the same round as slot i of the arm before it, so the median difference
over rounds, one number a process, is free of drift; its interval is Student's t over processes. Medians of differences
need not add up to the difference of medians, and the residual is what they leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from harness.report.wording import Interval
from harness.schema import Ladder, LadderArm
from harness.stats import t_multiple


@dataclass(frozen=True)
class Step:
    """One rung of the waterfall: ms gained over the arm before it (positive is faster), and the ms then left.

    `level_ms` is the baseline less all gains so far; `measured_ms` is the arm's own time. Both gains are None where the
    arm was not measured.
    """

    name: str
    gain: Interval | None
    level_ms: float
    measured_ms: float | None
    processes: int
    note: str


@dataclass(frozen=True)
class Peer:
    """A peer's own time, or why there is none."""

    name: str
    ms: Interval | None
    note: str


@dataclass(frozen=True)
class Waterfall:
    """Steps from the baseline to the final stack: `baseline - gains - residual = final`, in ms."""

    baseline: Interval
    steps: tuple[Step, ...]
    residual_ms: float
    final: Interval
    log_ratio: Interval
    """ln(baseline / final) with its interval over processes; positive is faster."""
    peers: tuple[Peer, ...]
    floor_ms: float | None
    processes: int

    @property
    def gained_ms(self) -> float:
        return self.baseline.mean - self.final.mean

    @property
    def gap_closed(self) -> float | None:
        """Share of the way from the baseline to the floor that the stack has gone; None without a floor below it."""
        if self.floor_ms is None or not self.floor_ms < self.baseline.mean:
            return None
        return self.gained_ms / (self.baseline.mean - self.floor_ms)


def climb(ladder: Ladder) -> Waterfall | None:
    """The ladder's waterfall; None where its baseline holds no sample."""
    base = next((arm for arm in ladder.arms if arm.kind == "baseline"), None)
    baseline = level(base) if base else None
    if base is None or baseline is None:
        return None
    steps: list[Step] = []
    last, level_ms = base, baseline.mean
    for arm in (arm for arm in ladder.arms if arm.kind == "rung"):
        measured = level(arm)
        gain = over_processes(paired(last, arm))
        if gain is not None:
            level_ms -= gain.mean
            last = arm
        own_ms = measured.mean if measured else None
        steps.append(Step(arm.name, gain, level_ms, own_ms, len(process_medians(arm)), arm.note))
    final = level(last) or baseline
    return Waterfall(
        baseline=baseline,
        steps=tuple(steps),
        residual_ms=level_ms - final.mean,
        final=final,
        log_ratio=over_processes(log_ratios(base, last)) or Interval(0.0),
        peers=tuple(Peer(arm.name, level(arm), arm.note) for arm in ladder.arms if arm.kind == "peer"),
        floor_ms=ladder.floor_ms if ladder.floor_ms and math.isfinite(ladder.floor_ms) else None,
        processes=len(process_medians(base)),
    )


def process_medians(arm: LadderArm) -> list[float]:
    """The median slot of every process that has a finite one."""
    held = [[ms for ms in slots if math.isfinite(ms)] for slots in arm.samples_ms]
    return [median(slots) for slots in held if slots]


def level(arm: LadderArm) -> Interval | None:
    """The arm's ms a step: the mean over processes of each one's median slot."""
    return over_processes(process_medians(arm))


def paired(before: LadderArm, after: LadderArm) -> list[float]:
    """ms gained, one number a process: the median over rounds of before less after.

    Where a process's arms hold unequal numbers of slots there are no rounds, and the medians are subtracted.
    """
    gains = []
    for a, b in zip(before.samples_ms, after.samples_ms, strict=False):
        if len(a) == len(b):
            rounds = [x - y for x, y in zip(a, b, strict=True) if math.isfinite(x - y)]
            gains += [median(rounds)] if rounds else []
        else:
            gains += [x - y for x, y in zip(_median(a), _median(b), strict=False)]
    return gains


def log_ratios(first: LadderArm, last: LadderArm) -> list[float]:
    """ln of the ratio of the medians, one number a process."""
    ratios = []
    for a, b in zip(first.samples_ms, last.samples_ms, strict=False):
        ratios += [math.log(x / y) for x, y in zip(_median(a), _median(b), strict=False) if x > 0 and y > 0]
    return ratios


def _median(slots: Sequence[float]) -> list[float]:
    held = [ms for ms in slots if math.isfinite(ms)]
    return [median(held)] if held else []


def over_processes(values: Iterable[float]) -> Interval | None:
    """Mean and two-sided 95% t interval of one number a process."""
    held = list(values)
    if not held:
        return None
    mean = fmean(held)
    if len(held) == 1:
        return Interval(mean)
    half = t_multiple(len(held), 0.025) * stdev(held) / math.sqrt(len(held))
    return Interval(mean, mean - half, mean + half)
