"""The sparse feed-forward: router, dispatch, the two grouped products and the weighted sum.

Rounding follows transformers' `grouped_mm` experts, its default: the second product is rounded to storage, weights and
sum are in compute, and the sum is rounded once. E experts, k chosen a token, T*k = S dispatched rows.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.beam import cases, costs
from baselines.beam.regions import swiglu
from harness.program import Attrs, Decision, Outputs, Precision, Region, Weights

GATHER_LIMIT_BYTES = 1 << 30
"""Up to here an FP32 expert product on a GPU, or in a compiled step, gathers one weight a row, which a graph can
capture and torch.compile can trace (`grouped_mm` there is BF16 only); above it loops."""


def _scores(precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor) -> Tensor:
    """sigmoid(x W^T) [T, E], all of it in compute: a BF16 router changes experts."""
    return F.linear(rows.to(precision.compute), weights["weight"].to(precision.compute)).sigmoid()


def _group_scores(choice: Tensor, groups: int) -> Tensor:
    """[T, G]: the two best choice scores of each group, summed."""
    return choice.view(choice.shape[0], groups, choice.shape[1] // groups).topk(2, dim=-1)[0].sum(dim=-1)


def _normalised(scores: Tensor, ids: Tensor, attrs: Attrs) -> Tensor:
    chosen = scores.gather(1, ids)
    if attrs["norm_topk_prob"]:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen


def _router(precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor) -> Outputs:
    """(expert_ids [T, k] int64, expert_weights [T, k] in compute). The correction bias only chooses."""
    scores = _scores(precision, weights, attrs, rows)
    choice = scores + weights["correction_bias"].to(precision.compute)
    groups = attrs["num_groups"]
    best = torch.topk(_group_scores(choice, groups), k=attrs["topk_groups"], dim=-1)[1]
    stays = torch.zeros((rows.shape[0], groups), dtype=torch.bool, device=rows.device).scatter_(1, best, True)
    leaves = (~stays).repeat_interleave(choice.shape[1] // groups, dim=1)
    ids = torch.topk(choice.masked_fill(leaves, float("-inf")), k=attrs["top_k"], dim=-1)[1]
    return ids, _normalised(scores, ids, attrs)


@functools.cache
def _selections(groups: int, staying: int) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.combinations(range(groups), staying))


def _shortfall(scores: Tensor, weights: Weights, attrs: Attrs, ids: Tensor) -> Tensor:
    """[T]: over the group selections that hold all chosen ids, the least of the larger gap of the two stages.

    Group stage: best group left out minus worst kept. Expert stage: best expert passed over in the kept groups minus
    worst chosen. Infinite for ids out of range, repeated, or of more groups than may stay.
    """
    groups, experts = attrs["num_groups"], scores.shape[1]
    infinite = float("inf")
    choice = scores + weights["correction_bias"].to(scores.dtype)
    safe = ids.long().clamp(0, experts - 1)
    taken = torch.zeros_like(choice, dtype=torch.bool).scatter(1, safe, True)
    valid = ((ids >= 0) & (ids < experts)).all(-1) & (taken.sum(-1) == ids.shape[1])
    used = taken.view(len(ids), groups, -1).any(-1)
    passed = choice.masked_fill(taken, -infinite).view(len(ids), groups, -1).amax(-1)
    worst = choice.gather(1, safe).amin(-1)
    group_scores = _group_scores(choice, groups)
    least = torch.full_like(worst, infinite)
    for kept in _selections(groups, attrs["topk_groups"]):
        inside = torch.zeros(groups, dtype=torch.bool, device=scores.device)
        inside[list(kept)] = True
        outside = group_scores.masked_fill(inside, -infinite).amax(-1)
        group_gap = outside - group_scores.masked_fill(~inside, infinite).amin(-1)
        expert_gap = passed.masked_fill(~inside, -infinite).amax(-1) - worst
        gap = torch.maximum(group_gap, expert_gap).clamp_min(0)
        least = torch.minimum(least, gap.masked_fill((used & ~inside).any(-1), infinite))
    return least.masked_fill(~valid, infinite)


def _resolve(scores: Tensor, weights: Weights, attrs: Attrs, ids: Tensor) -> dict[str, Tensor]:
    return {"expert_weights": _normalised(scores, ids.long(), attrs)}


ROUTER = Region(
    "router",
    ("feedforward_input",),
    ("expert_ids", "expert_weights"),
    _router,
    costs.router,
    weights=("weight", "correction_bias"),
    rowwise=True,
    decision=Decision("expert_ids", _scores, _shortfall, _resolve),
    cases=cases.router_rows,
)


def _offsets(sorted_ids: Tensor, experts: int) -> Tensor:
    """[E] int32, cumulative ends. histc and not bincount, which synchronises; it wants floats on a CPU."""
    if sorted_ids.is_meta:
        return sorted_ids.new_empty(experts, dtype=torch.int32)
    counted = sorted_ids.int() if sorted_ids.is_cuda else sorted_ids.float()
    return torch.cumsum(torch.histc(counted, bins=experts, min=0, max=experts - 1), dim=0, dtype=torch.int32)


def _dispatch(precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor, ids: Tensor) -> Outputs:
    """(rows in order of their experts [S, H], the stable permutation [S] that orders them, ends of the experts)."""
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    return rows[order // ids.shape[1]], order, _offsets(sorted_ids, attrs["num_experts"])


EXPERT_DISPATCH = Region(
    "expert_dispatch",
    ("feedforward_input", "expert_ids"),
    ("dispatched", "dispatch_order", "expert_offsets"),
    _dispatch,
    costs.dispatch,
    cases=cases.lopsided_ids,
)


def _looped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One product an expert, its weights cast one at a time. Synchronises with the host: for oracles."""
    made = rows.new_zeros(rows.shape[0], weight.shape[1])
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            made[start:stop] = F.linear(rows[start:stop], weight[expert].to(rows.dtype))
        start = stop
    return made


def _gathered(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One matrix-vector product a row with its expert's weights, gathered."""
    numbers = torch.arange(rows.shape[0], dtype=offsets.dtype, device=rows.device)
    owners = torch.searchsorted(offsets, numbers, right=True).clamp_max(weight.shape[0] - 1)
    return torch.bmm(weight[owners], rows[:, :, None])[:, :, 0]


def _expert_linear(precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor, offsets: Tensor) -> Outputs:
    """Each expert's rows [n, K] times its weight [N, K] transposed, rounded to storage."""
    weight = weights["weight"]
    if rows.is_meta:
        return (rows.new_empty(rows.shape[0], weight.shape[1]),)
    if precision.storage == torch.float64:
        return (_looped(rows, weight, offsets),)
    weight = weight.to(precision.storage)
    if precision.storage == torch.float32 and (rows.is_cuda or torch.compiler.is_compiling()):
        needed_bytes = rows.shape[0] * weight[0].numel() * weight.element_size()
        product = _gathered if needed_bytes <= GATHER_LIMIT_BYTES else _looped
        return (product(rows, weight, offsets),)
    return (F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets),)


EXPERT_GATE_UP = Region(
    "expert_gate_up",
    ("dispatched", "expert_offsets"),
    ("expert_gate_up",),
    _expert_linear,
    costs.expert_linear,
    weights=("weight",),
    matmul=True,
    cases=cases.lopsided_offsets,
)
EXPERT_DOWN = Region(
    "expert_down",
    ("expert_act", "expert_offsets"),
    ("expert_rows",),
    _expert_linear,
    costs.expert_linear,
    weights=("weight",),
    matmul=True,
    cases=cases.lopsided_offsets,
)


def _expert_swiglu(precision: Precision, weights: Weights, attrs: Attrs, gate_up: Tensor) -> Outputs:
    gate, up = gate_up.chunk(2, dim=-1)
    return (swiglu(precision, gate, up),)


EXPERT_SWIGLU = Region(
    "expert_swiglu",
    ("expert_gate_up",),
    ("expert_act",),
    _expert_swiglu,
    costs.elementwise(5),
    rowwise=True,
    cases=cases.large_swiglu,
)


def _combine(
    precision: Precision, weights: Weights, attrs: Attrs, rows: Tensor, order: Tensor, expert_weights: Tensor
) -> Outputs:
    """sum over k of weight * row, back in token order [T, H]; products and sum in compute, one rounding."""
    tokens, top_k = expert_weights.shape
    weighted = rows * expert_weights.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return (weighted[back].view(tokens, top_k, -1).sum(dim=1).to(precision.storage),)


EXPERT_COMBINE = Region(
    "expert_combine",
    ("expert_rows", "dispatch_order", "expert_weights"),
    ("experts_out",),
    _combine,
    costs.elementwise(16),
    cases=cases.scaled_expert_rows,
)
