"""Positions, rotation tables, SSMax scales and attention masks of a decode or verify step in one launch.

A program takes a row and up to 1,024 keys of its masks; the first of a row makes its tables too. Angles are products of
FP64 frequencies, reduced to a turn in FP64, so that far positions keep theirs; sines and scales are FP32.

Predicts: some forty launches of a few kilobytes become one: 3 us in place of 80 to 100, once a step.

Measured, the captured step of 12 layers on an H200 (torch 2.11, Triton 3.6): decode-b1 0.998 -> 0.903 ms; the ladder
of all rungs is in results/h200-tp8-rank-12.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from harness.candidate import Rewrite, Site, When

REWRITE = Rewrite(
    name="step_tables",
    replaces=(("positions", "rope_table", "ssmax_scale", "masks"),),
    backend="triton",
    target="decode",
    when=When(tokens=(1, 4096), dtype=("bf16", "fp32"), phases=("decode", "verify")),
    kernels=("step_tables_kernel",),
)
KEYS = 1024


@triton.jit
def step_tables_kernel(
    lengths, ends, block_table, frequencies,
    positions, sequence_ids, cos, sin, query_scale, full_mask, near_table, near_mask,
    batch, blocks, table_stride, near_blocks,
    QUERIES: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, H_BLOCK: tl.constexpr, W_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    sequence = row // QUERIES
    length = tl.load(lengths + sequence)
    start = tl.load(ends + sequence)
    stop = tl.load(ends + sequence + 1)
    real = (row < tl.load(ends + batch)) & (length > 0)
    position = tl.where(real, length - (stop - start) + row - start, 0)
    first_page = tl.maximum(length - QUERIES - WINDOW + 1, 0) // PAGE

    # A padding sequence sees one key, the null page's first: its zero value makes attention zero.
    lone = length == 0
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    seen = tl.where(lone, key == 0, key <= position)
    at = row.to(tl.int64) * (blocks * PAGE) + key
    tl.store(full_mask + at, seen.to(tl.uint8), key < blocks * PAGE)
    near = first_page * PAGE + key
    seen = tl.where(lone, near == 0, (near <= position) & (position - near < WINDOW))
    tl.store(near_mask + row.to(tl.int64) * (near_blocks * PAGE) + key, seen.to(tl.uint8), key < near_blocks * PAGE)

    if tl.program_id(1) == 0:
        tl.store(positions + row, position.to(tl.int64))
        tl.store(sequence_ids + row, sequence.to(tl.int64))
        context = (position.to(tl.float32) + 1.0) / 2048.0
        tl.store(query_scale + row, tl.exp(0.1 * tl.log(1.0 + context)))
        half = tl.arange(0, H_BLOCK)
        inside = half < DIM // 2
        turns = position.to(tl.float64) * tl.load(frequencies + half, inside, other=0.0)
        angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
        c, s = tl.cos(angle), tl.sin(angle)
        to = row.to(tl.int64) * DIM + half
        tl.store(cos + to, c, inside)
        tl.store(cos + to + DIM // 2, c, inside)
        tl.store(sin + to, s, inside)
        tl.store(sin + to + DIM // 2, s, inside)
        if row % QUERIES == 0:
            number = tl.arange(0, W_BLOCK)
            held = number < near_blocks
            page = first_page + number
            entry = tl.load(block_table + sequence * table_stride + page, held & (page < blocks), other=0)
            tl.store(near_table + sequence * near_blocks + number, entry.to(tl.int64), held)


@dataclass(frozen=True)
class State:
    frequencies: torch.Tensor
    """[D / 2] FP64, turns a position."""
    dim: int
    queries: int
    page: int
    window: int
    near_blocks: int
    outputs: tuple[str, ...]


def prepare(site: Site) -> State:
    dim, theta = site.attrs["rope_table.head_dim"], site.attrs["rope_table.rope_theta"]
    turns = [theta ** (-index / dim) / 6.283185307179586 for index in range(0, dim, 2)]
    return State(
        frequencies=torch.tensor(turns, dtype=torch.float64, device=site.device),
        dim=dim,
        queries=site.attrs["masks.query_len"],
        page=site.attrs["masks.page_size"],
        window=site.attrs["masks.window"],
        near_blocks=site.outputs["window_block_table"].shape[1],
        outputs=tuple(site.outputs),
    )


def run(inputs, caches, state):
    lengths, ends, table = inputs["seq_lens"], inputs["cu_seqlens"], inputs["block_table"]
    rows, (batch, blocks), queries = inputs["slot_mapping"].shape[0], table.shape, state.queries
    device = table.device

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    keys, near_keys = blocks * state.page, state.near_blocks * state.page
    made = {
        "positions": empty(rows, dtype=torch.int64),
        "sequence_ids": empty(rows, dtype=torch.int64),
        "cos": empty(rows, state.dim),
        "sin": empty(rows, state.dim),
        "query_scale": empty(rows),
        "full_mask": empty(batch, 1, queries, keys, dtype=torch.uint8),
        "window_block_table": empty(batch, state.near_blocks, dtype=torch.int64),
        "window_mask": empty(batch, 1, queries, near_keys, dtype=torch.uint8),
    }
    if rows:
        step_tables_kernel[(rows, triton.cdiv(max(keys, near_keys), KEYS))](
            lengths, ends, table, state.frequencies, *made.values(), batch, blocks, table.stride(0), state.near_blocks,
            QUERIES=queries, DIM=state.dim, PAGE=state.page, WINDOW=state.window,
            KEYS=KEYS, H_BLOCK=triton.next_power_of_2(state.dim // 2),
            W_BLOCK=triton.next_power_of_2(state.near_blocks), num_warps=4,
        )  # fmt: skip
    for name in ("full_mask", "window_mask"):
        made[name] = made[name].view(torch.bool)
    return {name: made[name] for name in state.outputs}
