"""Gives one of two outputs."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="forgets_an_output", replaces=(("rope_table",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {"cos": inputs["positions"].float()}
