"""Runs a worker in a process of its own: environment, limits, deadline, and the death of its whole group.

The parent talks to it over a socket pair; standard output and error go to a log file, so a candidate's prints are
neither lost nor mistaken for answers.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pydantic import ValidationError

from harness.errors import WorkerError
from harness.messages import REPLY, Failed, Ready, Reply, Request

CHANNEL = "OPTIMIZE_CHANNEL"
MAX_REPLY_BYTES = 64 << 20
LOG_TAIL_CHARS = 4000
PASSED = tuple(
    "PATH HOME LANG LC_ALL TMPDIR CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV CC "
    "CXX".split()
)
"""Environment names a child may see: nothing that could hold a key."""

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
"""A parent that is killed takes its children along: nothing goes on measuring for nobody."""

R = TypeVar("R")


class Child:
    """A worker process. Use as a context manager; leaving kills the process group whatever state it is in."""

    def __init__(self, scratch: Path, cache: Path, *, file_bytes: int = 64 << 30, start_s: float = 180) -> None:
        """Starts at once; `scratch` is its working folder and log, `cache` where it builds."""
        scratch.mkdir(parents=True, exist_ok=True)
        self.scratch = scratch
        self.log = scratch / "log.txt"
        self._ready = False
        self._start_s = start_s
        self._buffer = bytearray()
        ours, theirs = socket.socketpair()
        self._socket = ours

        def limit() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "harness.worker"],
                cwd=scratch,
                env=environment(cache, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=limit,
            )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_ready(self) -> None:
        """Returns once the child has imported torch and made its device context."""
        if not self._ready:
            reply = self._receive(time.monotonic() + self._start_s)
            if not isinstance(reply, Ready):
                raise WorkerError("crashed", f"the worker did not start: {reply}")
            self._ready = True

    def ask(self, request: Request, reply_type: type[R], deadline_s: float) -> R:
        """The child's answer to `request`.

        Raises WorkerError: `timed_out` past the deadline, `crashed` where the process died, and `candidate`, `build` or
        `failed` where it answered with an error of the candidate's, of its build, or of the harness.
        """
        self.wait_ready()
        end = time.monotonic() + deadline_s
        try:
            self._socket.settimeout(deadline_s)
            self._socket.sendall(request.model_dump_json().encode() + b"\n")
        except (TimeoutError, OSError) as error:
            raise self._dead(error) from error
        reply = self._receive(end)
        if isinstance(reply, Failed):
            kind = {"candidate": "candidate", "build": "build", "harness": "failed"}[reply.blame]
            raise WorkerError(kind, f"{reply.error}\n{reply.detail}".strip())
        if not isinstance(reply, reply_type):
            raise WorkerError("crashed", f"the worker answered {type(reply).__name__} to {request.op}")
        return reply

    def _receive(self, end: float) -> Reply:
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0:
                self.close()
                raise WorkerError("timed_out", f"no answer before the deadline; last output:\n{self.tail()}")
            self._socket.settimeout(left)
            try:
                chunk = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._dead(error) from error
            if not chunk or len(self._buffer) > MAX_REPLY_BYTES:
                raise self._dead(None)
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        try:
            return REPLY.validate_json(line)
        except ValidationError as error:
            raise WorkerError("crashed", f"the worker's answer is not one: {str(error)[:500]}") from error

    def _dead(self, cause: OSError | None) -> WorkerError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        code = self.process.poll()
        how = "is alive but closed its channel" if code is None else _how_ended(code)
        return WorkerError("crashed", f"the worker {how}{f' ({cause})' if cause else ''}; last output:\n{self.tail()}")

    def tail(self) -> str:
        """The end of what the child printed."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_CHARS))
                return log.read(LOG_TAIL_CHARS).decode("utf-8", "replace").strip()
        except OSError:
            return ""


def _how_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code} before it answered"


def environment(cache: Path, channel: int) -> dict[str, str]:
    """The child's environment: a few harmless names, the packages' folder on the path, compilers' caches in `cache`."""
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    root = str(Path(__file__).resolve().parents[1])
    paths: Sequence[str] = [root, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return kept | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        CHANNEL: str(channel),
        "OPTIMIZE_BUILD_DIR": str(cache / "build"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
