"""The ledger of a run: strict JSON, one record a line, append-only, synced before anything is said of a record.

One process holds a ledger at a time, by a lock file beside it that the kernel releases when the holder dies. What a
kill or a full disk can leave is a last line without its end: opening the ledger moves those bytes to
`ledger.torn-<n>.bin` and says so in a `Repair` line. A record whose JSON could not be read back (a NaN in a field
that needs a number) is refused before it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from harness.errors import DataError
from harness.schema import SCHEMA_VERSION, Attempt, Commit, LedgerLine, Repair, Status

LINE: TypeAdapter[LedgerLine] = TypeAdapter(LedgerLine)

MIGRATIONS: dict[int, Callable[[dict[str, object]], dict[str, object]]] = {}
"""From version n, the function that makes a line of version n + 1. Version 1 is the first, so there is none yet."""


class Ledger:
    """A run's ledger, held until `close`. Raises DataError where another holds it, it cannot be read or is too new."""

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise DataError(f"{path.parent} is not a directory, so it holds no ledger; name a run directory")
        self.path = path
        self._lock = FileLock(f"{path}.lock", timeout=0, thread_local=False)
        self._acquire()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if not path.exists():
                write_atomic(path, b"")
            self.read()
            _repair(path)
            self._end = path.stat().st_size
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the ledger back; the lock file stays, which is what keeps two openers on the same inode."""
        self._lock.release(force=True)

    def append(self, record: LedgerLine) -> None:
        """Writes and syncs one line, or raises DataError and leaves the ledger as it was."""
        if not self._lock.is_locked:
            raise DataError(f"{self.path} was closed; open it again to append")
        line = encode(record)
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}; nothing was recorded") from error
        try:
            if os.fstat(handle).st_size != self._end:
                raise DataError(f"{self.path} was changed by another program; stop the run and resume it to repair it")
            _write_or_truncate(handle, line, self._end)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot take another record ({error.strerror}) and nothing was written: free some space "
                "or mend the disk, then `optimize run --resume` the run"
            ) from error
        finally:
            os.close(handle)
        self._end += len(line)

    def read(self) -> tuple[LedgerLine, ...]:
        """All records on disk, oldest first."""
        return read_ledger(self.path)

    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(record for record in self.read() if isinstance(record, Attempt))

    def commits(self) -> tuple[Commit, ...]:
        return tuple(record for record in self.read() if isinstance(record, Commit))

    @property
    def next_attempt(self) -> int:
        """Numbers start at 1 and are never used twice."""
        return max((attempt.attempt for attempt in self.attempts()), default=0) + 1

    def _acquire(self) -> None:
        """Takes the lock and notes who holds it, for the message that another opener gets."""
        note = Path(f"{self.path}.lock")
        holder = ""
        try:
            self._lock.acquire()
        except Timeout as error:
            with contextlib.suppress(OSError):
                holder = note.read_text(encoding="utf-8", errors="replace").strip()
            raise DataError(
                f"{self.path} is in use by {holder or 'another process'}: wait for that run to end or stop it"
            ) from error
        except OSError as error:
            raise DataError(
                f"{note} cannot be locked: {error.strerror or error}; is the run directory writable?"
            ) from error
        with contextlib.suppress(OSError):
            note.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")


def read_ledger(path: Path) -> tuple[LedgerLine, ...]:
    """A ledger's records without holding it, for reports on a run in progress: a last line still without its end is not
    there yet. Raises DataError, with the line's number, where a whole line is not a record.
    """
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    lines = whole.split(b"\n") if whole else []
    return tuple(decode(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1))


def encode(record: LedgerLine) -> bytes:
    """One line of strict JSON, UTF-8, newline included. Raises DataError where it would not read back."""
    what = f"{record.kind} record"
    try:
        text = LINE.dump_json(record)
        decode(text, what)
    except PydanticSerializationError as error:
        raise DataError(f"{what} cannot be written as JSON: {error}") from error
    return text + b"\n"


def decode(line: bytes, where: str) -> LedgerLine:
    """One line's record, brought up to this version of the schema. `where` begins the DataError's message."""
    try:
        found = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise DataError(f"{where}: not a line of strict JSON ({error}); restore the file from a copy") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if type(version) is not int or version < 1:
        raise DataError(f"{where}: not a ledger record, it has no schema_version; restore the file from a copy")
    if version > SCHEMA_VERSION:
        raise DataError(
            f"{where}: written by a newer optimize (schema version {version}, this one reads up to {SCHEMA_VERSION}); "
            "upgrade optimize"
        )
    for step in range(version, SCHEMA_VERSION):
        found = MIGRATIONS[step](found)
    try:
        return LINE.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where}: {field}: {first['msg']} (it is {first['input']!r:.80})") from error


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replaces `path` whole and synced, or raises DataError and leaves the old file; a `str` is written as UTF-8."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if path.exists():
                os.fchmod(handle, path.stat().st_mode & 0o7777)
            _write_or_truncate(handle, data, 0)
        finally:
            os.close(handle)
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; what was there before still is") from error
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _repair(path: Path) -> None:
    """Cuts a last line without its end, in one replacement of the file: a kill here loses nothing and fuses nothing.

    A last line that lacks only its newline is a whole record and is kept.
    """
    content = path.read_bytes()
    whole, newline, torn = content.rpartition(b"\n")
    if not torn:
        return
    try:
        decode(torn, str(path))
    except DataError:
        pass
    else:
        write_atomic(path, content + b"\n")
        return
    taken = {found.name for found in path.parent.glob(f"{path.stem}.torn-*.bin")}
    number = next(n for n in range(1, len(taken) + 2) if f"{path.stem}.torn-{n}.bin" not in taken)
    saved = path.with_name(f"{path.stem}.torn-{number}.bin")
    write_atomic(saved, torn)
    write_atomic(path, whole + newline + encode(Repair(dropped_bytes=len(torn), saved_as=saved.name)))


def _write_or_truncate(handle: int, data: bytes, end: int) -> None:
    """Writes all of `data` and syncs it; however it fails or is interrupted, the file is `end` bytes long again."""
    done = False
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
        done = True
    finally:
        if not done:
            os.ftruncate(handle, end)
            os.fsync(handle)


def _sync_directory(directory: Path) -> None:
    """Makes a new or replaced name last."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def kept_stack(lines: Iterable[LedgerLine]) -> dict[str, Attempt]:
    """Kept attempts by name, in the order of the stack; a newer one of a name takes the older one's place, last."""
    kept: dict[str, Attempt] = {}
    for line in lines:
        if isinstance(line, Attempt) and line.decision.status is Status.KEPT:
            kept.pop(line.name, None)
            kept[line.name] = line
    return kept
