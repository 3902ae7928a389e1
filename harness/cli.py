"""The commands. Builds the objects, shows progress, prints results; the only module that prints or exits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from agents.catalog import CatalogAgent
from harness import device, doctor, evaluate, loop, report, roofline, start
from harness.errors import OptimizeError, UsageError
from harness.evaluate import Evaluation, Proposed
from harness.ladder import PeerSpec
from harness.ledger import Ledger
from harness.schema import EXIT_CODES, Attempt, Commit, Gate, Ladder, Status
from harness.session import Session, load_config, read_profiles, take_profile
from harness.workload import Workload, load_workloads

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Make a large model's serving step faster, one proven change at a time.",
    epilog="Exit codes: 0 fine; 1 not kept; 2 usage; 3 wrong numerics; 4 inconclusive; 5 no device or no data; "
    "6 refused by the guard; 7 build failed, crashed or timed out.",
)
out = Console()
err = Console(stderr=True)

WorkloadOption = Annotated[str | None, typer.Option("--workload", "-w", help="A preset's name (`optimize workloads`).")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
FileOption = Annotated[Path | None, typer.Option("--workloads", help="A TOML file of workloads of your own.", exists=True)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PhasesOption = Annotated[list[str] | None, typer.Option("--phase", help="Only this phase; may be given again.")]
Candidate = Annotated[Path, typer.Argument(help="A candidate file.", exists=True, dir_okay=False)]

MARKS = {Status.KEPT: "[green]kept[/]", Status.INCONCLUSIVE: "[yellow]inconclusive[/]"}
REPOSITORY = Path(__file__).resolve().parents[1]


@contextmanager
def progress(quiet: bool = False) -> Iterator[Any]:
    """A live line that says what is going on; plain lines where the output is no terminal."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("starting") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: err.print(f"{datetime.now(UTC):%H:%M:%S} {text}", highlight=False)


def command_line() -> str:
    return " ".join(["optimize", *sys.argv[1:]])


@app.command(epilog="Example: optimize run -w beam-tiny --attempts 4")
def run(
    workload: WorkloadOption = None,
    agent: Annotated[str, typer.Option(help="Who proposes: `catalog`, the offline collection in kernel_candidates/.")] = "catalog",
    attempts: Annotated[int | None, typer.Option(min=1, help="Stop after this many attempts in all.")] = None,
    hours: Annotated[float | None, typer.Option(min=0, help="Stop after this many hours of judging, over all sittings.")] = None,
    budget_usd: Annotated[float | None, typer.Option(min=0, help="Stop after this much spent on models.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder; default results/local/<date>-...")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run; the other options are the run's own.")] = None,
    repo: Annotated[Path | None, typer.Option(help="Repository whose branch optimize/<run> takes the kept rungs; default: the one around this folder.")] = None,
    no_git: Annotated[bool, typer.Option("--no-git", help="Keep the rungs in the run's folder alone.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this file of the catalog, by its stem; may be given again.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, inputs and orders; drawn where not given.")] = None,
    rounds: Annotated[int, typer.Option(help="Slots an arm in each of the final ladder's processes; 0 for no ladder.")] = 8,
    device_name: DeviceOption = "auto",
    workloads_file: FileOption = None,
) -> None:
    """Profile, propose, judge, keep, record: the loop. Kept rewrites become commits, every attempt a ledger line."""
    target = device.resolve(device_name)
    with progress() as said, device.DeviceLock(target):
        if resume is not None:
            session = start.resume_session(resume, target, said)
        else:
            session = start.new_session(
                start.find_workload(workload, workloads_file, target),
                target,
                out=out_dir,
                agent=agent,
                seed=seed,
                attempts=attempts,
                hours=hours,
                budget_usd=budget_usd,
                repository=None if no_git else (repo or Path.cwd()),
                workloads_file=workloads_file,
                command=command_line(),
                said=said,
            )
        try:
            reason = _run(session, make_agent(session.config.agent, target, only or []), said, rounds)
            page = write_report(session.directory, session.ledger)
        finally:
            session.close()
    summarise(session, page, reason)
    if session.warnings:
        raise typer.Exit(7)


def _run(session: Session, agent: CatalogAgent, said: Any, rounds: int) -> str:
    session.judged = lambda attempt: err.print(attempt_line(attempt), highlight=False)
    session.judge.said = lambda text: said(f"attempt {len(session.ledger.attempts()) + 1}: {text}")
    reason = loop.run(session, agent)
    session.judge.said = said
    if session.stack():
        phases = [phase.name for phase in session.judge.workload.deciding]
        for phase in phases:
            session.profile(phase)
        if rounds:
            session.climb(phases, processes=3, rounds=rounds, peers=[], command=session.config.command)
    return reason


def make_agent(name: str, target: torch.device, only: list[str]) -> CatalogAgent:
    if name != CatalogAgent.name:
        raise UsageError(f"no agent is named {name!r}; there is {CatalogAgent.name}")
    return CatalogAgent.load(REPOSITORY / "kernel_candidates", target.type, only)


def attempt_line(attempt: Attempt) -> str:
    status = attempt.decision.status
    mark = MARKS.get(status, f"[red]{status.value.replace('_', ' ')}[/]")
    return f"{attempt.attempt:3d} {mark} [bold]{attempt.name}[/] ({attempt.seconds:.0f} s): {attempt.decision.reason[:300]}"


def summarise(session: Session, page: Path, reason: str) -> None:
    """The final table, the ladder's ends and where the report is."""
    table = Table(title=f"{session.config.run}: {reason}", title_justify="left")
    for column in ("#", "rewrite", "verdict", "phase", "before ms", "after ms", "why"):
        table.add_column(column, overflow="fold")
    for attempt in session.ledger.attempts():
        estimate = attempt.estimates[0] if attempt.estimates else None
        table.add_row(
            str(attempt.attempt),
            attempt.name,
            MARKS.get(attempt.decision.status, f"[red]{attempt.decision.status.value.replace('_', ' ')}[/]"),
            attempt.target,
            f"{estimate.baseline_ms:.3f}" if estimate else "",
            f"{estimate.candidate_ms:.3f}" if estimate else "",
            attempt.decision.reason[:160],
        )
    out.print(table)
    for line in session.ledger.read():
        if isinstance(line, Ladder):
            first, last = line.arms[0], [arm for arm in line.arms if arm.kind == "rung"][-1]
            before, after = (sorted(ms for p in arm.samples_ms for ms in p) for arm in (first, last))
            a, b = before[len(before) // 2], after[len(after) // 2]
            out.print(f"{line.phase}: {a:.3f} -> {b:.3f} ms, {a / b:.2f}x, re-measured interleaved on {session.config.fingerprint.device}")
    for warning in session.warnings:
        err.print(f"[yellow]not committed:[/] {warning}", highlight=False)
    if session.config.branch:
        out.print(f"kept rungs: branch {session.config.branch}")
    out.print(f"report: {page}", soft_wrap=True)


def write_report(directory: Path, ledger: Ledger) -> Path:
    """Writes report.html, ledger.csv and waterfall.svg of a run directory."""
    config = load_config(directory)
    lines = ledger.read()
    attempts = tuple(line for line in lines if isinstance(line, Attempt))
    before, after = read_profiles(directory)
    ladders = {line.phase: line for line in lines if isinstance(line, Ladder)}
    known = load_workloads(Path(config.workloads_file) if config.workloads_file else None)
    data = report.RunData(
        config=config,
        attempts=attempts,
        commits=tuple(line for line in lines if isinstance(line, Commit)),
        ladders=tuple(ladders.values()),
        before=before,
        after=after,
        sources={a.file: (directory / a.file).read_text(encoding="utf-8", errors="replace") for a in attempts},
        notes=notes(known[config.workload], config.fingerprint.device_kind) if config.workload in known else (),
    )
    return report.write(data, directory)


def notes(workload: Workload, kind: str) -> tuple[str, ...]:
    """What a reader must know before any number on the page."""
    found = []
    if kind == "cpu":
        found.append(
            "A demonstration: a small model on a CPU, with the real loop and real measurements. It says nothing about Beam "
            "on a GPU."
        )
    if workload.rank_of > workload.ranks:
        found.append(f"One rank's share of {workload.rank_of}, with no collectives.")
    return tuple(found)


@app.command(epilog="Example: optimize check my_kernel.py -w beam-tiny-bf16")
def check(
    file: Candidate,
    workload: WorkloadOption = None,
    phase: PhasesOption = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 1,
    as_json: JsonOption = False,
    device_name: DeviceOption = "auto",
    workloads_file: FileOption = None,
) -> None:
    """Guard, build and numerics of one file: is it right? Prints the worst error and its budget, or where it is wrong."""
    _judge_file(file, workload, phase, seed, as_json, device_name, workloads_file, Gate.NUMERICS)


@app.command(epilog="Example: optimize bench my_kernel.py -w beam-tiny")
def bench(
    file: Candidate,
    workload: WorkloadOption = None,
    phase: PhasesOption = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 1,
    as_json: JsonOption = False,
    device_name: DeviceOption = "auto",
    workloads_file: FileOption = None,
) -> None:
    """All gates of one file against the baseline: is it right, and is it faster? Nothing is kept."""
    _judge_file(file, workload, phase, seed, as_json, device_name, workloads_file, Gate.CONFIRM)


def _judge_file(
    file: Path, name: str | None, phases: list[str] | None, seed: int, as_json: bool, device_name: str,
    workloads_file: Path | None, until: Gate,
) -> None:  # fmt: skip
    target = device.resolve(device_name)
    workload = start.find_workload(name, workloads_file, target)
    started = datetime.now(UTC)
    with progress(as_json) as said, device.DeviceLock(target):
        judge = start.make_judge(workload, target, seed, said, tuple(phases or ()))
        try:
            evaluation = Evaluation(judge, Proposed(1, file.resolve(), file.name, "person"), {})
            gates = evaluation.run(until)
            attempt = evaluation.attempt(
                gates,
                parent=None,
                started=started,
                device=device.fingerprint(target).device,
                baseline_hash=start.baseline_hash(workload),
            )
        finally:
            judge.close()
    if as_json:
        typer.echo(attempt.model_dump_json())
    else:
        show_attempt(attempt, until)
    raise typer.Exit(EXIT_CODES[attempt.decision.status])


def show_attempt(attempt: Attempt, until: Gate) -> None:
    for gate in attempt.gates:
        mark = "[green]passed[/]" if gate.passed else f"[red]{gate.status.value if gate.status else ''}[/]"
        out.print(f"{gate.gate.value:14s} {mark} {gate.seconds:.1f} s  {gate.reason}", highlight=False)
        for error in gate.errors[:5]:
            out.print(f"    {describe_error(error)}", highlight=False)
    for estimate in attempt.estimates:
        out.print(
            f"{estimate.phase}: {estimate.baseline_ms:.4f} -> {estimate.candidate_ms:.4f} ms, "
            f"log ratio {estimate.log_ratio:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"
        )
    if attempt.decision.status is Status.KEPT:
        out.print("[green]right[/]" if until is Gate.NUMERICS else "[green]would be kept[/]")


def describe_error(error: evaluate.OutputError) -> str:
    figures = f"error {error.error:.3g}, budget {error.budget:.3g}" if error.error is not None and error.budget is not None else ""
    place = f" at {list(error.place)}" if error.place else ""
    return f"{error.region}, layer {error.layer}, {error.case}, {error.output}{place}: {figures}"


@app.command(epilog="Example: optimize profile -w beam-tiny --trace trace.json")
def profile(
    workload: WorkloadOption = None,
    phase: PhasesOption = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run", help="Profile this run's kept stack in place of the baseline.", exists=True)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 1,
    as_json: JsonOption = False,
    device_name: DeviceOption = "auto",
    workloads_file: FileOption = None,
) -> None:
    """Where a step's time goes: time, floor and gap of each region, from torch.profiler and measured ceilings."""
    target = device.resolve(device_name)
    found = start.find_workload(workload, workloads_file, target)
    taken = []
    with progress(as_json) as said, device.DeviceLock(target):
        judge = start.make_judge(found, target, seed, said, tuple(phase or ()))
        try:
            said("measuring this device's ceilings")
            ceilings = device.measure_ceilings(target)
            files = kept_files(run_dir) if run_dir else ()
            for name in phase or [p.name for p in found.deciding]:
                said(f"profiling {name}")
                path = trace.resolve().with_stem(f"{trace.stem}-{name}") if trace else None
                taken.append((take_profile(judge, files, name, ceilings, path), ceilings))
        finally:
            judge.close()
    if as_json:
        typer.echo(json.dumps([p.model_dump(mode="json") for p, _ in taken]))
        return
    for result, ceilings in taken:
        show_profile(result, roofline.gaps(result, ceilings) if result.complete else ())


def kept_files(directory: Path) -> tuple[str, ...]:
    with Ledger(directory / "ledger.jsonl") as ledger:
        kept = {a.name: a.file for a in ledger.attempts() if a.decision.status is Status.KEPT}
    return tuple(str(directory.resolve() / file) for file in kept.values())


def show_profile(result: Any, gaps: tuple[Any, ...]) -> None:
    captured = f", captured {result.captured_ms:.3f} ms" if result.captured_ms is not None else ""
    table = Table(title=f"{result.workload} {result.phase}: {result.step_ms:.3f} ms a step{captured}", title_justify="left")
    for column in ("region", "calls", "launches", "ms", "share", "floor ms", "gap ms", "bound"):
        table.add_column(column, justify="left" if column in ("region", "bound") else "right")
    calls = {r.region: r for r in result.regions}
    for gap in gaps:
        row = calls[gap.region]
        table.add_row(gap.region, str(row.calls), str(row.launches), f"{gap.time_ms:.4f}", f"{gap.share:.1%}", f"{gap.floor_ms:.4f}", f"{gap.gap_ms:.4f}", gap.bound)
    table.add_row("unattributed", "", "", f"{result.unattributed_ms:.4f}", "", "", "", "")
    out.print(table)
    if not result.complete:
        err.print(f"[yellow]incomplete, so not ranked:[/] {result.reason}")


@app.command(epilog="Example: optimize ladder results/h200 -w beam-tp8-rank --peer torch_compile")
def ladder(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.", exists=True, file_okay=False)],
    workload: WorkloadOption = None,
    phase: PhasesOption = None,
    peer: Annotated[list[str] | None, typer.Option(help="torch_compile, transformers_eager or baseline_eager.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Slots an arm in each process.")] = 8,
    ends: Annotated[bool, typer.Option("--ends", help="Only the baseline and the whole stack, not each rung.")] = False,
    device_name: DeviceOption = "auto",
) -> None:
    """Re-measure every kept rung of a run, interleaved in the same processes, on this or another workload."""
    target = device.resolve(device_name)
    with progress() as said, device.DeviceLock(target):
        session = start.ladder_session(run_dir, workload, target, said)
        try:
            phases = phase or [p.name for p in session.judge.workload.deciding]
            peers = [PeerSpec(name, captured=not name.endswith("_eager")) for name in peer or ()]
            made = session.climb(phases, processes=processes, rounds=rounds, peers=peers, command=command_line(), ends=ends)
            write_report(session.directory, session.ledger)
        finally:
            session.close()
    for result in made:
        table = Table(title=f"{result.workload} {result.phase} on {session.config.fingerprint.device}", title_justify="left")
        for column in ("arm", "kind", "median ms", "processes", "note"):
            table.add_column(column)
        for arm in result.arms:
            times = sorted(ms for process in arm.samples_ms for ms in process)
            table.add_row(arm.name, arm.kind, f"{times[len(times) // 2]:.4f}" if times else "", str(len(arm.samples_ms)), arm.note)
        out.print(table)


@app.command("report", epilog="Example: optimize report results/local/2026-11-29-beam-tiny-1")
def report_command(run_dir: Annotated[Path, typer.Argument(help="A run directory.", exists=True, file_okay=False)]) -> None:
    """Write report.html, ledger.csv and waterfall.svg of a run, from its ledger."""
    load_config(run_dir)
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        out.print(str(write_report(run_dir.resolve(), ledger)), soft_wrap=True)


@app.command(epilog="Example: optimize workloads")
def workloads(as_json: JsonOption = False, device_name: DeviceOption = "auto", workloads_file: FileOption = None) -> None:
    """The presets: bytes and FLOPs a step, memory needed, and whether they fit this machine."""
    target = device.resolve(device_name)
    with progress(as_json) as said:
        rows = [row for w in load_workloads(workloads_file).values() for row in doctor.workload_rows(w, target, said)]
    if as_json:
        typer.echo(json.dumps([row.model_dump(mode="json") for row in rows]))
        return
    table = Table()
    for column in ("workload", "phase", "tokens", "GB a step", "GFLOP a step", "weights GiB", "fits here"):
        table.add_column(column, justify="left" if column in ("workload", "phase", "fits here") else "right")
    for row in rows:
        table.add_row(row.workload, row.phase + (" *" if row.decides else ""), f"{row.tokens:,}", f"{row.bytes / 1e9:.3f}", f"{row.flops / 1e9:,.1f}", f"{row.weight_bytes / 2**30:.2f}", row.fits)
    out.print(table)
    out.print("* decides; the others guard")


@app.command("doctor", epilog="Example: optimize doctor")
def doctor_command(as_json: JsonOption = False) -> None:
    """What this machine can run, what is missing, and the command that mends it."""
    findings = doctor.examine()
    if as_json:
        typer.echo(json.dumps([f.model_dump(mode="json") for f in findings]))
    else:
        for finding in findings:
            mark = {"ok": "[green]ok[/]     ", "missing": "[yellow]missing[/]", "bad": "[red]bad[/]    "}[finding.state]
            out.print(f"{mark} {finding.what}: {finding.detail}" + (f"\n        mend: {finding.mend}" if finding.mend else ""), highlight=False)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(5)


def main() -> None:
    """The `optimize` command."""
    try:
        doctor.check_packages()
        app()
    except OptimizeError as error:
        err.print(f"[red]optimize:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("stopped; a run goes on with `optimize run --resume DIR`")
        sys.exit(130)


if __name__ == "__main__":
    main()
