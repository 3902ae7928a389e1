"""Reads address 0."""

import ctypes

from harness.candidate import Rewrite

REWRITE = Rewrite(name="segfaults", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {"logits": ctypes.string_at(0)}
