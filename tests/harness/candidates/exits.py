"""Ends its process as if all were well."""

import ctypes

from harness.candidate import Rewrite

REWRITE = Rewrite(name="exits", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    print("about to leave", flush=True)  # noqa: T201 - the log is under test
    ctypes.CDLL(None).exit(0)
