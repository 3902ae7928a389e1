"""Positions, masks, the paged KV cache and attention. B sequences, T flat tokens, D head dimension.

A cache is [blocks, kv heads, page, 2 D] in storage, K before V in the last dimension. Page 0 is the null page: no
sequence owns it, unused entries of a block table point at it, and it stays zero. Key j is visible to query i where
0 <= i - j < window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.beam import cases, costs
from harness.program import Attrs, Outputs, Precision, Region, Weights


def _rows_of(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each flat row: its sequence [T] int64, its offset in it [T], and whether it lies in any [T] bool."""
    rows = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequences = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp_max(cu_seqlens.shape[0] - 2)
    return sequences, rows - cu_seqlens[sequences], rows < cu_seqlens[-1]


def _positions(
    precision: Precision, weights: Weights, attrs: Attrs, seq_lens: Tensor, cu_seqlens: Tensor, slot_mapping: Tensor
) -> Outputs:
    """(positions [T], sequence_ids [T]), int64. Position 0 in padding rows, sequence B - 1 in those past the end."""
    sequences, offsets, inside = _rows_of(cu_seqlens, slot_mapping.shape[0])
    lengths = seq_lens[sequences]
    past = lengths - cu_seqlens.diff()[sequences]
    real = inside & (lengths > 0)
    return (past + offsets).masked_fill(~real, 0).long(), sequences


POSITIONS = Region(
    "positions",
    ("seq_lens", "cu_seqlens", "slot_mapping"),
    ("positions", "sequence_ids"),
    _positions,
    costs.elementwise(2),
)


def window_pages(window: int, query_len: int, page: int, blocks: int) -> int:
    """Pages that any `window + query_len - 1` neighbouring keys can touch, at most those of the block table."""
    return min(blocks, (window + query_len + page - 3) // page + 1)


def _decode_masks(
    precision: Precision, weights: Weights, attrs: Attrs, seq_lens: Tensor, block_table: Tensor, positions: Tensor
) -> Outputs:
    """full_mask [B, 1, q, blocks * page], window_block_table [B, nw] int64, window_mask [B, 1, q, nw * page].

    The rows of a padding sequence see one key, the null page's first: its zero value makes their attention zero.
    """
    (batch, blocks), page, queries = block_table.shape, attrs["page_size"], attrs["query_len"]
    asked = positions.view(batch, 1, queries, 1)
    padding = (seq_lens == 0).view(batch, 1, 1, 1)
    keys = torch.arange(blocks * page, device=block_table.device)
    full_mask = ((keys <= asked) & ~padding) | (padding & (keys == 0))

    first = (seq_lens.long() - queries - attrs["window"] + 1).clamp_min(0) // page
    count = window_pages(attrs["window"], queries, page, blocks)
    numbers = first[:, None] + torch.arange(count, device=block_table.device)
    table = block_table.long().gather(1, numbers.clamp_max(blocks - 1)).masked_fill(numbers >= blocks, 0)
    within = torch.arange(page, device=block_table.device)
    keys = (numbers[:, :, None] * page + within).view(batch, 1, 1, count * page)
    near = (keys <= asked) & (asked - keys < attrs["window"])
    return full_mask, table, (near & ~padding) | (padding & (keys == 0))


DECODE_MASKS = Region(
    "masks",
    ("seq_lens", "block_table", "positions"),
    ("full_mask", "window_block_table", "window_mask"),
    _decode_masks,
    costs.elementwise(2),
)


def _prefill_masks(
    precision: Precision, weights: Weights, attrs: Attrs, seq_lens: Tensor, pad_index: Tensor
) -> Outputs:
    """(full_mask, window_mask), bool [B, 1, S, S]. A row past its sequence's end sees itself only, to stay finite."""
    (batch, length), device = pad_index.shape, pad_index.device
    keys = torch.arange(length, device=device)
    asked = keys[:, None]
    real = asked < seq_lens.view(batch, 1, 1, 1)
    causal = keys <= asked
    near = causal & (asked - keys < attrs["window"])
    itself = keys == asked
    return (causal & real) | itself, (near & real) | itself


PREFILL_MASKS = Region(
    "masks", ("seq_lens", "pad_index"), ("full_mask", "window_mask"), _prefill_masks, costs.elementwise(2)
)


def _kv_cache_update(
    precision: Precision, weights: Weights, attrs: Attrs, key: Tensor, value: Tensor, slots: Tensor, cache: Tensor
) -> Outputs:
    """Writes key and value of each row to its slot, page * page_size + offset; a row of slot -1 writes nothing.

    Such a row rewrites the null page's first slot with what is there: shapes stay static and no byte changes.
    """
    page = cache.shape[2]
    fresh = torch.cat((key, value.view(key.shape)), dim=-1)
    written = slots >= 0
    fresh = torch.where(written[:, None, None], fresh, cache[0, :, 0])
    safe = slots.clamp_min(0)
    cache[safe // page, :, safe % page] = fresh
    return ()


KV_CACHE_UPDATE = Region(
    "kv_cache_update",
    ("key", "value", "slot_mapping", "kv_cache"),
    (),
    _kv_cache_update,
    costs.cache_update,
    mutates=("kv_cache",),
    cases=cases.cache_slots,
)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """[B, kv heads, S, D] -> [B, kv heads * times, S, D], each head `times` times in a row."""
    batch, count, length, dim = heads.shape
    wide = heads[:, :, None].expand(batch, count, times, length, dim)
    return wide.reshape(batch, count * times, length, dim)


def _decode_attention(
    precision: Precision,
    weights: Weights,
    attrs: Attrs,
    query: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    page_table: Tensor,
    mask: Tensor,
    cache: Tensor,
) -> Outputs:
    """Attention of the q newest tokens of each sequence over the pages of `page_table` -> [T, Hq * D].

    Slots that no query of the sequence sees are zeroed before use: they may hold anything, NaN included. With one
    query a sequence, the query heads of a key/value head are packed as its queries; else keys and values are repeated.
    """
    batch, dim = page_table.shape[0], attrs["head_dim"]
    tokens, heads, _ = query.shape
    pages = cache[page_table]
    kv = pages.transpose(1, 2).reshape(batch, cache.shape[1], -1, 2 * dim)
    kv = kv.masked_fill(~mask.any(dim=2)[..., None], 0)
    key, value = kv.chunk(2, dim=-1)
    groups = heads // cache.shape[1]
    if tokens == batch:
        packed = query.view(batch, cache.shape[1], groups, dim)
        made = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=attrs["scale"])
        return (made.reshape(tokens, heads * dim),)
    asked = query.view(batch, -1, heads, dim).transpose(1, 2)
    key, value = _repeated(key, groups), _repeated(value, groups)
    made = F.scaled_dot_product_attention(asked, key, value, attn_mask=mask, scale=attrs["scale"])
    return (made.transpose(1, 2).reshape(tokens, heads * dim),)


DECODE_ATTENTION = Region(
    "attention",
    ("query", "seq_lens", "block_table", "page_table", "attention_mask", "kv_cache"),
    ("attention",),
    _decode_attention,
    costs.decode_attention,
    matmul=True,
    cases=cases.decode_keys,
)


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[B, h, S, D] each; causal and with grouped heads where there is no mask, else masked with repeated heads."""
    groups = query.shape[1] // key.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=groups > 1
        )
    if groups > 1:
        key, value = _repeated(key, groups), _repeated(value, groups)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _prefill_attention(
    precision: Precision,
    weights: Weights,
    attrs: Attrs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    pad_index: Tensor,
    mask: Tensor,
) -> Outputs:
    """Attention of each sequence over itself -> [T, Hq * D], zeros in padding rows.

    Sequences are padded at their ends, so that where no window binds a causal mask alone is right for every real row.
    The FP64 oracle goes sequence by sequence: its scores of 8 x 2,048 tokens at once would be 13 GB.
    """
    (batch, length), tokens, dim = pad_index.shape, query.shape[0], attrs["head_dim"]
    padded = [rows.view(tokens, -1, dim)[pad_index].transpose(1, 2) for rows in (query, key, value)]
    masked = 0 < attrs["window"] <= length
    if precision.storage == torch.float64:
        parts = zip(*(part.chunk(batch) for part in (*padded, mask)), strict=True)
        made = torch.cat([_padded_attention(q, k, v, m if masked else None, attrs["scale"]) for q, k, v, m in parts])
    else:
        made = _padded_attention(padded[0], padded[1], padded[2], mask if masked else None, attrs["scale"])
    sequences, offsets, inside = _rows_of(cu_seqlens, tokens)
    cells = (sequences * length + offsets).masked_fill(~inside, 0)
    flat = made.transpose(1, 2).reshape(batch * length, -1)[cells]
    return (flat.masked_fill(~inside[:, None], 0),)


PREFILL_ATTENTION = Region(
    "attention",
    ("query", "key", "value", "cu_seqlens", "pad_index", "attention_mask"),
    ("attention",),
    _prefill_attention,
    costs.prefill_attention,
    matmul=True,
    cases=cases.prefill_keys,
)
