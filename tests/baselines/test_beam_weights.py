"""Random weights, and checkpoints as transformers saves them: whole, one rank's share, and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baselines.beam import build
from baselines.beam.checkpoint import CheckpointWeights
from baselines.beam.config import whole_shape
from baselines.beam.model import BeamModel
from baselines.beam.weights import beam_weights
from harness.errors import WeightsError
from harness.executor import Executor, bind_reference
from harness.program import BF16, FP32, FP64, TensorSpec
from harness.workload import Phase, Workload, load_workloads

CPU = torch.device("cpu")
GATE_UP = "model.layers.3.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def saved(toy_bf16: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beam")
    toy_bf16.theirs.save_pretrained(path, max_shard_size="3MB")
    assert len(list(path.glob("*.safetensors"))) > 4
    return path


def tiny(path: Path | None, **changes: Any) -> Workload:
    return load_workloads()["beam-tiny-bf16"].model_copy(update={"checkpoint": path, **changes})


def test_round_trip_is_exact(toy_bf16: Any, saved: Path) -> None:
    model = build(tiny(saved, config={}))
    assert model.shape == toy_bf16.model.shape
    weights = model.weights(CPU, 0, BF16)
    for name in weights:
        assert torch.equal(weights[name], toy_bf16.weights[name]), name
        assert weights[name].dtype == toy_bf16.weights[name].dtype
        assert weights.spec(name) == TensorSpec.of(weights[name])
    phase = Phase(name="p", kind="prefill", batch=1, context=20)
    values = toy_bf16.inputs(phase)
    step = Executor(model.program(phase), lambda call: bind_reference(call, weights, BF16))
    assert torch.equal(step(values)["logits"], toy_bf16.step(phase)(values)["logits"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_share_is_its_slices(toy_bf16: Any, saved: Path, rank: int) -> None:
    weights = BeamModel(tiny(saved, config={}, rank_of=2), rank).weights(CPU, 0, BF16)
    plan, whole = beam_weights(toy_bf16.model.shape), toy_bf16.weights
    for name in weights:
        split, tensor = plan[name].split, whole[name]
        if split == "packed_rows":
            want = torch.cat([half.chunk(2, dim=1)[rank] for half in tensor.chunk(2, dim=1)], dim=1)
        elif split == "none":
            want = tensor
        else:
            want = tensor.chunk(2, dim=-1 if split == "columns" else max(tensor.ndim - 2, 0))[rank]
        assert torch.equal(weights[name], want), name


def test_packed_experts_and_a_single_file_load_too(toy_bf16: Any, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    save_file({name: toy_bf16.weights[name].contiguous() for name in toy_bf16.weights}, tmp_path / "model.safetensors")
    whole = BeamModel(tiny(tmp_path, config={})).weights(CPU, 0, BF16)
    halves = [BeamModel(tiny(tmp_path, config={}, rank_of=2), rank).weights(CPU, 0, BF16) for rank in (0, 1)]
    assert torch.equal(whole[GATE_UP], toy_bf16.weights[GATE_UP])
    gates, ups = zip(*(half[GATE_UP].chunk(2, dim=1) for half in halves), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), toy_bf16.weights[GATE_UP])


def broken(saved: Path, path: Path, change: Any) -> CheckpointWeights:
    """The saved checkpoint with `change(tensors)` applied, as one file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in saved.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    workload = tiny(saved, config={})
    return CheckpointWeights(path, whole_shape(workload), (0, 1), CPU, torch.bfloat16, BF16)


def test_a_missing_tensor_is_named(saved: Path, tmp_path: Path) -> None:
    gone = "model.layers.3.mlp.experts.17.up_proj.weight"
    with pytest.raises(WeightsError, match=gone):
        broken(saved, tmp_path, lambda tensors: tensors.pop(gone))


def test_a_misshapen_tensor_is_named_with_both_shapes(saved: Path, tmp_path: Path) -> None:
    name = "model.layers.4.self_attn.o_proj.weight"
    weights = broken(saved, tmp_path, lambda tensors: tensors.update({name: tensors[name][:, :-1]}))
    with pytest.raises(WeightsError, match=rf"{name}.*wanted shape \(128, 384\), found \(128, 383\)"):
        weights[name]


def test_a_dtype_that_would_round_is_refused(saved: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    weights = broken(saved, tmp_path, lambda tensors: tensors.update({name: tensors[name].float()}))
    with pytest.raises(WeightsError, match=rf"{name}.*wanted BF16, found F32"):
        weights[name]


def test_an_empty_directory_says_what_it_lacks(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json nor model\.safetensors"):
        build(tiny(tmp_path, config={})).weights(CPU, 0, BF16)


def test_an_index_may_name_a_file_that_is_gone(saved: Path, tmp_path: Path) -> None:
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = CheckpointWeights(tmp_path, whole_shape(tiny(saved, config={})), (0, 1), CPU, torch.bfloat16, BF16)
    with pytest.raises(WeightsError, match=r"cannot read lm_head\.weight"):
        weights["lm_head.weight"]


def test_random_weights_repeat_and_agree_across_precisions(toy_bf16: Any) -> None:
    model = toy_bf16.model
    again, wide, exact, other = (
        model.weights(CPU, seed, p) for seed, p in ((11, BF16), (11, FP32), (11, FP64), (12, BF16))
    )
    for name in reversed(list(again)):
        tensor = again[name]
        assert torch.equal(tensor, toy_bf16.weights[name]) and torch.equal(wide[name], tensor.float())
        assert torch.equal(exact[name].double(), tensor.double()) and not torch.equal(other[name], tensor)
        assert tensor.float().std() > 0 and tensor.unique().numel() > 2
        again.forget(name)
        assert torch.equal(again[name], toy_bf16.weights[name])
    assert (
        wide["model.layers.3.mlp.gate.weight"].dtype == torch.float32 == again["model.layers.3.mlp.gate.weight"].dtype
    )
    with pytest.raises(KeyError):
        again["model.layers.99.mlp.gate.weight"]
