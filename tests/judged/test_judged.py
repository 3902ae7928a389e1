"""`optimize check` on candidates whose verdict is known: the wrong ones differ from a right one by a single mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WRONG = sorted(path.name for path in (HERE / "wrong").glob("*.py"))
RIGHT = sorted(path.name for path in (HERE / "right").glob("*.py"))
IN_WORDS = "rope.py"
"""The wrong candidate that is also checked without `--json`."""
SIDE_BY_SIDE = 2

REGIONS = {
    "norm.py": "post_attention_norm",
    "residual_index.py": "feedforward_residual_add",
    "rope.py": "rope",
    "routed_scale.py": "routed_scale",
    "router.py": "router",
    "softcap.py": "logit_softcap",
    "ssmax.py": "ssmax_scale",
    "window.py": "attention",
}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Checked:
    """What one `optimize check` said."""

    code: int
    out: str
    err: str

    def attempt(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


def check(file: Path, home: Path, *options: str) -> Checked:
    """Runs the command with caches, and so a device lock, of its own."""
    home.mkdir()
    own = {"XDG_CACHE_HOME": home, "XDG_RUNTIME_DIR": home, "TMPDIR": home, "PYTHONPATH": ROOT, "COLUMNS": 200}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "harness.cli", "check", str(file), "-w", "beam-tiny-bf16", *options],
        cwd=home,
        env=os.environ | {name: str(value) for name, value in own.items()},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return Checked(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Checked]]]:
    """Every file's check, by folder and name, and one in words; all begin at once and run a few at a time."""
    home = tmp_path_factory.mktemp("judged")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        begun = {
            f"{kind}/{name}": pool.submit(check, HERE / kind / name, home / f"{kind}-{name}", "--json")
            for kind, names in (("wrong", WRONG), ("right", RIGHT))
            for name in names
        }
        begun["in words"] = pool.submit(check, HERE / "wrong" / IN_WORDS, home / "words")
        yield begun
        pool.shutdown(cancel_futures=True)


def test_each_wrong_candidate_has_its_region_and_a_right_twin() -> None:
    assert sorted(REGIONS) == WRONG
    assert set(WRONG) <= set(RIGHT)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_called_wrong(name: str, checks: dict[str, Future[Checked]]) -> None:
    checked = checks[f"wrong/{name}"].result()
    assert checked.code == 3, checked.err
    attempt = checked.attempt()
    assert attempt["decision"]["status"] == "wrong"
    assert [(gate["gate"], gate["passed"]) for gate in attempt["gates"]] == [
        ("guard", True),
        ("build", True),
        ("numerics", False),
    ]
    assert attempt["estimates"] == attempt["launches"] == []
    assert REGIONS[name] in attempt["decision"]["reason"]


@pytest.mark.parametrize("name", WRONG)
def test_its_errors_say_where_and_by_how_much(name: str, checks: dict[str, Future[Checked]]) -> None:
    """Region, input, place, error and budget of each: enough to mend the kernel without running it again."""
    errors = checks[f"wrong/{name}"].result().attempt()["gates"][-1]["errors"]
    assert errors
    for error in errors:
        assert not error["ok"] and error["reason"]
        assert error["region"] == REGIONS[name]
        assert re.search(r"(seed \d+|adversarial: ).*(decode-b1|prefill-2x128), (bf16|fp32)", error["case"])
        assert error["output"] and error["place"]
        assert error["budget"] is not None, f"no budget is given: {error['reason']}"
        assert error["error"] > error["budget"] > 0


def test_plain_output_says_it_in_words(checks: dict[str, Future[Checked]]) -> None:
    checked = checks["in words"].result()
    assert checked.code == 3, checked.err
    lines = checked.out.splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith(" ")] == [
        ["guard", "passed"],
        ["build", "passed"],
        ["numerics", "wrong"],
    ]
    shown = [line.strip() for line in lines if line.startswith("    ")]
    assert shown
    for line in shown:
        found = re.fullmatch(
            r"rope, layer \d+, (fresh|recorded|adversarial).*, decode-b1, fp32.*, (query|key) at \[\d+, \d+, \d+\]: "
            r"error (?P<error>\S+), budget (?P<budget>\S+)",
            line,
        )
        assert found, line
        assert float(found["error"]) > float(found["budget"])


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_candidate_is_called_right(name: str, checks: dict[str, Future[Checked]]) -> None:
    checked = checks[f"right/{name}"].result()
    assert checked.code == 0, checked.out + checked.err
    attempt = checked.attempt()
    assert attempt["decision"]["status"] == "kept"
    assert [gate["gate"] for gate in attempt["gates"] if gate["passed"]] == ["guard", "build", "numerics"]
    evidence = attempt["gates"][-1]["evidence"]
    assert evidence["outputs_judged"] > 0
    assert evidence["storages"] == ["bf16", "fp32"]
