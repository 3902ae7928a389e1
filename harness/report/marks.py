"""Small figures that stand beside a number: a card's bars, a region's bar, an interval. Pure, SVG text."""

from __future__ import annotations

import math

from harness.report.figures import describe, svg
from harness.report.steps import Waterfall
from harness.report.wording import Interval


def headline_svg(fall: Waterfall, uid: str) -> str:
    """Baseline above kept stack, to one scale from zero, with the floor as a line: the card's small bars."""
    most = max(fall.baseline.mean, fall.final.mean) or 1.0
    wide = {ms: 320 * ms / most for ms in (fall.baseline.mean, fall.final.mean)}
    body = f'<rect class="base" x="0" y="2" width="{wide[fall.baseline.mean]:.1f}" height="9" rx="1.5"/>'
    body += f'<rect class="final" x="0" y="15" width="{wide[fall.final.mean]:.1f}" height="9" rx="1.5"/>'
    if fall.floor_ms is not None:
        body += f'<path class="floor" d="M{320 * fall.floor_ms / most:.1f} 0V26"/>'
    return svg(
        body, 320, 26, uid, "Baseline above kept stack, with the roofline floor as a line", describe(fall), False
    )


def interval_svg(log_ratio: Interval, span: float, kind: str) -> str:
    """A log ratio's interval around the line of no change, the axis from -span to span; decoration beside its text."""

    def x(value: float) -> float:
        return 48 + 44 * min(max(value / span, -1.0), 1.0)

    low, high = log_ratio.low, log_ratio.high
    bar = f'<path class="err" d="M{x(low):.1f} 8H{x(high):.1f}"/>' if low is not None and high is not None else ""
    return (
        f'<svg class="fig forest" viewBox="0 0 96 16" aria-hidden="true"><path class="rule" d="M48 1V15"/>{bar}'
        f'<circle class="{kind}" cx="{x(log_ratio.mean):.1f}" cy="8" r="3"/></svg>'
    )


def bar_px(ms: float, most_ms: float, width: int = 48) -> str:
    """The CSS width of a bar of `ms` where `most_ms` fills it."""
    share = ms / most_ms if most_ms > 0 else 0.0
    return f"{width * min(max(share, 0.0), 1.0) if math.isfinite(share) else 0:.1f}px"
