"""One NaN among right logits."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="one_nan", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    cap = site.attrs["logit_softcap.softcap"]
    logits = torch.tanh(inputs["logits_raw"] / cap) * cap
    logits[-1:, 3] = float("nan")
    return {"logits": logits}
