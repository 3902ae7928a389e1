"""Raises in prepare."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="raises_in_prepare", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    raise ValueError(f"no kernel for layer {site.layer}")


def run(inputs, caches, site):
    return {}
