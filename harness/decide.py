"""The rule that keeps or discards: pure functions of the measured launches.

Looks are registered before anything is measured, and every number of them is in the Decision. All gains are log
ratios, ln(baseline / candidate). A decision depends on the launches alone, so calling `confirm` after every launch, or
only at the looks, or again from the ledger, gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness import stats
from harness.errors import DataError
from harness.schema import Decision, Launch, Look, Status


@dataclass(frozen=True)
class Calibration:
    """What `processes` launches of the same code on both arms spread by, by phase (standard deviation of log ratio)."""

    processes: int
    spreads: Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """What a candidate must show. Gains, margins and errors are in log ratio: 0.003 is 0.3%."""

    looks: tuple[tuple[int, float], ...] = ((6, 0.0003), (12, 0.0008))
    """(processes, one-sided alpha) of each look; simulated, they keep 0.1% of null changes in all."""
    min_gain: float = 0.003
    guard_margin: float = 0.01
    guard_alpha: float = 0.01
    screen_gain: float = 0.003
    se_floor: float = 0.0005
    """No standard error is taken as smaller: launches that agree by luck to better than 0.05% prove nothing more.
    Under half of what a spread of 0.3% between processes gives at 6: it binds where launches are oddly alike."""
    max_spread: float = 0.1
    """Launches whose standard deviation is above this, and above a third of the gain, measure something else than the
    candidate: never kept."""
    skew_sds: float = 2.0
    """A left skew of the launches beyond so many of its standard deviations for normal samples widens the bound ..."""
    skew_widening: float = 1.5
    """... by this factor on the standard error: a left tail makes the t bound too short where it was not sampled."""
    drift_t: float = 4.0
    """A drift over the launches with a t statistic beyond this lowers the bound to the line's slow end."""
    reject_from: int = 6
    """A look at fewer processes can keep, never reject."""
    calibration: Calibration | None = None
    """Pools the variance with the calibrated one, and never takes it as smaller; see `calibrated`."""


@dataclass(frozen=True)
class Screened:
    """The screen's answer; it drops hopeless candidates and never keeps one."""

    passed: bool
    reason: str
    median: float


CALIBRATED_LOOKS = ((3, 0.0002), (6, 0.0002), (12, 0.0006))
"""The early look's alpha comes out of the same 0.001."""


def calibrated(rule: Rule, launches: Sequence[Launch], phases: Sequence[str]) -> Rule:
    """`rule` with the noise of this device and workload, from launches that had the same code on both arms; a big win
    may then be kept at three processes. Raises DataError for fewer than 6 launches, or where a phase has none."""
    if len(launches) < 6:
        raise DataError(f"{len(launches)} launches do not calibrate: measure at least 6, better 12, with equal arms")
    spreads = {
        phase: float(np.std([stats.launch_log_ratio(launch, phase) for launch in launches], ddof=1)) for phase in phases
    }
    return replace(rule, looks=CALIBRATED_LOOKS, calibration=Calibration(len(launches), spreads))


def screen(launch: Launch, phase: str, rule: Rule) -> Screened:
    """One process: the median block must show `screen_gain`."""
    median = stats.launch_log_ratio(launch, phase)
    if median >= rule.screen_gain:
        return Screened(True, f"{percent(median)} in {phase}: worth measuring", median)
    return Screened(False, f"{percent(median)} in {phase}, below the screen's {percent(rule.screen_gain)}", median)


def needed(launches: Sequence[Launch], rule: Rule | None = None) -> int:
    """Launches until the next look; 0 after the last."""
    sizes = [size for size, _ in (rule or Rule()).looks if size > len(launches)]
    return min(sizes) - len(launches) if sizes else 0


def confirm(launches: Sequence[Launch], target: str, guards: Sequence[str], rule: Rule) -> Decision | None:
    """The answer of the first registered look that gives one; None where more launches are needed.

    A look tests `target` for gain; only where that passes does it test that no phase of `guards` is worse than the
    margin. A guard that fails ends in INCONCLUSIVE at the last look and in more launches before.
    """
    looks: list[Look] = []
    spent = 0.0
    last, _ = rule.looks[-1]
    for size, alpha in rule.looks:
        if len(launches) < size:
            return None
        seen = launches[:size]
        spent += alpha
        try:
            look, doubts = _look(seen, target, alpha, rule)
            failed = _failed_guards(seen, guards, rule) if look.verdict == "keep" else ()
        except DataError as error:
            return Decision(status=Status.INCONCLUSIVE, reason=str(error), looks=tuple(looks), alpha_spent=spent)
        if failed:
            look = look.model_copy(update={"verdict": "continue"})
        looks.append(look)
        if look.verdict != "continue" or size == last:
            status, reason = _answer(look, target, rule, (*failed, *doubts))
            return Decision(status=status, reason=reason, looks=tuple(looks), alpha_spent=round(spent, 9))
    return None


def _look(launches: Sequence[Launch], phase: str, alpha: float, rule: Rule) -> tuple[Look, tuple[str, ...]]:
    """One look at the target, and what makes its samples doubtful, in words."""
    ratios = [stats.launch_log_ratio(launch, phase) for launch in launches]
    mean = float(np.mean(ratios))
    error, multiple = _error(ratios, phase, alpha, rule)
    shift, doubts = 0.0, []
    skew, skew_sd = stats.skewness(ratios)
    if skew < -rule.skew_sds * skew_sd:
        error *= rule.skew_widening
        doubts.append(
            f"the launches are left-skewed ({skew:.1f}), so the error is widened {rule.skew_widening:g} times"
        )
    change, drift_t = stats.drift(ratios)
    if abs(drift_t) > rule.drift_t and abs(change) > 2 * rule.se_floor:
        shift = abs(change) / 2
        doubts.append(f"the launches drift by {percent(change)} from first to last, so the slow end decides")
    bound = mean - shift - multiple * error
    spread = float(np.std(ratios, ddof=1))
    steady = max(rule.max_spread, mean / 3)
    if spread > steady:
        doubts.append(f"the launches spread by {100 * spread:.1f}%, too much to keep anything: find what disturbs them")
    keep = bound > 0 and mean >= rule.min_gain and spread <= steady
    verdict: Literal["keep", "reject", "continue"]
    verdict = "keep" if keep else "reject" if mean < 0 and len(ratios) >= rule.reject_from else "continue"
    look = Look(
        processes=len(ratios),
        mean=mean,
        standard_error=error,
        bound=bound,
        alpha=alpha,
        verdict=verdict,
    )
    return look, tuple(doubts)


def _failed_guards(launches: Sequence[Launch], guards: Sequence[str], rule: Rule) -> tuple[str, ...]:
    """In words, the guarded phases that may be slower than the margin: one-sided 99% bound below it."""
    failed = []
    for phase in guards:
        ratios = [stats.launch_log_ratio(launch, phase) for launch in launches]
        mean = float(np.mean(ratios))
        error, multiple = _error(ratios, phase, rule.guard_alpha, rule)
        low = mean - multiple * error
        margin = max(rule.guard_margin, _calibrated_half_width(len(ratios), phase, rule))
        if low < -margin:
            confidence = f"{100 * (1 - rule.guard_alpha):g}%"
            failed.append(
                f"{phase} may be worse by more than {100 * margin:.1f}%: {percent(mean)}, "
                f"{confidence} bound {percent(low)}"
            )
    return tuple(failed)


def _error(ratios: Sequence[float], phase: str, alpha: float, rule: Rule) -> tuple[float, float]:
    """(standard error of the mean, its t multiple). With a calibration the variances are pooled, by degrees of freedom,
    and never below the calibrated one, so that launches which agree by luck prove no more than they can."""
    n = len(ratios)
    variance, freedom = float(np.var(ratios, ddof=1)), n - 1
    known = rule.calibration.spreads.get(phase) if rule.calibration else None
    if rule.calibration and known is not None:
        more = rule.calibration.processes - 1
        variance = max((freedom * variance + more * known**2) / (freedom + more), known**2)
        freedom += more
    return max(math.sqrt(variance / n), rule.se_floor), stats.t_multiple(freedom + 1, alpha)


def _calibrated_half_width(processes: int, phase: str, rule: Rule) -> float:
    """Of a two-sided 99% interval over so many processes with the calibrated spread; 0 without a calibration."""
    known = rule.calibration.spreads.get(phase) if rule.calibration else None
    if rule.calibration is None or known is None:
        return 0.0
    return stats.t_multiple(rule.calibration.processes, 0.005) * known / math.sqrt(processes)


def _answer(look: Look, target: str, rule: Rule, remarks: Sequence[str]) -> tuple[Status, str]:
    """Status and reason of the look that ends it."""
    found = f"{target} {percent(look.mean)} over {look.processes} processes, bound {percent(look.bound)}"
    if look.verdict == "keep":
        status, why = Status.KEPT, found
    elif look.mean < 0:
        status, why = Status.REJECTED, f"{found}: no gain"
    elif look.bound > 0 and look.mean < rule.min_gain:
        status, why = Status.INCONCLUSIVE, f"{found}: a gain, below the floor of {percent(rule.min_gain)}"
    elif look.bound > 0:
        status, why = Status.INCONCLUSIVE, found
    else:
        status, why = Status.INCONCLUSIVE, f"{found}: a gain is not proven"
    return status, "; ".join((why, *remarks))


def percent(log_ratio: float) -> str:
    """A log ratio as people read it: +1.0% is a step that takes 1/1.01 of the time."""
    return f"{100 * math.expm1(log_ratio):+.2f}%"
