"""BF16 regions bit-equal to transformers' modules and functions, and the edges each is known to break at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.beam import modeling_beam as hf

from baselines.beam.experts import _gathered, _looped
from harness.program import BF16, FP32, FP64
from harness.workload import Phase

PREFILL = Phase(name="p", kind="prefill", batch=1, context=24)
SLIDING_SPARSE, FULL_SPARSE = 3, 5


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    "region", ["input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm"]
)
def test_norms(toy_bf16: Any, region: str, scale: float) -> None:
    rows = bf16(24, 128, scale=scale)
    layer = toy_bf16.theirs.model.layers[3]
    module = getattr(layer, {"input_norm": "input_layernorm"}.get(region, region.replace("_norm", "_layernorm")))
    assert torch.equal(toy_bf16.run(PREFILL, region, 3, rows)[0], module(rows))


def test_qk_norm_and_rope(toy_bf16: Any) -> None:
    attention = toy_bf16.theirs.model.layers[3].self_attn
    query, key = bf16(24, 12 * 32), bf16(24, 2 * 32, seed=1)
    normed = toy_bf16.run(PREFILL, "qk_norm", 3, query, key)
    want = attention.q_norm(query.view(24, 12, 32)), attention.k_norm(key.view(24, 2, 32))
    assert torch.equal(normed[0], want[0]) and torch.equal(normed[1], want[1])
    positions = torch.arange(24) * 41_011
    tables = toy_bf16.run(PREFILL, "rope_table", 0, positions)
    theirs = toy_bf16.theirs.model.rotary_emb(query, positions[None], "sliding_attention")
    assert torch.equal(tables[0], theirs[0][0]) and torch.equal(tables[1], theirs[1][0])
    turned = toy_bf16.run(PREFILL, "rope", 3, *normed, *tables)
    expected = hf.apply_rotary_pos_emb(*(heads.transpose(0, 1)[None] for heads in want), *theirs)
    for ours, other in zip(turned, expected, strict=True):
        assert torch.equal(ours, other[0].transpose(0, 1))


def test_ssmax_counts_the_position_from_one(toy_bf16: Any) -> None:
    positions = torch.tensor([0, 1, 64, 2047, 1_000_000])
    (scale,) = toy_bf16.run(PREFILL, "ssmax_scale", 0, positions)
    theirs = hf.compute_attention_scaling(positions[None])
    assert torch.equal(scale, theirs[0, 0, :, 0]) and scale[0] > 1
    query = bf16(5, 12, 32)
    want = (query.float() * scale[:, None, None]).bfloat16()
    assert torch.equal(toy_bf16.run(PREFILL, "ssmax", FULL_SPARSE, query, scale)[0], want)


def test_output_gate(toy_bf16: Any) -> None:
    attention, gate = bf16(24, 12 * 32), bf16(24, 12 * 32, seed=1, scale=3)
    bias = toy_bf16.theirs.model.layers[3].self_attn.gate_bias
    heads = attention.view(1, 24, 12, 32)
    want = heads * torch.sigmoid(gate.view_as(heads) + bias[None, None, :, None])
    assert torch.equal(toy_bf16.run(PREFILL, "output_gate", 3, attention, gate)[0], want.view(24, -1))


@pytest.mark.parametrize(("region", "index"), [("attention_residual_add", 8), ("feedforward_residual_add", 9)])
def test_residual_adds(toy_bf16: Any, region: str, index: int) -> None:
    branch, stream = bf16(24, 128), bf16(24, 128, seed=1)
    want = hf.depth_scaled_residual_add(branch, stream, index)
    assert torch.equal(toy_bf16.run(PREFILL, region, 3, branch, stream)[0], want)


def test_dense_feed_forward(toy_bf16: Any) -> None:
    rows = bf16(24, 128)
    gate, up = (toy_bf16.run(PREFILL, name, 0, rows)[0] for name in ("mlp_gate_proj", "mlp_up_proj"))
    (act,) = toy_bf16.run(PREFILL, "mlp_swiglu", 0, gate, up)
    made = toy_bf16.run(PREFILL, "mlp_down_proj", 0, act)[0]
    assert torch.equal(made, toy_bf16.theirs.model.layers[0].mlp(rows))


@pytest.mark.parametrize("tokens", [1, 24])
def test_sparse_feed_forward(toy_bf16: Any, tokens: int) -> None:
    rows = bf16(tokens, 128)
    theirs = toy_bf16.theirs.model.layers[3].mlp
    ids, weights = toy_bf16.run(PREFILL, "router", 3, rows)
    _, want_weights, want_ids = theirs.gate(rows)
    assert torch.equal(ids, want_ids) and torch.equal(weights, want_weights) and weights.dtype == torch.float32
    dispatched, order, offsets = toy_bf16.run(PREFILL, "expert_dispatch", 3, rows, ids)
    assert offsets.dtype == torch.int32 and offsets[-1] == tokens * 8
    (gate_up,) = toy_bf16.run(PREFILL, "expert_gate_up", 3, dispatched, offsets)
    (act,) = toy_bf16.run(PREFILL, "expert_swiglu", 3, gate_up)
    (expert_rows,) = toy_bf16.run(PREFILL, "expert_down", 3, act, offsets)
    (summed,) = toy_bf16.run(PREFILL, "expert_combine", 3, expert_rows, order, weights)
    assert torch.equal(summed, theirs.experts(rows, want_ids, want_weights))
    assert torch.equal(toy_bf16.run(PREFILL, "routed_scale", 3, summed)[0], theirs(rows[None])[0])


def test_gathered_experts_are_the_grouped_product(toy: Any) -> None:
    weight = toy.weights["model.layers.3.mlp.experts.gate_up_proj"]
    offsets = torch.zeros(256, dtype=torch.int32)
    offsets[3:], offsets[200:], offsets[255:] = 5, 17, 24
    rows = torch.randn(24, 128, generator=torch.Generator().manual_seed(0))
    (grouped,) = toy.run(PREFILL, "expert_gate_up", 3, rows, offsets)
    torch.testing.assert_close(_gathered(rows, weight, offsets), grouped)
    torch.testing.assert_close(_looped(rows, weight, offsets), grouped)


def test_softcap_at_its_edges(toy_bf16: Any) -> None:
    logits = torch.tensor([[0.0, 1e-3, -1e-3, 29.0, -29.0, 300.0, -300.0, 5000.0, -5000.0]]).bfloat16()
    head = toy_bf16.model.shape.num_hidden_layers
    (capped,) = toy_bf16.run(PREFILL, "logit_softcap", head, logits)
    assert capped.dtype == torch.float32 and capped.isfinite().all()
    assert torch.equal(capped, torch.tanh(logits.float() / 30) * 30)
    assert capped[0, 0] == 0 and capped[0, -2] == 30 and capped[0, -1] == -30 and 22 < capped[0, 3] < 23


def test_padding_writes_nothing_and_slots_are_exact(toy_bf16: Any) -> None:
    key, value = bf16(4, 2, 32), bf16(4, 64, seed=1)
    key[1], value[1], key[3], value[3] = (float("nan"),) * 4
    cache = bf16(5, 2, 16, 64, seed=2)
    before = cache.clone()
    slots = torch.tensor([3 * 16 + 5, -1, 1 * 16 + 15, -1])
    assert toy_bf16.run(PREFILL, "kv_cache_update", 3, key, value, slots, cache) == ()
    for row, (page, offset) in ((0, (3, 5)), (2, (1, 15))):
        assert torch.equal(cache[page, :, offset], torch.cat((key[row], value[row].view(2, 32)), dim=-1))
        before[page, :, offset] = cache[page, :, offset]
    assert torch.equal(cache, before)


def test_cases_run_and_keep_shapes(toy_bf16: Any) -> None:
    """Every adversarial case of every region runs in each precision and is finite wherever its inputs are."""
    for phase in (PREFILL, Phase(name="d", kind="decode", batch=3, context=150, ragged=True)):
        env, seen, count = toy_bf16.inputs(phase), set(), 0
        for call in toy_bf16.model.program(phase).calls:
            inputs = [env[name] for name in call.inputs]
            env.update(zip(call.outputs, toy_bf16.run(phase, call.region.name, call.layer, *inputs), strict=True))
            if call.region.cases is None or (call.region.name, call.attrs.get("window")) in seen:
                continue
            seen.add((call.region.name, call.attrs.get("window")))
            weights = {
                role: toy_bf16.weights[name] for role, name in zip(call.region.weights, call.weights, strict=True)
            }
            generator = torch.Generator().manual_seed(0)
            for name, case in call.region.cases(inputs, weights, call.attrs, generator):
                count += 1
                assert [(t.shape, t.dtype) for t in case] == [(t.shape, t.dtype) for t in inputs], (call, name)
                for precision in (BF16, FP32, FP64):
                    cast = [t.to(precision.storage) if t.dtype == torch.bfloat16 else t for t in case]
                    cast = [t.to(precision.compute) if t.dtype == torch.float32 else t for t in cast]
                    for made in call.region.reference(precision, weights, call.attrs, *cast):
                        assert made.isfinite().all(), (str(call), name, precision)
        assert count > 30
