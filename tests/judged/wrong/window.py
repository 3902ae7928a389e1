"""Decode attention whose window holds one key too many."""

import math

import torch

from harness.candidate import Rewrite, When

REWRITE = Rewrite(
    name="window", replaces=(("attention",),), backend="torch", target="decode", when=When(phases=("decode",))
)


def prepare(site):
    return site


def run(inputs, caches, site):
    query, cache = inputs["query"], caches["kv_cache"]
    pages = inputs["block_table"].long()
    kv = cache[pages].permute(0, 2, 1, 3, 4).flatten(2, 3)
    keys, values = kv.chunk(2, dim=-1)
    window = site.attrs["attention.window"]
    last = inputs["seq_lens"].long()[:, None] - 1
    at = torch.arange(keys.shape[2], device=keys.device)[None]
    seen = at <= last
    if window:
        seen &= at > last - window - 1
    heads = query.shape[1]
    group = heads // keys.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
    values = values.masked_fill(~seen[:, None, :, None], 0)
    scores = torch.einsum("bhd,bhkd->bhk", query.float(), keys) * site.attrs["attention.scale"]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    made = torch.einsum("bhk,bhkd->bhd", weights, values).nan_to_num(0)
    return {"attention": made.flatten(1).to(query.dtype)}
