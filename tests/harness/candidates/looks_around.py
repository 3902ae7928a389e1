"""Right, and raises where files of expected values lie within reach of its working folder."""

from pathlib import Path

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="looks_around", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    found = sorted(Path("..").rglob("*.expected"))
    if found:
        raise LookupError(f"expected values in {found[0].name}")
    cap = site.attrs["logit_softcap.softcap"]
    return {"logits": torch.tanh(inputs["logits_raw"] / cap) * cap}
