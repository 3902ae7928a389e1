"""Regions that work row by row: embedding, norms, projections, rotation, gates, residuals, activation, softcap.

Each reference rounds to `precision.storage` exactly where transformers' Beam does and computes in `precision.compute`
in between; with both FP64 nothing is rounded and the same code is the oracle. Rows are tokens, [T, ...] throughout.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.beam import cases, costs
from harness.program import Attrs, Outputs, Precision, Region, Weights

SSMAX_EXPONENT = 0.1
SSMAX_CONTEXT_TOKENS = 2048
"""Full layers scale a query by exp(0.1 log1p((position + 1) / 2048)); the + 1 is in transformers' code."""


def rms_norm(precision: Precision, weight: Tensor, eps: float, values: Tensor) -> Tensor:
    """w * (x * rsqrt(mean(x^2) + eps)) over the last dimension, rounded once, after the product with w."""
    wide = values.to(precision.compute)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(precision.compute) * wide).to(precision.storage)


def _norm(precision: Precision, weights: Weights, attrs: Attrs, values: Tensor) -> Outputs:
    return (rms_norm(precision, weights["weight"], attrs["eps"], values),)


def norm_region(name: str, source: str, output: str) -> Region:
    return Region(
        name,
        (source,),
        (output,),
        _norm,
        costs.elementwise(4),
        weights=("weight",),
        rowwise=True,
        cases=cases.norm_rows,
    )


INPUT_NORM = norm_region("input_norm", "hidden", "attention_input")
POST_ATTENTION_NORM = norm_region("post_attention_norm", "attention_out", "attention_out_normed")
PRE_FEEDFORWARD_NORM = norm_region("pre_feedforward_norm", "residual", "feedforward_input")
POST_FEEDFORWARD_NORM = norm_region("post_feedforward_norm", "feedforward_out", "feedforward_out_normed")
FINAL_NORM = norm_region("final_norm", "hidden", "final_hidden")


def _linear(precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor) -> Outputs:
    return (F.linear(rows, weights["weight"].to(precision.storage)),)


def linear_region(name: str, source: str, output: str) -> Region:
    return Region(name, (source,), (output,), _linear, costs.linear, weights=("weight",), rowwise=True, matmul=True)


Q_PROJ = linear_region("q_proj", "attention_input", "query_raw")
K_PROJ = linear_region("k_proj", "attention_input", "key_raw")
V_PROJ = linear_region("v_proj", "attention_input", "value")
OUTPUT_GATE_PROJ = linear_region("output_gate_proj", "attention_input", "gate_raw")
O_PROJ = linear_region("o_proj", "attention_gated", "attention_out")
MLP_GATE_PROJ = linear_region("mlp_gate_proj", "feedforward_input", "mlp_gate")
MLP_UP_PROJ = linear_region("mlp_up_proj", "feedforward_input", "mlp_up")
MLP_DOWN_PROJ = linear_region("mlp_down_proj", "mlp_act", "feedforward_out")
LM_HEAD = linear_region("lm_head", "final_hidden", "logits_raw")


def _embedding(precision: Precision, weights: Weights, attrs: Attrs, token_ids: Tensor) -> Outputs:
    return (F.embedding(token_ids, weights["weight"]).to(precision.storage),)


EMBEDDING = Region(
    "embedding", ("token_ids",), ("hidden",), _embedding, costs.gather, weights=("weight",), rowwise=True
)


@functools.cache
def _inverse_frequencies(theta: float, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[head_dim / 2]. Made on the CPU, as transformers does: a GPU's pow differs in the last bit, which a million
    positions multiply. Held, so that a captured step copies nothing from the host."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    return (1.0 / (theta**exponents)).to(device)


def _rope_table(precision: Precision, weights: Weights, attrs: Attrs, positions: Tensor) -> Outputs:
    wide = precision.compute
    frequencies = _inverse_frequencies(attrs["rope_theta"], attrs["head_dim"], wide, positions.device)
    angles = positions[:, None].to(wide) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


ROPE_TABLE = Region(
    "rope_table",
    ("positions",),
    ("cos", "sin"),
    _rope_table,
    costs.elementwise(1),
    rowwise=True,
    cases=cases.positions,
)


def _ssmax_scale(precision: Precision, weights: Weights, attrs: Attrs, positions: Tensor) -> Outputs:
    contexts = (positions.to(precision.compute) + 1) / SSMAX_CONTEXT_TOKENS
    return (torch.exp(SSMAX_EXPONENT * torch.log1p(contexts)),)


SSMAX_SCALE = Region(
    "ssmax_scale",
    ("positions",),
    ("query_scale",),
    _ssmax_scale,
    costs.elementwise(5),
    rowwise=True,
    cases=cases.positions,
)


def _qk_norm(precision: Precision, weights: Weights, attrs: Attrs, query: Tensor, key: Tensor) -> Outputs:
    dim = attrs["head_dim"]
    query, key = (t.view(t.shape[0], t.shape[1] // dim, dim) for t in (query, key))
    return (
        rms_norm(precision, weights["q_weight"], attrs["eps"], query),
        rms_norm(precision, weights["k_weight"], attrs["eps"], key),
    )


QK_NORM = Region(
    "qk_norm",
    ("query_raw", "key_raw"),
    ("query_normed", "key_normed"),
    _qk_norm,
    costs.elementwise(4),
    weights=("q_weight", "k_weight"),
    rowwise=True,
    cases=cases.norm_rows,
)


def _rotated(precision: Precision, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin on [T, heads, D] with tables [T, D] in compute; rounded once, after the sum."""
    low, high = heads.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (heads * cos[:, None] + turned * sin[:, None]).to(precision.storage)


def _rope(
    precision: Precision, weights: Weights, attrs: Attrs, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> Outputs:
    return _rotated(precision, query, cos, sin), _rotated(precision, key, cos, sin)


ROPE = Region(
    "rope",
    ("query_normed", "key_normed", "cos", "sin"),
    ("query", "key"),
    _rope,
    costs.elementwise(3),
    rowwise=True,
    cases=cases.loud_query_key,
)


def _ssmax(precision: Precision, weights: Weights, attrs: Attrs, query: Tensor, scale: Tensor) -> Outputs:
    return ((query.to(precision.compute) * scale[:, None, None]).to(precision.storage),)


SSMAX = Region(
    "ssmax",
    ("query_normed", "query_scale"),
    ("query",),
    _ssmax,
    costs.elementwise(1),
    rowwise=True,
    cases=cases.loud_query,
)


def _output_gate(precision: Precision, weights: Weights, attrs: Attrs, attention: Tensor, gate: Tensor) -> Outputs:
    """attention * sigmoid(gate + bias of the head); rounds after the sum, the sigmoid and the product."""
    shape = (attention.shape[0], attention.shape[1] // attrs["head_dim"], attrs["head_dim"])
    biased = gate.view(shape) + weights["bias"].to(precision.storage)[None, :, None]
    return ((attention.view(shape) * torch.sigmoid(biased)).flatten(1),)


OUTPUT_GATE = Region(
    "output_gate",
    ("attention", "gate_raw"),
    ("attention_gated",),
    _output_gate,
    costs.elementwise(3),
    weights=("bias",),
    rowwise=True,
    cases=cases.saturated_gate,
)


def _residual_add(precision: Precision, weights: Weights, attrs: Attrs, branch: Tensor, stream: Tensor) -> Outputs:
    """x / sqrt(n) + r sqrt((n - 1) / n), n = `residual_index`; rounds after each product and after the sum."""
    index = attrs["residual_index"]
    return (branch * (1.0 / math.sqrt(index)) + stream * math.sqrt((index - 1) / index),)


def residual_region(name: str, branch: str, stream: str, output: str) -> Region:
    return Region(
        name,
        (branch, stream),
        (output,),
        _residual_add,
        costs.elementwise(3),
        rowwise=True,
        cases=cases.cancelling_residual,
    )


ATTENTION_RESIDUAL_ADD = residual_region("attention_residual_add", "attention_out_normed", "hidden", "residual")
FEEDFORWARD_RESIDUAL_ADD = residual_region("feedforward_residual_add", "feedforward_out_normed", "residual", "hidden")


def swiglu(precision: Precision, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded once, after the product."""
    return (F.silu(gate.to(precision.compute)) * up.to(precision.compute)).to(precision.storage)


def _mlp_swiglu(precision: Precision, weights: Weights, attrs: Attrs, gate: Tensor, up: Tensor) -> Outputs:
    return (swiglu(precision, gate, up),)


MLP_SWIGLU = Region(
    "mlp_swiglu",
    ("mlp_gate", "mlp_up"),
    ("mlp_act",),
    _mlp_swiglu,
    costs.elementwise(5),
    rowwise=True,
    cases=cases.large_swiglu,
)


def _routed_scale(precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor) -> Outputs:
    return (rows * attrs["scale"],)


ROUTED_SCALE = Region(
    "routed_scale", ("experts_out",), ("feedforward_out",), _routed_scale, costs.elementwise(1), rowwise=True
)


def _logits_select(precision: Precision, weights: Weights, attrs: Attrs, hidden: Tensor, index: Tensor) -> Outputs:
    return (hidden[index],)


LOGITS_SELECT = Region("logits_select", ("hidden", "logits_index"), ("hidden_selected",), _logits_select, costs.gather)


def _logit_softcap(precision: Precision, weights: Weights, attrs: Attrs, logits: Tensor) -> Outputs:
    """cap * tanh(logits / cap), in compute throughout: FP32 logits of a BF16 model."""
    cap = attrs["softcap"]
    return (torch.tanh(logits.to(precision.compute) / cap) * cap,)


LOGIT_SOFTCAP = Region(
    "logit_softcap",
    ("logits_raw",),
    ("logits",),
    _logit_softcap,
    costs.elementwise(3),
    rowwise=True,
    cases=cases.softcap_edges,
)
