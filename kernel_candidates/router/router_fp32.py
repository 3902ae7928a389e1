"""The whole router in FP32: one matrix-vector kernel (few tokens) or one tensor-core kernel (many), then one top-k
kernel.

With many BF16 tokens the FP32 weight is split into three BF16 parts, which hold its 24 bits: BF16 activations are
exact, so three BF16 products summed in FP32 are an FP32 product at tensor-core speed. Each block of the inner
dimension is summed from the smallest part up and then added to an FP32 total, so that the tensor cores' own sums stay
short. FP32 activations take FP32 products. The top-k kernel does a token a program: sigmoid, correction bias for
choosing only, the two best of each group, groups left out at minus infinity, then the experts by descending score.

Predicts: at one token 5.2 MB, 1.2 us of floor and 6 us for both launches in place of some 50; at 16,384 tokens 129
GFLOP, 170-300 us in place of 973 for the FP32 product, and 30 us for the choice in place of a dozen launches.

Measured, the captured step of 12 layers on an H200 (torch 2.11, Triton 3.6): decode-b1 2.936 -> 2.487 ms;
prefill-8x2048 129.9 -> 116.6 ms; the ladder of all rungs is in results/h200-tp8-rank-12.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="router_fp32",
    replaces=(("router",),),
    backend="triton",
    target="decode",
    when=When(tokens=(1, 65536), dtype=("bf16", "fp32")),
    kernels=("router_topk_kernel",),
)
FEW_TOKENS = 64
SPLIT = WeakIdKeyDictionary()
"""Weight -> its three BF16 parts: phases and arms share them, and they go when the weight goes."""


@triton.jit
def router_gemv_kernel(
    rows, weight, logits, tokens, row_stride, experts,
    WIDTH: tl.constexpr, T_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * T_BLOCK + tl.arange(0, T_BLOCK)
    expert = tl.program_id(0) * E_BLOCK + tl.arange(0, E_BLOCK)
    column = tl.arange(0, K_BLOCK)
    at_row = rows + token[:, None].to(tl.int64) * row_stride
    at_weight = weight + expert[:, None] * WIDTH
    total = tl.zeros((T_BLOCK, E_BLOCK, K_BLOCK), tl.float32)
    for start in tl.static_range(0, WIDTH, K_BLOCK):
        k = start + column
        inside = (k < WIDTH)[None, :]
        w = tl.load(at_weight + k[None, :], inside & (expert < experts)[:, None], other=0.0)
        x = tl.load(at_row + k[None, :], inside & (token < tokens)[:, None], other=0.0).to(tl.float32)
        total += x[:, None, :] * w[None, :, :]
    made = tl.sum(total, 2)
    at = logits + token[:, None] * experts + expert[None, :]
    tl.store(at, made, (token < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def router_gemm_kernel(
    rows, weight, logits, tokens, row_stride, experts, part_stride,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, T_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * T_BLOCK + tl.arange(0, T_BLOCK)
    expert = tl.program_id(1) * E_BLOCK + tl.arange(0, E_BLOCK)
    column = tl.arange(0, K_BLOCK)
    at_row = rows + token[:, None].to(tl.int64) * row_stride + column[None, :]
    at_weight = weight + expert[None, :] * WIDTH + column[:, None]
    real_token = (token < tokens)[:, None]
    real_expert = (expert < experts)[None, :]
    total = tl.zeros((T_BLOCK, E_BLOCK), tl.float32)
    for start in range(0, WIDTH, K_BLOCK):
        inside = start + column < WIDTH
        x = tl.load(at_row + start, real_token & inside[None, :], other=0.0)
        mask = inside[:, None] & real_expert
        if PARTS == 1:
            total += tl.dot(x, tl.load(at_weight + start, mask, other=0.0), input_precision="ieee")
        else:
            low = tl.load(at_weight + 2 * part_stride + start, mask, other=0.0)
            middle = tl.load(at_weight + part_stride + start, mask, other=0.0)
            high = tl.load(at_weight + start, mask, other=0.0)
            total += tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low)))
    at = logits + token[:, None].to(tl.int64) * experts + expert[None, :]
    tl.store(at, total, real_token & real_expert)


@triton.jit
def router_topk_kernel(
    logits, bias, ids, weights,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, G_BLOCK: tl.constexpr, M_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, K_BLOCK: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = float("-inf")
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G_BLOCK)
    member = tl.arange(0, M_BLOCK)
    expert = group[:, None] * MEMBERS + member[None, :]
    real = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    logit = tl.load(logits + token * (GROUPS * MEMBERS) + expert, real, other=0.0)
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    choice = tl.where(real, score + tl.load(bias + expert, real, other=0.0), LOWEST)

    best, best_at = tl.max(choice, 1), tl.argmax(choice, 1)
    second = tl.max(tl.where(member[None, :] == best_at[:, None], LOWEST, choice), 1)
    group_score = tl.where(group < GROUPS, best + second, LOWEST)
    stays = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        chosen = group == tl.argmax(tl.where(stays, LOWEST, group_score), 0)
        stays = stays | chosen

    choice = tl.reshape(tl.where(stays[:, None], choice, LOWEST), (G_BLOCK * M_BLOCK,))
    score = tl.reshape(score, (G_BLOCK * M_BLOCK,))
    expert = tl.reshape(expert, (G_BLOCK * M_BLOCK,))
    place = tl.arange(0, G_BLOCK * M_BLOCK)
    rank = tl.arange(0, K_BLOCK)
    picked_ids = tl.zeros((K_BLOCK,), tl.int32)
    picked = tl.zeros((K_BLOCK,), tl.float32)
    for turn in tl.static_range(TOP_K):
        here = place == tl.argmax(choice, 0)
        picked_ids = tl.where(rank == turn, tl.sum(tl.where(here, expert, 0), 0), picked_ids)
        picked = tl.where(rank == turn, tl.sum(tl.where(here, score, 0.0), 0), picked)
        choice = tl.where(here, LOWEST, choice)
    if NORMALISES:
        picked = tl.div_rn(picked, tl.zeros((K_BLOCK,), tl.float32) + (tl.sum(picked, 0) + 1e-20))
    kept = rank < TOP_K
    tl.store(ids + token * TOP_K + rank, picked_ids.to(tl.int64), kept)
    tl.store(weights + token * TOP_K + rank, picked, kept)


@dataclass(frozen=True)
class State:
    weight: torch.Tensor
    parts: torch.Tensor
    """[1 or 3, E, H]: the weight itself, or its BF16 parts from high to low."""
    bias: torch.Tensor
    groups: int
    top_groups: int
    top_k: int
    normalises: bool


def split_weight(weight):
    """[3, E, H] BF16 whose sum is the FP32 weight to its last bit or nearly."""
    if weight not in SPLIT:
        parts, rest = [], weight
        for _ in range(3):
            parts.append(rest.to(torch.bfloat16))
            rest = rest - parts[-1].float()
        SPLIT[weight] = torch.stack(parts)
    return SPLIT[weight]


def prepare(site: Site) -> State:
    weight = site.weights["router.weight"]
    splits = site.tokens > FEW_TOKENS and site.inputs["feedforward_input"].dtype == torch.bfloat16
    return State(
        weight=weight,
        parts=split_weight(weight) if splits else weight[None],
        bias=site.weights["router.correction_bias"],
        groups=site.attrs["router.num_groups"],
        top_groups=site.attrs["router.topk_groups"],
        top_k=site.attrs["router.top_k"],
        normalises=site.attrs["router.norm_topk_prob"],
    )


def few_logits(rows, state, logits):
    tokens, width = rows.shape
    experts = logits.shape[1]
    t_block = min(8, triton.next_power_of_2(tokens))
    e_block, k_block = (2, 1024) if t_block == 1 else (2, 512)
    grid = (triton.cdiv(experts, e_block), triton.cdiv(tokens, t_block))
    router_gemv_kernel[grid](
        rows, state.weight, logits, tokens, rows.stride(0), experts,
        WIDTH=width, T_BLOCK=t_block, E_BLOCK=e_block, K_BLOCK=min(k_block, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip


def many_logits(rows, state, logits):
    tokens, width = rows.shape
    experts = logits.shape[1]
    parts = state.parts.shape[0]
    if parts == 1:
        t_block, e_block, k_block, warps, stages = 64, 64, 32, 4, 2
    elif tokens < 4096:
        t_block, e_block, k_block, warps, stages = 64, 32, 64, 4, 4
    else:
        t_block, e_block, k_block, warps, stages = 128, 128, 64, 8, 3
    grid = (triton.cdiv(tokens, t_block), triton.cdiv(experts, e_block))
    router_gemm_kernel[grid](
        rows, state.parts, logits, tokens, rows.stride(0), experts, state.parts.stride(0),
        WIDTH=width, PARTS=parts, T_BLOCK=t_block, E_BLOCK=e_block, K_BLOCK=k_block, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def run(inputs, caches, state):
    rows = inputs["feedforward_input"]
    tokens, experts = rows.shape[0], state.weight.shape[0]
    ids = torch.empty(tokens, state.top_k, dtype=torch.int64, device=rows.device)
    weights = torch.empty(tokens, state.top_k, dtype=torch.float32, device=rows.device)
    if tokens:
        logits = torch.empty(tokens, experts, dtype=torch.float32, device=rows.device)
        # Parts fit activations of their own dtype: a case of fewer rows than the site's takes them as well.
        few = tokens <= FEW_TOKENS or state.parts.dtype != rows.dtype
        (few_logits if few else many_logits)(rows, state, logits)
        members = experts // state.groups
        router_topk_kernel[(tokens,)](
            logits, state.bias, ids, weights,
            GROUPS=state.groups, MEMBERS=members,
            G_BLOCK=triton.next_power_of_2(state.groups), M_BLOCK=triton.next_power_of_2(members),
            TOP_GROUPS=state.top_groups, TOP_K=state.top_k, K_BLOCK=triton.next_power_of_2(state.top_k),
            NORMALISES=state.normalises, num_warps=1,
        )  # fmt: skip
    return {"expert_ids": ids, "expert_weights": weights}
