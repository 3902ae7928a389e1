"""A norm a hundredth of a percent too large."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="off_by_a_little", replaces=(("post_attention_norm",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    rows = inputs["attention_out"]
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + site.attrs["post_attention_norm.eps"])
    return {"attention_out_normed": site.weights["post_attention_norm.weight"] * (rows * scale) * 1.0001}
