"""Causal attention of whole prompts on flat rows, aware of the window, with the output gate where it follows.

A program takes a block of queries of one head of one sequence and goes only over the keys that some of them see: from
the window's edge to the diagonal, with masks on the blocks that an edge crosses and none between. Sequences are read
where they lie through their ends, so that nothing is padded, repeated or transposed and no dense mask is read. One
further program slot of the grid zeroes the padding rows.

Predicts: at prefill 8x2048 of one rank 51 GFLOP (full) or 23 (sliding), 150 and 80 us, in place of some 700 of a
masked product over all 2,048 x 2,048 pairs with its copies.

Measured, the captured step of 12 layers on an H200 (torch 2.11, Triton 3.6): prefill-8x2048 65.62 -> 60.67 ms; the
ladder of all rungs is in results/h200-tp8-rank-12.
"""

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="prefill_attention",
    replaces=(("attention", "output_gate"), ("attention",)),
    backend="triton",
    target="prefill",
    when=When(tokens=(1, 65536), dtype=("bf16",), phases=("prefill",)),
    kernels=("prefill_attention_kernel",),
)


@triton.jit
def over_keys(
    q, peak, total, made, key, value, key_stride, value_stride, begin, end, length, asked, scale,
    DIM: tl.constexpr, WINDOW: tl.constexpr, N_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and result after the keys from `begin` to `end`, in blocks; scores are powers of two."""
    d = tl.arange(0, D_BLOCK)
    for start in range(begin, end, N_BLOCK):
        n = start + tl.arange(0, N_BLOCK)
        held = n < length
        at_key = key + n[None, :].to(tl.int64) * key_stride + d[:, None]
        at_value = value + n[:, None].to(tl.int64) * value_stride + d[None, :]
        k = tl.load(at_key, held[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(at_value, held[:, None] & (d < DIM)[None, :], other=0.0)
        score = tl.dot(q, k) * scale
        if MASKED:
            seen = (n[None, :] <= asked[:, None]) & held[None, :]
            if WINDOW > 0:
                seen = seen & (asked[:, None] - n[None, :] < WINDOW)
            score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(p, 1)
        made = tl.dot(p.to(v.dtype), v, made * fade[:, None])
        peak = new_peak
    return peak, total, made


@triton.jit
def prefill_attention_kernel(
    query, key, value, ends, gate, bias, out, query_stride, key_stride, value_stride, gate_stride, batch, tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, GATED: tl.constexpr,
    M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    d = tl.arange(0, D_BLOCK)
    row = tl.arange(0, M_BLOCK)
    storage = out.dtype.element_ty
    column = head * DIM + d
    real_d = (d < DIM)[None, :]
    if sequence == batch:
        step = tl.num_programs(0) * M_BLOCK
        for start in range(tl.load(ends + batch) + tl.program_id(0) * M_BLOCK, tokens, step):
            padded = start + row
            at = out + padded[:, None].to(tl.int64) * (HEADS * DIM) + column[None, :]
            tl.store(at, tl.zeros((M_BLOCK, D_BLOCK), storage), (padded < tokens)[:, None] & real_d)
        return
    first = tl.load(ends + sequence).to(tl.int64)
    length = (tl.load(ends + sequence + 1) - first).to(tl.int32)
    # The last blocks see the most keys: they start first.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) * M_BLOCK
    if block >= length:
        return
    asked = block + row
    real = (asked < length)[:, None] & real_d
    rows = (first + asked)[:, None]
    q = tl.load(query + rows * query_stride + column[None, :], real, other=0.0)
    at_key = key + first * key_stride + head // GROUP * DIM
    at_value = value + first * value_stride + head // GROUP * DIM
    peak = tl.full((M_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((M_BLOCK,), tl.float32)
    made = tl.zeros((M_BLOCK, D_BLOCK), tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(block - WINDOW + 1, 0) // N_BLOCK * N_BLOCK
        # From here on the last query of the block sees every key up to the diagonal.
        inner = tl.cdiv(tl.maximum(block + M_BLOCK - WINDOW, 0), N_BLOCK) * N_BLOCK
        inner = tl.minimum(inner, block)
        peak, total, made = over_keys(
            q, peak, total, made, at_key, at_value, key_stride, value_stride, begin, inner, length, asked, scale,
            DIM, WINDOW, N_BLOCK, D_BLOCK, True,
        )  # fmt: skip
        begin = tl.maximum(inner, begin)
    peak, total, made = over_keys(
        q, peak, total, made, at_key, at_value, key_stride, value_stride, begin, block, length, asked, scale,
        DIM, WINDOW, N_BLOCK, D_BLOCK, False,
    )  # fmt: skip
    peak, total, made = over_keys(
        q, peak, total, made, at_key, at_value, key_stride, value_stride,
        block, tl.minimum(block + M_BLOCK, length), length, asked, scale,
        DIM, WINDOW, N_BLOCK, D_BLOCK, True,
    )  # fmt: skip
    made = made / tl.where(total > 0.0, total, 1.0)[:, None]
    if GATED:
        g = tl.load(gate + rows * gate_stride + column[None, :], real, other=0.0).to(tl.float32)
        g = (g + tl.load(bias + head).to(storage).to(tl.float32)).to(storage).to(tl.float32)
        made = made.to(storage).to(tl.float32) * (1.0 / (1.0 + tl.exp(-g))).to(storage).to(tl.float32)
    tl.store(out + rows * (HEADS * DIM) + column[None, :], made.to(storage), real)


@dataclass(frozen=True)
class State:
    dim: int
    window: int
    scale: float
    bias: torch.Tensor | None


def prepare(site: Site) -> State:
    return State(
        dim=site.attrs["attention.head_dim"],
        window=site.attrs["attention.window"],
        scale=site.attrs["attention.scale"] * log2(e),
        bias=site.weights.get("output_gate.bias"),
    )


def run(inputs, caches, state):
    query, key, value, ends = inputs["query"], inputs["key"], inputs["value"], inputs["cu_seqlens"]
    tokens, heads, dim = query.shape
    out = query.new_empty(tokens, heads * dim)
    if tokens:
        batch, longest = inputs["pad_index"].shape
        gated = state.bias is not None
        gate = inputs["gate_raw"] if gated else query
        m_block = 128 if longest > 256 else 64
        prefill_attention_kernel[(triton.cdiv(longest, m_block), heads, batch + 1)](
            query, key, value, ends, gate, state.bias if gated else query, out,
            query.stride(0), key.stride(0), value.stride(0), gate.stride(0), batch, tokens, state.scale,
            HEADS=heads, GROUP=heads // key.shape[1], DIM=dim, WINDOW=state.window, GATED=gated,
            M_BLOCK=m_block, N_BLOCK=64, D_BLOCK=max(16, triton.next_power_of_2(dim)),
            num_warps=8 if m_block == 128 else 4, num_stages=3,
        )  # fmt: skip
    return {"attention_gated" if state.bias is not None else "attention": out}
