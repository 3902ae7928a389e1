"""A run directory to its report: reads the ledger's records, profiles and sources, and what a reader must be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import report
from harness.schema import Attempt, Commit, Ladder, LedgerLine, RunConfig
from harness.session import load_config, read_profiles
from harness.workload import load_workloads


def write_report(directory: Path, lines: Sequence[LedgerLine]) -> Path:
    """Writes report.html, ledger.csv and waterfall.svg of a run, the newest ladder of each phase and set of arms."""
    config = load_config(directory)
    attempts = tuple(line for line in lines if isinstance(line, Attempt))
    before, after = read_profiles(directory, lines)
    ladders = {(x.workload, x.phase, *(arm.name for arm in x.arms)): x for x in lines if isinstance(x, Ladder)}
    data = report.RunData(
        config=config,
        attempts=attempts,
        commits=tuple(line for line in lines if isinstance(line, Commit)),
        ladders=tuple(ladders.values()),
        before=before,
        after=after,
        sources={a.file: (directory / a.file).read_text(encoding="utf-8", errors="replace") for a in attempts},
        notes=notes(config),
    )
    return report.write(data, directory)


def notes(config: RunConfig) -> tuple[str, ...]:
    """What a reader must know before any number on the page."""
    found = []
    if config.fingerprint.device_kind == "cpu":
        found.append(
            "A demonstration: a small model on a CPU, with the real loop and real measurements. It says nothing about "
            "Beam on a GPU."
        )
    workload = load_workloads(Path(config.workloads_file) if config.workloads_file else None).get(config.workload)
    if workload is not None and workload.rank_of > workload.ranks:
        found.append(f"One rank's share of {workload.rank_of}, with no collectives.")
    return tuple(found)
