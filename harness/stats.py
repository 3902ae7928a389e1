"""Samples to intervals, all in log ratios: ln(baseline / candidate), positive where the candidate is faster.

The unit of replication is the process launch: placement and clocks shift both arms of one process alike, by amounts
that no pairing inside it can see, so the interval is Student's t over one number a launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from harness.errors import DataError
from harness.schema import Block, Estimate, Launch

UNKNOWN_HALF_WIDTH = 1.0
"""Half-width of the interval of a single launch, whose spread between launches is unknown: a factor e either way."""


def block_log_ratio(block: Block) -> float:
    """mean ln A - mean ln B over the four slots: a drift that is linear in time cancels in ABBA and in BAAB."""
    return _mean_log(block, "A") - _mean_log(block, "B")


def launch_log_ratio(launch: Launch, phase: str) -> float:
    """Median over the untainted blocks of one process; raises DataError where there is none."""
    return float(np.median([block_log_ratio(block) for block in clean_blocks(launch, phase)]))


def clean_blocks(launch: Launch, phase: str) -> tuple[Block, ...]:
    """The untainted blocks of one phase; raises DataError, naming what spoiled the others, where there is none."""
    measured = launch.blocks.get(phase, ())
    clean = tuple(block for block in measured if not block.tainted)
    if not clean:
        why = ", ".join(sorted({block.tainted for block in measured})) or "it was not measured"
        raise DataError(
            f"process {launch.index} has no clean block of {phase} ({why}): measure again on a quiet device"
        )
    return clean


def estimate(launches: Sequence[Launch], phase: str) -> Estimate:
    """Both arms of one phase: the median over processes of each process's median slot, and the mean log ratio with
    its two-sided 95% t interval over processes. One process alone tells no spread: its interval is a factor e wide.

    Processes without a clean block are left out, and not counted; raises DataError where no other is left.
    """
    usable = [launch for launch in launches if any(not block.tainted for block in launch.blocks.get(phase, ()))]
    launches = usable or launches
    ratios = [launch_log_ratio(launch, phase) for launch in launches]
    mean = float(np.mean(ratios))
    half = t_multiple(len(ratios), 0.025) * standard_error(ratios) if len(ratios) > 1 else UNKNOWN_HALF_WIDTH
    return Estimate(
        phase=phase,
        processes=len(launches),
        baseline_ms=_median_ms(launches, phase, "A"),
        candidate_ms=_median_ms(launches, phase, "B"),
        log_ratio=mean,
        low=mean - half,
        high=mean + half,
    )


def standard_error(ratios: Sequence[float]) -> float:
    """Of the mean, from the sample's own spread (n - 1)."""
    return float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios))


@functools.cache
def t_multiple(processes: int, alpha: float) -> float:
    """One-sided: a Student t with processes - 1 degrees of freedom exceeds it with probability alpha."""
    import scipy.stats  # over a second to import, which commands that judge nothing need not wait for

    return float(scipy.stats.t.isf(alpha, processes - 1))


def skewness(ratios: Sequence[float]) -> tuple[float, float]:
    """(G1, its standard deviation for normal samples): the adjusted Fisher-Pearson coefficient; 0 where all are equal
    to within rounding, or fewer than three."""
    n = len(ratios)
    if n < 3:
        return 0.0, math.inf
    sd = math.sqrt(6 * n * (n - 1) / ((n - 2) * (n + 1) * (n + 3)))
    values = np.asarray(ratios, dtype=float)
    if np.ptp(values) <= 1e-12:
        return 0.0, sd
    import scipy.stats

    return float(scipy.stats.skew(values, bias=False)), sd


def drift(ratios: Sequence[float]) -> tuple[float, float]:
    """(change of the fitted line from first to last, its t statistic): least squares on the order of the launches."""
    n = len(ratios)
    values = np.asarray(ratios, dtype=float)
    if n < 3 or np.ptp(values) <= 1e-12:
        return 0.0, 0.0
    at = np.arange(n) - (n - 1) / 2
    slope = float(at @ values / (at @ at))
    left = values - values.mean() - slope * at
    error = math.sqrt(float(left @ left) / (n - 2) / float(at @ at))
    change = slope * (n - 1)
    return change, slope / error if error > 0 else math.copysign(math.inf, slope)


def _mean_log(block: Block, arm: str) -> float:
    times = [ms for name, ms in zip(block.order, block.ms, strict=True) if name == arm]
    if not all(0 < ms < math.inf for ms in times):
        raise DataError(f"a slot of arm {arm} took {times} ms: a time is positive and finite; measure again")
    return sum(math.log(ms) for ms in times) / len(times)


def _median_ms(launches: Sequence[Launch], phase: str, arm: str) -> float:
    return float(
        np.median(
            [
                np.median(
                    [
                        ms
                        for block in clean_blocks(launch, phase)
                        for name, ms in zip(block.order, block.ms, strict=True)
                        if name == arm
                    ]
                )
                for launch in launches
            ]
        )
    )
