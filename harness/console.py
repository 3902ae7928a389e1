"""What the commands show: records to rich tables and lines. Prints nothing itself."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from harness.doctor import Finding, WorkloadRow
from harness.report import wording
from harness.report.steps import climb, level
from harness.schema import Attempt, Gap, Gate, Ladder, OutputError, Profile, Status

MARKS = {Status.KEPT: "[green]kept[/]", Status.INCONCLUSIVE: "[yellow]inconclusive[/]"}
WHY_CHARS = 200
FINDINGS = {"ok": "[green]ok[/]     ", "missing": "[yellow]missing[/]", "bad": "[red]bad[/]    "}


def table(columns: str, *, left: Sequence[str] = (), title: str | None = None) -> Table:
    """A table of comma-separated columns, numbers to the right but for those named in `left`."""
    made = Table(title=title, title_justify="left")
    for column in columns.split(","):
        made.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return made


def mark(status: Status) -> str:
    return MARKS.get(status, f"[red]{status.value.replace('_', ' ')}[/]")


def attempt_line(attempt: Attempt) -> str:
    reason = escape(attempt.decision.reason.splitlines()[0][:300] if attempt.decision.reason else "")
    verdict = mark(attempt.decision.status)
    return f"{attempt.attempt:3d} {verdict} [bold]{attempt.name}[/] ({attempt.seconds:.0f} s): {reason}"


def attempts_table(attempts: Iterable[Attempt], title: str) -> Table:
    """Every attempt with its verdict, both arms of its target phase and the gain; fits 80 columns."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("#", "rewrite", "verdict", "phase", "before", "after", "gain"):
        made.add_column(column, justify="left" if column in ("rewrite", "verdict", "phase") else "right", no_wrap=True)
    for attempt in attempts:
        found = next((e for e in attempt.estimates if e.phase == attempt.target), None)
        figures = (
            (wording.ms(found.baseline_ms), wording.ms(found.candidate_ms), f"{math.expm1(found.log_ratio):+.1%}")
            if found
            else ()
        )
        made.add_row(str(attempt.attempt), attempt.name, mark(attempt.decision.status), attempt.target, *figures)
    return made


def turned_down_lines(attempts: Iterable[Attempt]) -> Iterator[str]:
    """Why each attempt that was not kept was not."""
    for attempt in attempts:
        if attempt.decision.status is not Status.KEPT:
            reason = textwrap.shorten(attempt.decision.reason, WHY_CHARS, placeholder=" ...")
            yield f"{attempt.attempt} {attempt.name}: {mark(attempt.decision.status)}: {escape(reason)}"


def ladder_line(ladder: Ladder, device: str) -> str:
    """A ladder's two ends: the baseline and the whole kept stack."""
    title = f"{ladder.workload} {ladder.phase}"
    fall = climb(ladder)
    if fall is None:
        return f"{title}: not measured"
    first, last = fall.baseline.mean, fall.final.mean
    return f"{title}: {first:.3f} -> {last:.3f} ms, {first / last:.2f}x, re-measured interleaved on {device}"


def ladder_table(ladder: Ladder, device: str) -> Table:
    """Every arm's ms a step: the mean over processes of each one's median slot, with its 95% interval."""
    made = table(
        "arm,kind,ms,95%,processes,note",
        left=("arm", "kind", "note"),
        title=f"{ladder.workload} {ladder.phase} on {device}",
    )
    for arm in ladder.arms:
        found = level(arm)
        mean = wording.ms(found.mean) if found else None
        span = " to ".join(filter(None, (wording.ms(found.low), wording.ms(found.high)))) if found else ""
        made.add_row(arm.name, arm.kind, mean or "", span, str(len(arm.samples_ms)), escape(arm.note))
    return made


def gate_lines(attempt: Attempt, until: Gate) -> Iterator[str]:
    """A line a gate, the errors that matter below it, then estimates and the verdict."""
    for gate in attempt.gates:
        verdict = "[green]passed[/]" if gate.passed or gate.status is None else mark(gate.status)
        yield f"{gate.gate.value:14s} {verdict} {gate.seconds:.1f} s  {escape(gate.reason)}"
        for error in gate.errors[:5]:
            yield f"    {escape(error_line(error))}"
    for e in attempt.estimates:
        yield (
            f"{e.phase}: {e.baseline_ms:.4f} -> {e.candidate_ms:.4f} ms, ln ratio {e.log_ratio:+.4f} "
            f"\\[{e.low:+.4f}, {e.high:+.4f}] over {e.processes} processes"
        )
    if attempt.decision.status is Status.KEPT:
        yield "[green]right[/]" if until is Gate.NUMERICS else "[green]would be kept[/]"


def error_line(error: OutputError) -> str:
    """Region, input, place, error and budget of one judged output."""
    figures = ""
    if error.error is not None and error.budget is not None:
        figures = f": error {error.error:.3g}, budget {error.budget:.3g}"
    place = f" at {list(error.place)}" if error.place else ""
    return f"{error.region}, layer {error.layer}, {error.case}, {error.output}{place}{figures}"


def profile_table(profile: Profile, gaps: Sequence[Gap]) -> Table:
    """Regions by their gap to the floor; unranked where the profile is incomplete."""
    captured = f", captured {profile.captured_ms:.3f} ms" if profile.captured_ms is not None else ""
    title = (
        f"{profile.workload} {profile.phase}: {profile.step_ms:.3f} ms a step{captured}, {profile.launches} launches"
    )
    made = table("region,calls,launches,ms,share,floor ms,gap ms,bound", left=("region", "bound"), title=title)
    rows = {row.region: row for row in profile.regions}
    for gap in gaps:
        row = rows[gap.region]
        figures = (f"{gap.time_ms:.4f}", f"{gap.share:.1%}", f"{gap.floor_ms:.4f}", f"{gap.gap_ms:.4f}", gap.bound)
        made.add_row(gap.region, str(row.calls), str(row.launches), *figures)
    made.add_row("unattributed", "", "", f"{profile.unattributed_ms:.4f}", "", "", "", "")
    return made


def workloads_table(rows: Iterable[WorkloadRow]) -> Table:
    made = table(
        "workload,phase,tokens,GB a step,GFLOP a step,weights GiB,fits here", left=("workload", "phase", "fits here")
    )
    refused: set[str] = set()
    for row in rows:
        if not row.bytes:  # the whole workload cannot run, and says why once
            if row.workload not in refused:
                made.add_row(row.workload, "all", "", "", "", "", escape(row.fits))
            refused.add(row.workload)
            continue
        made.add_row(
            row.workload,
            row.phase + (" *" if row.decides else ""),
            f"{row.tokens:,}",
            f"{row.bytes / 1e9:.4g}",
            f"{row.flops / 1e9:,.4g}",
            f"{row.weight_bytes / 2**30:.2f}",
            escape(row.fits),
        )
    return made


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{FINDINGS[finding.state]} {finding.what}: {escape(finding.detail)}"
        if finding.mend:
            yield f"        mend: {escape(finding.mend)}"
