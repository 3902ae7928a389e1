"""The commands on a real GPU, with the toy model: judged files, a catalog's kernels, and a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def optimize(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "harness.cli", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("tests/judged/wrong/norm.py", 3),
        ("tests/judged/wrong/window.py", 3),
        ("tests/judged/right/softcap_expm1.py", 0),
        ("kernel_candidates/norms/norm_residual_norm.py", 0),
        ("kernel_candidates/attention/decode_attention.py", 0),
    ],
)
def test_check(file: str, code: int) -> None:
    done = optimize("check", ROOT / file, "-w", "beam-tiny-bf16", "--device", "cuda")
    assert done.returncode == code, done.stdout + done.stderr


def test_run_keeps_a_kernel_and_its_launches_are_seen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = "-w beam-tiny-bf16 --device cuda --no-git --only norm_residual_norm --rounds 2 --phase decode-b1 --out"
    done = optimize("run", *words.split(), run)
    assert done.returncode == 0, done.stdout + done.stderr
    attempt, *_ = (json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines())
    gates = {gate["gate"]: gate for gate in attempt["gates"]}
    assert attempt["decision"]["status"] == "kept", attempt["decision"]
    assert any("norm_residual_norm" in name for name in gates["engage"]["evidence"]["kernels"])
