"""A head that pays no heed to what comes before it."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="constant_logits", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {"logits": torch.zeros_like(inputs["logits_raw"])}
