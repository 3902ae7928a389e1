"""The scalable softmax's query scale."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="ssmax", replaces=(("ssmax_scale",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {"query_scale": torch.exp(0.1 * torch.log1p((inputs["positions"].float() + 1) / 2048))}
