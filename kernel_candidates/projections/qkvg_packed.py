"""Query, key, value and output-gate projections of a prompt as one library product over rows packed once.

The outputs are slices of its result. The packed copy is this rewrite's own memory, held once for all prompt phases of
a model: 18.4 MB a layer of one rank.

Predicts: two products of 128 columns at one rank leave the tensor cores half idle; merged, 300 GFLOP at 16,384 tokens
in 400 us in place of 470, and one launch in place of four.
"""

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from harness.candidate import Rewrite, Site, When

REGIONS = ("q_proj", "k_proj", "v_proj", "output_gate_proj")
OUTPUTS = ("query_raw", "key_raw", "value", "gate_raw")
REWRITE = Rewrite(
    name="qkvg_packed",
    replaces=(REGIONS,),
    backend="library",
    target="prefill",
    when=When(tokens=(17, 65536), dtype=("bf16", "fp32"), device=("cuda",), phases=("prefill",)),
    kernels=("gemm", "nvjet", "cutlass", "xmma"),
)
PACKED = WeakIdKeyDictionary()
"""Query weight -> the packed rows: phases and arms share them, and they go when the weight goes."""


def prepare(site: Site):
    parts = [site.weights[f"{region}.weight"] for region in REGIONS]
    if parts[0] not in PACKED:
        PACKED[parts[0]] = torch.cat(parts)
    return PACKED[parts[0]], [part.shape[0] for part in parts]


def run(inputs, caches, state):
    weight, widths = state
    return dict(zip(OUTPUTS, F.linear(inputs["attention_input"], weight).split(widths, dim=-1), strict=True))
