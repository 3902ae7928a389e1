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
from rich.markup import escape

from agents.catalog import CatalogAgent
from harness import console, device, doctor, loop, roofline, start
from harness.errors import OptimizeError, UsageError
from harness.ladder import PeerSpec
from harness.ledger import read_ledger
from harness.publish import write_report
from harness.schema import EXIT_CODES, Attempt, Gate, Ladder, RunConfig
from harness.session import Session, kept_files, take_profile
from harness.workload import load_workloads

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
FileOption = Annotated[
    Path | None, typer.Option("--workloads", help="A TOML file of workloads of your own.", exists=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PhasesOption = Annotated[list[str] | None, typer.Option("--phase", help="Only this phase; may be given again.")]
Candidate = Annotated[Path, typer.Argument(help="A candidate file.", exists=True, dir_okay=False)]

REPOSITORY = Path(__file__).resolve().parents[1]


@contextmanager
def progress(quiet: bool = False) -> Iterator[Any]:
    """A live line that says what is going on; plain lines where the output is no terminal."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("starting") as status:
            yield lambda text: status.update(escape(text))
    else:
        yield lambda text: err.print(f"{datetime.now(UTC):%H:%M:%S} {text}", highlight=False, markup=False)


def command_line() -> str:
    return " ".join(["optimize", *sys.argv[1:]])


@app.command(epilog="Example: optimize run -w beam-tiny --attempts 4")
def run(
    workload: WorkloadOption = None,
    agent: Annotated[
        str, typer.Option(help="Who proposes: `catalog`, the offline collection in kernel_candidates/.")
    ] = "catalog",
    attempts: Annotated[int | None, typer.Option(min=1, help="Stop after this many attempts in all.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many hours of judging, over all sittings.")
    ] = None,
    budget_usd: Annotated[float | None, typer.Option(min=0, help="Stop after this much spent on models.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="The run's folder; default results/local/<date>-...")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run; the other options are the run's own.")
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(
            help="Repository whose branch optimize/<run> takes the kept rungs; default: the one around this folder."
        ),
    ] = None,
    no_git: Annotated[bool, typer.Option("--no-git", help="Keep the rungs in the run's folder alone.")] = False,
    catalog: Annotated[
        Path | None,
        typer.Option(help="A catalog folder of your own, with its catalog.toml.", exists=True, file_okay=False),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this file of the catalog, by its stem; may be given again.")
    ] = None,
    phase: PhasesOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, inputs and orders; drawn where not given.")] = None,
    min_gain: Annotated[float, typer.Option(help="The smallest gain worth keeping: 0.003 is 0.3%.")] = 0.003,
    rounds: Annotated[
        int, typer.Option(help="Slots an arm in each of the final ladder's processes; 0 for no ladder.")
    ] = 8,
    device_name: DeviceOption = "auto",
    workloads_file: FileOption = None,
) -> None:
    """Profile, propose, judge, keep, record: the loop. Kept rewrites become commits, every attempt a ledger line."""
    target = device.resolve(device_name)
    given = {"-w": workload, "--only": only, "--phase": phase, "--seed": seed, "--catalog": catalog, "--out": out_dir}
    if resume is not None and (own := [option for option, value in given.items() if value not in (None, [])]):
        raise UsageError(f"--resume goes on with the run's own {', '.join(own)}: leave out what you gave")
    order = start.Order(
        agent=agent,
        command=command_line(),
        catalog=catalog,
        only=tuple(only or ()),
        phases=tuple(phase or ()),
        out=out_dir,
        seed=seed,
        attempts=attempts,
        hours=hours,
        budget_usd=budget_usd,
        min_gain=min_gain,
        repository=None if no_git else (repo or Path.cwd()),
        workloads_file=workloads_file,
    )
    with progress() as said, device.DeviceLock(target):
        if resume is not None:
            session = start.resume_session(resume, target, said)
            proposer = make_agent(session.config, target)
        else:
            found = start.find_workload(workload, workloads_file, target)
            proposer = make_agent(order, target)  # a misspelt name leaves no run behind
            session = start.new_session(order, found, target, said)
        try:
            reason = _run(session, proposer, said, rounds)
            page = write_report(session.directory, session.ledger.read())
        finally:
            session.close()
    _summarise(session, reason, page)


def _run(session: Session, agent: CatalogAgent, said: Any, rounds: int) -> str:
    session.judged = lambda attempt: err.print(console.attempt_line(attempt), highlight=False)
    session.judge.said = lambda text: said(f"attempt {len(session.ledger.attempts()) + 1}: {text}")
    reason = loop.run(session, agent)
    session.judge.said = said
    loop.finish(session, rounds)
    return reason


def _summarise(session: Session, reason: str, page: Path) -> None:
    """The final table, the ladders' ends, what is not committed, and where the report is."""
    lines = read_ledger(session.directory / "ledger.jsonl")
    attempts = [line for line in lines if isinstance(line, Attempt)]
    out.print(console.attempts_table(attempts, f"{session.config.run}: {reason}; ms a step"))
    for text in console.turned_down_lines(attempts):
        out.print(text, highlight=False)
    for line in lines:
        if isinstance(line, Ladder):
            out.print(console.ladder_line(line, session.config.fingerprint.device), highlight=False)
    for warning in session.warnings:
        err.print(f"[yellow]not committed:[/] {escape(warning)}", highlight=False)
    if session.config.branch:
        out.print(f"kept rungs: branch {escape(session.config.branch)}", highlight=False)
    out.print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)
    if session.warnings:
        raise typer.Exit(7)


def make_agent(config: RunConfig | start.Order, target: torch.device) -> CatalogAgent:
    if config.agent != CatalogAgent.name:
        raise UsageError(f"no agent is named {config.agent!r}; there is {CatalogAgent.name}")
    folder = Path(config.catalog) if config.catalog else REPOSITORY / "kernel_candidates"
    return CatalogAgent.load(folder, target.type, config.only)


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
    """Guard, build and numerics of one file: is it right? Says where it is wrong, by how much, over which budget."""
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
    with progress(as_json) as said, device.DeviceLock(target):
        attempt = start.judge_file(file, workload, target, seed, said, tuple(phases or ()), until)
    if as_json:
        typer.echo(attempt.model_dump_json())
    else:
        for line in console.gate_lines(attempt, until):
            out.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_CODES[attempt.decision.status])


@app.command(epilog="Example: optimize profile -w beam-tiny --trace trace.json")
def profile(
    workload: WorkloadOption = None,
    phase: PhasesOption = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="Profile this run's kept stack in place of the baseline.", exists=True)
    ] = None,
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
        out.print(console.profile_table(result, roofline.gaps(result, ceilings) if result.complete else ()))
        if not result.complete:
            err.print(f"[yellow]incomplete, so not ranked:[/] {result.reason}")


@app.command(epilog="Example: optimize ladder results/h200 -w beam-tp8-rank --peer torch_compile")
def ladder(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.", exists=True, file_okay=False)],
    workload: WorkloadOption = None,
    phase: PhasesOption = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="torch_compile, torch_compile_max_autotune, transformers or baseline_eager."),
    ] = None,
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
            cuda = target.type == "cuda"
            peers = [PeerSpec(name, captured=cuda and name.startswith("torch_compile")) for name in peer or ()]
            made = session.climb(
                phases, processes=processes, rounds=rounds, peers=peers, command=command_line(), ends=ends
            )
            write_report(session.directory, session.ledger.read())
        finally:
            session.close()
    for result in made:
        out.print(console.ladder_table(result, device.device_name(target)))


@app.command("report", epilog="Example: optimize report results/local/2026-11-29-beam-tiny-1")
def report_command(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.", exists=True, file_okay=False)],
) -> None:
    """Write report.html, ledger.csv and waterfall.svg of a run, from its ledger."""
    page = write_report(run_dir.resolve(), read_ledger(run_dir / "ledger.jsonl"))
    out.print(escape(str(page)), soft_wrap=True, highlight=False)


@app.command(epilog="Example: optimize workloads")
def workloads(
    as_json: JsonOption = False, device_name: DeviceOption = "auto", workloads_file: FileOption = None
) -> None:
    """The presets: bytes and FLOPs a step, memory needed, and whether they fit this machine."""
    target = device.resolve(device_name)
    with progress(as_json) as said:
        rows = [row for w in load_workloads(workloads_file).values() for row in doctor.workload_rows(w, target, said)]
    if as_json:
        typer.echo(json.dumps([row.model_dump(mode="json") for row in rows]))
        return
    out.print(console.workloads_table(rows))
    out.print("* decides; the others guard")


@app.command("doctor", epilog="Example: optimize doctor")
def doctor_command(as_json: JsonOption = False) -> None:
    """What this machine can run, what is missing, and the command that mends it."""
    findings = doctor.examine()
    if as_json:
        typer.echo(json.dumps([f.model_dump(mode="json") for f in findings]))
    else:
        for line in console.finding_lines(findings):
            out.print(line, highlight=False, soft_wrap=True)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(5)


def main() -> None:
    """The `optimize` command."""
    try:
        doctor.check_packages()
        app()
    except OptimizeError as error:
        err.print(f"[red]optimize:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("stopped; a run goes on with `optimize run --resume DIR`")
        sys.exit(130)


if __name__ == "__main__":
    main()
