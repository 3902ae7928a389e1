"""RMSNorm that sums its squares in another order."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="norm_other_order", replaces=(("post_attention_norm",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    x = inputs["attention_out"]
    wide = x.float()
    squares = wide.pow(2).flip(-1).unflatten(-1, (8, -1)).sum(-2).sum(-1, keepdim=True) / x.shape[-1]
    wide = wide * torch.rsqrt(squares + site.attrs["post_attention_norm.eps"])
    return {"attention_out_normed": (wide * site.weights["post_attention_norm.weight"].float()).to(x.dtype)}
