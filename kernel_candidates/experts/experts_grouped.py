"""The experts of many tokens: pairs ordered by expert, two grouped products with fused gather and SwiGLU, one weighted
sum.

Only the order of the (token, choice) pairs is made, not a copy of their rows: the first product gathers its rows as it
loads them and leaves the activation, the second writes each pair's row where the weighted sum finds it. A program
takes one tile of one expert's rows; tiles start anew at each expert, and a program finds its own from the experts'
ends, so that the host never needs the counts and the grid is an upper bound. Few tokens order themselves by counting
in one kernel, many by a sort. Rounds as the grouped products do: gate and up, the activation, each row, the sum, the
scaled sum.

Predicts: at prefill 8x2048 of one rank 1,289 GFLOP a layer, 1.65 ms at 780 TFLOP/s and some 3 ms at what Triton
reaches, in place of grouped products with copies and FP32 passes between them; at 32 tokens each chosen expert is read
once.

Measured, the captured step of 12 layers on an H200 (torch 2.11, Triton 3.6): prefill-8x2048 112.1 -> 62.41 ms; the
ladder of all rungs is in results/h200-tp8-rank-12.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="experts_grouped",
    replaces=(("expert_dispatch", "expert_gate_up", "expert_swiglu", "expert_down", "expert_combine", "routed_scale"),),
    backend="triton",
    target="prefill",
    when=When(tokens=(9, 65536), dtype=("bf16",)),
    kernels=("grouped_up_kernel", "grouped_down_kernel", "grouped_sum_kernel"),
)
COUNTED_PAIRS = 2048
"""Up to here every pair counts the pairs before it; above, a sort is faster."""


@triton.jit
def order_kernel(ids, order, ends, pairs, experts, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Stable order of the pairs by expert and the experts' cumulative ends, both by counting over all pairs."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + index, index < pairs, other=0).to(tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    upto = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, STEP):
        other = start + tl.arange(0, STEP)
        theirs = tl.load(ids + other, other < pairs, other=2147483647).to(tl.int32)[None, :]
        earlier = (theirs < own[:, None]) | ((theirs == own[:, None]) & (other[None, :] < index[:, None]))
        before += tl.sum(earlier.to(tl.int32), 1)
        upto += tl.sum((theirs <= index[:, None]).to(tl.int32), 1)
    tl.store(order + before, index, index < pairs)
    tl.store(ends + index, upto, index < experts)


@triton.jit
def tile_of(ends, number, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, M_BLOCK: tl.constexpr):
    """(expert, first row, end of its rows) of a tile; the expert is EXPERTS or more past the last tile."""
    index = tl.arange(0, E_BLOCK)
    end = tl.load(ends + index, index < EXPERTS, other=0)
    start = tl.load(ends + index - 1, (index > 0) & (index < EXPERTS), other=0)
    count = tl.where(index < EXPERTS, end - start, 0)
    tiles = (count + M_BLOCK - 1) // M_BLOCK
    tile_end = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_end <= number).to(tl.int32), 0)
    here = index == expert
    first_tile = tl.sum(tl.where(here, tile_end - tiles, 0), 0)
    row = tl.sum(tl.where(here, start, 0), 0) + (number - first_tile) * M_BLOCK
    return expert, row, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def grouped_up_kernel(
    x, weight, order, ends, act, x_stride, expert_stride,
    WIDTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr,
    M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (INNER + N_BLOCK - 1) // N_BLOCK
    expert, first, end = tile_of(ends, tl.program_id(0) // N_TILES, EXPERTS, E_BLOCK, M_BLOCK)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, M_BLOCK)
    n_first = (tl.program_id(0) % N_TILES) * N_BLOCK
    column = tl.arange(0, K_BLOCK)
    real = (row < end)[:, None]
    token = tl.load(order + row, row < end, other=0).to(tl.int64) // TOP_K
    at_x = x + token[:, None] * x_stride + column[None, :]
    # Columns alternate between gate and up: one wide product, whose halves part within a thread.
    pair = tl.arange(0, 2 * N_BLOCK)
    weight_n = n_first + pair // 2
    at_weight = weight + expert.to(tl.int64) * expert_stride
    at_weight += (weight_n + (pair % 2) * INNER)[None, :] * WIDTH + column[:, None]
    both = tl.zeros((M_BLOCK, 2 * N_BLOCK), tl.float32)
    for start in range(0, WIDTH, K_BLOCK):
        inside = start + column < WIDTH
        rows = tl.load(at_x + start, real & inside[None, :], other=0.0)
        w = tl.load(at_weight + start, inside[:, None] & (weight_n < INNER)[None, :], other=0.0)
        both = tl.dot(rows, w, both)
    gate, up = tl.split(tl.reshape(both, (M_BLOCK, N_BLOCK, 2)))
    storage = act.dtype.element_ty
    g = gate.to(storage).to(tl.float32)
    u = up.to(storage).to(tl.float32)
    made = (g / (1.0 + tl.exp(-g)) * u).to(storage)
    n = n_first + tl.arange(0, N_BLOCK)
    tl.store(act + row[:, None].to(tl.int64) * INNER + n[None, :], made, real & (n < INNER)[None, :])


@triton.jit
def grouped_down_kernel(
    act, weight, order, ends, rows_out, expert_stride,
    WIDTH: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr,
    M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (WIDTH + N_BLOCK - 1) // N_BLOCK
    expert, first, end = tile_of(ends, tl.program_id(0) // N_TILES, EXPERTS, E_BLOCK, M_BLOCK)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, M_BLOCK)
    n = (tl.program_id(0) % N_TILES) * N_BLOCK + tl.arange(0, N_BLOCK)
    column = tl.arange(0, K_BLOCK)
    real = (row < end)[:, None]
    real_n = (n < WIDTH)[None, :]
    at_act = act + row[:, None].to(tl.int64) * INNER + column[None, :]
    at_weight = weight + expert.to(tl.int64) * expert_stride + n[None, :] * INNER + column[:, None]
    made = tl.zeros((M_BLOCK, N_BLOCK), tl.float32)
    for start in range(0, INNER, K_BLOCK):
        inside = start + column < INNER
        rows = tl.load(at_act + start, real & inside[None, :], other=0.0)
        made = tl.dot(rows, tl.load(at_weight + start, inside[:, None] & real_n, other=0.0), made)
    pair = tl.load(order + row, row < end, other=0).to(tl.int64)
    at = rows_out + pair[:, None] * WIDTH + n[None, :]
    tl.store(at, made.to(rows_out.dtype.element_ty), real & real_n)


@triton.jit
def grouped_sum_kernel(rows, weights, out, scale, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        row = tl.load(rows + pair * WIDTH + column, inside, other=0.0).to(tl.float32)
        total += row * tl.load(weights + pair)
    storage = out.dtype.element_ty
    tl.store(out + token * WIDTH + column, (total.to(storage).to(tl.float32) * scale).to(storage), inside)


@dataclass(frozen=True)
class State:
    gate_up: torch.Tensor
    down: torch.Tensor
    scale: float
    experts: torch.Tensor
    """0 to E - 1, to find the ends of the experts in sorted ids."""


def prepare(site: Site) -> State:
    down = site.weights["expert_down.weight"]
    return State(
        gate_up=site.weights["expert_gate_up.weight"],
        down=down,
        scale=site.attrs["routed_scale.scale"],
        experts=torch.arange(down.shape[0], dtype=torch.int32, device=down.device),
    )


def ordered(ids, experts):
    """(order [S] int32 or int64, ends [E] int32) of the pairs of `ids` [T, K]."""
    pairs, count = ids.numel(), experts.shape[0]
    flat = ids.reshape(-1)
    if pairs > COUNTED_PAIRS:
        keys, order = torch.sort(flat.to(torch.int16 if count < 1 << 15 else torch.int32), stable=True)
        return order, torch.searchsorted(keys, experts.to(keys.dtype), right=True, out_int32=True)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    ends = torch.empty(count, dtype=torch.int32, device=ids.device)
    order_kernel[(triton.cdiv(max(pairs, count), 32),)](
        flat, order, ends, pairs, count, BLOCK=32, STEP=128, num_warps=4
    )
    return order, ends


def tiles(pairs: int, experts: int):
    """(rows a tile, launch options of the first product, of the second) for the mean number of rows an expert."""
    mean = pairs / experts
    if mean <= 4:
        return 16, ((64, 128), 4, 4), ((128, 64), 4, 4)
    if mean <= 24:
        return 32, ((64, 128), 4, 4), ((128, 64), 4, 4)
    if mean <= 96:
        return 64, ((64, 64), 4, 4), ((128, 64), 4, 4)
    return 128, ((64, 64), 8, 4), ((128, 64), 8, 4)


def run(inputs, caches, state):
    x, ids, weights = inputs["feedforward_input"], inputs["expert_ids"], inputs["expert_weights"]
    tokens, top_k = ids.shape
    experts, width, inner = state.down.shape
    out = x.new_empty(tokens, width)
    pairs = tokens * top_k
    if pairs:
        order, ends = ordered(ids, state.experts)
        m_block, (up_block, up_warps, up_stages), (down_block, down_warps, down_stages) = tiles(pairs, experts)
        most = min(pairs, triton.cdiv(pairs, m_block) + experts)
        sizes = {
            "WIDTH": width, "INNER": inner, "EXPERTS": experts, "E_BLOCK": triton.next_power_of_2(experts),
            "M_BLOCK": m_block,
        }  # fmt: skip
        act = x.new_empty(pairs, inner)
        grouped_up_kernel[(most * triton.cdiv(inner, up_block[0]),)](
            x, state.gate_up, order, ends, act, x.stride(0), state.gate_up.stride(0), **sizes,
            TOP_K=top_k, N_BLOCK=up_block[0], K_BLOCK=up_block[1], num_warps=up_warps, num_stages=up_stages,
        )  # fmt: skip
        rows = x.new_empty(pairs, width)
        grouped_down_kernel[(most * triton.cdiv(width, down_block[0]),)](
            act, state.down, order, ends, rows, state.down.stride(0), **sizes,
            N_BLOCK=down_block[0], K_BLOCK=down_block[1], num_warps=down_warps, num_stages=down_stages,
        )  # fmt: skip
        block = min(256 if tokens < 64 else 1024, triton.next_power_of_2(width))
        grouped_sum_kernel[(tokens, triton.cdiv(width, block))](
            rows, weights, out, state.scale, WIDTH=width, TOP_K=top_k, BLOCK=block, num_warps=max(1, block // 256)
        )
    return {"feedforward_out": out}
