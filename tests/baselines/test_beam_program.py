"""Whole steps against transformers: prefill, decode past the window, verify, ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.beam import build
from baselines.beam.cache import filled_cache, page_batch
from harness.errors import UsageError
from harness.executor import Executor, bind_reference
from harness.program import FP64
from harness.workload import Phase, load_workloads

CPU = torch.device("cpu")


def prefill(batch: int, context: int, **more: Any) -> Phase:
    return Phase(name="prefill", kind="prefill", batch=batch, context=context, logits="all", **more)


def scaled_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def stepwise(toy: Any, token_ids: Tensor, query_len: int = 1) -> Tensor:
    """Logits [n, V] of one sequence decoded `query_len` tokens at a time from an empty paged cache."""
    total, page = len(token_ids), toy.model.workload.page_size
    kind = "decode" if query_len == 1 else "verify"
    step = toy.step(Phase(name="d", kind=kind, batch=1, context=total, query_len=query_len))
    whole = page_batch([total], [total], total, page, torch.Generator().manual_seed(1))
    caches = {
        f"{layer}.kv_cache": filled_cache(toy.model.shape, whole, page, CPU, None, toy.precision.storage)
        for layer in range(toy.model.shape.num_hidden_layers)
    }
    logits = []
    for start in range(0, total, query_len):
        stop = start + query_len
        values = {
            "token_ids": token_ids[start:stop],
            "seq_lens": torch.tensor([stop], dtype=torch.int32),
            "cu_seqlens": torch.tensor([0, query_len], dtype=torch.int32),
            "block_table": whole.block_table,
            "slot_mapping": whole.slot_mapping[start:stop],
        }
        logits.append(step({**values, **caches})["logits"])
    return torch.cat(logits)


def test_fp32_prefill_matches_transformers(toy: Any) -> None:
    phase = prefill(2, 128)
    values = toy.inputs(phase)
    ours = toy.step(phase)(values)["logits"]
    theirs = toy.theirs(input_ids=values["token_ids"].view(2, 128)).logits.flatten(0, 1)
    assert scaled_error(ours, theirs) < 1e-5


def test_bf16_prefill_is_bit_equal_to_transformers(toy_bf16: Any) -> None:
    phase = prefill(2, 128)
    values = toy_bf16.inputs(phase)
    ours = toy_bf16.step(phase)(values)["logits"]
    theirs = toy_bf16.theirs(input_ids=values["token_ids"].view(2, 128)).logits.flatten(0, 1)
    assert torch.equal(ours, theirs)


def test_decode_past_the_window_matches_transformers(toy: Any) -> None:
    tokens = torch.randint(2048, (600,), generator=torch.Generator().manual_seed(3))
    theirs = toy.theirs(input_ids=tokens[None]).logits[0]
    assert scaled_error(stepwise(toy, tokens), theirs) < 1e-5


def test_verify_of_eight_tokens_is_eight_decodes(toy: Any) -> None:
    tokens = torch.randint(2048, (96,), generator=torch.Generator().manual_seed(4))
    assert scaled_error(stepwise(toy, tokens, query_len=8), stepwise(toy, tokens)) < 1e-5


def test_last_logits_are_the_last_of_all(toy: Any) -> None:
    phase = prefill(2, 48)
    values = toy.inputs(phase)
    every = toy.step(phase)(values)["logits"].view(2, 48, -1)
    last = phase.model_copy(update={"logits": "last"})
    assert scaled_error(toy.step(last)(toy.inputs(last))["logits"], every[:, -1]) < 1e-5


def test_ragged_prefill_is_each_sequence_alone(toy: Any) -> None:
    phase = prefill(3, 96, ragged=True)
    values = toy.inputs(phase)
    lengths = values["seq_lens"].tolist()
    assert len(set(lengths)) == 3 and min(lengths) >= 48 and values["slot_mapping"][-1] == -1
    ours = toy.step(phase)(values)["logits"]
    assert ours.isfinite().all()
    for start, length in zip(values["cu_seqlens"].tolist(), lengths, strict=False):
        theirs = toy.theirs(input_ids=values["token_ids"][None, start : start + length]).logits[0]
        assert scaled_error(ours[start : start + length], theirs) < 1e-5


def test_ragged_decode_is_each_sequence_alone(toy: Any) -> None:
    phase = Phase(name="d", kind="decode", batch=4, context=150, ragged=True)
    values = toy.inputs(phase)
    lengths = values["seq_lens"].tolist()
    assert lengths[-1] == 0 and values["slot_mapping"][-1] == -1 and len(set(lengths)) == 4
    before = {name: value.clone() for name, value in values.items()}
    ours = toy.step(phase)(values)["logits"]
    assert ours.isfinite().all()
    single = toy.step(Phase(name="s", kind="decode", batch=1, context=150))
    for row, length in enumerate(lengths[:-1]):
        alone = {**before, "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}
        alone |= {
            name: before[name][row : row + 1] for name in ("token_ids", "seq_lens", "block_table", "slot_mapping")
        }
        alone = {name: value.clone() for name, value in alone.items()}
        assert length and scaled_error(single(alone)["logits"][0], ours[row]) < 1e-5
    written = before["slot_mapping"][:-1]
    for layer in range(toy.model.shape.num_hidden_layers):
        changed = (values[f"{layer}.kv_cache"] != before[f"{layer}.kv_cache"]).any(dim=1).any(dim=-1).flatten()
        assert sorted(changed.nonzero().flatten().tolist()) == sorted(written.tolist())


def test_fp64_program_agrees_with_fp32(toy: Any) -> None:
    phase = prefill(1, 80)
    weights = toy.model.weights(CPU, 11, FP64)
    step = Executor(toy.model.program(phase), lambda call: bind_reference(call, weights, FP64))
    exact = step(toy.model.inputs(phase, CPU, 11, FP64))["logits"]
    assert exact.dtype == torch.float64
    assert scaled_error(toy.step(phase)(toy.inputs(phase))["logits"], exact) < 1e-5


def test_inputs_are_the_same_values_in_every_precision(toy_bf16: Any) -> None:
    phase = Phase(name="d", kind="decode", batch=1, context=40)
    ours, exact = toy_bf16.inputs(phase), toy_bf16.model.inputs(phase, CPU, 11, FP64)
    for name, value in ours.items():
        assert torch.equal(value.double(), exact[name].double()), name
    assert (ours["0.kv_cache"][0] == 0).all() and ours["0.kv_cache"].dtype == torch.bfloat16
    assert not torch.equal(toy_bf16.model.tokens(phase, 1), toy_bf16.model.tokens(phase, 2))


def test_several_ranks_are_refused_with_the_way_out() -> None:
    workload = load_workloads()["beam-tp2-12"]
    with pytest.raises(UsageError, match="not built yet; beam-tp8-rank"):
        build(workload).program(workload.phases[0])


def test_padding_alone_cannot_be_ragged(toy: Any) -> None:
    with pytest.raises(UsageError, match="two sequences at least"):
        toy.inputs(Phase(name="d", kind="decode", batch=1, context=40, ragged=True))
