"""A step's inputs: lengths, pages, slots and filled caches, for decode, verify and prefill.

Sequences own pages in shuffled order; page 0 is nobody's. A ragged batch has unequal lengths, and a ragged decode ends
in a padding sequence: length 0, slots -1, a block table of null pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.beam.config import BeamShape
from baselines.beam.weights import derived_seed
from harness.errors import UsageError
from harness.workload import Phase

NULL_PAGE = 0
SPARE_PAGES = 1
"""Pages that no sequence owns besides the null page: a stray write shows there."""


@dataclass(frozen=True)
class Batch:
    """Which tokens a step has and where their keys go; all on the CPU."""

    seq_lens: Tensor
    """[B] int32, this step's tokens included; 0 for a padding sequence."""
    cu_seqlens: Tensor
    """[B + 1] int32"""
    block_table: Tensor
    """[B, max blocks] int32"""
    slot_mapping: Tensor
    """[T] int64"""
    blocks: int

    @property
    def owned(self) -> Tensor:
        """[blocks] bool: pages of some sequence."""
        owned = torch.zeros(self.blocks, dtype=torch.bool)
        owned[self.block_table.flatten().long()] = True
        owned[NULL_PAGE] = False
        return owned


def sequence_lengths(phase: Phase) -> list[int]:
    """Tokens of each sequence: `context`, or where ragged evenly down to half of it, and a 0 last in a decode."""
    if not phase.ragged:
        return [phase.context] * phase.batch
    padding = phase.kind != "prefill"
    if phase.batch < 2:
        raise UsageError(f"phase {phase.name}: a ragged batch needs two sequences at least, not {phase.batch}")
    real = phase.batch - padding
    drop = phase.context // 2
    lengths = [phase.context - index * drop // max(real - 1, 1) for index in range(real)]
    return lengths + [0] * padding


def page_batch(
    lengths: list[int], queries: list[int], tokens: int, page: int, generator: torch.Generator, max_blocks: int = 0
) -> Batch:
    """A batch of `lengths`, the last `queries` tokens of each new in this step, in `tokens` flat rows.

    A sequence of length 0 keeps its `queries` as padding rows. `max_blocks` widens the block table and the pages owned
    by each sequence, for lengths still to come.
    """
    needed = [max(-(-length // page), max_blocks if length else 0) for length in lengths]
    total = sum(needed)
    blocks = 1 + total + SPARE_PAGES
    order = 1 + torch.randperm(blocks - 1, generator=generator)
    table = torch.zeros(len(lengths), max([*needed, 1]), dtype=torch.int32)
    start = 0
    for sequence, count in enumerate(needed):
        table[sequence, :count] = order[start : start + count]
        start += count
    cu_seqlens = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    for sequence, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        if length:
            positions = torch.arange(length - count, length)
            pages = table[sequence].long()[positions // page]
            first = int(cu_seqlens[sequence])
            slots[first : first + count] = pages * page + positions % page
    return Batch(torch.tensor(lengths, dtype=torch.int32), cu_seqlens, table, slots, blocks)


def prefill_indices(lengths: list[int], cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(pad_index [B, S], logits_index [B]), int64: flat rows of each padded position and of each last token."""
    steps = torch.arange(max(lengths))
    inside = steps < torch.tensor(lengths)[:, None]
    starts = cu_seqlens[:-1].long()[:, None]
    return torch.where(inside, starts + steps, 0), cu_seqlens[1:].long() - 1


def step_inputs(
    shape: BeamShape,
    phase: Phase,
    page: int,
    token_ids: Tensor,
    device: torch.device,
    seed: int,
    drawn: torch.dtype,
    storage: torch.dtype,
) -> dict[str, Tensor]:
    """A program's inputs by name. Caches hold seeded normal values drawn in `drawn` and cast to `storage`."""
    lengths = sequence_lengths(phase)
    prefill = phase.kind == "prefill"
    queries = lengths if prefill else [phase.query_len] * phase.batch
    if any(0 < length < count for length, count in zip(lengths, queries, strict=True)):
        raise UsageError(f"phase {phase.name}: a context of {phase.context} is shorter than its new tokens")
    order = torch.Generator().manual_seed(derived_seed(seed, phase.name, "pages"))
    batch = page_batch(lengths, queries, phase.tokens, page, order)
    values = {
        "token_ids": token_ids,
        "seq_lens": batch.seq_lens,
        "cu_seqlens": batch.cu_seqlens,
        "block_table": batch.block_table,
        "slot_mapping": batch.slot_mapping,
    }
    if prefill:
        values["pad_index"], last = prefill_indices(lengths, batch.cu_seqlens)
        if phase.logits == "last":
            values["logits_index"] = last
    values = {name: value.to(device) for name, value in values.items()}
    for layer in range(shape.num_hidden_layers):
        cache_seed = None if prefill else derived_seed(seed, phase.name, layer)
        values[f"{layer}.kv_cache"] = filled_cache(shape, batch, page, device, cache_seed, drawn).to(storage)
    return values


def filled_cache(
    shape: BeamShape, batch: Batch, page: int, device: torch.device, seed: int | None, dtype: torch.dtype
) -> Tensor:
    """[blocks, kv heads, page, 2 D] of zeros, and where `seed` is given normal values in owned pages.

    Unit RMS is what the key norm makes of keys, and near what the value projection makes of values.
    """
    sizes = (batch.blocks, shape.num_key_value_heads, page, 2 * shape.head_dim)
    if seed is None or device.type == "meta":
        return torch.zeros(sizes, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    cache = torch.empty(sizes, dtype=dtype, device=device).normal_(generator=generator)
    return cache.masked_fill_(~batch.owned.to(device)[:, None, None, None], 0)
