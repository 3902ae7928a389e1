"""Right logits, forty milliseconds late."""

import ctypes

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="slow", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    ctypes.CDLL(None).usleep(40_000)
    cap = site.attrs["logit_softcap.softcap"]
    return {"logits": torch.tanh(inputs["logits_raw"] / cap) * cap}
