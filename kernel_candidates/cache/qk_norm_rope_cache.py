"""Query and key norm, rotation (sliding layers) or SSMax scale (full layers) and the paged cache write: one program a
token.

All heads of a token are one tile of two halves, so that the rotation's partner is in the same thread. Rounds after the
norm's weight and after the rotation or scale. A row of slot -1 writes nothing to the cache.

Predicts: some 25 launches of a decode step's layer become one, 2 us in place of 40; at 16,384 tokens 75 MB, a floor of
18 us.

Measured, the captured step of 12 layers on an H200 (torch 2.11, Triton 3.6): decode-b1 2.490 -> 1.791 ms;
prefill-8x2048 116.7 -> 110.7 ms; the ladder of all rungs is in results/h200-tp8-rank-12.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="qk_norm_rope_cache",
    replaces=(("qk_norm", "rope", "kv_cache_update"), ("qk_norm", "ssmax", "kv_cache_update")),
    backend="triton",
    target="decode",
    when=When(tokens=(1, 65536), dtype=("bf16", "fp32")),
    kernels=("qk_norm_rope_cache_kernel",),
)


@triton.jit
def normed_halves(source, weight, eps, heads, d, inside, DIM: tl.constexpr):
    """Both halves of the normed heads, rounded to storage and widened again, [heads, DIM / 2] each."""
    at = source + heads[:, None] * DIM + d[None, :]
    low = tl.load(at, inside, other=0.0)
    high = tl.load(at + DIM // 2, inside, other=0.0)
    storage = low.dtype
    real = d < DIM // 2
    w_low = tl.load(weight + d, real, other=0.0).to(tl.float32)[None, :]
    w_high = tl.load(weight + DIM // 2 + d, real, other=0.0).to(tl.float32)[None, :]
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
    low = (low * scale * w_low).to(storage).to(tl.float32)
    high = (high * scale * w_high).to(storage).to(tl.float32)
    return low, high


@triton.jit
def qk_norm_rope_cache_kernel(
    query, key, value, q_weight, k_weight, cos, sin, scale, slots, cache, query_out, key_out,
    query_stride, key_stride, value_stride, block_stride, head_stride, slot_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    ROTATES: tl.constexpr, KEEPS_KEY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    d = tl.arange(0, HALF_BLOCK)
    real = d < HALF
    q_head = tl.arange(0, Q_BLOCK)
    kv_head = tl.arange(0, KV_BLOCK)
    q_inside = (q_head[:, None] < Q_HEADS) & real[None, :]
    kv_inside = (kv_head[:, None] < KV_HEADS) & real[None, :]
    slot = tl.load(slots + row)

    q_low, q_high = normed_halves(query + row * query_stride, q_weight, eps, q_head, d, q_inside, DIM)
    k_low, k_high = normed_halves(key + row * key_stride, k_weight, eps, kv_head, d, kv_inside, DIM)
    if ROTATES:
        at = row * DIM + d
        c_low = tl.load(cos + at, real, other=0.0)[None, :]
        c_high = tl.load(cos + at + HALF, real, other=0.0)[None, :]
        s_low = tl.load(sin + at, real, other=0.0)[None, :]
        s_high = tl.load(sin + at + HALF, real, other=0.0)[None, :]
        turned = q_low * c_low - q_high * s_low
        q_high = q_high * c_high + q_low * s_high
        q_low = turned
        turned = k_low * c_low - k_high * s_low
        k_high = k_high * c_high + k_low * s_high
        k_low = turned
    else:
        by = tl.load(scale + row)
        q_low = q_low * by
        q_high = q_high * by

    storage = query_out.dtype.element_ty
    at_query = query_out + row * (Q_HEADS * DIM) + q_head[:, None] * DIM + d[None, :]
    tl.store(at_query, q_low.to(storage), q_inside)
    tl.store(at_query + HALF, q_high.to(storage), q_inside)
    if KEEPS_KEY:
        at_key = key_out + row * (KV_HEADS * DIM) + kv_head[:, None] * DIM + d[None, :]
        tl.store(at_key, k_low.to(storage), kv_inside)
        tl.store(at_key + HALF, k_high.to(storage), kv_inside)

    written = (kv_head[:, None] < tl.where(slot >= 0, KV_HEADS, 0)) & real[None, :]
    safe = tl.maximum(slot, 0)
    base = cache + (safe // PAGE) * block_stride + (safe % PAGE) * slot_stride
    at_cache = base + kv_head[:, None] * head_stride + d[None, :]
    at_value = value + row * value_stride + kv_head[:, None] * DIM + d[None, :]
    tl.store(at_cache, k_low.to(storage), written)
    tl.store(at_cache + HALF, k_high.to(storage), written)
    tl.store(at_cache + DIM, tl.load(at_value, kv_inside, other=0.0), written)
    tl.store(at_cache + DIM + HALF, tl.load(at_value + HALF, kv_inside, other=0.0), written)


@dataclass(frozen=True)
class State:
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    dim: int
    rotates: bool
    keeps_key: bool


def prepare(site: Site) -> State:
    return State(
        q_weight=site.weights["qk_norm.q_weight"],
        k_weight=site.weights["qk_norm.k_weight"],
        eps=site.attrs["qk_norm.eps"],
        dim=site.attrs["qk_norm.head_dim"],
        rotates="rope" in site.run,
        keeps_key="key" in site.outputs,
    )


def run(inputs, caches, state):
    query, key, value, cache = inputs["query_raw"], inputs["key_raw"], inputs["value"], caches["kv_cache"]
    rows, dim = query.shape[0], state.dim
    q_heads, kv_heads = query.shape[1] // dim, key.shape[1] // dim
    made = {"query": query.new_empty(rows, q_heads, dim)}
    if state.keeps_key:
        made["key"] = query.new_empty(rows, kv_heads, dim)
    if rows:
        table = inputs["cos"] if state.rotates else inputs["query_scale"]
        q_block, kv_block = triton.next_power_of_2(q_heads), triton.next_power_of_2(kv_heads)
        qk_norm_rope_cache_kernel[(rows,)](
            query, key, value, state.q_weight, state.k_weight,
            table, inputs["sin"] if state.rotates else table, table, inputs["slot_mapping"], cache,
            made["query"], made.get("key", made["query"]),
            query.stride(0), key.stride(0), value.stride(0), *cache.stride()[:3], state.eps,
            Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=cache.shape[2],
            Q_BLOCK=q_block, KV_BLOCK=kv_block, HALF_BLOCK=triton.next_power_of_2(dim // 2),
            ROTATES=state.rotates, KEEPS_KEY=state.keeps_key,
            num_warps=max(1, min(8, q_block // 2)),
        )  # fmt: skip
    return made
