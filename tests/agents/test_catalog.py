"""The catalog agent: its order, what it skips, and what it says of a catalog that will not do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from agents.catalog import CatalogAgent
from harness.brief import Brief
from harness.errors import UsageError
from harness.schema import Attempt, Decision, Gate, GateResult, Status

ROOT = Path(__file__).resolve().parents[2]
CATALOG = """
[[cpu]]
file = "norms/second_by_name.py"
note = "the first to be proposed"

[[cpu]]
file = "a_first_by_name.py"

[[cpu]]
file = "norms/third.py"

[[cuda]]
file = "norms/for_a_gpu.py"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalog of three files for a CPU and one for a GPU."""
    (tmp_path / "norms").mkdir()
    for name in ("norms/second_by_name", "a_first_by_name", "norms/third", "norms/for_a_gpu"):
        (tmp_path / f"{name}.py").write_text(f'"""{name}"""\n')
    (tmp_path / "catalog.toml").write_text(CATALOG)
    return tmp_path


def attempt(number: int, source: bytes) -> Attempt:
    """A ledger line of a source that was turned down."""
    refused = GateResult(gate=Gate.GUARD, passed=False, seconds=0, status=Status.REFUSED, reason="no")
    return Attempt(
        attempt=number,
        name="x",
        regions=(),
        backend="",
        target="",
        file=f"candidates/{number:03d}-x.py",
        file_sha256=hashlib.sha256(source).hexdigest(),
        parent=None,
        agent="catalog",
        started="2026-11-29T00:00:00+00:00",
        seconds=0,
        gates=(refused,),
        decision=Decision(status=Status.REFUSED, reason="no"),
        device="cpu",
        baseline_hash="0",
    )


def brief(*attempts: Attempt) -> Brief:
    return Brief("w", "cpu", len(attempts) + 1, attempts, (), lambda: ())


def proposed(agent: CatalogAgent, *attempts: Attempt) -> list[str]:
    """Stems in the order of proposal, each attempted before the next is asked for."""
    stems: list[str] = []
    while proposal := agent.propose(brief(*attempts)):
        stems.append(proposal.stem)
        attempts = (*attempts, attempt(len(attempts) + 1, proposal.source))
        assert len(stems) <= len(agent.entries), "a file is proposed again"
    return stems


def test_the_order_is_the_catalogs_for_each_kind_of_device(folder: Path) -> None:
    assert proposed(CatalogAgent.load(folder, "cpu")) == ["second_by_name", "a_first_by_name", "third"]
    assert proposed(CatalogAgent.load(folder, "cuda")) == ["for_a_gpu"]


def test_a_proposal_is_the_files_bytes_and_says_who_made_it(folder: Path) -> None:
    source = b'"""\xc3\xa9"""\r\nlast line without its end'
    (folder / "norms" / "second_by_name.py").write_bytes(source)
    proposal = CatalogAgent.load(folder, "cpu").propose(brief())
    assert proposal is not None
    assert (proposal.source, proposal.agent, proposal.note) == (source, "catalog", "the first to be proposed")
    assert (proposal.tokens, proposal.cost_usd, proposal.model) == (0, 0.0, None)


def test_the_same_brief_gets_the_same_proposal(folder: Path) -> None:
    agent = CatalogAgent.load(folder, "cpu")
    assert agent.propose(brief()) == agent.propose(brief())


def test_what_was_attempted_is_not_proposed_again(folder: Path) -> None:
    done = attempt(1, (folder / "a_first_by_name.py").read_bytes())
    assert proposed(CatalogAgent.load(folder, "cpu"), done) == ["second_by_name", "third"]


def test_a_file_that_was_edited_since_its_attempt_is_proposed_again(folder: Path) -> None:
    done = attempt(1, (folder / "a_first_by_name.py").read_bytes())
    (folder / "a_first_by_name.py").write_text('"""another idea"""\n')
    assert proposed(CatalogAgent.load(folder, "cpu"), done) == ["second_by_name", "a_first_by_name", "third"]


def test_only_picks_by_stem_and_sets_the_order(folder: Path) -> None:
    assert proposed(CatalogAgent.load(folder, "cpu", ["third", "second_by_name"])) == ["third", "second_by_name"]


def test_only_with_an_unknown_name_says_what_there_is(folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        CatalogAgent.load(folder, "cpu", ["third", "for_a_gpu"])
    for word in ("'for_a_gpu'", "cpu", "second_by_name", "a_first_by_name", "third"):
        assert word in str(caught.value)


def test_a_folder_without_a_catalog_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"catalog\.toml.*No such file"):
        CatalogAgent.load(tmp_path, "cpu")


@pytest.mark.parametrize(
    "text",
    [
        "[[cpu]\nfile = 1",
        '[[cpu]]\nnote = "no file"',
        '[cpu]\nfile = "a_first_by_name.py"',
        'cpu = "a_first_by_name.py"',
    ],
    ids=["no TOML", "an entry without its file", "a table in place of a list", "a string in place of a list"],
)
def test_a_catalog_of_another_form_is_named(text: str, folder: Path) -> None:
    (folder / "catalog.toml").write_text(text)
    with pytest.raises(UsageError, match=r"catalog\.toml"):
        CatalogAgent.load(folder, "cpu")


def test_a_catalog_that_names_a_missing_file_is_refused_before_anything_is_proposed(folder: Path) -> None:
    (folder / "norms" / "third.py").unlink()
    with pytest.raises(UsageError, match=r"norms/third\.py"):
        CatalogAgent.load(folder, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_projects_own_catalog_names_files_that_are_there(device: str) -> None:
    agent = CatalogAgent.load(ROOT / "kernel_candidates", device)
    files = [entry.file for entry in agent.entries]
    assert files and [file for file in files if not (agent.folder / file).is_file()] == []
    assert len({Path(file).stem for file in files}) == len(files), "`only` picks by stem"
    assert all(entry.note for entry in agent.entries)
