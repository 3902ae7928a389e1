"""The routed scale, twice."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="routed_scale", replaces=(("routed_scale",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    return {
        "feedforward_out": inputs["experts_out"] * site.attrs["routed_scale.scale"] * site.attrs["routed_scale.scale"]
    }
