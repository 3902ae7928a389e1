"""RoPE whose tables were rounded to BF16."""

import torch

from harness.candidate import Rewrite

REWRITE = Rewrite(name="rope", replaces=(("rope",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    cos, sin = (inputs[name].bfloat16().float()[:, None] for name in ("cos", "sin"))

    def rotate(x):
        left, right = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)

    return {"query": rotate(inputs["query_normed"]), "key": rotate(inputs["key_normed"])}
