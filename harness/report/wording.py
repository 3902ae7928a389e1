"""Numbers as people read them: milliseconds, ratios, intervals, sizes. Pure; None and non-finite give no text."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUS = "\u2212"
TIMES = "\u00d7"
LARGEST_LOG = 50.0
"""A log ratio beyond this is no ratio of two measured times."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval; the ends are None where one process alone was measured."""

    mean: float
    low: float | None = None
    high: float | None = None


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def places(value: float | None, digits: int = 4) -> int:
    """Decimals with which `value` shows `digits` significant digits, 6 at the most."""
    if value is None or not math.isfinite(value) or value == 0:
        return digits - 1
    return min(max(digits - 1 - math.floor(math.log10(abs(value))), 0), 6)


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """A decimal with a true minus sign, and none before a zero; `sign` puts a plus before what is larger."""
    text = f"{abs(value):,.{decimals}f}"
    if not any(digit in "123456789" for digit in text):
        return text
    return (MINUS if value < 0 else "+" if sign else "") + text


def ms(value: float | None, decimals: int | None = None) -> str | None:
    """Milliseconds without the unit."""
    if value is None or not math.isfinite(value):
        return None
    return fixed(value, places(value) if decimals is None else decimals)


def ratio(log_ratio: float | None, decimals: int = 3) -> str | None:
    """`2.712x` from a log ratio."""
    if log_ratio is None or not math.isfinite(log_ratio) or abs(log_ratio) > LARGEST_LOG:
        return None
    return fixed(math.exp(log_ratio), decimals) + TIMES


def ratio_decimals(interval: Interval) -> int:
    """Decimals that show two digits of the interval's half-width, from 2 to 3."""
    if interval.low is None or interval.high is None or not finite(interval.high - interval.low):
        return 2
    return min(max(places(math.expm1((interval.high - interval.low) / 2), 2), 2), 3)


def between(low: float | None, high: float | None, decimals: int, *, exp: bool = False) -> str | None:
    """`[low, high]`; `exp` takes them for logs. None where an end is missing or no number."""
    if low is None or high is None or not (finite(low) and finite(high)):
        return None
    if exp:
        if max(abs(low), abs(high)) > LARGEST_LOG:
            return None
        low, high = math.exp(low), math.exp(high)
    return f"[{fixed(low, decimals)}, {fixed(high, decimals)}]"


def ratio_text(log_ratio: Interval) -> tuple[str | None, str | None]:
    """(`2.71x`, `[2.69, 2.73]`) with decimals that suit the interval."""
    decimals = ratio_decimals(log_ratio)
    return ratio(log_ratio.mean, decimals), between(log_ratio.low, log_ratio.high, decimals, exp=True)


def seconds(value: float | None) -> str | None:
    """Seconds, minutes or hours, with unit."""
    if value is None or not math.isfinite(value):
        return None
    if value < 10:
        return f"{value:.1f}\u00a0s"
    if value < 120:
        return f"{value:.0f}\u00a0s"
    if value < 7200:
        return f"{value / 60:.0f}\u00a0min"
    return f"{value / 3600:.1f}\u00a0h"


def scaled(value: float | None, unit: str, step: int = 1000) -> str | None:
    """Three digits with an SI prefix, or a binary one where `step` is 1024: `4.21 TB/s`, `22.0 GiB`."""
    if value is None or not math.isfinite(value):
        return None
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi") if step == 1024 else ("", "k", "M", "G", "T", "P")
    power = 0
    while abs(value) >= step and power < len(prefixes) - 1:
        value /= step
        power += 1
    return f"{value:.{0 if not power else min(places(value, 3), 2)}f}\u00a0{prefixes[power]}{unit}"


def precise(value: float | None) -> str | None:
    """Three significant digits, in exponent form where small: errors and probabilities."""
    return f"{value:.3g}".replace("-", MINUS) if value is not None and math.isfinite(value) else None


def percent(share: float | None) -> str | None:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}%" if share is not None and math.isfinite(share) else None
