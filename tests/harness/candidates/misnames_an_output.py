"""Gives an output under another name."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="misnames_an_output", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {"capped": inputs["logits_raw"]}
