"""Beam's step as a flat list of region calls: the order, the value names, and the weights' names in a state dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baselines.beam import attention as att
from baselines.beam import experts as exp
from baselines.beam import regions as reg
from baselines.beam.config import BeamShape
from harness.program import Call, Program, Region
from harness.workload import Phase


def program_inputs(shape: BeamShape, phase: Phase) -> tuple[str, ...]:
    """Names of the values a step starts from."""
    names = ["token_ids", "seq_lens", "cu_seqlens", "block_table", "slot_mapping"]
    if phase.kind == "prefill":
        names.append("pad_index")
        if phase.logits == "last":
            names.append("logits_index")
    return (*names, *(f"{layer}.kv_cache" for layer in range(shape.num_hidden_layers)))


def beam_program(shape: BeamShape, phase: Phase, page_size: int) -> Program:
    """One step of `phase`, whatever its batch and lengths: those come with the inputs."""
    calls = list(_prologue(shape, phase, page_size))
    for layer in range(shape.num_hidden_layers):
        calls += _Layer(shape, phase, layer).calls()
    calls += _head(shape, phase)
    return Program(tuple(calls), program_inputs(shape, phase), ("logits",))


def _prologue(shape: BeamShape, phase: Phase, page_size: int) -> Iterator[Call]:
    yield Call(reg.EMBEDDING, 0, ("token_ids",), ("0.hidden",), ("model.embed_tokens.weight",))
    yield Call(att.POSITIONS, 0, att.POSITIONS.inputs, att.POSITIONS.outputs)
    rope = {"rope_theta": shape.rope_theta, "head_dim": shape.head_dim}
    yield Call(reg.ROPE_TABLE, 0, ("positions",), ("cos", "sin"), attrs=rope)
    yield Call(reg.SSMAX_SCALE, 0, ("positions",), ("query_scale",))
    masks = att.PREFILL_MASKS if phase.kind == "prefill" else att.DECODE_MASKS
    attrs = {"window": shape.sliding_window, "page_size": page_size, "query_len": phase.query_len}
    yield Call(masks, 0, masks.inputs, masks.outputs, attrs=attrs)


def _head(shape: BeamShape, phase: Phase) -> Iterator[Call]:
    count = shape.num_hidden_layers
    hidden = f"{count}.hidden"
    if phase.kind == "prefill" and phase.logits == "last":
        selected = f"{count}.hidden_selected"
        yield Call(reg.LOGITS_SELECT, count, (hidden, "logits_index"), (selected,))
        hidden = selected
    final, raw = f"{count}.final_hidden", f"{count}.logits_raw"
    yield Call(reg.FINAL_NORM, count, (hidden,), (final,), ("model.norm.weight",), {"eps": shape.rms_norm_eps})
    yield Call(reg.LM_HEAD, count, (final,), (raw,), ("lm_head.weight",))
    yield Call(reg.LOGIT_SOFTCAP, count, (raw,), ("logits",), attrs={"softcap": shape.final_logit_softcapping})


class _Layer:
    """The calls of one layer. Value names take its number unless they are the whole step's."""

    def __init__(self, shape: BeamShape, phase: Phase, layer: int) -> None:
        self.shape, self.phase, self.layer = shape, phase, layer
        self.sliding = shape.sliding(layer)

    def _call(
        self,
        region: Region,
        weights: str = "",
        attrs: dict[str, Any] | None = None,
        rename: dict[str, str] | None = None,
    ) -> Call:
        """`rename` maps a region's role to a value name: whole-step ones, and those another layer's start."""
        names = {**{role: f"{self.layer}.{role}" for role in (*region.inputs, *region.outputs)}, **(rename or {})}
        return Call(
            region,
            self.layer,
            tuple(names[role] for role in region.inputs),
            tuple(names[role] for role in region.outputs),
            tuple(f"model.layers.{self.layer}.{name}" for name in weights.split()),
            attrs or {},
        )

    def calls(self) -> Iterator[Call]:
        eps = {"eps": self.shape.rms_norm_eps}
        branch = 2 * (self.layer + 1)
        yield self._call(reg.INPUT_NORM, "input_layernorm.weight", eps)
        yield from self._attention()
        yield self._call(reg.POST_ATTENTION_NORM, "post_attention_layernorm.weight", eps)
        yield self._call(reg.ATTENTION_RESIDUAL_ADD, attrs={"residual_index": branch})
        yield self._call(reg.PRE_FEEDFORWARD_NORM, "pre_feedforward_layernorm.weight", eps)
        yield from self._experts() if self.shape.sparse(self.layer) else self._dense()
        yield self._call(reg.POST_FEEDFORWARD_NORM, "post_feedforward_layernorm.weight", eps)
        following = {"hidden": f"{self.layer + 1}.hidden"}
        yield self._call(reg.FEEDFORWARD_RESIDUAL_ADD, attrs={"residual_index": branch + 1}, rename=following)

    def _attention(self) -> Iterator[Call]:
        dim = {"head_dim": self.shape.head_dim}
        yield self._call(reg.Q_PROJ, "self_attn.q_proj.weight")
        yield self._call(reg.K_PROJ, "self_attn.k_proj.weight")
        yield self._call(reg.V_PROJ, "self_attn.v_proj.weight")
        yield self._call(reg.OUTPUT_GATE_PROJ, "self_attn.gate_proj.weight")
        key = {} if self.sliding else {"key_normed": f"{self.layer}.key"}
        norms = "self_attn.q_norm.weight self_attn.k_norm.weight"
        yield self._call(reg.QK_NORM, norms, {"eps": self.shape.rms_norm_eps, **dim}, key)
        if self.sliding:
            yield self._call(reg.ROPE, rename={"cos": "cos", "sin": "sin"})
        else:
            yield self._call(reg.SSMAX, rename={"query_scale": "query_scale"})
        yield self._call(att.KV_CACHE_UPDATE, rename={"slot_mapping": "slot_mapping"})
        yield self._attend()
        yield self._call(reg.OUTPUT_GATE, "self_attn.gate_bias", dim)
        yield self._call(reg.O_PROJ, "self_attn.o_proj.weight")

    def _attend(self) -> Call:
        dim = self.shape.head_dim
        attrs = {"window": self.shape.sliding_window if self.sliding else 0, "scale": dim**-0.5, "head_dim": dim}
        mask = {"attention_mask": "window_mask" if self.sliding else "full_mask"}
        if self.phase.kind == "prefill":
            shared = {name: name for name in ("cu_seqlens", "pad_index")}
            return self._call(att.PREFILL_ATTENTION, attrs=attrs, rename=shared | mask)
        shared = {name: name for name in ("seq_lens", "block_table")}
        pages = {"page_table": "window_block_table" if self.sliding else "block_table"}
        attrs["query_len"] = self.phase.query_len
        return self._call(att.DECODE_ATTENTION, attrs=attrs, rename=shared | pages | mask)

    def _dense(self) -> Iterator[Call]:
        yield self._call(reg.MLP_GATE_PROJ, "mlp.gate_proj.weight")
        yield self._call(reg.MLP_UP_PROJ, "mlp.up_proj.weight")
        yield self._call(reg.MLP_SWIGLU)
        yield self._call(reg.MLP_DOWN_PROJ, "mlp.down_proj.weight")

    def _experts(self) -> Iterator[Call]:
        shape = self.shape
        chosen = {"top_k": shape.num_experts_per_tok}
        routing = {
            "num_groups": shape.n_group,
            "topk_groups": shape.topk_group,
            "norm_topk_prob": shape.norm_topk_prob,
        }
        yield self._call(exp.ROUTER, "mlp.gate.weight mlp.gate.e_score_correction_bias", routing | chosen)
        yield self._call(exp.EXPERT_DISPATCH, attrs={"num_experts": shape.num_experts})
        yield self._call(exp.EXPERT_GATE_UP, "mlp.experts.gate_up_proj", chosen)
        yield self._call(exp.EXPERT_SWIGLU)
        yield self._call(exp.EXPERT_DOWN, "mlp.experts.down_proj", chosen)
        yield self._call(exp.EXPERT_COMBINE)
        yield self._call(reg.ROUTED_SCALE, attrs={"scale": shape.routed_scaling_factor})
