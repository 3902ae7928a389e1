"""A right norm that then clears the rows it was given."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="writes_its_input", replaces=(("post_attention_norm",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    rows = inputs["attention_out"]
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + site.attrs["post_attention_norm.eps"])
    normed = site.weights["post_attention_norm.weight"] * (rows * scale)
    rows.zero_()
    return {"attention_out_normed": normed}
