"""The page's figures: waterfalls, headline bars, interval marks. Pure functions of records that return SVG text.

What a colour says is said again by a pattern and in words. Colours are CSS variables of the page; a figure that stands
alone brings them along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from harness.report.palette import PALETTE, STYLE, class_of, family
from harness.report.steps import Peer, Step, Waterfall, climb
from harness.report.wording import between, fixed, places
from harness.schema import Ladder

NARROW = 640
"""Below this width a row's label stands above its bar, not beside it."""
OFF_SCALE = 1.35
"""A peer this many times slower than the slowest arm is an arrow at the edge, or it would squeeze the steps."""


@dataclass(frozen=True)
class Frame:
    """Where a waterfall's parts stand: px of the plot's edges, row height, and ms at the right edge."""

    width: int
    left: float
    right: float
    row: int
    bar: int
    top: int
    most_ms: float
    decimals: int

    @property
    def narrow(self) -> bool:
        return self.width < NARROW

    def x(self, ms: float) -> float:
        return self.left + (self.right - self.left) * max(ms, 0.0) / self.most_ms

    def middle(self, index: int) -> float:
        """The bar's vertical middle in row `index`."""
        return self.top + index * self.row + (self.row - self.bar / 2 - 6 if self.narrow else self.row / 2)


def frame(fall: Waterfall, width: int) -> Frame:
    slowest = max([fall.baseline.mean, fall.final.mean, *(step.level_ms for step in fall.steps)])
    near = [peer.ms.mean for peer in fall.peers if peer.ms and peer.ms.mean <= OFF_SCALE * slowest]
    ends = [end.high for end in (fall.baseline, fall.final) if end.high is not None]
    most = max([slowest, *near, *(min(end, OFF_SCALE * slowest) for end in ends)]) * 1.03 or 1.0
    decimals = places(fall.baseline.mean)
    if width < NARROW:
        return Frame(width, 1, width - 8, 46, 14, 26, most, decimals)
    side = 236 if width > 900 else 208
    return Frame(width, side, width - side, 36, 20, 28, most, decimals)


def waterfall_svg(
    ladder: Ladder,
    backends: Mapping[str, str] | None = None,
    *,
    width: int = 1080,
    uid: str = "waterfall",
    standalone: bool = True,
) -> str:
    """One ladder from the baseline down to the final stack; `backends` names each rung's. Empty without a baseline.

    `uid` must be unique on a page. `standalone` adds the namespace, the colours and a background.
    """
    fall = climb(ladder)
    if fall is None:
        return ""
    known = backends or {}
    box = frame(fall, width)
    rows = len(fall.steps) + 3 + len(fall.peers) + (fall.floor_ms is not None)
    end = box.top + rows * box.row
    names = [step.name for step in fall.steps]
    parts = [*_rows(box, fall, known, uid), *_references(box, fall, len(names) + 3)]
    parts.sort(key=lambda part: part.startswith("<text"))  # words last, so that no line runs through them
    parts.insert(0, _axis(box, end))
    parts.append(_legend(box, end + 8, {class_of(known.get(name)) for name in names}, uid))
    title = f"{ladder.workload}, {ladder.phase}: milliseconds a step, from the baseline to the kept stack"
    return svg("".join(parts), width, end + 36, uid, title, describe(fall), standalone)


def describe(fall: Waterfall) -> str:
    """The waterfall in one sentence."""
    d = places(fall.baseline.mean)
    steps = ", ".join(f"{s.name} {fixed(-s.gain.mean, d, sign=True)} ms" for s in fall.steps if s.gain) or "no rung"
    floor = f" The roofline floor is {fixed(fall.floor_ms, d)} ms." if fall.floor_ms is not None else ""
    return (
        f"Baseline {fixed(fall.baseline.mean, d)} ms; {steps}; residual {fixed(-fall.residual_ms, d, sign=True)} ms; "
        f"final {fixed(fall.final.mean, d)} ms.{floor}"
    )


def svg(body: str, width: float, height: float, uid: str, title: str, text: str, standalone: bool) -> str:
    """An image of `title` and description `text`, for eyes and for screen readers."""
    head = f'<title id="{uid}-t">{escape(title)}</title><desc id="{uid}-d">{escape(text)}</desc>{_patterns(uid)}'
    if standalone:
        style = PALETTE + "\n" + STYLE
        head += f'<style>{style}</style><rect width="100%" height="100%" fill="var(--paper)"/>'
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    size = f'width="{width:g}" height="{height:g}" ' if standalone else ""
    return (
        f'<svg{space} class="fig" {size}viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-labelledby="{uid}-t {uid}-d">{head}{body}</svg>'
    )


def _patterns(uid: str) -> str:
    """Textures laid over a bar: diagonals for a library, dots for plain PyTorch."""
    size = 'width="7" height="7" patternUnits="userSpaceOnUse"'
    return (
        f'<defs><pattern id="{uid}-library" {size}><path class="tex" d="M-2 9L9 -2M-2 2L2 -2M5 9L9 5"/></pattern>'
        f'<pattern id="{uid}-torch" {size}><circle class="dot" cx="2" cy="2" r="1.3"/>'
        f'<circle class="dot" cx="5.5" cy="5.5" r="1.3"/></pattern></defs>'
    )


def _bar(box: Frame, index: int, low: float, high: float, kind: str, uid: str, tip: str, extra: str = "") -> str:
    """A bar between two ms, never thinner than a pixel; the texture says its kind without colour."""
    x, w = box.x(low), max(box.x(high) - box.x(low), 1.0)
    shape = f'x="{x:.1f}" y="{box.middle(index) - box.bar / 2:.1f}" width="{w:.1f}" height="{box.bar}" rx="1.5"'
    made = f'<rect class="{kind}{extra}" {shape}><title>{escape(tip)}</title></rect>'
    if kind in ("library", "torch"):
        made += f'<rect fill="url(#{uid}-{kind})" {shape} pointer-events="none"/>'
    return made


def _label(
    box: Frame, index: int, name: str, kind: str, value: str, interval: str | None, *, bold: bool = False
) -> str:
    """Name and kind at the left, value and interval at the right; above the bar where it is narrow."""
    room = 27 if box.narrow else round(box.left / 8)
    shown = name if len(name) <= room else name[: room - 1] + "\u2026"
    weight = ' class="b"' if bold else ""
    y = box.middle(index)
    if box.narrow:
        y -= box.bar / 2 + 6
        note = f'<tspan class="mut"> {escape(kind)}</tspan>' if kind and len(shown) + len(kind) < 34 else ""
        tail = f'<text class="e b" x="{box.width - 8}" y="{y:.1f}">{escape(value)}</text>'
        return f'<text{weight} x="1" y="{y:.1f}">{escape(shown)}{note}</text>{tail}'
    lift = 2 if kind else -4
    made = f'<text{weight} x="0" y="{y - lift:.1f}">{escape(shown)}<title>{escape(name)}</title></text>'
    made += f'<text class="mut" x="0" y="{y + 12:.1f}">{escape(kind)}</text>' if kind else ""
    made += f'<text class="e b" x="{box.right + 96:.1f}" y="{y + 4:.1f}">{escape(value)}</text>'
    return made + (f'<text class="mut" x="{box.right + 106:.1f}" y="{y + 4:.1f}">{interval}</text>' if interval else "")


def _rows(box: Frame, fall: Waterfall, known: Mapping[str, str], uid: str) -> list[str]:
    d = box.decimals
    base = fall.baseline
    made = [
        _bar(box, 0, 0, base.mean, "base", uid, f"baseline: {fixed(base.mean, d)} ms"),
        _whisker(box, 0, base.low, base.high),
        _label(box, 0, "Baseline", "", f"{fixed(base.mean, d)} ms", between(base.low, base.high, d), bold=True),
    ]
    level = base.mean
    for index, step in enumerate(fall.steps, start=1):
        made.append(_join(box, index, level))
        made += _rung(box, index, level, step, known.get(step.name), uid)
        level = step.level_ms
    index = len(fall.steps) + 1
    final, left = fall.final, fall.residual_ms
    low, high = sorted((level, final.mean))
    made += [
        _join(box, index, level),
        _bar(box, index, low, high, "hollow", uid, f"residual: {fixed(-left, d, sign=True)} ms"),
        _label(box, index, "Residual", "what the steps leave", f"{fixed(-left, d, sign=True)} ms", None),
        _join(box, index + 1, final.mean),
        _bar(box, index + 1, 0, final.mean, "final", uid, f"kept stack: {fixed(final.mean, d)} ms"),
        _whisker(box, index + 1, final.low, final.high),
        _label(
            box, index + 1, "Kept stack", "", f"{fixed(final.mean, d)} ms", between(final.low, final.high, d), bold=True
        ),
    ]
    return made


def _rung(box: Frame, index: int, level: float, step: Step, backend: str | None, uid: str) -> list[str]:
    """The rung's bar, whiskers and words."""
    what = f"{backend} {family(backend)}" if family(backend) == "kernel" else family(backend) if backend else ""
    if step.gain is None:
        return [_label(box, index, step.name, what or "rung", "not measured", None)]
    gain = step.gain
    text = f"{fixed(-gain.mean, box.decimals, sign=True)} ms"
    interval = between(_minus(gain.high), _minus(gain.low), box.decimals)
    unsure = gain.low is not None and gain.high is not None and gain.low <= 0 <= gain.high
    said = "within noise" if unsure else "slower" if gain.mean < 0 else ""
    tip = " ".join(filter(None, (f"{step.name}: {text}", interval, said)))
    low, high = sorted((level, step.level_ms))
    made = [_bar(box, index, low, high, class_of(backend), uid, tip, " slower" if said == "slower" else "")]
    if gain.low is not None and gain.high is not None:
        made += [_whisker(box, index, level - gain.high, level - gain.low)]
    return [*made, _label(box, index, step.name, ", ".join(filter(None, (what, said))), text, interval)]


def _minus(value: float | None) -> float | None:
    return None if value is None else -value


def _join(box: Frame, index: int, ms: float) -> str:
    """The thin line that carries a level down from one bar to the next."""
    x, half = box.x(ms), box.bar / 2
    return f'<path class="join" d="M{x:.1f} {box.middle(index - 1) + half:.1f}V{box.middle(index) - half:.1f}"/>'


def _whisker(box: Frame, index: int, low: float | None, high: float | None) -> str:
    """A 95% bar, with a light edge so that it shows on a dark one; empty without an interval."""
    if low is None or high is None:
        return ""
    y, a, b = box.middle(index), box.x(low), min(box.x(high), box.right)
    caps = [x for x, ms in ((a, low), (b, high)) if 0 <= ms <= box.most_ms]  # an end outside the plot is cut
    path = f"M{a:.1f} {y:.1f}H{b:.1f}" + "".join(f"M{x:.1f} {y - 4:.1f}v8" for x in caps)
    halo = f'<path d="{path}" fill="none" stroke="var(--paper)" stroke-width="3.4" opacity=".85"/>'
    return halo + f'<path class="err" d="{path}"/>'


def _axis(box: Frame, end: float) -> str:
    """Ticks at round milliseconds from zero, so that lengths may be compared."""
    rough = box.most_ms / (4 if box.narrow else 7)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    made = []
    for n in range(int(box.most_ms / step) + 1):
        x = box.x(n * step)
        label = f"{n * step:g}" + (" ms" if n == 0 else "")
        anchor = "mut" if box.narrow and n == 0 else "mut m"
        made.append(f'<path class="grid" d="M{x:.1f} {box.top - 4}V{end:.0f}"/>')
        made.append(f'<text class="{anchor}" x="{x:.1f}" y="{box.top - 10}">{label}</text>')
    return "".join(made)


def _references(box: Frame, fall: Waterfall, first: int) -> list[str]:
    """The floor and the peers: a row each, whose line runs up through all steps."""
    made = [f'<path class="rule" d="M0 {box.top + first * box.row + 1}H{box.width}"/>']
    index = first
    if fall.floor_ms is not None:
        value = f"{fixed(fall.floor_ms, box.decimals)} ms"
        made.append(_line(box, index, fall.floor_ms, "floor"))
        made.append(_label(box, index, "Roofline floor", "what the bytes and FLOPs allow", value, None))
        index += 1
    for peer in fall.peers:
        made += _peer(box, index, peer)
        index += 1
    return made


def _peer(box: Frame, index: int, peer: Peer) -> list[str]:
    if peer.ms is None:
        return [_label(box, index, peer.name, "peer, not measured", "\u2014", None)]
    value = f"{fixed(peer.ms.mean, box.decimals)} ms"
    text = _label(box, index, peer.name, "peer", value, between(peer.ms.low, peer.ms.high, box.decimals))
    if peer.ms.mean <= box.most_ms:
        return [_line(box, index, peer.ms.mean, "peer"), text]
    x, y = box.right, box.middle(index)
    arrow = f'<path class="mark-peer" d="M{x - 12:.1f} {y - 6:.1f}L{x:.1f} {y:.1f}L{x - 12:.1f} {y + 6:.1f}Z"/>'
    return [arrow, f'<text class="mut e" x="{x - 18:.1f}" y="{y + 4:.1f}">off the scale</text>', text]


def _line(box: Frame, index: int, ms: float, kind: str) -> str:
    x, y = box.x(ms), box.middle(index)
    mark = f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6Z"
    return f'<path class="{kind}" d="M{x:.1f} {box.top - 4}V{y:.1f}"/><path class="mark-{kind}" d="{mark}"/>'


def _legend(box: Frame, y: float, kinds: set[str], uid: str) -> str:
    """Only the kinds of bar that stand in the figure."""
    names = {
        "kernel": "kernel",
        "library": "library call",
        "torch": "plain PyTorch",
        "other": "several, or not recorded",
    }
    x, made = (1.0 if box.narrow else box.left), []
    for kind in (kind for kind in names if kind in kinds):
        shape = f'x="{x:.0f}" y="{y:.0f}" width="14" height="12" rx="1.5"'
        made.append(f'<rect class="{kind}" {shape}/>')
        if kind in ("library", "torch"):
            made.append(f'<rect fill="url(#{uid}-{kind})" {shape}/>')
        made.append(f'<text class="mut" x="{x + 20:.0f}" y="{y + 10:.0f}">{names[kind]}</text>')
        x += 36 + 6.2 * len(names[kind])
    whisker = f'<path class="err" d="M{x:.0f} {y + 2:.0f}v8M{x:.0f} {y + 6:.0f}h16m0 -4v8"/>'
    return "".join(made) + f'{whisker}<text class="mut" x="{x + 24:.0f}" y="{y + 10:.0f}">95%</text>'


def stacked_svg(ladders: Sequence[Ladder], backends: Mapping[str, str], width: int = 1080) -> str:
    """All ladders of a run in one file, each under its phase; empty where none has a baseline."""
    pad, y, parts = 28, 12, []
    for number, ladder in enumerate(ladders):
        inner = waterfall_svg(ladder, backends, width=width, uid=f"w{number}", standalone=False)
        if not inner:
            continue
        height = float(inner.split('viewBox="', 1)[1].split('"', 1)[0].split()[3])
        parts.append(f'<text class="b" x="{pad}" y="{y + 20}">{escape(f"{ladder.workload}, {ladder.phase}")}</text>')
        parts.append(inner.replace("<svg ", f'<svg x="{pad}" y="{y + 36}" width="{width}" height="{height:g}" ', 1))
        y += 36 + int(height) + 24
    title = "Milliseconds a step, from the baseline to the kept stack"
    phases = ", ".join(ladder.phase for ladder in ladders)
    return svg("".join(parts), width + 2 * pad, y, "all", title, phases, standalone=True) if parts else ""
