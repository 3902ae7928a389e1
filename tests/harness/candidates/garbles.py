"""Writes what is no answer into every open channel."""

import ctypes

from harness.candidate import Rewrite

REWRITE = Rewrite(name="garbles", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    line = b'{"kind": "perfect"}\n'
    for channel in range(3, 64):
        ctypes.CDLL(None).send(channel, line, len(line), 0)
    return {"logits": inputs["logits_raw"]}
