"""The scratch folder: removed by the next run where its owner is dead, and never while it lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.session import scratch_folder

ROOT = Path(__file__).resolve().parents[2]
OWNER = "from harness.session import scratch_folder as make; import time; print(make(), flush=True); time.sleep(600)"


def test_a_killed_owners_folder_goes_and_a_living_ones_stays() -> None:
    mine = scratch_folder()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        others = [mine, scratch_folder()]
        assert theirs.is_dir() and all(folder.is_dir() for folder in others)
        owner.kill()
    others.append(scratch_folder())
    assert not theirs.exists()
    for folder in others:
        folder.rmdir()
