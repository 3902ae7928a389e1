"""Raises while it is imported."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="raises_at_import", replaces=(("logit_softcap",),), backend="torch", target="decode")

raise RuntimeError("no compiler here")
