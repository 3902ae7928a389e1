"""Shapes of the whole model, of a rank and of its first layers; and what their steps must move and compute."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers.models.beam import BeamConfig

import baselines
from baselines.beam import build
from baselines.beam.config import FULL, BeamShape, rank_shape, whole_shape
from baselines.beam.oracle import transformers_config
from baselines.beam.weights import beam_weights
from harness.errors import UsageError
from harness.executor import bind_reference
from harness.workload import Workload, load_workloads

META = torch.device("meta")


def test_defaults_are_the_published_model() -> None:
    shape = BeamShape()
    assert BeamShape.from_transformers(BeamConfig()) == shape
    assert [layer for layer in range(52) if not shape.sliding(layer)] == [5, 11, 17, 23, 29, 35, 41, 47, 51]
    assert [layer for layer in range(52) if not shape.sparse(layer)] == [0, 1, 2]
    total = sum(torch.Size(weight.shape).numel() for weight in beam_weights(shape).values())
    assert round(total / 1e9, 2) == 501.27


def test_transformers_round_trip() -> None:
    shape = BeamShape().truncated(12).for_rank(8)
    assert BeamShape.from_transformers(transformers_config(shape)) == shape


def test_a_ranks_shape() -> None:
    shape = BeamShape().for_rank(8)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.vocab_size) == (6, 1, 18_992)
    assert (shape.moe_intermediate_size, shape.intermediate_size, shape.num_experts) == (320, 2560, 256)
    with pytest.raises(UsageError, match="num_key_value_heads 8 does not divide among 16"):
        BeamShape().for_rank(16)


def test_the_first_layers_keep_their_kinds() -> None:
    assert BeamShape().truncated(12).layer_types[11] == FULL
    assert BeamShape().truncated(8).layer_types[7] != FULL
    workloads = load_workloads()
    assert not rank_shape(workloads["beam-tp8-rank-12"]).sliding(11)
    toy = whole_shape(workloads["beam-tiny"])
    assert [toy.sliding(layer) for layer in range(8)] == [True] * 5 + [False, True, False]
    with pytest.raises(UsageError, match="this model has 52"):
        BeamShape().truncated(53)


def test_config_json_gives_theta_and_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    raw = BeamConfig(rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 5e6}}).to_dict()
    path.write_text(json.dumps(raw))
    assert BeamShape.from_json(path).rope_theta == 5e6
    for change, message in (
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn'"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping is null"),
        ({"layer_types": ["linear_attention"] * 52}, "'linear_attention'"),
    ):
        path.write_text(json.dumps({**raw, **change}))
        with pytest.raises(UsageError, match=message):
            BeamShape.from_json(path)
    with pytest.raises(UsageError, match="cannot read"):
        BeamShape.from_json(tmp_path / "none.json")


def test_an_unknown_override_is_named() -> None:
    workload = load_workloads()["beam-tiny"].model_copy(update={"config": {"hiden_size": 3}})
    with pytest.raises(UsageError, match=r"config\.hiden_size"):
        whole_shape(workload)


def costs(workload: Workload, phase_name: str) -> tuple[Counter[str], Counter[str]]:
    """(bytes, FLOPs) by region of one step, on meta tensors."""
    model, phase = build(workload), workload.phase(phase_name)
    weights, env = model.weights(META, 0, workload.precision), model.inputs(phase, META, 0, workload.precision)
    moved: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for call in model.program(phase).calls:
        inputs = [env[name] for name in call.inputs]
        outputs = bind_reference(call, weights, workload.precision)(*inputs)
        env.update(zip(call.outputs, outputs, strict=True))
        own = {role: weights[name] for role, name in zip(call.region.weights, call.weights, strict=True)}
        cost = call.region.cost(inputs, outputs, own, call.attrs)
        moved[call.region.name] += cost.bytes
        flops[call.region.name] += cost.flops
    return moved, flops


def test_decode_bytes_of_one_rank() -> None:
    moved, _ = costs(load_workloads()["beam-tp8-rank"], "decode-b1")
    assert sum(moved.values()) / 1e9 == pytest.approx(5.93, rel=0.01)
    experts = moved["expert_gate_up"] + moved["expert_down"]
    projections = sum(moved[name] for name in ("q_proj", "k_proj", "v_proj", "output_gate_proj"))
    for found, want_gb in (
        (experts, 3.854),
        (projections, 0.954),
        (moved["o_proj"], 0.409),
        (moved["router"], 0.257),
        (moved["lm_head"], 0.194),
        (moved["attention"], 0.021),
    ):
        assert found / 1e9 == pytest.approx(want_gb, rel=0.02)


def test_prefill_flops_of_the_whole_model() -> None:
    whole = load_workloads()["beam-tp8-rank"].model_copy(update={"rank_of": 1})
    _, flops = costs(whole, "prefill-8x2048")
    total = sum(flops.values())
    assert total / 1e12 == pytest.approx(728, rel=0.005)
    assert (flops["expert_gate_up"] + flops["expert_down"]) / total == pytest.approx(0.69, abs=0.01)


@pytest.mark.parametrize(("phase", "hit"), [("decode-b8", 57), ("verify-b1x8", 57), ("decode-b32", 163)])
def test_expected_experts_read(phase: str, hit: int) -> None:
    moved, _ = costs(load_workloads()["beam-tp8-rank"], phase)
    assert (moved["expert_gate_up"] + moved["expert_down"]) / 49 / (3 * 320 * 5120 * 2) == pytest.approx(hit, rel=0.02)


def test_meta_and_real_costs_agree_but_for_the_experts_hit() -> None:
    workload = load_workloads()["beam-tiny"]
    model, phase = build(workload), workload.phase("decode-b1")
    cpu = torch.device("cpu")
    weights, env = model.weights(cpu, 0, workload.precision), model.inputs(phase, cpu, 0, workload.precision)
    expected, _ = costs(workload, "decode-b1")
    found: Counter[str] = Counter()
    for call in model.program(phase).calls:
        inputs = [env[name] for name in call.inputs]
        outputs = bind_reference(call, weights, workload.precision)(*inputs)
        env.update(zip(call.outputs, outputs, strict=True))
        own = {role: weights[name] for role, name in zip(call.region.weights, call.weights, strict=True)}
        found[call.region.name] += call.region.cost(inputs, outputs, own, call.attrs).bytes
    assert found == expected


def test_published_figures_are_the_ratios_reported() -> None:
    path = Path(baselines.__file__).with_name("published.toml")
    phases = {phase["name"]: phase for phase in tomllib.loads(path.read_text())["phases"]}
    assert round(phases["decode"]["before_ms"] / phases["decode"]["after_ms"], 2) == 2.71
    assert round(phases["prefill"]["before_ms"] / phases["prefill"]["after_ms"], 2) == 1.86


def test_building_a_model_does_not_import_transformers() -> None:
    code = (
        "import sys; from harness.workload import load_workloads; from baselines.beam import build;"
        "build(load_workloads()['beam-tiny']); sys.exit('transformers' in sys.modules)"
    )
    root = Path(baselines.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0
