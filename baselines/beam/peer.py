"""Steps of other implementations over the same weights and inputs, to stand beside the baseline: transformers' eager
model with its dynamic cache, and torch.compile of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from baselines.beam.config import BeamShape
from baselines.beam.oracle import transformers_model
from baselines.peers import compiled_step
from harness.errors import UsageError
from harness.program import Precision, Program
from harness.workload import Phase

Step = Callable[[], dict[str, Tensor]]
TRANSFORMERS, COMPILE, COMPILE_TUNED = "transformers", "torch_compile", "torch_compile_max_autotune"


def peer_step(
    name: str,
    shape: BeamShape,
    program: Program,
    phase: Phase,
    weights: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    precision: Precision,
) -> Step:
    """One step of the named peer over static `values`, giving the program's outputs.

    Raises UsageError for an unknown name, a ragged batch under transformers, and transformers not installed.
    """
    if name == TRANSFORMERS:
        return _transformers_step(shape, phase, weights, values, precision)
    if name in (COMPILE, COMPILE_TUNED):
        mode = "max-autotune-no-cudagraphs" if name == COMPILE_TUNED else None
        return compiled_step(program, weights, precision, values, mode)
    raise UsageError(f"Beam has no peer {name!r}; it has {TRANSFORMERS}, {COMPILE}, {COMPILE_TUNED}")


def _transformers_step(
    shape: BeamShape, phase: Phase, weights: Mapping[str, Tensor], values: Mapping[str, Tensor], precision: Precision
) -> Step:
    if phase.ragged:
        raise UsageError(f"phase {phase.name} is ragged, which transformers runs only padded: no peer of the same work")
    device = values["token_ids"].device
    try:
        from transformers import DynamicCache

        model = transformers_model(shape, weights, device, precision.storage)
    except ImportError as error:
        raise UsageError(f"the peer {TRANSFORMERS} needs transformers 5.21 or later: {error}") from error
    tokens = values["token_ids"].view(phase.batch, -1)
    if phase.kind == "prefill":
        keep = 1 if phase.logits == "last" else 0

        def prefill() -> dict[str, Tensor]:
            made = model(input_ids=tokens, use_cache=True, logits_to_keep=keep)
            return {"logits": made.logits.flatten(0, 1)}

        return prefill
    past = phase.context - phase.query_len
    cache: Any = DynamicCache(config=model.config)
    held = [_dense_cache(shape, layer, past, values) for layer in range(shape.num_hidden_layers)]
    for own, (key, value) in zip(cache.layers, held, strict=True):
        own.lazy_initialization(key, value)
    positions = torch.arange(past, phase.context, device=device).expand(phase.batch, -1)

    def decode() -> dict[str, Tensor]:
        _rewind(cache, held, past)
        made = model(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True)
        return {"logits": made.logits.flatten(0, 1)}

    return decode


def _dense_cache(shape: BeamShape, layer: int, past: int, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [B, kv heads, n, D] of the past tokens a layer still sees, out of the paged cache."""
    pages = values[f"{layer}.kv_cache"][values["block_table"].long()]
    kv = pages.transpose(1, 2).flatten(2, 3)[:, :, :past]
    if shape.sliding(layer):
        kv = kv[:, :, max(past - shape.sliding_window + 1, 0) :]
    key, value = kv.chunk(2, dim=-1)
    return key.contiguous(), value.contiguous()


def _rewind(cache: Any, held: list[tuple[Tensor, Tensor]], past: int) -> None:
    """Puts a dynamic cache back to `past` tokens, whatever a step appended."""
    for own, (key, value) in zip(cache.layers, held, strict=True):
        own.keys, own.values = key, value
        if own.is_sliding:
            own.cumulative_length = past
