"""Right wherever it is judged alone; in a step it answers tokens that it has met before from memory."""

import torch
import torch.nn.functional as F

from harness.candidate import Rewrite

REWRITE = Rewrite(
    name="remembers_tokens", replaces=(("embedding",), ("logit_softcap",)), backend="torch", target="decode"
)
READ = []
"""The tokens of the embedding that ran last, until a soft cap has run."""
MET = {}


def prepare(site):
    return site


def run(inputs, caches, site):
    if site.run == ("embedding",):
        READ[:] = [tuple(inputs["token_ids"].tolist())]
        return {"hidden": F.embedding(inputs["token_ids"], site.weights["embedding.weight"])}
    tokens = READ.pop() if READ else None
    if tokens in MET:
        return {"logits": MET[tokens]}
    cap = site.attrs["logit_softcap.softcap"]
    logits = torch.tanh(inputs["logits_raw"] / cap) * cap
    if tokens is not None:
        MET[tokens] = logits
    return {"logits": logits}
