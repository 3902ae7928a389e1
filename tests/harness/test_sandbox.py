"""Real workers: what they see of the environment, how they die, and what the parent is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness import messages as m
from harness.errors import WorkerError
from harness.sandbox import CHANNEL, LOG_TAIL_CHARS, PASSED, Child, environment
from harness.workload import load_workloads

HERE = Path(__file__).parent
ADDED = {
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    CHANNEL,
    "OPTIMIZE_BUILD_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
}
SECRETS = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK")
SOON_S = 20.0

IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
PARENT = """
import sys, time
from pathlib import Path
from harness.sandbox import Child
child = Child(Path(sys.argv[1]), Path(sys.argv[1]))
child.wait_ready()
print(child.process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    with Child(tmp_path / "scratch", tmp_path / "cache") as child:
        yield child


def opening() -> m.Open:
    workload = load_workloads(HERE / "small.toml")["small"]
    return m.Open(workload=workload, device="cpu", seed=1, threads=1, arms={"A": ()})


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> bool:
    end = time.monotonic() + SOON_S
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return gone(pid)


def test_the_environment_passes_nothing_that_is_not_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/libraries")
    monkeypatch.setenv("PYTHONPATH", "/first:/second")
    made = environment(tmp_path, 5)
    assert set(made) <= set(PASSED) | ADDED
    assert "secret" not in made.values()
    assert made["LD_LIBRARY_PATH"] == "/libraries"
    assert made["PYTHONPATH"].split(os.pathsep)[1:] == ["/first", "/second"]
    assert made["OPTIMIZE_BUILD_DIR"] == str(tmp_path / "build")
    assert made[CHANNEL] == "5"


def test_a_running_child_has_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    with Child(tmp_path / "scratch", tmp_path / "cache") as child:
        child.wait_ready()
        seen = Path(f"/proc/{child.process.pid}/environ").read_bytes()
        folder = Path(f"/proc/{child.process.pid}/cwd").resolve()
    names = {entry.partition(b"=")[0].decode() for entry in seen.split(b"\0") if entry}
    assert names <= set(PASSED) | ADDED
    assert b"secret" not in seen
    assert folder == tmp_path / "scratch"
    assert gone(child.process.pid)


def test_closing_kills_the_whole_group(child: Child, tmp_path: Path) -> None:
    """A process that the candidate started and that ignores SIGTERM dies with its worker."""
    mark = tmp_path / "pid"
    file = tmp_path / "spawns.py"
    file.write_text(
        "import subprocess, sys\n"
        f"started = subprocess.Popen([sys.executable, '-c', {IGNORES_SIGTERM!r}], stdout=subprocess.PIPE)\n"
        "started.stdout.readline()\n"
        f"open({str(mark)!r}, 'w').write(str(started.pid))\n"
    )
    child.ask(opening(), m.Opened, 60)
    with pytest.raises(WorkerError, match=r"spawns\.py has no REWRITE"):
        child.ask(m.Build(file=str(file)), m.Built, 60)
    grandchild = int(mark.read_text())
    os.kill(grandchild, signal.SIGTERM)
    time.sleep(0.1)
    assert not gone(grandchild), "it ignores SIGTERM"
    child.close()
    assert gone(child.process.pid)
    assert wait_gone(grandchild)
    child.close()


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    root = str(HERE.parents[1])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "scratch")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not gone(worker)
        parent.kill()
    assert wait_gone(worker)


def test_a_deadline_ends_the_child_and_gives_the_end_of_its_log(child: Child) -> None:
    child.ask(opening(), m.Opened, 60)
    file = child.scratch / "endless.py"
    file.write_text("for number in range(1000):\n    print('line', number)\nwhile True:\n    pass\n")
    with pytest.raises(WorkerError, match="no answer before the deadline") as caught:
        child.ask(m.Build(file=str(file)), m.Built, 2)
    assert caught.value.kind == "timed_out"
    assert str(caught.value).endswith("line 998\nline 999")
    assert "line 1\n" not in str(caught.value), "its end alone"
    assert len(str(caught.value)) < LOG_TAIL_CHARS + 100
    assert gone(child.process.pid)
    with pytest.raises(WorkerError) as caught:
        child.ask(m.Build(file=str(file)), m.Built, 2)
    assert caught.value.kind == "crashed"


def test_the_end_of_a_long_log_is_read_without_the_rest(child: Child) -> None:
    child.close()
    with child.log.open("ab") as log:
        log.truncate(256 << 20)
        log.seek(0, os.SEEK_END)
        log.write(b"the end")
    tracemalloc.start()
    tail = child.tail()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tail.endswith("the end")
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no answer at all", "the worker's answer is not one"),
        ('{"kind": "built", "name": "all but a name is missing"}', "the worker's answer is not one"),
        ('{"kind": "ready", "pid": 1}', "the worker answered Ready to build"),
        ("\\xff\\xfe", "the worker's answer is not one"),
    ],
    ids=["garbage", "half", "another kind", "not UTF-8"],
)
def test_a_forged_line_is_a_crash(child: Child, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "forges.py"
    file.write_text(
        "import ctypes\n"
        f"line = b'{line}\\n'\n"
        "for channel in range(3, 64):\n"
        "    ctypes.CDLL(None).send(channel, line, len(line), 0)\n"
        "raise RuntimeError('said enough')\n"
    )
    child.ask(opening(), m.Opened, 60)
    with pytest.raises(WorkerError, match=said) as caught:
        child.ask(m.Build(file=str(file)), m.Built, 60)
    assert caught.value.kind == "crashed"


def test_a_file_may_not_outgrow_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "writes.py"
    file.write_text("from pathlib import Path\nPath('large').write_bytes(bytes(3 << 20))\n")
    with Child(tmp_path / "scratch", tmp_path / "cache", file_bytes=2 << 20) as child:
        child.ask(opening(), m.Opened, 60)
        with pytest.raises(WorkerError, match="File too large") as caught:
            child.ask(m.Build(file=str(file)), m.Built, 60)
        assert (child.scratch / "large").stat().st_size <= 2 << 20
    assert caught.value.kind == "build"
