"""The logits without their soft cap."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="softcap", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {"logits": inputs["logits_raw"].float()}
