"""The ledger: torn lines, full disks, two holders, kills, and numbers that are not."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import DataError
from harness.ledger import Ledger, encode, read_ledger, write_atomic
from harness.schema import Attempt, Commit, Decision, Estimate, Gate, GateResult, Ladder, LadderArm, Repair, Status

ROOT = Path(__file__).resolve().parents[2]


def attempt(number: int, summary: str = "", evidence: dict[str, object] | None = None, seconds: float = 1.0) -> Attempt:
    gate = GateResult(
        gate=Gate.GUARD, passed=False, seconds=seconds, status=Status.REFUSED, reason="no", evidence=evidence or {}
    )
    return Attempt(
        attempt=number,
        name="norm_residual",
        regions=(("input_norm",),),
        backend="torch",
        target="decode-b1",
        file=f"candidates/{number:03d}-norm_residual.py",
        file_sha256="0" * 64,
        parent=None,
        agent="catalog",
        summary=summary,
        started="2026-11-29T00:00:00Z",
        seconds=1.0,
        gates=(gate,),
        decision=Decision(status=Status.REFUSED, reason="no"),
        device="cpu",
        baseline_hash="0" * 64,
    )


def script(tmp_path: Path, body: str) -> list[str]:
    """A command that runs `body` in a fresh process, with this file's `attempt` and the ledger's names at hand."""
    path = tmp_path / "script.py"
    head = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "import os, resource, signal\nfrom pathlib import Path\nfrom test_ledger import attempt\n"
        "from harness.errors import DataError\nfrom harness.ledger import Ledger, write_atomic\n"
    )
    path.write_text(head + body)
    return [sys.executable, str(path)]


def test_lines_come_back_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    records: list[Attempt | Commit] = [
        attempt(1, "größer\n\u2028 </script>"),
        Commit(attempt=1, commit="c" * 40, branch="optimize/x"),
    ]
    with Ledger(path) as ledger:
        assert ledger.read() == () and ledger.next_attempt == 1
        for record in records:
            ledger.append(record)
        assert list(ledger.read()) == records
        assert ledger.attempts() == (records[0],) and ledger.commits() == (records[1],)
        assert ledger.next_attempt == 2
    assert path.read_bytes().count(b"\n") == 2
    with Ledger(path) as ledger:
        assert list(ledger.read()) == records


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_ledger_cut_anywhere_loses_at_most_one_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = [encode(attempt(n, "naïve ✓ größer" * n)) for n in (1, 2, 3)]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path_factory.mktemp("cut") / "ledger.jsonl"
    path.write_bytes(content[:cut])
    whole = sum(1 for n in (1, 2, 3) if len(b"".join(lines[:n])) - 1 <= cut)  # a line that lacks only its end is whole
    with Ledger(path) as ledger:
        ledger.append(attempt(9))
        assert [a.attempt for a in ledger.attempts()] == [*(1, 2, 3)[:whole], 9]
        repairs = [record for record in ledger.read() if isinstance(record, Repair)]
    saved = list(path.parent.glob("*.torn-*.bin"))
    assert len(repairs) == len(saved) <= 1
    for repair in repairs:
        torn = (path.parent / repair.saved_as).read_bytes()
        assert len(torn) == repair.dropped_bytes and content[:cut].endswith(torn)


@pytest.mark.parametrize("ending", ["mid-object", "mid-utf8", "zeros"])
def test_a_torn_last_line_is_saved_and_reported(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = encode(attempt(1)), encode(attempt(2, "größer"))
    torn = {
        "mid-object": second[:40],
        "mid-utf8": second[: second.index("ö".encode()) + 1],
        "zeros": b"\0" * 512,
    }[ending]
    for n in (1, 2):
        path.write_bytes(first + torn)
        with Ledger(path) as ledger:
            ledger.append(attempt(2))
            kinds = [record.kind for record in ledger.read()]
        assert kinds == ["attempt", "repair", "attempt"]
        assert (tmp_path / f"ledger.torn-{n}.bin").read_bytes() == torn


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    content = encode(attempt(1)) + encode(attempt(2))[:30] + b"\n" + encode(attempt(3))
    path.write_bytes(content)
    with pytest.raises(DataError, match="line 2"):
        Ledger(path)
    with pytest.raises(DataError, match="line 2"):
        read_ledger(path)
    assert path.read_bytes() == content
    path.write_bytes(encode(attempt(1)))
    Ledger(path).close()  # the refused opening gave the lock back


def test_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    newer = json.loads(encode(attempt(1))) | {"schema_version": 2, "unheard_of": 1}
    content = json.dumps(newer).encode() + b'\n{"kind": "att'
    path.write_bytes(content)
    with pytest.raises(DataError, match="newer optimize"):
        Ledger(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"[1]", b"null", b"{}", b'{"schema_version": "1"}', b'{"schema_version": true}', b""])
def test_json_that_is_no_record_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(encode(attempt(1)) + line + b"\n")
    with pytest.raises(DataError, match="line 2"):
        read_ledger(path)


def test_nan_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(encode(attempt(1, evidence={"x": 7.25})).replace(b"7.25", b"NaN"))
    with pytest.raises(DataError, match="NaN is not JSON"):
        read_ledger(path)


def test_evidence_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    evidence: dict[str, object] = {"latency_ms": math.nan, "speedup": [math.inf, {"low": -math.inf}], "n": 1}
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append(attempt(1, "<script>alert(1)</script>", evidence))
        (back,) = ledger.attempts()
    assert back.gates[0].evidence == {"latency_ms": None, "speedup": [None, {"low": None}], "n": 1}


def test_a_record_that_could_not_be_read_back_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ladder = Ladder(
        workload="w",
        phase="p",
        device="cpu",
        floor_ms=math.nan,
        arms=(LadderArm(name="baseline", kind="baseline", samples_ms=((1.0, math.inf),)),),
        started="",
        seconds=1.0,
        command="",
    )
    with Ledger(path) as ledger:
        ledger.append(attempt(1))
        before = path.read_bytes()
        with pytest.raises(DataError, match=r"gates\.0\.seconds"):
            ledger.append(attempt(2, seconds=math.nan))
        with pytest.raises(DataError, match=r"samples_ms\.0\.1"):
            ledger.append(ladder)
        with pytest.raises(DataError, match="cannot be written as JSON"):
            ledger.append(attempt(2, evidence={"tensor": object()}))
        assert path.read_bytes() == before
        ledger.append(attempt(2))
    assert Estimate.model_fields["low"].is_required()


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    body = f"ledger = Ledger(Path({str(path)!r}))\nprint('held', flush=True)\nsignal.pause()\n"
    with subprocess.Popen(script(tmp_path, body), stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(DataError, match=f"process {holder.pid} on "):
                Ledger(path)
            assert read_ledger(path) == ()
        finally:
            holder.kill()
    Ledger(path).close()  # the dead holder's lock is free


def test_one_process_cannot_hold_it_twice_and_cannot_write_once_closed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    with pytest.raises(DataError, match=f"process {os.getpid()} on "):
        Ledger(path)
    ledger.close()
    with pytest.raises(DataError, match="closed"):
        ledger.append(attempt(1))


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(attempt(1))
        with path.open("ab") as other:
            other.write(b'{"half')
        with pytest.raises(DataError, match="another program"):
            ledger.append(attempt(2))
    with Ledger(path) as ledger:
        ledger.append(attempt(2))
        assert [record.kind for record in ledger.read()] == ["attempt", "repair", "attempt"]


def test_killed_while_appending_every_said_record_is_there(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    body = (
        f"ledger = Ledger(Path({str(path)!r}))\n"
        "while True:\n    n = ledger.next_attempt\n    ledger.append(attempt(n, 'größer' * 4000))\n"
        "    print(n, flush=True)\n"
    )
    said = 0
    for _ in range(3):
        with subprocess.Popen(script(tmp_path, body), stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.05)
            writer.send_signal(signal.SIGKILL)
            rest = [int(line) for line in writer.stdout.read().splitlines() if line.isdigit()]
            said = max([said, *rest])
        with Ledger(path) as ledger:
            numbers = [a.attempt for a in ledger.attempts()]
            assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= said
            ledger.append(attempt(ledger.next_attempt))


FILL = """
directory = Path({directory!r})
(directory / "run.json").write_text("old")
ledger = Ledger(directory / "ledger.jsonl")
ledger.append(attempt(1))
{limit}
large = "x" * 300000
for call in (lambda: ledger.append(attempt(2, large)), lambda: write_atomic(directory / "run.json", large)):
    before = {{p.name: p.read_bytes() for p in directory.iterdir()}}
    try:
        call()
    except DataError as error:
        print("refused:", error)
    else:
        sys.exit("a short write was taken for a whole one")
    assert before == {{p.name: p.read_bytes() for p in directory.iterdir()}}, "something half-written remains"
ledger.append(attempt(2))
print([a.attempt for a in ledger.attempts()], (directory / "run.json").read_text())
"""


def test_a_file_size_limit_leaves_the_old_files(tmp_path: Path) -> None:
    """The kernel writes up to the limit and reports a short write first, as on a disk that fills."""
    directory = tmp_path / "run"
    directory.mkdir()
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))"
    command = script(tmp_path, FILL.format(directory=str(directory), limit=limit))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == 2 and done.stdout.endswith("[1, 2] old\n")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100000


def test_a_full_disk_leaves_the_old_files(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace here, so no small tmpfs of our own; the file size limit covers the short write")
    directory = tmp_path / "run"
    directory.mkdir()
    command = script(tmp_path, FILL.format(directory=str(directory), limit=""))
    mounted = f'mount -t tmpfs -o size=128k none "{directory}" && exec "$@"'
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", mounted, "sh", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left") == 2 and done.stdout.endswith("[1, 2] old\n")


def test_write_atomic_keeps_the_mode_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "naïve file.json"
    write_atomic(path, "é")
    path.chmod(0o640)
    write_atomic(path, b"\xff\0")
    assert path.read_bytes() == b"\xff\0" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(DataError, match="cannot be written"):
        write_atomic(tmp_path / "missing" / "run.json", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_atomic(tmp_path / "folder", b"")
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "folder"])


def test_a_run_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        Ledger(tmp_path / "missing" / "ledger.jsonl")
    assert list(tmp_path.iterdir()) == []
