"""Colours of the page and its figures, light and dark, and which of them a kind of change has."""

from __future__ import annotations

FAMILIES = {"torch": "plain PyTorch", "library": "library", "triton": "kernel", "cuda": "kernel", "cpp": "kernel"}
OTHER = "other"

STYLE = """
.fig{font:13px/1.3 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
.fig text{fill:var(--ink);stroke:var(--paper);stroke-width:3px;paint-order:stroke}
.fig .mut{fill:var(--muted);font-size:11px}.fig .b{font-weight:600}.fig .e{text-anchor:end}
.fig .m{text-anchor:middle}.fig .grid{stroke:var(--line);stroke-width:1}
.fig .join{stroke:var(--muted);stroke-width:1;opacity:.55}.fig .base{fill:var(--bar)}
.fig .final{fill:var(--final)}.fig .kernel{fill:var(--kernel)}.fig .library{fill:var(--library)}
.fig .torch{fill:var(--torch)}.fig .other{fill:var(--other)}
.fig .tex{stroke:var(--paper);stroke-width:1.6;fill:none}.fig .dot{fill:var(--paper)}
.fig .slower{stroke:var(--bad);stroke-width:2}.fig .hollow{fill:none;stroke:var(--muted);stroke-dasharray:3 2}
.fig .err{stroke:var(--ink);stroke-width:1.4;fill:none}.fig .floor{stroke:var(--floor);stroke-width:1.6}
.fig .mark-floor{fill:var(--floor)}.fig .peer{stroke:var(--peer);stroke-width:1.4;stroke-dasharray:5 4}
.fig .mark-peer{fill:var(--peer)}.fig .rule{stroke:var(--rule);stroke-width:1}
""".strip()

PALETTE = """
:root{
--ink:#1b1f24;--muted:#5b6573;--paper:#ffffff;--ground:#f6f7f8;--line:#e6e8eb;--rule:#c9ced6;
--bar:#8d97a5;--final:#1b1f24;--kernel:#2563a8;--library:#9a6a00;--torch:#7a4fa3;--other:#5b6573;
--floor:#0b7a55;--peer:#b3541e;--bad:#b3261e;--good:#16713f;--warn:#8a5a00;--soft:#eef1f5;
--link:#1d5aa0;}
@media (prefers-color-scheme:dark){:root{
--ink:#e7eaee;--muted:#9aa5b3;--paper:#15181c;--ground:#0e1013;--line:#272c33;--rule:#3d4550;
--bar:#6c7684;--final:#e7eaee;--kernel:#6ea8ec;--library:#d9a441;--torch:#b892dd;--other:#9aa5b3;
--floor:#3fc18f;--peer:#e8915b;--bad:#f2867d;--good:#5fc98d;--warn:#e0b04f;--soft:#1d2127;
--link:#8cbcf3;}}
""".strip()


def family(backend: str | None) -> str:
    """What kind of change a backend is: `kernel`, `library` or `plain PyTorch`."""
    return FAMILIES.get(backend or "", OTHER)


def class_of(backend: str | None) -> str:
    return {"plain PyTorch": "torch"}.get(family(backend), family(backend))
