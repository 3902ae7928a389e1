"""Beam's weights: what each is and how it divides among ranks, and random ones of realistic size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baselines.beam.config import BeamShape
from harness.program import Precision, TensorSpec
from harness.workload import WeightSource

Split = Literal["none", "rows", "columns", "packed_rows"]
"""The tensor-parallel plan: whole on each rank; dimension -2 (or a vector's only one); the last; -2 of each half."""
Draw = Literal["matrix", "head", "stream", "norm", "gate_bias", "correction_bias"]
LM_HEAD_GAIN = 4.0


@dataclass(frozen=True)
class Weight:
    """One tensor of the state dict: its shape, how it divides, whether it stays FP32, how a random one is drawn."""

    shape: tuple[int, ...]
    split: Split
    draw: Draw
    fp32: bool = False

    def dtype(self, storage: torch.dtype) -> torch.dtype:
        return torch.float32 if self.fp32 else storage


def beam_weights(shape: BeamShape) -> dict[str, Weight]:
    """Every weight of `shape` by its name in transformers' state dict."""
    hidden, dim = shape.hidden_size, shape.head_dim
    vocabulary = (shape.vocab_size, hidden)
    found = {
        "model.embed_tokens.weight": Weight(vocabulary, "rows", "stream"),
        "model.norm.weight": Weight((hidden,), "none", "norm"),
        "lm_head.weight": Weight(vocabulary, "rows", "head"),
    }
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    for layer in range(shape.num_hidden_layers):
        own = {
            **{f"self_attn.{name}_proj.weight": Weight((queries, hidden), "rows", "matrix") for name in ("q", "gate")},
            **{f"self_attn.{name}_proj.weight": Weight((keys, hidden), "rows", "matrix") for name in ("k", "v")},
            **{f"self_attn.{name}_norm.weight": Weight((dim,), "none", "norm") for name in ("q", "k")},
            "self_attn.gate_bias": Weight((shape.num_attention_heads,), "rows", "gate_bias"),
            "self_attn.o_proj.weight": Weight((hidden, queries), "columns", "matrix"),
            **{
                f"{name}_layernorm.weight": Weight((hidden,), "none", "norm")
                for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
            },
            **(_sparse(shape) if shape.sparse(layer) else _dense(shape)),
        }
        found.update({f"model.layers.{layer}.{name}": weight for name, weight in own.items()})
    return found


def _dense(shape: BeamShape) -> dict[str, Weight]:
    wide = (shape.intermediate_size, shape.hidden_size)
    return {
        "mlp.gate_proj.weight": Weight(wide, "rows", "matrix"),
        "mlp.up_proj.weight": Weight(wide, "rows", "matrix"),
        "mlp.down_proj.weight": Weight(wide[::-1], "columns", "matrix"),
    }


def _sparse(shape: BeamShape) -> dict[str, Weight]:
    experts, hidden, width = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
    return {
        "mlp.gate.weight": Weight((experts, hidden), "none", "matrix", fp32=True),
        "mlp.gate.e_score_correction_bias": Weight((experts,), "none", "correction_bias", fp32=True),
        "mlp.experts.gate_up_proj": Weight((experts, 2 * width, hidden), "packed_rows", "matrix"),
        "mlp.experts.down_proj": Weight((experts, hidden, width), "columns", "matrix"),
    }


def derived_seed(*parts: object) -> int:
    """A 63-bit seed of its parts, the same on every machine and in every process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class HeldWeights(WeightSource):
    """Weights made by `_make` on first use and held until forgotten."""

    def __init__(self, weights: dict[str, Weight], storage: torch.dtype) -> None:
        self._weights, self._storage = weights, storage
        self._held: dict[str, Tensor] = {}

    def _make(self, name: str) -> Tensor:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            if name not in self._weights:
                raise KeyError(name)
            self._held[name] = self._make(name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def spec(self, name: str) -> TensorSpec:
        weight = self._weights[name]
        return TensorSpec(weight.shape, weight.dtype(self._storage))

    def forget(self, name: str) -> None:
        self._held.pop(name, None)


def stored_dtype(workload: torch.dtype, precision: Precision) -> torch.dtype:
    """FP64 keeps the workload's own dtype: the values are the same, references cast, and memory is a quarter."""
    return workload if precision.storage == torch.float64 else precision.storage


class RandomWeights(HeldWeights):
    """Seeded random weights; a tensor is the same however often and in whatever order it is made.

    Values are drawn in the workload's dtype, so that another precision gets the same ones cast. A matrix has standard
    deviation 1/sqrt(fan in) (0.014 at hidden 5120), which keeps every projection near unit RMS at any size, toys
    included; the embedding is at unit RMS, where depth-scaled residual adds hold the stream; the head's gain of 4
    brings logits to where the softcap bends them. Norms, gate biases and correction biases are neither one nor zero,
    or a rewrite that drops one would go unseen.
    """

    def __init__(
        self, shape: BeamShape, device: torch.device, seed: int, workload: torch.dtype, precision: Precision
    ) -> None:
        super().__init__(beam_weights(shape), stored_dtype(workload, precision))
        self._device, self._seed, self._drawn = device, seed, workload

    def _make(self, name: str) -> Tensor:
        weight = self._weights[name]
        spec = self.spec(name)
        if self._device.type == "meta":
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(derived_seed(self._seed, name))
        drawn = torch.empty(spec.shape, dtype=weight.dtype(self._drawn), device=self._device)
        fan_in = spec.shape[-1]
        mean, std = {
            "matrix": (0.0, fan_in**-0.5),
            "head": (0.0, LM_HEAD_GAIN * fan_in**-0.5),
            "stream": (0.0, 1.0),
            "norm": (1.0, 0.1),
            "gate_bias": (0.0, 0.1),
            "correction_bias": (0.0, 0.02),
        }[weight.draw]
        return drawn.normal_(mean, std, generator=generator).to(spec.dtype)
