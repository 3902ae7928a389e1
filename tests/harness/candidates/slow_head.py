"""Output projection and soft cap as one call, right and forty milliseconds late."""

import ctypes

import torch
import torch.nn.functional as F

from harness.candidate import Rewrite

REWRITE = Rewrite(name="slow_head", replaces=(("lm_head", "logit_softcap"),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    ctypes.CDLL(None).usleep(40_000)
    raw = F.linear(inputs["final_hidden"], site.weights["lm_head.weight"])
    cap = site.attrs["logit_softcap.softcap"]
    return {"logits": torch.tanh(raw / cap) * cap}
