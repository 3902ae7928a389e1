"""The soft cap by expm1 in place of tanh."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="softcap_expm1", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    cap = site.attrs["logit_softcap.softcap"]
    grown = torch.expm1(2 * inputs["logits_raw"].float().abs() / cap)
    return {"logits": cap * torch.sign(inputs["logits_raw"].float()) * (1 - 2 / (grown + 2))}
