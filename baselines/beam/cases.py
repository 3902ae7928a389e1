"""Adversarial inputs of each kind of region, made from recorded ones: `cases(inputs, weights, attrs, generator)`.

Each yields (name, inputs) with the recorded shapes and dtypes. They may synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.program import Attrs, Weights

Case = tuple[str, Sequence[Tensor]]
FAR_POSITION = 1_000_000
LOUD = 30.0


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(like.device, like.dtype)


def _swapped(inputs: Sequence[Tensor], index: int, tensor: Tensor) -> list[Tensor]:
    return [tensor if at == index else value for at, value in enumerate(inputs)]


def norm_rows(inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator) -> Iterator[Case]:
    fresh = [_normal(rows, generator) for rows in inputs]
    yield "zero rows", [torch.zeros_like(rows) for rows in inputs]
    yield "scale 1e-4", [rows * 1e-4 for rows in fresh]
    yield "scale 1e3", [rows * 1e3 for rows in fresh]
    yield "mean 50", [rows + 50 for rows in fresh]


def positions(inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator) -> Iterator[Case]:
    near = torch.arange(inputs[0].shape[0], device=inputs[0].device)
    yield "positions 0 to 64", [near % 65]
    yield "positions from a million", [near + FAR_POSITION]


def loud_query_key(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    query, key, *tables = inputs
    loud = [_normal(query, generator) * LOUD, _normal(key, generator) * LOUD]
    yield "query and key of scale 30", [*loud, *tables]
    yield "query and key of scale 1e-4", [loud[0] * 1e-5, loud[1] * 1e-5, *tables]


def loud_query(inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator) -> Iterator[Case]:
    yield "query of scale 30", [_normal(inputs[0], generator) * LOUD, inputs[1]]
    far = torch.full_like(inputs[1], (1 + (FAR_POSITION + 1) / 2048) ** 0.1)
    yield "query at a million", [inputs[0], far]


def saturated_gate(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    attention, gate = inputs
    yield "gates of scale 30", [attention, _normal(gate, generator) * LOUD]
    yield "closed gates", [attention, torch.full_like(gate, -100)]
    yield "zero attention", [torch.zeros_like(attention), gate]


def cancelling_residual(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    """The two scaled terms all but cancel: what is left is the rounding of each."""
    branch = _normal(inputs[0], generator)
    ratio = max(attrs["residual_index"] - 1, 1) ** 0.5
    yield "cancelling terms", [branch, -branch / ratio]
    yield "zero branch", [torch.zeros_like(branch), inputs[1]]
    yield "scale 1e3", [branch * 1e3, _normal(inputs[1], generator) * 1e3]


def large_swiglu(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    fresh = [_normal(rows, generator) for rows in inputs]
    yield "scale 100", [rows * 100 for rows in fresh]
    yield "scale 1e-4", [rows * 1e-4 for rows in fresh]
    yield "all at -200", [torch.full_like(rows, -200) for rows in inputs]


def softcap_edges(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    edges = torch.tensor([0.0, 1e-3, -1e-3, 29.0, -29.0, 300.0, -300.0, 5000.0, -5000.0])
    logits = inputs[0]
    picked = edges.to(logits.device, logits.dtype)
    yield "0 to 5000, both signs", [picked[torch.arange(logits.numel(), device=logits.device) % 9].view(logits.shape)]


def router_rows(inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator) -> Iterator[Case]:
    """A zero row ties every score at 1/2, so that the correction bias alone decides."""
    fresh = _normal(inputs[0], generator)
    yield "zero rows: all scores tie", [torch.zeros_like(fresh)]
    yield "scale 100: saturated scores", [fresh * 100]
    yield "scale 1e-4: scores nearly tie", [fresh * 1e-4]
    yield "mean 10", [fresh + 10]


def lopsided_ids(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    rows, ids = inputs
    same = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
    yield "every token to the first experts", [rows, same]
    yield "every token to the last experts", [rows, attrs["num_experts"] - 1 - same]
    spread = (torch.arange(ids.numel(), device=ids.device) % attrs["num_experts"]).view(ids.shape)
    yield "experts in turn", [rows, spread]


def lopsided_offsets(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    rows, offsets = inputs
    total, experts = rows.shape[0], offsets.shape[0]
    numbers = torch.arange(experts, device=offsets.device)
    yield "all rows to the first expert", [rows, torch.full_like(offsets, total)]
    yield "all rows to the last expert", [rows, ((numbers == experts - 1) * total).to(offsets.dtype)]
    even = ((numbers + 1) * total // experts).to(offsets.dtype)
    yield "rows spread evenly", [rows, even]
    yield "no row to the first half", [rows, torch.where(numbers < experts // 2, 0, even)]
    yield "scale 1e-4", [_normal(rows, generator) * 1e-4, offsets]


def scaled_expert_rows(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    rows, order, expert_weights = inputs
    yield "scale 1e-4", [_normal(rows, generator) * 1e-4, order, expert_weights]
    yield (
        "one expert weighs all",
        [
            rows,
            order,
            (torch.arange(expert_weights.shape[1], device=rows.device) == 0)
            .to(expert_weights.dtype)
            .expand_as(expert_weights)
            .contiguous(),
        ],
    )
    back = torch.arange(order.shape[0], device=order.device).flip(0)
    yield "reversed order", [rows, back, expert_weights]


def cache_slots(inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator) -> Iterator[Case]:
    key, value, slots, cache = inputs
    yield "every slot -1, NaN keys", [torch.full_like(key, torch.nan), value, torch.full_like(slots, -1), cache]
    yield "slots reversed", [key, value, slots.flip(0).contiguous(), cache]
    yield (
        "last row padded",
        [key, value, torch.where(torch.arange(len(slots), device=slots.device) == len(slots) - 1, -1, slots), cache],
    )


def _slot(block_table: Tensor, sequence: int, position: int, page: int) -> tuple[int, int]:
    return int(block_table[sequence, position // page]), position % page


def _loud(inputs: Sequence[Tensor], place: tuple[int, int], sequence: int, head_dim: int) -> list[Tensor]:
    """The recorded inputs with one cache slot whose key is 30 times a query of the sequence, and whose value is 100."""
    query, cache = inputs[0], inputs[5].clone()
    first = sequence * (query.shape[0] // inputs[1].shape[0])
    per_kv = query[first].view(cache.shape[1], -1, head_dim)[:, 0]
    page, offset = place
    cache[page, :, offset, :head_dim] = per_kv * LOUD
    cache[page, :, offset, head_dim:] = 100
    return _swapped(inputs, 5, cache)


def decode_keys(inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator) -> Iterator[Case]:
    """Loud keys on both sides of the window's edge and past the sequence's end; NaN in every slot nobody may read.

    The edge is that of the sequence's first new token, whose query the loud key follows.
    """
    _, seq_lens, block_table, _, _, cache = inputs
    page, window, dim = cache.shape[2], attrs["window"], attrs["head_dim"]
    length = int(seq_lens[0])
    first = length - attrs["query_len"]
    places = {"loud key at the start": 0, "loud key past the end": length}
    if window:
        places |= {
            "loud key just inside the window": first - window + 1,
            "loud key just outside the window": first - window,
        }
    for name, position in places.items():
        if 0 <= position < block_table.shape[1] * page:
            place = _slot(block_table, 0, position, page)
            if place[0]:
                yield name, _loud(inputs, place, 0, dim)
    unread = torch.ones(cache.shape[0], page, dtype=torch.bool)
    unread[0] = False
    for sequence, count in enumerate(seq_lens.tolist()):
        for position in range(count):
            unread[_slot(block_table, sequence, position, page)] = False
    poisoned = cache.masked_fill(unread[:, None, :, None].to(cache.device), torch.nan)
    yield "NaN in unused slots", _swapped(inputs, 5, poisoned)


def prefill_keys(
    inputs: Sequence[Tensor], weights: Weights, attrs: Attrs, generator: torch.Generator
) -> Iterator[Case]:
    """A loud first key in each sequence: queries up to `window - 1` see it, those from `window` on do not."""
    query, key, value, cu_seqlens, *rest = inputs
    key, value = key.clone(), value.clone()
    starts = cu_seqlens[:-1][cu_seqlens.diff() > 0].long()
    heads = query[starts].view(len(starts), key.shape[1], -1, attrs["head_dim"])[:, :, 0]
    key[starts], value[starts] = heads * LOUD, torch.full_like(value[starts], 100)
    yield "loud first key", [query, key, value, cu_seqlens, *rest]
    end = int(cu_seqlens[-1])
    if end < query.shape[0]:
        padded = [rows.clone() for rows in inputs[:3]]
        for rows in padded:
            rows[end:] = torch.nan
        yield "NaN in padding rows", [*padded, cu_seqlens, *rest]
