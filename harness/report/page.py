"""A run's records to files: one self-contained HTML page, and beside it the CSV and the waterfalls as one SVG.

The page needs no network and no script; what came from an agent is escaped text wherever it stands.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from harness.ledger import write_atomic
from harness.report import figures, marks, palette, wording
from harness.report.rows import (
    LABELS,
    AttemptRow,
    Climb,
    RegionTable,
    RunData,
    attempt_rows,
    climbs,
    estimate_of,
    false_keeps,
    log_interval,
    profiled_ms,
    region_tables,
    status_counts,
)
from harness.report.table import csv
from harness.schema import Attempt, Estimate, GateResult, OutputError, Status

TEMPLATE = Path(__file__).with_name("template.html.j2")
SOURCES_BYTES = 800_000
"""Highlighted source in one page, at the most; what does not fit is a link to its file."""
DASH = Markup('<span class="none" title="not measured">\u2014</span>')
EVIDENCE_CHARACTERS = 400
WIDTHS = {"broad": 1080, "middling": 730, "slim": 358}
"""px of a waterfall by the class that shows it: one for each kind of screen, so that its words keep their size."""


@dataclass(frozen=True)
class Head:
    """One phase's card: the run's own ladder where there is one, else its kept rungs' confirms, without a whole."""

    phase: str
    climb: Climb | None
    confirmed: tuple[tuple[Attempt, Estimate], ...]
    uid: str


@dataclass(frozen=True)
class Source:
    """A rung's file: highlighted, or empty where the page has no room for it."""

    row: AttemptRow
    html: Markup


@dataclass(frozen=True)
class Page:
    """All that the template reads."""

    data: RunData
    heads: tuple[Head, ...]
    climbs: tuple[Climb, ...]
    attempts: tuple[AttemptRow, ...]
    counts: tuple[tuple[Status, int], ...]
    regions: tuple[RegionTable, ...]
    sources: tuple[Source, ...]
    false_keeps: float
    span: float
    """The interval marks' axis: the largest log ratio of an attempt, within reason."""

    @property
    def backends(self) -> dict[str, str]:
        return {name: attempt.backend for name, attempt in self.data.kept().items()}


def build(data: RunData) -> Page:
    made, rows = climbs(data), attempt_rows(data)
    changes = [abs(row.change.mean) for row in rows if row.change]
    return Page(
        data=data,
        heads=tuple(head(data, made, phase, f"head-{n}") for n, phase in enumerate(data.phases())),
        climbs=made,
        attempts=rows,
        counts=status_counts(data.attempts),
        regions=region_tables(data),
        sources=sources(data, rows),
        false_keeps=false_keeps(data.attempts),
        span=min(max([0.02, *changes]) * 1.15, 1.0),
    )


def head(data: RunData, made: tuple[Climb, ...], phase: str, uid: str) -> Head:
    own = [climb for climb in made if climb.ladder.phase == phase and not climb.foreign]
    found = ((attempt, estimate_of(attempt, phase)) for attempt in data.kept().values())
    confirmed = tuple((attempt, estimate) for attempt, estimate in found if estimate)
    return Head(phase, own[-1] if own else None, confirmed, uid)


def sources(data: RunData, rows: tuple[AttemptRow, ...]) -> tuple[Source, ...]:
    """The kept rungs' files, highlighted until the page's room for them is used up."""
    formatter = HtmlFormatter(nowrap=True, classprefix="p-")
    room, made = SOURCES_BYTES, []
    for row in rows:
        text = data.sources.get(row.attempt.file, "") if row.kept else ""
        if not text:
            continue
        html = highlight(text, PythonLexer(), formatter) if len(text) * 3 < room else ""
        html = html if len(html) < room else ""
        room -= len(html)
        made.append(Source(row, Markup(html)))
    return tuple(made)


@functools.cache
def source_css() -> str:
    """Colours of the highlighted source, for light and for dark."""
    light, dark = ("\n".join(_rules(style)) for style in ("xcode", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}"


def _rules(style: str) -> list[str]:
    """A style's rules for tokens, without those for the page around them."""
    css = str(HtmlFormatter(style=style, classprefix="p-").get_style_defs(".src"))
    return [line for line in css.splitlines() if line.startswith(".src .p-")]


def render(data: RunData) -> str:
    """The page, self-contained."""
    page = build(data)
    return _environment().from_string(TEMPLATE.read_text(encoding="utf-8")).render(page=page, data=data, css=page_css())


def page_css() -> Markup:
    return Markup("\n".join((palette.PALETTE, palette.STYLE, source_css())))


def _environment() -> Environment:
    made = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=or_dash
    )
    made.filters |= {
        "ms": wording.ms,
        "fixed": wording.fixed,
        "places": wording.places,
        "ratio": wording.ratio,
        "percent": wording.percent,
        "seconds": wording.seconds,
        "scaled": wording.scaled,
        "precise": wording.precise,
        "evidence": evidence_text,
        "shortened": shortened,
        "breakable": breakable,
        "over": over_budget,
    }
    made.globals |= {
        "labels": LABELS,
        "between": wording.between,
        "ratio_text": wording.ratio_text,
        "bar_px": marks.bar_px,
        "log_interval": log_interval,
        "profiled_ms": profiled_ms,
        "family": palette.family,
        "waterfall": lambda climb, page, width, uid: Markup(
            figures.waterfall_svg(climb.ladder, page.backends, width=width, uid=uid, standalone=False)
        ),
        "headline": lambda fall, uid: Markup(marks.headline_svg(fall, uid)),
        "forest": lambda change, span, kind: Markup(marks.interval_svg(change, span, kind)),
        "summary_json": lambda page: Markup(summary_json(page)),
        "widths": WIDTHS,
    }
    return made


def or_dash(value: Any) -> Any:
    """What the template writes for a value: a dash that says what it stands for in place of None."""
    return DASH if value is None else value


def evidence_text(gate: GateResult) -> str:
    """A gate's evidence as `name: value`, each shortened."""
    parts = []
    for name, value in gate.evidence.items():
        text = value if isinstance(value, str) else json.dumps(strict(value), ensure_ascii=False, default=str)
        parts.append(f"{name}: {shortened(text, EVIDENCE_CHARACTERS)}")
    return "; ".join(parts)


def shortened(text: str, most: int) -> str:
    """At most `most` characters, and then how many more there are: a compiler's output may be a megabyte."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more)"


def breakable(name: str) -> Markup:
    """The name, escaped, with leave to break its line after an underscore."""
    return Markup(str(escape(name)).replace("_", "_<wbr>"))


def over_budget(error: OutputError) -> str | None:
    """How many times its budget an error is."""
    if error.error is None or not error.budget or not math.isfinite(error.error / error.budget):
        return None
    return wording.fixed(error.error / error.budget, 2) + wording.TIMES


def strict(value: Any) -> Any:
    """`value` with NaN and infinities as None, so that it is JSON for every reader."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def summary_json(page: Page) -> str:
    """The page's numbers for a program that reads it: strict JSON that no markup can end."""
    phases = {
        head.phase: {
            "baseline_ms": head.climb.fall.baseline.mean,
            "kept_ms": head.climb.fall.final.mean,
            "floor_ms": head.climb.fall.floor_ms,
            "log_ratio": head.climb.fall.log_ratio.mean,
            "low": head.climb.fall.log_ratio.low,
            "high": head.climb.fall.log_ratio.high,
            "residual_ms": head.climb.fall.residual_ms,
        }
        for head in page.heads
        if head.climb
    }
    summary = {
        "run": page.data.config.run,
        "workload": page.data.config.workload,
        "device": page.data.config.fingerprint.device,
        "phases": phases,
        "attempts": [
            {"attempt": row.attempt.attempt, "name": row.attempt.name, "status": row.status}
            | ({"log_ratio": row.change.mean, "low": row.change.low, "high": row.change.high} if row.change else {})
            for row in page.attempts
        ],
    }
    text = json.dumps(strict(summary), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write(data: RunData, run_dir: Path) -> Path:
    """Writes report.html, ledger.csv and, where a ladder was measured, waterfall.svg; returns the page's path."""
    path = run_dir / "report.html"
    write_atomic(path, render(data))
    write_atomic(run_dir / "ledger.csv", csv(data))
    figure = figures.stacked_svg(data.ladders, {name: attempt.backend for name, attempt in data.kept().items()})
    if figure:
        write_atomic(run_dir / "waterfall.svg", figure)
    return path
