"""A run killed with SIGKILL at random moments and resumed ends as an undisturbed one: real processes, a real git.

`OPTIMIZE_KILLS=10` makes as many trials; without it three are made.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
KILLS = int(os.environ.get("OPTIMIZE_KILLS", "3"))
FILES = ("experts/experts_gathered_cpu.py", "router/router_bf16.py", "norms/norm_float64.py")
WORKLOADS = ROOT / "tests" / "cli_workloads.toml"
BEFORE_SCREEN = ("guard", "build", "numerics")
SURE_GAIN = 0.10


@dataclass
class Site:
    """A folder of its own for one run: repository, catalog, caches."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Site:
        repo = root / "repo"
        catalog = root / "catalog"
        for folder in (repo, catalog):
            folder.mkdir(parents=True)
        entries = []
        for file in FILES:
            name = Path(file).name
            (catalog / name).write_bytes((ROOT / "kernel_candidates" / file).read_bytes())
            entries.append(f'[[cpu]]\nfile = "{name}"\n')
        (catalog / "catalog.toml").write_text("\n".join(entries))
        (repo / "README").write_text("somebody's project\n")
        for command in (("init", "-q", "-b", "main"), ("add", "README"), ("commit", "-qm", "first")):
            cls(root).git(*command)
        return cls(root)

    @property
    def run(self) -> Path:
        return self.root / "run"

    def git(self, *command: str) -> str:
        identity = ("-c", "user.name=T", "-c", "user.email=t@example.org")
        done = subprocess.run(["git", *identity, *command], cwd=self.root / "repo", check=True, capture_output=True)
        return done.stdout.decode()

    def blob(self, branch: str, path: str) -> bytes:
        command = ["git", "show", f"{branch}:{path}"]
        return subprocess.run(command, cwd=self.root / "repo", check=True, capture_output=True).stdout

    def start(self) -> subprocess.Popen[str]:
        """Begins the run, or goes on with it where it has begun."""
        new = f"-w small --workloads {WORKLOADS} --catalog {self.root}/catalog --seed 11 --out {self.run}"
        words = f"--resume {self.run}" if (self.run / "run.json").exists() else new
        own = {"XDG_CACHE_HOME": str(self.root / "cache"), "TMPDIR": str(self.root), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "harness.cli", "run", *words.split(), "--rounds", "2"],
            cwd=self.root / "repo",
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> None:
        process = self.start()
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0, said

    def lines(self, kind: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (self.run / "ledger.jsonl").read_text().splitlines()]
        return [row for row in rows if row["kind"] == kind]


def outcome(attempt: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on when the run was killed: all but times and what follows from them."""
    gates = [
        {key: gate[key] for key in ("gate", "passed", "status", "reason", "errors", "evidence")}
        for gate in attempt["gates"]
        if gate["gate"] in BEFORE_SCREEN
    ]
    return {"gates": gates} | {
        key: attempt[key] for key in ("attempt", "name", "file", "file_sha256", "agent", "tokens", "cost_usd", "sites")
    }


def gain(attempt: dict[str, Any]) -> float:
    return max((e["log_ratio"] for e in attempt["estimates"]), default=0.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, float]:
    """(the finished run, the seconds it took)"""
    site = Site.make(tmp_path_factory.mktemp("undisturbed"))
    start = time.monotonic()
    site.finish()
    return site, time.monotonic() - start


def workers(site: Site) -> list[int]:
    """Processes left of this run: those whose environment names its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(site.root) in process.environ().get("TMPDIR", "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_undisturbed_run(undisturbed: tuple[Site, float]) -> None:
    site, _ = undisturbed
    statuses = {a["name"]: a["decision"]["status"] for a in site.lines("attempt")}
    assert list(statuses) == ["experts_gathered_cpu", "router_bf16", "norm_float64"]
    assert statuses["experts_gathered_cpu"] == "kept"
    assert statuses["router_bf16"] == "wrong"
    assert statuses["norm_float64"] != "kept"


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(KILLS))
def test_killed_and_resumed(trial: int, undisturbed: tuple[Site, float], tmp_path: Path) -> None:
    calm, seconds = undisturbed
    site = Site.make(tmp_path)
    process = site.start()
    time.sleep(random.Random(trial).uniform((trial + 0.1) / KILLS, (trial + 0.9) / KILLS) * seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for _ in range(50):
        if not workers(site):
            break
        time.sleep(0.1)
    assert not workers(site), "the children outlive the run"
    site.finish()

    attempts, expected = site.lines("attempt"), calm.lines("attempt")
    assert [outcome(a) for a in attempts] == [outcome(a) for a in expected]
    sure = [a["name"] for a in expected if a["decision"]["status"] == "kept" and gain(a) >= SURE_GAIN]
    kept = [a for a in attempts if a["decision"]["status"] == "kept"]
    assert sure == [a["name"] for a in kept if gain(a) >= SURE_GAIN]

    branch = f"optimize/{site.run.name}"
    assert len(site.git("log", "--format=%s", f"main..{branch}").splitlines()) == len(kept)
    assert len([line for line in site.lines("commit") if line["commit"]]) == len(kept)
    tree = site.git("ls-tree", "-r", "--name-only", branch).splitlines()
    blobs = [site.blob(branch, path) for path in tree if path.endswith(".py")]
    assert [hashlib.sha256(blob).hexdigest() for blob in blobs] == [attempt["file_sha256"] for attempt in kept]
    assert site.git("status", "--porcelain") == ""
    assert (site.run / "report.html").exists()
    assert not list(Path("/dev/shm").glob(f"optimize-{process.pid}-*")), "the killed run's scratch is still there"
