"""transformers' own Beam with this package's weights: the model the references are checked against, and a peer.

transformers is imported inside the functions: it is slow to import, and a run does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from baselines.beam.config import FULL, SLIDING, BeamShape
from baselines.beam.weights import beam_weights


def transformers_config(shape: BeamShape, experts: str = "grouped_mm", attn: str = "sdpa") -> Any:
    """A `BeamConfig` of `shape`; `experts` and `attn` name transformers' implementations."""
    from transformers.models.beam import BeamConfig

    values = asdict(shape)
    theta = values.pop("rope_theta")
    rope = {SLIDING: {"rope_type": "default", "rope_theta": theta}, FULL: None}
    for key in ("layer_types", "mlp_layer_types"):
        values[key] = list(values[key])
    config = BeamConfig(**values, rope_parameters=rope)
    config._attn_implementation = attn
    config._experts_implementation = experts
    return config


def transformers_model(
    shape: BeamShape,
    weights: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    experts: str = "grouped_mm",
    attn: str = "sdpa",
) -> Any:
    """A `BeamForCausalLM` in evaluation mode that shares `weights`; those kept in FP32 stay so, `dtype` is the rest's.

    Built without memory of its own: every parameter is replaced by the given tensor.
    """
    from transformers.models.beam import BeamForCausalLM

    config = transformers_config(shape, experts, attn)
    with torch.device("meta"):
        model: Any = BeamForCausalLM(config)
    state = {name: weights[name].to(device, weight.dtype(dtype)) for name, weight in beam_weights(shape).items()}
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device=device)
    model.train(False)
    model.requires_grad_(False)
    return model
