"""RMSNorm that rounds before the weight, as Llama's does: wrong for Beam."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="norm", replaces=(("post_attention_norm",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    x = inputs["attention_out"]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + site.attrs["post_attention_norm.eps"])
    return {"attention_out_normed": site.weights["post_attention_norm.weight"] * wide.to(x.dtype)}
