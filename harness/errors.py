"""The one exception family. Every message says what is wrong and what mends it."""

from __future__ import annotations


class OptimizeError(Exception):
    """Base of every error that a user of `optimize` can meet; carries the command's exit code."""

    exit_code = 2


class UsageError(OptimizeError):
    """A wrong argument, file or name; the message names the right ones."""


class ProgramError(OptimizeError):
    """A program or a substitution that does not fit: overlap, gap, wrong value name. Names the call."""


class CandidateError(OptimizeError):
    """A candidate file that is not a rewrite: no REWRITE, unknown region, missing function."""

    exit_code = 7


class RefusedError(OptimizeError):
    """The guard refuses the candidate's source."""

    exit_code = 6


class WeightsError(OptimizeError):
    """A checkpoint lacks a tensor or holds one of another shape or dtype; the message names it."""


class DeviceError(OptimizeError):
    """No device, not enough memory, or a device in use by another run."""

    exit_code = 5


class DataError(OptimizeError):
    """A run directory, ledger or record that cannot be read."""

    exit_code = 5


class WorkerError(OptimizeError):
    """The child failed; `kind` tells how: `crashed`, `timed_out`, or `failed` (it answered with an error)."""

    exit_code = 7

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class KeepError(OptimizeError):
    """A win could not be committed; it is kept as a patch whose path the message gives."""

    exit_code = 7
