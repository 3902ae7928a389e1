"""What a region must move and compute at the least. Bytes are of tensors as stored; a FLOP is one add or multiply.

Works on meta tensors: where a count depends on values (lengths, experts hit) it is then the largest or the expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from harness.program import Attrs, Cost, CostModel, Outputs, Weights


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def elementwise(flops_per_element: int) -> CostModel:
    """Every input and weight read once, every output written once; FLOPs per output element."""

    def cost(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
        elements = sum(output.numel() for output in outputs)
        return Cost(tensor_bytes((*inputs, *weights.values(), *outputs)), flops_per_element * elements)

    return cost


def gather(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    """Rows picked by index: each picked row is read once and written once, and the indices are read."""
    return Cost(tensor_bytes(inputs[-1:]) + 2 * tensor_bytes(outputs), 0)


def linear(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    (rows,), (made,) = inputs, outputs
    moved = tensor_bytes((rows, made, *weights.values()))
    return Cost(moved, 2 * rows.shape[0] * weights["weight"].numel())


def router(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    (rows,) = inputs
    moved = tensor_bytes((rows, *outputs, *weights.values()))
    return Cost(moved, 2 * rows.shape[0] * weights["weight"].numel())


def experts_hit(offsets: Tensor, rows: int, top_k: int) -> float:
    """Experts with a row: counted, or on meta tensors expected of independent routing, E (1 - (1 - k/E)^tokens)."""
    experts = offsets.shape[0]
    if offsets.is_meta:
        return float(experts * (1 - (1 - top_k / experts) ** (rows / top_k)))
    return float((offsets.diff(prepend=offsets.new_zeros(1)) > 0).sum().item())


def expert_linear(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    """Only the experts that got a row are read."""
    rows, offsets = inputs
    weight = weights["weight"]
    hit = experts_hit(offsets, rows.shape[0], attrs["top_k"])
    read = round(hit * tensor_bytes((weight,)) / weight.shape[0])
    return Cost(read + tensor_bytes((rows, offsets, *outputs)), 2 * rows.shape[0] * weight[0].numel())


def dispatch(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    return Cost(tensor_bytes((*inputs, *outputs)), 0)


def cache_update(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    """New keys and values read once and written once: the cache's other slots are not touched."""
    key, value, slots, _ = inputs
    return Cost(2 * tensor_bytes((key, value)) + tensor_bytes((slots,)), 0)


def _pairs(length: int, queries: int, window: int) -> int:
    """Visible (query, key) pairs of the last `queries` positions of a sequence; window 0 sees everything before."""
    reach = window or length
    return sum(min(position + 1, reach) for position in range(length - queries, length))


def decode_attention(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    """Keys and values of the visible slots, read once a sequence and not once a query or head."""
    query, seq_lens, block_table, _, _, cache = inputs
    window, queries, page = attrs["window"], attrs["query_len"], cache.shape[2]
    full = block_table.shape[1] * page
    lengths = [full] * seq_lens.shape[0] if seq_lens.is_meta else [int(n) for n in seq_lens.tolist() if n]
    seen = sum(min(length, window + queries - 1) if window else length for length in lengths)
    slot_bytes = cache.shape[1] * cache.shape[3] * cache.element_size()
    pairs = sum(_pairs(length, queries, window) for length in lengths)
    moved = seen * slot_bytes + tensor_bytes((query, seq_lens, block_table, *outputs))
    return Cost(moved, 4 * pairs * query.shape[1] * query.shape[2])


def prefill_attention(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    query, key, value, cu_seqlens, pad_index, _ = inputs
    batch, longest = pad_index.shape
    lengths = [longest] * batch if cu_seqlens.is_meta else [int(n) for n in cu_seqlens.diff().tolist()]
    pairs = sum(_pairs(length, length, attrs["window"]) for length in lengths)
    moved = tensor_bytes((query, key, value, cu_seqlens, *outputs))
    return Cost(moved, 4 * pairs * query.shape[1] * query.shape[2])
