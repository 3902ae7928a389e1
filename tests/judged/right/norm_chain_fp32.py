"""Norm, residual add and next norm in one FP32 chain: fewer roundings than the reference."""

import math

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(
    name="norm_chain_fp32",
    replaces=(("post_attention_norm", "attention_residual_add", "pre_feedforward_norm"),),
    backend="torch",
    target="decode",
)


def prepare(site):
    return site


def run(inputs, caches, site):
    x, hidden = inputs["attention_out"], inputs["hidden"]

    def norm(wide, name):
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + site.attrs[f"{name}.eps"])
        return wide * site.weights[f"{name}.weight"].float()

    index = site.attrs["attention_residual_add.residual_index"]
    added = norm(x.float(), "post_attention_norm") / math.sqrt(index) + hidden.float() * math.sqrt((index - 1) / index)
    residual = added.to(x.dtype)
    return {"residual": residual, "feedforward_input": norm(residual.float(), "pre_feedforward_norm").to(x.dtype)}
