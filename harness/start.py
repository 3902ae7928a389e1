"""Makes the objects a command needs: the workload, the judge on a device, and a run's session, new or resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from harness import decide, device
from harness.arms import build_model
from harness.errors import DataError, DeviceError, UsageError
from harness.evaluate import Evaluation, Proposed
from harness.judge import Judge, Limits
from harness.keep import Keeper
from harness.ledger import Ledger, write_atomic
from harness.schema import Attempt, Gate, RunConfig
from harness.session import Session, load_config, scratch_folder
from harness.workload import Workload, load_workloads

Say = Callable[[str], None]
CUDA_LIMITS = Limits(slot_ms=5, warm_ms=200)


def find_workload(name: str | None, file: Path | None, target: torch.device) -> Workload:
    """The named workload, or the default of the device kind. Raises UsageError with the names there are."""
    known = load_workloads(file)
    chosen = name or ("beam-tp8-rank-12" if target.type == "cuda" else "beam-tiny")
    if chosen not in known:
        raise UsageError(f"no workload is named {chosen!r}; there are {', '.join(known)} (`optimize workloads`)")
    workload = known[chosen]
    if workload.ranks > 1:
        build_model(workload).program(workload.phases[0])  # says so where several ranks cannot run
    if target.type not in workload.devices:
        raise DeviceError(
            f"{chosen} runs on {', '.join(workload.devices)}, and this is {target.type}; "
            "`optimize workloads` shows what fits this machine"
        )
    return workload


def make_judge(workload: Workload, target: torch.device, seed: int, said: Say, phases: tuple[str, ...] = ()) -> Judge:
    """A judge on `target`. On a CPU its children are pinned to the last core and this process keeps off it."""
    for phase in phases:
        workload.phase(phase)
    cuda = target.type == "cuda"
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Judge(
        workload=workload,
        model=build_model(workload),
        device=str(target),
        seed=seed,
        scratch=scratch_folder(),
        rule=decide.Rule(),
        limits=CUDA_LIMITS if cuda else Limits(),
        threads=max(1, min(8, len(cores))) if cuda else 1,
        cores=() if cuda else cores[-1:],
        phases=phases,
        said=said,
    )


def judge_file(
    file: Path, workload: Workload, target: torch.device, seed: int, said: Say, phases: tuple[str, ...], until: Gate
) -> Attempt:
    """One file against the baseline alone, up to a gate, as the attempt it would be; nothing is written."""
    started = datetime.now(UTC)
    judge = make_judge(workload, target, seed, said, phases)
    try:
        evaluation = Evaluation(judge, Proposed(1, file.resolve(), file.name, "person"), {})
        gates = evaluation.run(until)
    finally:
        judge.close()
    return evaluation.attempt(
        gates,
        parent=None,
        started=started,
        device=device.fingerprint(target).device,
        baseline_hash=baseline_hash(workload),
    )


def baseline_hash(workload: Workload) -> str:
    """sha256 over the sources of the workload's model package and the workload itself: what a number is relative to."""
    digest = hashlib.sha256(workload.model_dump_json().encode())
    for folder in importlib.import_module(workload.model).__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def new_run_directory(out: Path | None, workload: str) -> Path:
    """`out`, or the first free results/local/<date>-<workload>-<n>. Raises UsageError where `out` holds a run."""
    if out is not None:
        if (out / "run.json").exists():
            raise UsageError(f"{out} holds a run already: go on with it by --resume {out}, or name another folder")
        out.mkdir(parents=True, exist_ok=True)
        return out.resolve()
    root = Path.cwd() / "results" / "local"
    for number in range(1, 10_000):
        path = root / f"{datetime.now(UTC):%Y-%m-%d}-{workload}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise UsageError(f"{root} is full of runs of today; name a folder with --out")


@dataclass(frozen=True)
class Order:
    """What a user asks of a new run; None where it is for us to choose or without limit."""

    agent: str
    command: str
    catalog: Path | None = None
    only: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    out: Path | None = None
    seed: int | None = None
    attempts: int | None = None
    hours: float | None = None
    budget_usd: float | None = None
    min_gain: float = decide.Rule().min_gain
    repository: Path | None = None
    """Where kept rungs are committed; None keeps them in the run directory alone."""
    workloads_file: Path | None = None


def new_session(order: Order, workload: Workload, target: torch.device, said: Say) -> Session:
    """A new run. Raises UsageError before anything is measured where the repository or the folder will not do."""
    for phase in order.phases:
        workload.phase(phase)
    directory = new_run_directory(order.out, workload.name)
    keeper = Keeper.open(order.repository, directory.name, directory) if order.repository else None
    fingerprint = device.fingerprint(target)
    said("measuring this device's ceilings")
    config = RunConfig(
        run=directory.name,
        workload=workload.name,
        workloads_file=str(order.workloads_file.resolve()) if order.workloads_file else None,
        agent=order.agent,
        catalog=str(order.catalog.resolve()) if order.catalog else None,
        only=order.only,
        phases=order.phases,
        seed=secrets.randbits(32) if order.seed is None else order.seed,
        attempts=order.attempts,
        hours=order.hours,
        budget_usd=order.budget_usd,
        min_gain=order.min_gain,
        repository=str(order.repository.resolve()) if order.repository else None,
        branch=keeper.branch if keeper else None,
        base_commit=keeper.base if keeper else None,
        baseline_hash=baseline_hash(workload),
        fingerprint=fingerprint,
        ceilings=device.measure_ceilings(target),
        command=order.command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_atomic(directory / "run.json", config.model_dump_json(indent=2))
    return _session(config, directory, workload, target, keeper, said)


def resume_session(directory: Path, target: torch.device, said: Say) -> Session:
    """A run that goes on. Raises DataError where the baseline or the device is no longer the one it was begun with."""
    directory = directory.resolve()
    config = load_config(directory)
    workload = find_workload(config.workload, Path(config.workloads_file) if config.workloads_file else None, target)
    if baseline_hash(workload) != config.baseline_hash:
        raise DataError(
            f"the baseline of {config.workload} has changed since {directory.name} began, so its attempts cannot be "
            "compared with new ones: check out the commit it was begun with, or begin a new run"
        )
    here = device.fingerprint(target)
    if here.device != config.fingerprint.device:
        raise DataError(f"{directory.name} was measured on {config.fingerprint.device}; this is {here.device}")
    keeper = Keeper.open(Path(config.repository), config.run, directory) if config.repository else None
    return _session(config, directory, workload, target, keeper, said)


def ladder_session(directory: Path, name: str | None, target: torch.device, said: Say) -> Session:
    """A run's session for re-measuring its rungs on this device, at `name` in place of its own workload."""
    directory = directory.resolve()
    config = load_config(directory)
    extra = Path(config.workloads_file) if config.workloads_file else None
    workload = find_workload(name or config.workload, extra, target)
    config = config.model_copy(update={"phases": ()})  # the run's own: another workload need not have them
    return _session(config, directory, workload, target, None, said)


def _session(
    config: RunConfig, directory: Path, workload: Workload, target: torch.device, keeper: Keeper | None, said: Say
) -> Session:
    ledger = Ledger(directory / "ledger.jsonl")
    judge = make_judge(workload, target, config.seed, said, config.phases)
    judge.rule = dataclasses.replace(judge.rule, min_gain=config.min_gain)
    return Session(config, directory, ledger, judge, keeper, said)
