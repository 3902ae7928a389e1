"""Raises in run."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="raises", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    raise ValueError(f"no kernel for {inputs['logits_raw'].shape[0]} rows")
