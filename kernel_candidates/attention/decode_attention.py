"""Attention of a step's newest tokens over the paged cache, split over keys, and with the output gate where it
follows.

The first kernel gives each chunk of a sequence's visible keys to one program: it reads pages through the block table,
masks by length, causality and window, and leaves a maximum, a sum and an unscaled result per query; keys that nobody
may see are never loaded. The second joins the chunks of a token and applies the gate. Query heads of one key/value
head and all new tokens of a sequence share a program's keys. Probabilities enter the second product as two BF16 parts,
so that they lose nothing to its dtype. A padding sequence has no visible key and gives zeros.

Predicts: at one token and 2,048 keys 1 MB (full layer) or 0.26 MB (sliding); 5 us in two launches in place of some 40
in a dozen, which gather the pages, repeat the heads and mask the whole table.

Measured, the captured step of 12 layers on an H200 (torch 2.11, Triton 3.6): decode-b1 1.791 -> 1.300 ms; the ladder
of all rungs is in results/h200-tp8-rank-12.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="decode_attention",
    replaces=(("attention", "output_gate"), ("attention",)),
    backend="triton",
    target="decode",
    when=When(tokens=(1, 512), dtype=("bf16", "fp32"), phases=("decode", "verify")),
    kernels=("attention_chunk_kernel",),
)
TILE = 64


@triton.jit
def attention_chunk_kernel(
    query, cache, lengths, block_table, partial, peaks, sums,
    table_stride, block_stride, head_stride, slot_stride, scale,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    R_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    ROWS: tl.constexpr = QUERIES * GROUP
    row = tl.arange(0, R_BLOCK)
    d = tl.arange(0, D_BLOCK)
    length = tl.load(lengths + sequence)
    past = length - QUERIES
    first = 0
    if WINDOW > 0:
        first = tl.maximum(past - WINDOW + 1, 0)
    begin = first + chunk * CHUNK
    end = tl.minimum(begin + CHUNK, length)

    token = sequence * QUERIES + row // GROUP
    head = kv_head * GROUP + row % GROUP
    at_query = query + (token * (KV_HEADS * GROUP) + head)[:, None].to(tl.int64) * DIM + d[None, :]
    real = (row < ROWS)[:, None] & (d < DIM)[None, :]
    q = tl.load(at_query, real, other=0.0)
    asked = past + row // GROUP
    peak = tl.full((R_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((R_BLOCK,), tl.float32)
    made = tl.zeros((R_BLOCK, D_BLOCK), tl.float32)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        held = key < end
        page = tl.load(block_table + sequence * table_stride + key // PAGE, held, other=0).to(tl.int64)
        at = cache + page * block_stride + kv_head * head_stride + (key % PAGE) * slot_stride
        k = tl.load(at[None, :] + d[:, None], held[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(at[:, None] + DIM + d[None, :], held[:, None] & (d < DIM)[None, :], other=0.0)
        seen = held[None, :] & (key[None, :] <= asked[:, None])
        if WINDOW > 0:
            seen = seen & (asked[:, None] - key[None, :] < WINDOW)
        score = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp(score - shift[:, None])
        fade = tl.exp(peak - shift)
        total = total * fade + tl.sum(p, 1)
        made = made * fade[:, None]
        high = p.to(v.dtype)
        made = tl.dot(high, v, made, input_precision="ieee")
        if v.dtype != tl.float32:
            made = tl.dot((p - high.to(tl.float32)).to(v.dtype), v, made)
        peak = new_peak
    slot = ((sequence * KV_HEADS + kv_head) * CHUNKS + chunk) * ROWS + row
    tl.store(peaks + slot, peak, row < ROWS)
    tl.store(sums + slot, total, row < ROWS)
    tl.store(partial + slot[:, None].to(tl.int64) * DIM + d[None, :], made, real)


@triton.jit
def attention_join_kernel(
    partial, peaks, sums, gate, bias, out, gate_stride,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr,
    C_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.arange(0, C_BLOCK)
    d = tl.arange(0, D_BLOCK)
    row = (token % QUERIES) * GROUP + head % GROUP
    first = (token // QUERIES * KV_HEADS + head // GROUP) * CHUNKS
    slot = (first + chunk) * (QUERIES * GROUP) + row
    inside = chunk < CHUNKS
    peak = tl.load(peaks + slot, inside, other=float("-inf"))
    highest = tl.max(peak, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp(peak - highest)
    total = tl.sum(tl.load(sums + slot, inside, other=0.0) * fade, 0)
    real = d < DIM
    part = tl.load(
        partial + slot[:, None].to(tl.int64) * DIM + d[None, :],
        (peak > float("-inf"))[:, None] & real[None, :],
        other=0.0,
    )
    made = tl.sum(part * fade[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    storage = out.dtype.element_ty
    column = head * DIM + d
    if GATED:
        g = tl.load(gate + token * gate_stride + column, real, other=0.0).to(tl.float32)
        g = (g + tl.load(bias + head).to(storage).to(tl.float32)).to(storage).to(tl.float32)
        made = made.to(storage).to(tl.float32) * (1.0 / (1.0 + tl.exp(-g))).to(storage).to(tl.float32)
    tl.store(out + token.to(tl.int64) * (KV_HEADS * GROUP * DIM) + column, made.to(storage), real)


@dataclass(frozen=True)
class State:
    dim: int
    window: int
    scale: float
    queries: int
    bias: torch.Tensor | None


def prepare(site: Site) -> State:
    return State(
        dim=site.attrs["attention.head_dim"],
        window=site.attrs["attention.window"],
        scale=site.attrs["attention.scale"],
        queries=site.attrs["attention.query_len"],
        bias=site.weights.get("output_gate.bias"),
    )


def chunk_keys(keys: int, programs: int) -> int:
    """Keys a chunk: TILE while chunks are scarce, more as they would exceed some four a multiprocessor or 64 in all."""
    chunk = TILE
    while (triton.cdiv(keys, chunk) * programs > 512 or triton.cdiv(keys, chunk) > 64) and chunk < 65536:
        chunk *= 2
    return chunk


def run(inputs, caches, state):
    query, lengths, table, cache = inputs["query"], inputs["seq_lens"], inputs["block_table"], caches["kv_cache"]
    tokens, heads, dim = query.shape
    batch, (_, kv_heads, page, _) = lengths.shape[0], cache.shape
    queries, group = state.queries, heads // kv_heads
    out = query.new_empty(tokens, heads * dim)
    if tokens:
        keys = table.shape[1] * page
        if state.window:
            keys = min(keys, state.window + queries - 1)
        chunk = chunk_keys(keys, batch * kv_heads)
        chunks = triton.cdiv(keys, chunk)
        rows = batch * kv_heads * chunks * queries * group
        partial = torch.empty(rows, dim, dtype=torch.float32, device=query.device)
        peaks, sums = torch.empty(2, rows, dtype=torch.float32, device=query.device)
        sizes = {"QUERIES": queries, "GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "CHUNKS": chunks}
        r_block, d_block = max(16, triton.next_power_of_2(queries * group)), max(16, triton.next_power_of_2(dim))
        attention_chunk_kernel[(batch, kv_heads, chunks)](
            query, cache, lengths, table, partial, peaks, sums,
            table.stride(0), cache.stride(0), cache.stride(1), cache.stride(2), state.scale,
            **sizes, PAGE=page, WINDOW=state.window, CHUNK=chunk, TILE=TILE,
            R_BLOCK=r_block, D_BLOCK=d_block, num_warps=4, num_stages=2,
        )  # fmt: skip
        gated = state.bias is not None
        gate = inputs["gate_raw"] if gated else query
        attention_join_kernel[(tokens, heads)](
            partial, peaks, sums, gate, state.bias if gated else query, out, gate.stride(0),
            **sizes, C_BLOCK=triton.next_power_of_2(chunks), D_BLOCK=d_block, GATED=gated, num_warps=4,
        )  # fmt: skip
    return {"attention_gated" if state.bias is not None else "attention": out}
