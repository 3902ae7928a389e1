"""The window's edge, stale and poisoned cache slots, and attention against a sum written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.beam.attention import DECODE_ATTENTION, DECODE_MASKS, PREFILL_ATTENTION, PREFILL_MASKS, window_pages
from baselines.beam.cache import page_batch, prefill_indices
from harness.program import FP64
from harness.workload import Phase

HEADS, KV_HEADS, DIM = 6, 2, 8


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(query: Tensor, key: Tensor, value: Tensor, position: int, window: int) -> Tensor:
    """One query [Hq, D] at `position` over keys and values [n, Hkv, D] -> [Hq * D], from the definition."""
    first = max(0, position - window + 1) if window else 0
    made = []
    for head in range(HEADS):
        seen = slice(first, position + 1)
        scores = key[seen, head // (HEADS // KV_HEADS)] @ query[head] * DIM**-0.5
        made.append(scores.softmax(0) @ value[seen, head // (HEADS // KV_HEADS)])
    return torch.cat(made)


def prefill(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int, limit: int) -> Tensor:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    pad_index, _ = prefill_indices(lengths, cu_seqlens)
    masks = PREFILL_MASKS.reference(FP64, {}, {"window": limit}, torch.tensor(lengths), pad_index)
    attrs = {"window": window, "scale": DIM**-0.5, "head_dim": DIM}
    inputs = (query, key, value.flatten(1), cu_seqlens, pad_index, masks[1 if window else 0])
    return PREFILL_ATTENTION.reference(FP64, {}, attrs, *inputs)[0]


def decode(
    query: Tensor, keys: Tensor, values: Tensor, window: int, limit: int, page: int, stale: float = 0.0
) -> Tensor:
    """The last len(query) positions of one sequence over a paged cache whose other slots hold `stale`."""
    length, count = len(keys), len(query)
    batch = page_batch([length], [length], length, page, torch.Generator().manual_seed(2))
    cache = torch.full((batch.blocks, KV_HEADS, page, 2 * DIM), stale, dtype=torch.float64)
    cache[batch.slot_mapping // page, :, batch.slot_mapping % page] = torch.cat((keys, values), dim=-1)
    attrs = {"window": limit, "page_size": page, "query_len": count}
    positions = torch.arange(length - count, length)
    full, table, near = DECODE_MASKS.reference(FP64, {}, attrs, batch.seq_lens, batch.block_table, positions)
    pages, mask = (table, near) if window else (batch.block_table, full)
    attrs = {"window": window, "scale": DIM**-0.5, "head_dim": DIM, "query_len": count}
    return DECODE_ATTENTION.reference(FP64, {}, attrs, query, batch.seq_lens, batch.block_table, pages, mask, cache)[0]


@pytest.mark.parametrize("window", [0, 4, 512])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prefill_and_decode_at_the_window_edge(window: int, offset: int) -> None:
    limit = window or 4
    length = limit + offset
    query, key, value = (
        drawn(length, HEADS, DIM),
        drawn(length, KV_HEADS, DIM, seed=1),
        drawn(length, KV_HEADS, DIM, seed=2),
    )
    want = by_hand(query[-1], key, value, length - 1, window)
    torch.testing.assert_close(prefill(query, key, value, [length], window, limit)[-1], want)
    torch.testing.assert_close(decode(query[-1:], key, value, window, limit, page=16)[0], want)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("window", [4, 512])
def test_a_loud_key_counts_inside_the_window_only(window: int, query_len: int) -> None:
    length = window + 9
    query = drawn(length, HEADS, DIM)
    key, value = drawn(length, KV_HEADS, DIM, seed=1), drawn(length, KV_HEADS, DIM, seed=2)
    quiet = prefill(query, key, value, [length], window, window)
    loud_at = length - window - query_len
    key[loud_at], value[loud_at] = 50 * query[-query_len:, ::3].mean(0), 100.0
    loud = prefill(query, key, value, [length], window, window)
    paged = decode(query[-query_len:], key, value, window, window, page=4)
    torch.testing.assert_close(paged, loud[-query_len:])
    assert torch.equal(loud[loud_at + window :], quiet[loud_at + window :])
    assert (loud[loud_at + window - 1] - quiet[loud_at + window - 1]).abs().max() > 1e-3


@pytest.mark.parametrize("window", [0, 8])
def test_stale_slots_may_hold_anything(window: int) -> None:
    key, value, query = drawn(21, KV_HEADS, DIM), drawn(21, KV_HEADS, DIM, seed=1), drawn(1, HEADS, DIM, seed=2)
    clean = decode(query, key, value, window, 8, page=4)
    for stale in (float("nan"), float("inf"), 1e30):
        assert torch.equal(decode(query, key, value, window, 8, page=4, stale=stale), clean)


def test_prefill_padding_rows_are_zero_whatever_they_hold() -> None:
    query, key, value = drawn(24, HEADS, DIM), drawn(24, KV_HEADS, DIM), drawn(24, KV_HEADS, DIM)
    clean = prefill(query, key, value, [12, 7], 4, 4)
    for rows in (query, key, value):
        rows[19:] = torch.nan
    padded = prefill(query, key, value, [12, 7], 4, 4)
    assert torch.equal(padded, clean) and (padded[19:] == 0).all()


def test_window_pages_cover_every_alignment() -> None:
    for window, query_len, page in ((4, 1, 4), (64, 1, 16), (512, 8, 16), (5, 3, 2)):
        longest = 0
        for length in range(window + query_len, window + query_len + page):
            first = length - query_len - window + 1
            longest = max(longest, (length - 1) // page - first // page + 1)
        assert window_pages(window, query_len, page, blocks=1000) == longest


def test_decode_crosses_a_window_of_four(narrow: Any) -> None:
    tokens = torch.randint(2048, (24,), generator=torch.Generator().manual_seed(3))
    theirs = narrow.theirs(input_ids=tokens[None]).logits[0]
    total = len(tokens)
    for length in (3, 4, 5, 17, total):
        phase = Phase(name="p", kind="prefill", batch=1, context=length, logits="all")
        values = narrow.inputs(phase) | {"token_ids": tokens[:length]}
        ours = narrow.step(phase)(values)["logits"]
        torch.testing.assert_close(ours, theirs[:length], atol=2e-4, rtol=0)
        following = Phase(name="d", kind="decode", batch=1, context=length)
        batch = {name: values[name] for name in values if name.endswith("kv_cache") or name == "block_table"}
        batch |= {
            "token_ids": tokens[length - 1 : length],
            "seq_lens": torch.tensor([length], dtype=torch.int32),
            "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
            "slot_mapping": values["slot_mapping"][-1:],
        }
        torch.testing.assert_close(
            narrow.step(following)(batch)["logits"], theirs[length - 1 : length], atol=2e-4, rtol=0
        )
