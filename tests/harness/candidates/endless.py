"""Never returns."""

from harness.candidate import Rewrite

REWRITE = Rewrite(name="endless", replaces=(("logit_softcap",),), backend="torch", target="decode")


def prepare(site):
    return site


def run(inputs, caches, site):
    print("round and round", flush=True)  # noqa: T201 - the log is under test
    while True:
        pass
