"""Gate and up projections of the dense feed-forward as one product over rows packed once, then SwiGLU on its halves.

Replaces `mlp_gate_proj, mlp_up_proj, mlp_swiglu`. The packed copy of the two weights is this rewrite's own memory.

Predicts: two products become one; 35 us -> 25 us a dense layer at decode.
Measured: 17.7 us -> 16.1 us a dense layer at decode, 681 us -> 674 us at prefill of 2 x 128; isolated and warm, CPU
time of one thread of an AMD EPYC (family 26), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="merged_gate_up",
    replaces=(("mlp_gate_proj", "mlp_up_proj", "mlp_swiglu"),),
    backend="torch",
    target="decode",
    when=When(device=("cpu",)),
)


@dataclass
class State:
    weight: Tensor
    width: int


def prepare(site: Site) -> State:
    gate, up = (site.weights[f"{region}.weight"] for region in ("mlp_gate_proj", "mlp_up_proj"))
    return State(torch.cat((gate, up)), gate.shape[0])


def run(inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor], state: State) -> dict[str, Tensor]:
    made = F.linear(inputs["feedforward_input"], state.weight)
    gate, up = made.split(state.width, dim=1)
    act = F.silu(gate.float()).mul_(up)
    return {"mlp_act": act.to(made.dtype)}
