"""The commands as a user meets them: real processes, a real repository, the toy model on one core."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harness.cli import app
from harness.device import DeviceLock
from harness.workload import load_workloads

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("-w", "small", "--workloads", str(ROOT / "tests" / "cli_workloads.toml"))
COMMANDS = ("run", "check", "bench", "profile", "ladder", "report", "workloads", "doctor")
WRONG, RIGHT = "softcap", "experts_gathered_cpu"
CATALOG = {
    WRONG: ROOT / "tests" / "judged" / "wrong" / "softcap.py",
    RIGHT: ROOT / "kernel_candidates" / "experts" / "experts_gathered_cpu.py",
}
RAISES = '''"""Raises when it is run."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="raises", replaces=(("post_attention_norm",),), backend="torch", target="decode")


def prepare(site):
    return None


def run(inputs, caches, state):
    raise ValueError("no such luck")
'''
SIDE_BY_SIDE = 2
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Both outputs as one line without frames: a message may be wrapped anywhere."""
        return " ".join(re.sub(r"[│╭╮╰╯─]", " ", self.out + self.err).split())


def environment(home: Path) -> dict[str, str]:
    """A user's with nothing configured: home, caches, device lock and git identity are the test's own."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV") if name in os.environ}
    folders = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "TMPDIR")}
    rest = {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "TERM": "dumb", "COLUMNS": "200", "GIT_CONFIG_NOSYSTEM": "1"}
    return kept | folders | rest


def optimize(*words: str | Path, home: Path, cwd: Path | None = None) -> Answer:
    """Runs `optimize` with these words to its end."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "harness.cli", *map(str, words)],
        cwd=cwd or home,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return Answer(done.returncode, done.stdout, ESCAPES.sub("", done.stderr))


def git(repository: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=User", "-c", "user.email=user@example.org", *words],
        cwd=repository,
        env=environment(repository.parent / "home of git"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_is_for_and_shows_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    said = " ".join(ESCAPES.sub("", done.output).split())
    assert done.exit_code == 0
    assert f"Example: optimize {command}" in said
    before_options = said.partition("Options")[0].partition("Usage:")[2]
    assert len(before_options.split()) > 12, "a sentence says what the command does"


def test_every_command_has_its_help_tested() -> None:
    assert {found.name or found.callback.__name__ for found in app.registered_commands if found.callback} == set(
        COMMANDS
    )


@dataclasses.dataclass(frozen=True)
class Asked:
    """Commands that have begun, by name, and the folder they were begun in."""

    root: Path
    begun: Mapping[str, Future[Answer]]

    def __getitem__(self, name: str) -> Answer:
        return self.begun[name].result()

    def wait(self) -> None:
        """Until all have ended: what is timed next has the machine to itself."""
        for future in self.begun.values():
            future.result()


@contextmanager
def begin(root: Path, commands: Mapping[str, tuple[str | Path, ...]]) -> Iterator[Asked]:
    """Begins commands, each with a home of its own below `root`, and runs a few at a time."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        homes = {name: root / f"home of {name}" for name in commands}
        yield Asked(root, {name: pool.submit(optimize, *commands[name], home=homes[name]) for name in commands})
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Commands that need no run and no quiet machine.

    The lock of the device that "in use" asks for is held by this process until they have ended.
    """
    root = tmp_path_factory.mktemp("asked")
    norm = ROOT / "tests" / "judged" / "right" / "norm.py"
    syntax, raises, brackets = root / "syntax.py", root / "raises.py", root / "run [old]"
    syntax.write_text("def run(:\n")
    raises.write_text(RAISES)
    brackets.mkdir()
    _repository(root / "typo")
    commands: dict[str, tuple[str | Path, ...]] = {
        "raises": ("check", raises, *SMALL),
        "workloads": ("workloads", "--json"),
        "profile": ("profile", *SMALL, "--json", "--trace", root / "step.json"),
        "doctor": ("doctor", "--json"),
        "help": ("--help",),
        "syntax": ("check", syntax, *SMALL),
        "typo": ("run", *SMALL, "--only", "no_such_file", "--out", root / "typo-run", "--repo", root / "typo"),
        "unknown workload": ("check", norm, "-w", "beam-huge"),
        "missing file": ("check", root / "not_there.py", *SMALL),
        "needs a GPU": ("profile", "-w", "beam-tp8-rank", "--device", "cpu"),
        "in use": ("run", *SMALL, "--no-git", "--out", root / "never"),
        "no run": ("report", brackets),
    }
    lock = DeviceLock(torch.device("cpu"), folder=root / "home of in use" / "optimize" / "locks")
    with lock, begin(root, commands) as begun:
        yield begun


def _repository(path: Path) -> Path:
    """A repository with one commit."""
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    (path / "kernel.py").write_text("a = 1\n")
    git(path, "add", ".")
    git(path, "commit", "-q", "-m", "first")
    return path


def test_help_lists_the_commands_and_exit_codes(asked: Asked) -> None:
    answer = asked["help"]
    assert answer.code == 0
    assert [name for name in COMMANDS if not re.search(rf"│ {name} +\w", answer.out)] == []
    assert "Exit codes: 0 fine; 1 not kept; 2 usage; 3 wrong numerics" in answer.words


def test_workloads_counts_every_preset_and_says_what_fits(asked: Asked) -> None:
    answer = asked["workloads"]
    assert (answer.code, answer.err) == (0, "")
    rows = json.loads(answer.out)
    known = load_workloads()
    assert [(r["workload"], r["phase"]) for r in rows] == [(w.name, p.name) for w in known.values() for p in w.phases]
    for row in rows:
        workload = known[row["workload"]]
        assert row["tokens"] == workload.phase(row["phase"]).tokens
        assert row["decides"] == workload.phase(row["phase"]).decides
        if workload.ranks == 1:
            assert min(row["bytes"], row["flops"], row["weight_bytes"]) > 0
        if "cpu" not in workload.devices and not torch.cuda.is_available():
            assert row["fits"].startswith("no: ")
    assert {row["fits"] for row in rows if row["workload"] == "beam-tiny"} == {"yes"}


def test_doctor_finds_what_is_here_and_mends_what_is_not(asked: Asked) -> None:
    answer = asked["doctor"]
    assert (answer.code, answer.err) == (0, "")
    findings = {finding["what"]: finding for finding in json.loads(answer.out)}
    assert {"Python", "torch", "g++", "nvcc", "triton", "git", "bubblewrap", "memory"} <= set(findings)
    assert findings["Python"]["detail"] == sys.version.split()[0]
    assert findings["git"]["state"] == "ok"
    for finding in findings.values():
        assert finding["detail"]
        assert finding["state"] == "ok" or finding["mend"], finding


def test_an_unknown_workload_is_answered_with_those_there_are(asked: Asked) -> None:
    answer = asked["unknown workload"]
    assert answer.code == 2
    assert "'beam-huge'" in answer.words
    assert [name for name in load_workloads() if name not in answer.words] == []


def test_a_missing_file_is_named(asked: Asked) -> None:
    answer = asked["missing file"]
    assert answer.code == 2
    assert "not_there.py' does not exist" in answer.words


def test_a_file_that_is_no_python_is_refused_with_its_line(asked: Asked) -> None:
    answer = asked["syntax"]
    assert answer.code == 6
    assert re.search(r"guard refused .*line 1: not Python that can be read", answer.words)


def test_a_candidate_that_raises_is_shown_its_own_exception(asked: Asked) -> None:
    answer = asked["raises"]
    assert answer.code == 7
    assert re.search(r"numerics crashed .*ValueError: no such luck", answer.words)
    assert "raises.py" in answer.words, "the traceback leads to the candidate's own line"


def test_a_workload_for_a_gpu_is_refused_on_a_cpu(asked: Asked) -> None:
    answer = asked["needs a GPU"]
    assert answer.code == 5
    assert "beam-tp8-rank runs on cuda, and this is cpu" in answer.words
    assert "`optimize workloads`" in answer.words


def test_a_second_run_on_a_device_is_refused_and_leaves_nothing(asked: Asked) -> None:
    answer = asked["in use"]
    assert answer.code == 5
    assert f"cpu is in use by another run of optimize (process {os.getpid()})" in answer.words
    assert not (asked.root / "never").exists()


def test_a_misspelt_file_of_the_catalog_is_found_before_a_run_is_made(asked: Asked) -> None:
    answer = asked["typo"]
    assert answer.code == 2
    assert "'no_such_file'" in answer.words and RIGHT in answer.words
    assert not (asked.root / "typo-run" / "run.json").exists(), "the corrected command would be told to resume this run"
    assert git(asked.root / "typo", "branch", "--list", "optimize/*") == ""


def test_a_folder_that_is_no_run_is_named_brackets_and_all(asked: Asked) -> None:
    answer = asked["no run"]
    assert answer.code == 2
    assert f"{asked.root}/run [old] is no run directory" in answer.words


def test_a_profile_adds_up(asked: Asked) -> None:
    answer = asked["profile"]
    assert (answer.code, answer.err) == (0, "")
    (profile,) = json.loads(answer.out)
    assert (profile["workload"], profile["phase"]) == ("small", "decode-b1")
    assert profile["complete"], profile["reason"]
    regions = {region["region"]: region for region in profile["regions"]}
    assert {"embedding", "attention", "router", "expert_down", "lm_head"} <= set(regions)
    assert (
        regions["post_attention_norm"]["calls"] == load_workloads(ROOT / "tests" / "cli_workloads.toml")["small"].layers
    )
    times = [region["time_ms"] for region in regions.values()]
    assert min(times) > 0 and profile["unattributed_ms"] >= 0
    assert sum(times) + profile["unattributed_ms"] <= profile["step_ms"] * (1 + 1e-6)


def test_a_profiles_trace_opens_as_json(asked: Asked) -> None:
    assert asked["profile"].code == 0
    trace = json.loads((asked.root / "step-decode-b1.json").read_text())
    assert trace["traceEvents"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run in a dirty repository."""

    root: Path
    answer: Answer
    before: Mapping[str, str]
    """The repository's state."""

    @property
    def directory(self) -> Path:
        return self.root / "first-run"

    @property
    def repository(self) -> Path:
        return self.root / "mon dépôt"

    @property
    def catalog(self) -> Path:
        return self.root / "mes idées"

    def copy(self, to: Path) -> Path:
        """The run directory again, for a test that changes it."""
        return Path(shutil.copytree(self.directory, to / self.directory.name))


def state(repository: Path) -> dict[str, str]:
    """Everything of a repository that a run must leave alone."""
    files = {path.name: path.read_text() for path in repository.iterdir() if path.is_file()}
    index = hashlib.sha256((repository / ".git" / "index").read_bytes()).hexdigest()
    head = (repository / ".git" / "HEAD").read_text()
    config = (repository / ".git" / "config").read_text()
    return (
        files
        | {"index": index, "HEAD": head, "config": config}
        | {
            word: git(repository, *word.split())
            for word in (
                "rev-parse HEAD",
                "status --porcelain",
                "stash list",
                "worktree list",
                "for-each-ref refs/tags",
            )
        }
    )


def lines(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


@pytest.fixture(scope="module")
def run(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run over one wrong and one right candidate, below a path with spaces and accents, after all that was asked."""
    if shutil.which("g++") is None:
        pytest.skip("the right candidate is built with g++")
    asked.wait()
    root = tmp_path_factory.mktemp("run") / "à part"
    made = Run(root, Answer(0, "", ""), {})
    made.catalog.mkdir(parents=True)
    for name, file in CATALOG.items():
        shutil.copyfile(file, made.catalog / f"{name}.py")
    (made.catalog / "catalog.toml").write_text("".join(f'[[cpu]]\nfile = "{name}.py"\n' for name in CATALOG))
    _repository(made.repository)
    (made.repository / "kernel.py").write_text("a = 2  # not committed\n")
    (made.repository / "staged.txt").write_text("staged\n")
    git(made.repository, "add", "staged.txt")
    (made.repository / "untracked.txt").write_text("nobody's\n")
    before = state(made.repository)
    words = ("--catalog", made.catalog, "--out", made.directory, "--seed", "7", "--rounds", "0")
    answer = optimize("run", *SMALL, *words, home=root / "home", cwd=made.repository)
    return dataclasses.replace(made, answer=answer, before=before)


@pytest.mark.slow
def test_a_run_records_every_candidate_once(run: Run) -> None:
    assert run.answer.code == 0, run.answer.err
    attempts = lines(run.directory, "attempt")
    assert [(a["attempt"], a["name"]) for a in attempts] == [(1, WRONG), (2, RIGHT)]
    wrong, right = attempts
    assert (wrong["decision"]["status"], wrong["gates"][-1]["gate"]) == ("wrong", "numerics")
    assert wrong["estimates"] == wrong["launches"] == []
    assert all(gate["passed"] for gate in right["gates"] if gate["gate"] != "confirm"), right["decision"]
    assert right["launches"], "it was measured"
    config = json.loads((run.directory / "run.json").read_text())
    for attempt in attempts:
        measured = (run.directory / attempt["file"]).read_bytes()
        assert measured == CATALOG[attempt["name"]].read_bytes()
        assert hashlib.sha256(measured).hexdigest() == attempt["file_sha256"]
        assert attempt["baseline_hash"] == config["baseline_hash"]


@pytest.mark.slow
def test_a_run_says_what_it_does_and_ends_with_a_summary(run: Run) -> None:
    for words in ("attempt 1: numerics", f"1 wrong {WRONG}", "attempt 2: confirm"):
        assert words in run.answer.err
    assert "the agent has nothing more to propose" in run.answer.out
    assert f"report: {run.directory / 'report.html'}" in run.answer.out


@pytest.mark.slow
def test_kept_rungs_and_nothing_else_are_commits_on_the_runs_branch(run: Run) -> None:
    kept = [a for a in lines(run.directory, "attempt") if a["decision"]["status"] == "kept"]
    assert [a["name"] for a in kept] == [RIGHT], "nearly all of the step is experts, and it reads a few of them"
    commits = lines(run.directory, "commit")
    found = git(run.repository, "rev-list", "--reverse", "main..optimize/first-run").split()
    assert found == [line["commit"] for line in commits]
    assert [line["attempt"] for line in commits] == [a["attempt"] for a in kept]
    changed = git(run.repository, "diff", "--name-only", "main", "optimize/first-run").split()
    (file,) = [path for path in changed if path.endswith(".py")]
    assert Path(file).parts[0] == "optimized"
    assert git(run.repository, "show", f"optimize/first-run:{file}") == CATALOG[RIGHT].read_text()
    assert git(run.repository, "show", "optimize/first-run:kernel.py") == "a = 1\n", "what was dirty is in no commit"


@pytest.mark.slow
def test_the_users_checkout_index_and_files_are_as_they_were(run: Run) -> None:
    assert run.before["status --porcelain"].splitlines() == [" M kernel.py", "A  staged.txt", "?? untracked.txt"]
    assert state(run.repository) == run.before


@pytest.mark.slow
def test_a_runs_report_holds_every_attempt(run: Run) -> None:
    page = (run.directory / "report.html").read_text()
    assert all(name in page for name in CATALOG)
    with (run.directory / "ledger.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {name for row in rows for name in CATALOG if name in row.values()} == set(CATALOG)


@pytest.fixture(scope="module")
def after(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Commands on the finished run, each but "begun again" on a copy: `root / name / "first-run"`."""
    root = tmp_path_factory.mktemp("after")
    ladder, resumed, reported, rebased = (run.copy(root / n) for n in ("ladder", "resumed", "reported", "rebased"))
    for name in ("report.html", "ledger.csv"):
        (reported / name).unlink()
    config = json.loads((rebased / "run.json").read_text())
    (rebased / "run.json").write_text(json.dumps(config | {"baseline_hash": "0" * 64}))
    commands: dict[str, tuple[str | Path, ...]] = {
        "ladder": ("ladder", ladder, "--processes", "1", "--rounds", "2", "--peer", "baseline_eager"),
        "resumed": ("run", "--resume", resumed, "--rounds", "0"),
        "reported": ("report", reported),
        "rebased": ("run", "--resume", rebased),
        "begun again": ("run", *SMALL, "--no-git", "--out", run.directory),
    }
    with begin(root, commands) as begun:
        yield begun


@pytest.mark.slow
def test_report_writes_the_same_again_from_the_ledger(run: Run, after: Asked) -> None:
    answer, directory = after["reported"], after.root / "reported" / "first-run"
    assert answer.code == 0, answer.err
    assert answer.out.strip() == str(directory / "report.html")
    for name in ("report.html", "ledger.csv"):
        assert (directory / name).read_bytes() == (run.directory / name).read_bytes()


@pytest.mark.slow
def test_resuming_a_finished_run_adds_nothing(run: Run, after: Asked) -> None:
    answer, directory = after["resumed"], after.root / "resumed" / "first-run"
    assert answer.code == 0, answer.err
    assert "the agent has nothing more to propose" in answer.out
    for name in ("ledger.jsonl", "run.json"):
        assert (directory / name).read_bytes() == (run.directory / name).read_bytes()
    tip = git(run.repository, "rev-parse", "optimize/first-run").strip()
    assert tip == lines(run.directory, "commit")[-1]["commit"]


@pytest.mark.slow
def test_a_run_is_not_begun_where_one_is(run: Run, after: Asked) -> None:
    answer = after["begun again"]
    assert answer.code == 2
    assert f"--resume {run.directory}" in answer.words
    for name in ("ledger.jsonl", "run.json", "profiles/decode-b1-baseline.json"):
        assert (run.directory / name).read_bytes() == (after.root / "reported" / "first-run" / name).read_bytes()


@pytest.mark.slow
def test_a_run_on_another_baseline_is_not_resumed(run: Run, after: Asked) -> None:
    answer, directory = after["rebased"], after.root / "rebased" / "first-run"
    assert answer.code == 5
    assert "the baseline of small has changed since first-run began" in answer.words
    assert "check out the commit it was begun with, or begin a new run" in answer.words
    assert (directory / "ledger.jsonl").read_bytes() == (run.directory / "ledger.jsonl").read_bytes()


@pytest.mark.slow
def test_a_ladder_is_one_line_more_with_every_arm(run: Run, after: Asked) -> None:
    answer, directory = after["ladder"], after.root / "ladder" / "first-run"
    assert answer.code == 0, answer.err
    assert lines(directory)[:-1] == lines(run.directory)
    ladder = lines(directory)[-1]
    kept = [a["name"] for a in lines(run.directory, "attempt") if a["decision"]["status"] == "kept"]
    assert (ladder["kind"], ladder["workload"], ladder["phase"]) == ("ladder", "small", "decode-b1")
    assert [(arm["kind"], arm["name"]) for arm in ladder["arms"]] == [
        ("baseline", "baseline"),
        *(("rung", name) for name in kept),
        ("peer", "baseline_eager"),
    ]
    for arm in ladder["arms"]:
        assert [len(process) for process in arm["samples_ms"]] == [2], arm["note"]
        row = re.search(rf"│ {arm['name']} +│ {arm['kind']} +│(.*)", answer.out)
        assert row, answer.out
        median = statistics.median(arm["samples_ms"][0])
        assert any(abs(float(shown) - median) < 1e-3 * median for shown in re.findall(r"\d+\.\d+", row[1])), answer.out
    assert (directory / "waterfall.svg").exists()
