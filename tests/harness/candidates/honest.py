"""The logits' soft cap, as it should be."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="softcap", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    cap = site.attrs["logit_softcap.softcap"]
    return {"logits": torch.tanh(inputs["logits_raw"] / cap) * cap}
