"""Declares its region where it is judged alone, and no token count at all in a process that comes later."""

import os
from pathlib import Path

import torch

from harness.candidate import Rewrite, When

MARK = Path(os.environ["OPTIMIZE_BUILD_DIR"]) / "second_thoughts"
LATER = MARK.exists()
MARK.parent.mkdir(parents=True, exist_ok=True)
MARK.touch()
REWRITE = Rewrite(
    name="second_thoughts",
    replaces=(("logit_softcap",),),
    backend="torch",
    target="decode",
    when=When(tokens=(0, 0) if LATER else (1, 65536)),
)


def prepare(site):
    return site


def run(inputs, caches, site):
    cap = site.attrs["logit_softcap.softcap"]
    return {"logits": torch.tanh(inputs["logits_raw"] / cap) * cap}
