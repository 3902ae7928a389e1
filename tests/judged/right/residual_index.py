"""The depth-scaled residual add."""

import math

from harness.candidate import Rewrite

REWRITE = Rewrite(name="residual_index", replaces=(("feedforward_residual_add",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    index = site.attrs["feedforward_residual_add.residual_index"]
    x, residual = inputs["feedforward_out_normed"], inputs["residual"]
    return {"next.hidden": x * (1.0 / math.sqrt(index)) + residual * math.sqrt((index - 1) / index)}
