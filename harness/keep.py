"""Kept rungs in git: one branch `optimize/<run>` of the user's repository, one commit a rung.

Commits are made from objects alone: blobs, a tree from a temporary index, a commit, then the branch moved by
compare-and-swap. So the user's checkout, index, stash and configuration are not written, a dirty tree or a held
`index.lock` does not matter, no hook runs, nothing is signed, and no filter touches the measured bytes.

There is no worktree on purpose. It would cost a checkout of the whole repository, leave an entry in `.git/worktrees`
when the run directory goes, and could come to hold someone's edits. To look: `git worktree add <folder>
optimize/<run>`. While some checkout has the branch out, moving it would show the rung as deleted there, so that is
refused, as git refuses it.

The one lock in the way is the branch's own, `refs/heads/optimize/<run>.lock`. It is waited for and never deleted: git
writes no owner into it, so a dead owner's cannot be told from a live one's. A win that cannot be committed becomes a
patch, and resuming the run commits it.
"""

from __future__ import annotations

import hashlib
import re
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from harness.errors import DataError, KeepError, UsageError
from harness.ledger import write_atomic

FOLDER = "optimized"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
IDENTITY = ("optimize", "optimize@localhost")

UNSET = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
"""Set by git where it calls `optimize` itself (a hook, `git bisect run`); they would redirect every command."""

ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "SSH_ASKPASS": "true",
    "GIT_EDITOR": "true",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
}

SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.splitIndex=false",
    "core.fsync=committed,reference",
    "commit.gpgSign=false",
    "i18n.commitEncoding=UTF-8",
    "gc.auto=0",
)


@dataclass(frozen=True)
class Rung:
    """A kept attempt: `source` is what was measured, `sha256` its hash, `message` the commit's subject and body."""

    attempt: int
    name: str
    source: bytes
    sha256: str
    message: str


class NotCommittedError(KeepError):
    """Git would not do it; `patch` holds the win where it could be written, and the message says how to go on."""

    def __init__(self, message: str, patch: Path | None = None) -> None:
        super().__init__(message)
        self.patch = patch


@dataclass(frozen=True)
class Git:
    """Runs git without prompts or hooks, under a deadline. `base` precedes each subcommand."""

    base: tuple[str, ...]
    deadline_s: float
    lock_wait_s: float
    variables: Mapping[str, str]

    def __call__(self, *arguments: str) -> bytes:
        """Standard output. Raises NotCommittedError with git's own words, or where the deadline passed."""
        status, output, error = self.attempt(*arguments)
        if status == -signal.SIGKILL:
            raise NotCommittedError(f"`git {arguments[0]}` was stopped: it did not end within {self.deadline_s:g} s")
        if status:
            words = " ".join(error.split())
            raise NotCommittedError(f"`git {arguments[0]}` failed: {words or f'exit status {status}'}")
        return output

    def attempt(self, *arguments: str) -> tuple[int, bytes, str]:
        """Exit status, standard output and error. GitPython looks for git when it is imported, hence only here."""
        try:
            from git.cmd import Git as Runner
            from git.exc import GitCommandNotFound
        except ImportError as error:
            raise UsageError("git is needed to keep a win and is not on PATH; install it") from error
        wait = f"core.filesRefLockTimeout={self.lock_wait_s * 1000:.0f}"
        command = [
            "env",
            *(word for name in UNSET for word in ("-u", name)),
            *(f"{name}={value}" for name, value in (ENVIRONMENT | dict(self.variables)).items()),
            Runner.GIT_PYTHON_GIT_EXECUTABLE or "git",
            *(word for setting in (*SETTINGS, wait) for word in ("-c", setting)),
            *self.base,
            *arguments,
        ]
        try:
            return Runner().execute(
                command,
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
                kill_after_timeout=self.deadline_s + self.lock_wait_s,
            )
        except GitCommandNotFound as error:
            raise UsageError("git is needed to keep a win and is not on PATH; install it") from error


@dataclass(frozen=True)
class Keeper:
    """One run's branch. `base` is its tip when it was opened: HEAD for a new run."""

    run: str
    branch: str
    base: str
    run_dir: Path
    git: Git

    @classmethod
    def open(
        cls, repository: Path, run: str, run_dir: Path, *, deadline_s: float = 60.0, lock_wait_s: float = 5.0
    ) -> Keeper:
        """Makes or resumes the run's branch in the repository that holds `repository`, be it bare or a linked worktree.

        Raises UsageError for a wrong name, no repository, no commit yet, or something in the branch's way.
        """
        if not RUN_NAME.fullmatch(run) or ".." in run or run.endswith((".", ".lock")):
            raise UsageError(
                f"{run!r} cannot name a branch; use letters, digits, '-', '_' and '.', as 2026-11-29-beam-tiny-1"
            )
        git = _find(repository, deadline_s, lock_wait_s)
        branch = f"optimize/{run}"
        reference = f"refs/heads/{branch}"
        absent, tip, _ = git.attempt("rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}")
        if absent:
            unborn, tip, _ = git.attempt("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
            if unborn:
                raise UsageError(
                    f"{repository} has no commit to start from: run `git commit --allow-empty -m start` there"
                )
        base = tip.decode().strip()
        keeper = cls(run, branch, base, run_dir, replace(git, variables=_identity(git)))
        try:
            keeper._refuse_obstacles(base)
            if absent:
                keeper.git("update-ref", "-m", f"optimize: run {run}", reference, base, "")
        except NotCommittedError as error:
            raise UsageError(f"{branch} cannot be used in {repository}: {error}") from error
        return keeper

    def commit(self, rung: Rung, files: Mapping[str, bytes]) -> str:
        """Commits the rung's file and `files` (paths below `optimized/<run>/`), or returns the commit that already did.

        Raises NotCommittedError, a KeepError, once the rung is written as a patch.
        """
        try:
            return self.find(rung.attempt) or self._commit(rung, files)
        except (KeepError, OSError) as error:
            reason = str(error)
        what = f"attempt {rung.attempt} ({rung.name}) was kept but is not committed: {reason}. Mend that, then "
        what += f"`optimize run --resume {self.run_dir}` commits it"
        try:
            patch = self._write_patch(rung)
        except (DataError, OSError) as error:
            measured = self.run_dir / "candidates"
            raise NotCommittedError(
                f"{what}. No patch could be written ({error}); its file is in {measured}"
            ) from error
        raise NotCommittedError(f"{what}; or apply {patch} with `git am --keep-cr`", patch)

    def find(self, attempt: int) -> str | None:
        """The newest commit of this run's attempt on the branch. Raises NotCommittedError where git cannot be asked."""
        reference = f"refs/heads/{self.branch}"
        if not self.git("ls-tree", reference, f"{FOLDER}/{self.run}/"):
            return None
        patterns = (f"^Optimize-Run: {re.escape(self.run)}$", f"^Optimize-Attempt: {attempt}$")
        greps = [f"--grep={pattern}" for pattern in patterns]
        return (
            self.git("rev-list", "-n1", "--extended-regexp", "--all-match", *greps, reference).decode().strip() or None
        )

    def _commit(self, rung: Rung, files: Mapping[str, bytes]) -> str:
        """Writes blobs, tree and commit, checks the tree's bytes, and only then moves the branch."""
        if hashlib.sha256(rung.source).hexdigest() != rung.sha256:
            raise NotCommittedError("its bytes are not the ones that were measured (sha256 differs)")
        reference = f"refs/heads/{self.branch}"
        parent = self.git("rev-parse", "--verify", f"{reference}^{{commit}}").decode().strip()
        self._refuse_obstacles(parent)
        path = self._path(rung)
        contents = {self._below(name): content for name, content in files.items()} | {path: rung.source}
        with tempfile.TemporaryDirectory(prefix=".keep-", dir=self.run_dir) as name:
            scratch = Path(name).resolve()
            staged = replace(self.git, variables={**self.git.variables, "GIT_INDEX_FILE": str(scratch / "index")})
            staged("read-tree", parent)
            for target, content in contents.items():
                (scratch / "content").write_bytes(content)
                blob = staged("hash-object", "-w", "--no-filters", "--", str(scratch / "content")).decode().strip()
                staged("update-index", "--add", "--cacheinfo", f"100644,{blob},{target}")
            tree = staged("write-tree", "--missing-ok").decode().strip()
            (scratch / "message").write_bytes(self._message(rung))
            made = staged("commit-tree", tree, "-p", parent, "-F", str(scratch / "message")).decode().strip()
        if hashlib.sha256(self.git("cat-file", "blob", f"{made}:{path}")).hexdigest() != rung.sha256:
            raise NotCommittedError("git gave back other bytes than were measured")
        self.git("update-ref", "-m", f"optimize: attempt {rung.attempt}", reference, made, parent)
        return made

    def _refuse_obstacles(self, tip: str) -> None:
        """Raises NotCommittedError where a checkout has the branch out, or a file has our folder's name."""
        for entry in self.git("worktree", "list", "--porcelain").decode("utf-8", "surrogateescape").split("\n\n"):
            lines = entry.splitlines()
            if f"branch refs/heads/{self.branch}" in lines and Path(lines[0].removeprefix("worktree ")).is_dir():
                raise NotCommittedError(
                    f"{self.branch} is checked out in {lines[0].removeprefix('worktree ')} and would move under it; "
                    "run `git switch --detach` there (nothing in it is touched)"
                )
        folder = self.git("ls-tree", tip, FOLDER)
        if folder and folder.split()[1] != b"tree":
            raise NotCommittedError(
                f"the repository has a file named {FOLDER}, where the folder of kept rungs would be"
            )

    def _stem(self, rung: Rung) -> str:
        """A proposer chose the name, so what could be more than a file name is replaced."""
        return f"{rung.attempt:02d}-{re.sub(r'[^A-Za-z0-9_]+', '-', rung.name).strip('-')[:80]}"

    def _path(self, rung: Rung) -> str:
        return f"{FOLDER}/{self.run}/{self._stem(rung)}.py"

    def _below(self, name: str) -> str:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise NotCommittedError(f"{name!r} is not a path below {FOLDER}/{self.run}/")
        return f"{FOLDER}/{self.run}/{path}"

    def _message(self, rung: Rung) -> bytes:
        """The message, our trailers last. A proposer's words are in it, so lines that would pass for a trailer of ours
        or end the message of a mailed patch are indented.
        """
        text = rung.message.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n").strip()
        text = re.sub(r"(?m)^(?=Optimize-|---|diff -|Index: |From |>From )", " ", text) or rung.name
        trailers = f"Optimize-Run: {self.run}\nOptimize-Attempt: {rung.attempt}\nOptimize-Sha256: {rung.sha256}\n"
        return f"{text}\n\n{trailers}".encode("utf-8", "replace")

    def _write_patch(self, rung: Rung) -> Path:
        """`patches/<NN>-<name>.patch`, a mailbox of one new file that `git am --keep-cr` applies; made without git."""
        subject, _, body = self._message(rung).partition(b"\n")
        lines = rung.source.split(b"\n")
        complete = lines[-1] == b""
        lines = lines[:-1] if complete else lines
        path = self._path(rung).encode()
        head = (
            b"From %s Mon Sep 17 00:00:00 2001\nFrom: %s <%s>\n"
            b"Date: Thu, 1 Jan 1970 00:00:00 +0000\nSubject: [PATCH] %s\n"
            b"MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n\n%s---\n\n"
        ) % (b"0" * 40, *(part.encode() for part in IDENTITY), subject, body.lstrip(b"\n"))
        diff = b"diff --git a/%s b/%s\nnew file mode 100644\n" % (path, path)
        if lines:
            diff += b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n" % (path, len(lines))
            diff += b"".join(b"+%s\n" % line for line in lines)
            diff += b"" if complete else b"\\ No newline at end of file\n"
        target = self.run_dir / "patches" / f"{self._stem(rung)}.patch"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, head + diff + b"-- \noptimize\n\n")
        return target


def _find(repository: Path, deadline_s: float, lock_wait_s: float) -> Git:
    """Git bound to the repository that holds `repository`."""
    if not repository.is_dir():
        raise UsageError(f"{repository} is not a folder; give --repo the folder of a git repository")
    here = Git(("-C", str(repository.resolve())), deadline_s, lock_wait_s, {})
    status, output, error = here.attempt("rev-parse", "--absolute-git-dir")
    if status and "not a git repository" in error:
        raise UsageError(
            f"{repository} is not in a git repository, where wins are committed: give --repo PATH, "
            "or run `git init` there"
        )
    if status:
        raise UsageError(f"git cannot read {repository}: {error.strip()}")
    directory = output.decode("utf-8", "surrogateescape").removesuffix("\n")
    return replace(here, base=(f"--git-dir={directory}",))


def _identity(git: Git) -> dict[str, str]:
    """Variables for author and committer where none is configured; git's guess from the host name does not count."""
    variables: dict[str, str] = {}
    for role in ("AUTHOR", "COMMITTER"):
        if git.attempt("-c", "user.useConfigOnly=true", "var", f"GIT_{role}_IDENT")[0]:
            variables |= {f"GIT_{role}_NAME": IDENTITY[0], f"GIT_{role}_EMAIL": IDENTITY[1]}
    return variables
