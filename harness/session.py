"""A run directory and everything in it: configuration, ledger, measured files, profiles, the kept stack, git.

run.json  ledger.jsonl  candidates/  profiles/  traces/  report.html  ledger.csv  waterfall.svg
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from harness import ladder, roofline
from harness import messages as m
from harness.brief import Brief, Proposal
from harness.errors import DataError, UsageError
from harness.evaluate import Evaluation, Proposed
from harness.judge import Judge
from harness.keep import Keeper, NotCommittedError, Rung
from harness.ledger import Ledger, kept_stack, read_ledger, write_atomic
from harness.profiling import cost_on_meta
from harness.schema import Attempt, Ceilings, Commit, Gap, Ladder, LedgerLine, Profile, RunConfig, Status

COMMIT_FILE = "stack.json"
SCRATCH, LOCKED = "optimize-", ".lock"
_owned: list[FileLock] = []
"""Locks of this process's scratch folders, held until it ends."""


@dataclass
class Session:
    """One sitting of a run. What it knows is what the ledger says, so that a killed run goes on where it was."""

    config: RunConfig
    directory: Path
    ledger: Ledger
    judge: Judge
    keeper: Keeper | None
    said: Callable[[str], None] = lambda _: None
    judged: Callable[[Attempt], None] = lambda _: None
    """Told of each attempt once it stands in the ledger."""
    warnings: list[str] = field(default_factory=list)
    """What a user must be told at the end: wins that are not committed."""

    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(line for line in self.ledger.read() if isinstance(line, Attempt))

    def stack(self) -> dict[str, str]:
        """Kept rewrites by name, in order, with the paths of their files; a newer one of a name replaces the older."""
        return {name: str(self.directory / a.file) for name, a in kept_stack(self.attempts()).items()}

    def spent_s(self) -> float:
        """Seconds of judging, over all sittings."""
        return sum(attempt.seconds for attempt in self.attempts())

    def budget_left(self) -> str:
        """Empty while the run may go on; else why it ends."""
        config = self.config
        attempts = self.attempts()
        if config.attempts is not None and len(attempts) >= config.attempts:
            return f"{config.attempts} attempts made"
        if config.hours is not None and self.spent_s() >= config.hours * 3600:
            return f"{config.hours} hours spent"
        if config.budget_usd is not None and sum(a.cost_usd for a in attempts) >= config.budget_usd:
            return f"${config.budget_usd} spent"
        return ""

    def brief(self) -> Brief:
        attempts = self.attempts()
        return Brief(
            workload=self.config.workload,
            device=self.judge.device,
            attempt=len(attempts) + 1,
            attempts=attempts,
            stack=tuple(self.stack()),
            gaps=self.gaps,
        )

    def evaluate(self, proposal: Proposal) -> Attempt:
        """Copies the proposal into the run, and takes exactly those bytes through the gates."""
        number = len(self.attempts()) + 1
        relative = f"candidates/{number:03d}-{proposal.stem}.py"
        path = self.directory / relative
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, proposal.source)
        started = datetime.now(UTC)
        proposed = Proposed(
            attempt=number,
            file=path,
            relative=relative,
            agent=proposal.agent,
            model=proposal.model,
            tokens=proposal.tokens,
            cost_usd=proposal.cost_usd,
        )
        evaluation = Evaluation(self.judge, proposed, self.stack())
        results = evaluation.run()
        parents = [a.file_sha256 for a in self.attempts() if a.decision.status is Status.KEPT]
        return evaluation.attempt(
            results,
            parent=parents[-1] if parents else None,
            started=started,
            device=self.config.fingerprint.device,
            baseline_hash=self.config.baseline_hash,
        )

    def record(self, attempt: Attempt) -> None:
        """The ledger first, then git: a commit without a ledger line cannot be."""
        self.ledger.append(attempt)
        if attempt.decision.status is Status.KEPT:
            self.commit(attempt)

    def commit(self, attempt: Attempt) -> None:
        """Puts a kept rung on the run's branch and says so in the ledger; a failure leaves a patch and a warning."""
        if self.keeper is None:
            return
        source = (self.directory / attempt.file).read_bytes()
        rung = Rung(attempt.attempt, attempt.name, source, attempt.file_sha256, commit_message(attempt))
        try:
            commit, patch, reason = self.keeper.commit(rung, {COMMIT_FILE: self._stack_json()}), None, ""
        except NotCommittedError as error:
            commit, patch, reason = None, str(error.patch) if error.patch else None, str(error)
            self.warnings.append(reason)
        branch = self.keeper.branch
        self.ledger.append(Commit(attempt=attempt.attempt, commit=commit, branch=branch, patch=patch, reason=reason))

    def settle(self) -> None:
        """After a kill: commits what the ledger says was kept and git does not have yet."""
        done = {line.attempt for line in self.ledger.read() if isinstance(line, Commit) and line.commit}
        for attempt in self.attempts():
            if attempt.decision.status is Status.KEPT and attempt.attempt not in done:
                self.commit(attempt)

    def _stack_json(self) -> bytes:
        rows = [
            {"attempt": a.attempt, "name": a.name, "file": Path(a.file).name, "sha256": a.file_sha256}
            for a in self.attempts()
            if a.decision.status is Status.KEPT
        ]
        return (json.dumps({"workload": self.config.workload, "rungs": rows}, indent=2) + "\n").encode()

    def profile(self, phase: str) -> Profile:
        """The kept stack's profile of a phase, taken once for each stack and held in `profiles/`."""
        path = self.directory / "profiles" / f"{phase}-{stack_digest(self.attempts())}.json"
        if path.exists():
            return Profile.model_validate_json(path.read_bytes())
        self.said(f"profile {phase}")
        profile = take_profile(self.judge, tuple(self.stack().values()), phase, self.config.ceilings)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, profile.model_dump_json(indent=1))
        return profile

    def gaps(self) -> tuple[Gap, ...]:
        phase = self.judge.workload.deciding[0].name
        return roofline.gaps(self.profile(phase), self.config.ceilings)

    def climbed(self, phase: str) -> bool:
        """Whether a ladder of the present stack stands in the ledger already."""
        arms = [ladder.BASELINE, *self.stack()]
        ladders = (line for line in self.ledger.read() if isinstance(line, Ladder) and line.phase == phase)
        return any([arm.name for arm in line.arms if arm.kind != "peer"] == arms for line in ladders)

    def climb(
        self,
        phases: list[str],
        *,
        processes: int,
        rounds: int,
        peers: list[ladder.PeerSpec],
        command: str,
        ends: bool = False,
    ) -> list[Ladder]:
        """Re-measures every kept rung, interleaved, into the ledger; `ends` only the whole stack."""
        stack = tuple(self.stack().items())
        made = []
        for phase in phases:
            workload = self.judge.workload
            totals = cost_on_meta(self.judge.model, workload.phase(phase), workload.precision)
            result = ladder.measure(
                self.judge,
                stack,
                phase,
                ends=ends,
                processes=processes,
                rounds=rounds,
                peers=peers,
                floor_ms=totals.floor_ms(self.config.ceilings),
                command=command,
            )
            self.ledger.append(result)
            made.append(result)
        return made

    def close(self) -> None:
        """Ends the children and lets the ledger go; what it said stays readable."""
        self.judge.close()
        self.ledger.close()


def take_profile(
    judge: Judge, files: tuple[str, ...], phase: str, ceilings: Ceilings, trace: Path | None = None
) -> Profile:
    with judge.child({"A": files}, f"profile-{phase}") as (child, _):
        request = m.TakeProfile(arm="A", phase=phase, ceilings=ceilings, trace=str(trace) if trace else None)
        return child.ask(request, m.Profiled, judge.limits.step_s).profile


def commit_message(attempt: Attempt) -> str:
    """Subject and body of a rung's commit: what, how much, by which evidence."""
    lines = [f"{attempt.name}: {attempt.decision.reason}", "", attempt.summary, ""]
    lines += [
        f"{e.phase}: {e.baseline_ms:.4g} -> {e.candidate_ms:.4g} ms ({e.processes} processes, {attempt.device})"
        for e in attempt.estimates
    ]
    return "\n".join(lines).strip()


def stack_digest(lines: Iterable[LedgerLine]) -> str:
    """The kept stack's name in `profiles/`: the same wherever the run lies."""
    hashes = [attempt.file_sha256 for attempt in kept_stack(lines).values()]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:12] if hashes else ladder.BASELINE


def read_profiles(directory: Path, lines: Iterable[LedgerLine]) -> tuple[tuple[Profile, ...], tuple[Profile, ...]]:
    """(the baseline's, the kept stack's) profiles of a run, one a phase."""

    def of(digest: str) -> tuple[Profile, ...]:
        paths = sorted((directory / "profiles").glob(f"*-{digest}.json"))
        return tuple(Profile.model_validate_json(path.read_bytes()) for path in paths)

    digest = stack_digest(lines)
    return of(ladder.BASELINE), of(digest) if digest != ladder.BASELINE else ()


def kept_files(directory: Path) -> tuple[str, ...]:
    """Files of a run's kept stack, in order, without opening the run. Raises UsageError where it is none."""
    load_config(directory)
    kept = kept_stack(read_ledger(directory / "ledger.jsonl"))
    return tuple(str(directory.resolve() / attempt.file) for attempt in kept.values())


def load_config(directory: Path) -> RunConfig:
    """A run's configuration. Raises UsageError where `directory` is no run and DataError where it cannot be read."""
    path = directory / "run.json"
    if not path.exists():
        raise UsageError(f"{directory} is no run directory: it has no run.json (`optimize run` makes one)")
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path} cannot be read: {error.errors()[0]['msg']}") from error


def scratch_folder() -> Path:
    """A private folder for tensors on their way between processes: shared memory where it has room.

    The lock beside it is this process's until it ends. What a killed run left is removed first: folders whose lock is
    free, which holds across containers too, where process ids say nothing.
    """
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 16 << 30
    root = shared if roomy else Path(tempfile.gettempdir())
    for left in root.glob(f"{SCRATCH}*{LOCKED}"):
        with suppress(OSError, Timeout), FileLock(left, timeout=0):
            shutil.rmtree(left.with_suffix(""), ignore_errors=True)
            left.unlink()
    made = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=root))
    lock = FileLock(f"{made}{LOCKED}")
    lock.acquire()
    _owned.append(lock)
    return made
