"""Beam's sizes: the published defaults, a checkpoint's own, one rank's share of them, and the first layers of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.workload import Workload

SLIDING, FULL = "sliding_attention", "full_attention"
DENSE, SPARSE = "dense", "sparse"
FULL_EVERY = 6
"""Every sixth layer attends to everything, and so does the last."""
DENSE_LAYERS = 3


@dataclass(frozen=True)
class BeamShape:
    """Every size and constant of a Beam model, under the names `config.json` gives them; defaults are the 501B model.

    `rope_theta` is the sliding layers' (full layers have no RoPE); the published checkpoint's is not known, 10,000 is
    what transformers falls back to. Empty layer types mean the published pattern. `moe_intermediate_size` and the other
    divided sizes are one rank's where the shape is one rank's.
    """

    vocab_size: int = 151_936
    hidden_size: int = 5120
    intermediate_size: int = 20_480
    num_hidden_layers: int = 52
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    moe_intermediate_size: int = 2560
    num_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    sliding_window: int = 512
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float = 30.0
    rope_theta: float = 10_000.0
    layer_types: tuple[str, ...] = ()
    mlp_layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = self.num_hidden_layers
        if not self.layer_types:
            kinds = [SLIDING if (index + 1) % FULL_EVERY else FULL for index in range(count)]
            object.__setattr__(self, "layer_types", (*kinds[:-1], FULL))
        if not self.mlp_layer_types:
            dense = min(DENSE_LAYERS, count)
            object.__setattr__(self, "mlp_layer_types", (DENSE,) * dense + (SPARSE,) * (count - dense))
        self._check_layers()
        self._check_groups()

    def _check_layers(self) -> None:
        for name, known in (("layer_types", (SLIDING, FULL)), ("mlp_layer_types", (DENSE, SPARSE))):
            kinds = getattr(self, name)
            if len(kinds) != self.num_hidden_layers:
                raise UsageError(f"{name} has {len(kinds)} entries for {self.num_hidden_layers} layers")
            for kind in kinds:
                if kind not in known:
                    raise UsageError(f"{name} holds {kind!r}; known are {', '.join(known)}")

    def _check_groups(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"{self.num_attention_heads} query heads do not divide among {self.num_key_value_heads} key/value heads"
            )
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise UsageError(
                f"{self.num_experts} experts in {self.n_group} groups of which {self.topk_group} stay: "
                "groups must divide the experts, and no more can stay than there are"
            )
        if self.num_experts_per_tok > self.topk_group * (self.num_experts // self.n_group):
            raise UsageError(f"{self.num_experts_per_tok} experts a token are more than the groups that stay hold")

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], source: str) -> BeamShape:
        """The shape a `config.json`'s content describes; `source` names it in errors.

        Raises UsageError for what the program does not implement: another activation, biases, tied embeddings, a
        scaled RoPE, no softcap, no window.
        """
        wanted = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
        for key, value in wanted.items():
            if raw.get(key, value) != value:
                raise UsageError(f"{source}: {key} is {raw[key]!r}; only {value!r} is implemented")
        for key in ("sliding_window", "final_logit_softcapping"):
            if key in raw and raw[key] is None:
                raise UsageError(f"{source}: {key} is null; a number is needed")
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in raw.items() if key in known and value is not None}
        rope = (raw.get("rope_parameters") or {}).get(SLIDING)
        if rope:
            if rope.get("rope_type", "default") != "default":
                raise UsageError(f"{source}: rope_type {rope['rope_type']!r} is not implemented; only 'default' is")
            values["rope_theta"] = rope.get("rope_theta", cls.rope_theta)
        for key in ("layer_types", "mlp_layer_types"):
            if key in values:
                values[key] = tuple(values[key])
        return cls(**values)

    @classmethod
    def from_transformers(cls, config: Any) -> BeamShape:
        """The shape of a transformers `BeamConfig`, or of anything with its `to_dict`."""
        return cls.from_mapping(config.to_dict(), type(config).__name__)

    @classmethod
    def from_json(cls, path: Path) -> BeamShape:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the model's configuration {path}: {error}") from error
        return cls.from_mapping(raw, str(path))

    def for_rank(self, ranks: int) -> BeamShape:
        """One rank's share of `ranks`: heads, expert width, dense width and vocabulary divided, all experts kept."""
        divided = {}
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "moe_intermediate_size",
            "intermediate_size",
            "vocab_size",
        ):
            total = getattr(self, name)
            if total % ranks:
                raise UsageError(f"{name} {total} does not divide among {ranks} ranks; choose a divisor of {total}")
            divided[name] = total // ranks
        return replace(self, **divided)

    def truncated(self, layers: int) -> BeamShape:
        """The first `layers` layers as they are in the whole model: the last one keeps its kind."""
        if not 1 <= layers <= self.num_hidden_layers:
            raise UsageError(f"layers = {layers}: this model has {self.num_hidden_layers}, and one at least is needed")
        return replace(
            self,
            num_hidden_layers=layers,
            layer_types=self.layer_types[:layers],
            mlp_layer_types=self.mlp_layer_types[:layers],
        )

    def sliding(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING

    def sparse(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == SPARSE


def whole_shape(workload: Workload) -> BeamShape:
    """All ranks' shape of a workload, its first layers: the checkpoint's or the published one, with its overrides."""
    base: dict[str, Any] = {}
    if workload.checkpoint is not None:
        found = BeamShape.from_json(workload.checkpoint / "config.json")
        base = {field.name: getattr(found, field.name) for field in fields(BeamShape)}
    known = {field.name for field in fields(BeamShape)}
    unknown = sorted(set(workload.config) - known)
    if unknown:
        raise UsageError(f"workload {workload.name}: config.{unknown[0]} is not a size of Beam; known: {sorted(known)}")
    overrides = {key: tuple(value) if isinstance(value, list) else value for key, value in workload.config.items()}
    if "num_hidden_layers" in overrides:
        base.pop("layer_types", None)
        base.pop("mlp_layer_types", None)
    return BeamShape(**(base | overrides)).truncated(workload.layers)


def rank_shape(workload: Workload) -> BeamShape:
    """The share of it that one rank of the workload holds."""
    return whole_shape(workload).for_rank(workload.rank_of)
