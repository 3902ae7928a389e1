"""Keeping a win: real repositories, dirty trees, locks, hooks, stuck helpers, kills; the user's files never change."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import KeepError, UsageError
from harness.keep import Keeper, NotCommittedError, Rung

ROOT = Path(__file__).resolve().parents[2]
RUN = "2026-11-29-beam-tiny-1"
SOURCE = b'"""One pass, \xc3\xa9.\r\n"""\n\tx = 1   \nlast line without its end'


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration but what a test writes: an empty home and no system file."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in [
        name for name in os.environ if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER", "XDG_CONFIG", "EMAIL"))
    ]:
        monkeypatch.delenv(name)


def git(repository: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=User", "-c", "user.email=user@example.org", *arguments],
        cwd=repository,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits, under a path with a space and an accent."""
    path = tmp_path / "mon dépôt"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    (path / "kernel.py").write_text("a = 1\n")
    (path / "sub").mkdir()
    (path / "sub" / "other.txt").write_text("b\r\n")
    git(path, "add", ".")
    git(path, "commit", "-q", "-m", "first")
    (path / "kernel.py").write_text("a = 2\n")
    git(path, "commit", "-q", "-a", "-m", "second")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run ü"
    path.mkdir()
    return path


def rung(
    attempt: int = 1, source: bytes = SOURCE, message: str = "norm: 3% faster\n\nbody é", name: str = "norm"
) -> Rung:
    return Rung(attempt, name, source, hashlib.sha256(source).hexdigest(), message)


def snapshot(repository: Path) -> dict[str, str]:
    """Hash of every file a user could call theirs: the tree, and of .git all but objects and our own references."""
    found = {}
    for path in sorted(repository.rglob("*")):
        name = path.relative_to(repository).as_posix()
        ours = name.startswith((".git/objects/", ".git/refs/heads/optimize", ".git/logs/refs/heads/optimize"))
        if path.is_file() and not ours:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert ".git/index" in found and ".git/HEAD" in found
    return found


def committed(repository: Path, commit: str, path: str) -> bytes:
    command = ["git", "cat-file", "blob", f"{commit}:{path}"]
    return subprocess.run(command, cwd=repository, capture_output=True, check=True).stdout


def test_a_rung_is_one_commit_on_its_branch(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository / "sub", RUN, run_dir)
    head = git(repository, "rev-parse", "HEAD")
    assert keeper.branch == f"optimize/{RUN}" and keeper.base == head
    first = keeper.commit(rung(), {"stack.json": b"{}\n"})
    second = keeper.commit(rung(2, b"x\n", name="q k"), {"stack.json": b"[2]\n"})
    assert git(repository, "rev-list", f"{head}..{keeper.branch}").split() == [second, first]
    assert committed(repository, first, f"optimized/{RUN}/01-norm.py") == SOURCE
    assert committed(repository, second, f"optimized/{RUN}/stack.json") == b"[2]\n"
    changed = git(repository, "diff", "--name-status", head, keeper.branch).splitlines()
    assert changed == [f"A\toptimized/{RUN}/{name}" for name in ("01-norm.py", "02-q-k.py", "stack.json")]
    message = git(repository, "log", "-1", "--format=%B", first)
    assert message.startswith("norm: 3% faster\n\nbody é\n\n")
    trailers = git(repository, "log", "-1", "--format=%(trailers)", first).splitlines()
    assert trailers == [f"Optimize-Run: {RUN}", "Optimize-Attempt: 1", f"Optimize-Sha256: {rung().sha256}"]
    assert [p.name for p in run_dir.iterdir()] == []


def test_the_users_files_are_byte_identical(repository: Path, run_dir: Path) -> None:
    (repository / "sub" / "other.txt").write_text("stashed\n")
    git(repository, "stash", "push", "-q")
    (repository / "staged.py").write_text("s\n")
    git(repository, "add", "staged.py")
    (repository / "kernel.py").write_text("unstaged\n")
    (repository / "untracked é.py").write_text("u\n")
    (repository / ".gitignore").write_text("optimized/\n*.py\n")
    (repository / "optimized").mkdir()
    (repository / "optimized" / "mine.py").write_text("mine\n")
    before = snapshot(repository)
    keeper = Keeper.open(repository, RUN, run_dir)
    keeper.commit(rung(), {"stack.json": b"{}"})
    assert Keeper.open(repository, RUN, run_dir).commit(rung(2), {})
    assert snapshot(repository) == before


def test_a_checkout_of_the_branch_is_refused_and_never_forced(repository: Path, run_dir: Path, tmp_path: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir)
    leftover = tmp_path / "left over"
    git(repository, "worktree", "add", "-q", str(leftover), keeper.branch)
    (leftover / "kernel.py").write_text("someone's edit\n")
    (leftover / "new.txt").write_text("untracked\n")
    before = {p.name: p.read_bytes() for p in leftover.iterdir() if p.is_file()}
    with pytest.raises(UsageError, match=r"left over.*git switch --detach"):
        Keeper.open(repository, RUN, run_dir)
    with pytest.raises(NotCommittedError, match="checked out in") as caught:
        keeper.commit(rung(), {})
    assert caught.value.patch is not None and caught.value.patch.exists()
    assert {p.name: p.read_bytes() for p in leftover.iterdir() if p.is_file()} == before
    git(leftover, "switch", "-q", "--detach")
    assert Keeper.open(leftover, RUN, run_dir).commit(rung(), {}) == keeper.find(1)
    assert {p.name: p.read_bytes() for p in leftover.iterdir() if p.is_file()} == before
    shutil.rmtree(leftover)  # a worktree that is gone holds nothing up
    git(repository, "worktree", "add", "-q", "-f", str(leftover), keeper.branch)
    shutil.rmtree(leftover)
    assert keeper.commit(rung(2), {})


@pytest.mark.parametrize("state", ["detached", "unborn", "bare", "sha256", "packed", "crlf"])
def test_states_of_a_repository(repository: Path, run_dir: Path, tmp_path: Path, state: str) -> None:
    place = repository
    if state == "detached":
        git(repository, "checkout", "-q", "--detach", "HEAD~1")
    elif state == "bare":
        place = tmp_path / "bare.git"
        git(tmp_path, "clone", "-q", "--bare", str(repository), str(place))
    elif state == "unborn":
        place = tmp_path / "empty"
        git(tmp_path, "init", "-q", str(place))
        with pytest.raises(UsageError, match="no commit to start from"):
            Keeper.open(place, RUN, run_dir)
        return
    elif state == "sha256":
        place = tmp_path / "sha256"
        git(tmp_path, "init", "-q", "--object-format=sha256", str(place))
        git(place, "commit", "-q", "--allow-empty", "-m", "start")
    elif state == "packed":
        Keeper.open(repository, RUN, run_dir).commit(rung(9), {})
        git(repository, "pack-refs", "--all")
        git(repository, "gc", "-q")
    elif state == "crlf":
        (repository / ".gitattributes").write_text("*.py text eol=crlf filter=upper\n")
        git(repository, "config", "core.autocrlf", "true")
        git(repository, "config", "filter.upper.clean", "tr a-z A-Z")
        git(repository, "config", "filter.upper.required", "true")
        git(repository, "config", "core.splitIndex", "true")
    keeper = Keeper.open(place, RUN, run_dir)
    commit = keeper.commit(rung(), {})
    assert committed(place, commit, f"optimized/{RUN}/01-norm.py") == SOURCE
    assert git(place, "rev-parse", f"{commit}^") == keeper.base
    assert Keeper.open(place, RUN, run_dir).find(1) == commit
    assert not list(place.rglob("sharedindex.*"))


def test_what_is_not_a_repository_is_a_usage_error(repository: Path, run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--repo PATH, or run `git init`"):
        Keeper.open(run_dir, RUN, run_dir)
    with pytest.raises(UsageError, match="not a folder"):
        Keeper.open(tmp_path / "missing", RUN, run_dir)
    for name in ("", "../x", "a/b", "x.lock", "a..b", "-x", "a b", "x\n", "y."):
        with pytest.raises(UsageError, match="cannot name a branch"):
            Keeper.open(repository, name, run_dir)


def test_what_stands_in_the_branchs_way_is_named(repository: Path, run_dir: Path) -> None:
    git(repository, "branch", "optimize")
    with pytest.raises(UsageError, match="'refs/heads/optimize' exists"):
        Keeper.open(repository, RUN, run_dir)
    git(repository, "branch", "-m", "optimize", "other")
    (repository / "optimized").write_text("a file\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "in the way")
    with pytest.raises(UsageError, match="a file named optimized"):
        Keeper.open(repository, RUN, run_dir)


def test_variables_of_a_calling_git_do_not_redirect(
    repository: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    commit = Keeper.open(repository, RUN, run_dir).commit(rung(), {})
    assert not (other / "index").exists()
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name)
    assert git(repository, "rev-parse", f"optimize/{RUN}") == commit


def author(repository: Path, commit: str) -> str:
    return git(repository, "log", "-1", "--format=%an <%ae> %cn <%ce>", commit)


def test_identity_is_the_users_where_there_is_one(repository: Path, run_dir: Path, tmp_path: Path) -> None:
    commit = Keeper.open(repository, RUN, run_dir).commit(rung(), {})
    assert author(repository, commit) == "optimize <optimize@localhost> optimize <optimize@localhost>"
    (tmp_path / "home" / ".gitconfig").write_text("[user]\n\tname = Ada\n")  # half an identity is none
    commit = Keeper.open(repository, RUN, run_dir).commit(rung(2), {})
    assert author(repository, commit) == "optimize <optimize@localhost> optimize <optimize@localhost>"
    (tmp_path / "home" / ".gitconfig").write_text("[user]\n\tname = Ada\n\temail = ada@example.org\n")
    commit = Keeper.open(repository, RUN, run_dir).commit(rung(3), {})
    assert author(repository, commit) == "Ada <ada@example.org> Ada <ada@example.org>"


def test_signing_helpers_and_hooks_are_not_run(repository: Path, run_dir: Path, tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text(f'#!/bin/sh\ntouch "{tmp_path}/called"\nsleep 600\n')
    stuck.chmod(0o755)
    for key in ("gpg.program", "gpg.ssh.program", "core.fsmonitor", "core.editor", "core.askPass", "credential.helper"):
        git(repository, "config", key, str(stuck))
    for key in ("commit.gpgSign", "tag.gpgSign", "log.showSignature"):
        git(repository, "config", key, "true")
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (
        "pre-commit",
        "commit-msg",
        "prepare-commit-msg",
        "post-commit",
        "reference-transaction",
        "post-index-change",
    ):
        (hooks / name).write_text(f'#!/bin/sh\ntouch "{tmp_path}/called"\nexit 1\n')
        (hooks / name).chmod(0o755)
    started = time.monotonic()
    keeper = Keeper.open(repository, RUN, run_dir)
    assert keeper.commit(rung(), {}) == keeper.find(1)
    assert time.monotonic() - started < 10 and not (tmp_path / "called").exists()


def test_a_stuck_git_is_stopped_and_the_win_becomes_a_patch(
    repository: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper.open(repository, RUN, run_dir, deadline_s=1.0, lock_wait_s=0.0)
    real = shutil.which("git")
    shim = tmp_path / "bin" / "git"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\ncase " $* " in *" commit-tree "*) sleep 600;; esac\nexec {real} "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    started = time.monotonic()
    with pytest.raises(NotCommittedError, match="`git commit-tree` was stopped") as caught:
        keeper.commit(rung(), {})
    assert time.monotonic() - started < 10
    assert caught.value.patch is not None and caught.value.patch.exists()
    shim.unlink()
    assert keeper.commit(rung(), {}) == keeper.find(1)


def test_locks_of_the_users_checkout_are_not_in_the_way(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir)
    locks = [repository / ".git" / name for name in ("index.lock", "HEAD.lock", "packed-refs.lock", "config.lock")]
    for lock in locks:
        lock.touch()
    assert keeper.commit(rung(), {})
    assert all(lock.exists() for lock in locks)


def test_the_branchs_lock_is_waited_for_and_never_deleted(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir, lock_wait_s=0.5)
    lock = repository / ".git" / "refs" / "heads" / "optimize" / f"{RUN}.lock"
    holder = subprocess.Popen([sys.executable, "-c", f"import time; f = open({str(lock)!r}, 'x'); time.sleep(60)"])
    try:
        while not lock.exists():
            time.sleep(0.01)
        started = time.monotonic()
        with pytest.raises(KeepError, match=r"attempt 1 .* not committed.*\.lock': File exists.*--resume") as caught:
            keeper.commit(rung(), {})
        assert time.monotonic() - started >= 0.45 and lock.exists()
        assert caught.value.exit_code != 0 and keeper.find(1) is None
    finally:
        holder.kill()
        holder.wait()
    with pytest.raises(NotCommittedError):  # its owner is dead, which nobody can tell from the file
        keeper.commit(rung(), {})
    assert lock.exists()
    lock.unlink()
    assert keeper.commit(rung(), {}) == keeper.find(1)


def test_a_lock_given_back_in_time_only_delays(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir, lock_wait_s=10.0)
    lock = repository / ".git" / "refs" / "heads" / "optimize" / f"{RUN}.lock"
    lock.touch()
    with subprocess.Popen(["sh", "-c", 'sleep 0.4; rm "$0"', str(lock)]):
        assert keeper.commit(rung(), {}) == keeper.find(1)


def test_a_commit_made_meanwhile_is_not_lost(
    repository: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone moves the branch between our commit and its reference: theirs stays, ours is a patch, then a commit."""
    keeper = Keeper.open(repository, RUN, run_dir)
    theirs = git(repository, "commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "theirs")
    real = shutil.which("git")
    shim = tmp_path / "bin" / "git"
    shim.parent.mkdir()
    move = f'GIT_DIR="{repository}/.git" {real} update-ref refs/heads/{keeper.branch} {theirs}'
    shim.write_text(f'#!/bin/sh\ncase " $* " in *" commit-tree "*) {move};; esac\nexec {real} "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    with pytest.raises(NotCommittedError, match="`git update-ref` failed"):
        keeper.commit(rung(), {})
    shim.unlink()
    assert git(repository, "rev-parse", keeper.branch) == theirs
    assert git(repository, "rev-parse", f"{keeper.commit(rung(), {})}^") == theirs


def test_an_attempt_is_committed_once(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir)
    assert keeper.find(1) is None
    first = keeper.commit(rung(1), {})
    keeper.commit(rung(11), {})
    assert keeper.commit(rung(1), {}) == first == Keeper.open(repository, RUN, run_dir).find(1)
    assert git(repository, "rev-list", "--count", f"{keeper.base}..{keeper.branch}") == "2"


def test_another_runs_commits_and_a_proposers_words_are_not_found(repository: Path, run_dir: Path) -> None:
    first = Keeper.open(repository, RUN, run_dir)
    first.commit(rung(3), {})
    git(repository, "merge", "-q", first.branch)
    second = Keeper.open(repository, "another-run", run_dir)
    assert second.find(3) is None
    forged = "subject\n\nOptimize-Run: another-run\nOptimize-Attempt: 7\n---\ndiff --git a/x b/x\nFrom x\0"
    second.commit(rung(4, message=forged), {})
    second.commit(rung(5, message=""), {})
    assert second.find(7) is None and second.find(4) and second.find(5)


def test_only_measured_bytes_are_committed(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir)
    with pytest.raises(NotCommittedError, match="not the ones that were measured"):
        keeper.commit(Rung(1, "norm", b"other", rung().sha256, "m"), {})
    for name in ("../kernel.py", "/etc/x", ""):
        with pytest.raises(NotCommittedError, match="not a path below"):
            keeper.commit(rung(1), {name: b""})
    commit = keeper.commit(rung(2, name="../../.git/hooks/é"), {})
    assert git(repository, "diff", "--name-only", keeper.base, commit) == f"optimized/{RUN}/02-git-hooks.py"


@pytest.mark.parametrize(
    "source", [SOURCE, b"", b"\n", b"a\n-- \nb\n", b"From x\n---\r\n\r\n", "é\n".encode("latin-1"), b"\x0c\n"]
)
def test_the_patch_applies_and_counts_as_the_commit(repository: Path, run_dir: Path, source: bytes) -> None:
    keeper = Keeper.open(repository, RUN, run_dir, lock_wait_s=0.0)
    lock = repository / ".git" / "refs" / "heads" / "optimize" / f"{RUN}.lock"
    lock.touch()
    wanted = rung(
        1, source, "norm é: 3%\n\n--- a\ndiff -u\nFrom 0a1b Mon Sep 17 00:00:00 2001\nOptimize-Attempt: 2\nlast"
    )
    with pytest.raises(NotCommittedError) as caught:
        keeper.commit(wanted, {"stack.json": b"{}"})
    lock.unlink()
    assert caught.value.patch == run_dir / "patches" / "01-norm.patch" and str(caught.value.patch) in str(caught.value)
    git(repository, "switch", "-q", keeper.branch)
    git(repository, "am", "-q", "--keep-cr", str(caught.value.patch))
    git(repository, "switch", "-q", "main")
    applied = git(repository, "rev-parse", keeper.branch)
    assert committed(repository, applied, f"optimized/{RUN}/01-norm.py") == source
    assert git(repository, "log", "-1", "--format=%s", applied) == "norm é: 3%"
    assert keeper.commit(wanted, {}) == keeper.find(1) == applied and keeper.find(2) is None


def test_a_broken_repository_still_leaves_a_patch(repository: Path, run_dir: Path) -> None:
    keeper = Keeper.open(repository, RUN, run_dir)
    (repository / ".git").rename(repository / "gone")
    with pytest.raises(NotCommittedError, match="not a git repository") as caught:
        keeper.commit(rung(), {})
    assert caught.value.patch is not None and b"+\tx = 1   \n" in caught.value.patch.read_bytes()
    with pytest.raises(KeepError):
        keeper.find(1)
    shutil.rmtree(run_dir)
    run_dir.write_text("no folder any more")
    with pytest.raises(NotCommittedError, match="No patch could be written") as caught:
        keeper.commit(rung(), {})
    assert caught.value.patch is None


COMMITTER = """
import sys; sys.path.insert(0, {root!r})
import hashlib
from pathlib import Path
from harness.errors import KeepError
from harness.keep import Keeper, Rung
keeper = Keeper.open(Path({repository!r}), {run!r}, Path({run_dir!r}))
{limit}
source = {source}
for n in range(1, 1000):
    try:
        keeper.commit(Rung(n, "norm", source, hashlib.sha256(source).hexdigest(), "m"), {{"stack.json": b"%d" % n}})
    except KeepError as error:
        sys.exit(str(error))
    print(n, flush=True)
"""


@pytest.fixture
def committer(repository: Path, run_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A command that commits attempts 1, 2, ... and prints each once it is committed."""

    def build(source: str = "b'x'", limit: str = "") -> list[str]:
        path = tmp_path / "committer.py"
        places = {"root": str(ROOT), "repository": str(repository), "run": RUN, "run_dir": str(run_dir)}
        path.write_text(COMMITTER.format(source=source, limit=limit, **places))
        return [sys.executable, str(path)]

    return build


def test_killed_anywhere_a_rung_is_neither_lost_nor_doubled(
    repository: Path, run_dir: Path, committer: Callable[..., list[str]]
) -> None:
    before = snapshot(repository)
    for pause in (0.0, 0.03, 0.06):
        with subprocess.Popen(committer(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(pause)
            process.kill()
            said = [int(line) for line in process.stdout.read().splitlines()]
        time.sleep(0.1)  # a git command outlives the kill by its own length
        keeper = Keeper.open(repository, RUN, run_dir)
        assert all(keeper.find(number) for number in said)
    keeper.commit(rung(1, b"x"), {})
    numbers = git(repository, "log", "--format=%(trailers:key=Optimize-Attempt,valueonly)", keeper.branch)
    assert len(numbers.split()) == len(set(numbers.split()))
    assert snapshot(repository) == before
    git(repository, "fsck", "--no-dangling")


def test_an_object_that_does_not_fit_is_no_commit(
    repository: Path, run_dir: Path, committer: Callable[..., list[str]]
) -> None:
    """A limit on file size stands for the full disk: neither git's object nor the patch fits."""
    limit = "import os, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, resource.RLIM_INFINITY))"
    before = snapshot(repository)
    done = subprocess.run(
        committer("bytes(range(10, 256)) * 10 + os.urandom(200000).hex().encode()", limit),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert (
        "attempt 1 (norm) was kept but is not committed" in done.stderr and "No patch could be written" in done.stderr
    )
    keeper = Keeper.open(repository, RUN, run_dir)
    assert git(repository, "rev-parse", keeper.branch) == keeper.base == git(repository, "rev-parse", "main")
    assert snapshot(repository) == before and not list(run_dir.rglob("*.patch"))
    git(repository, "fsck", "--no-dangling")
