"""The toy Beam of the presets, its weights and transformers' model of them, for every test of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.beam import build
from baselines.beam.model import BeamModel
from baselines.beam.oracle import transformers_model
from harness.executor import Executor, bind_reference
from harness.program import Call, Precision
from harness.workload import Phase, WeightSource, load_workloads

CPU = torch.device("cpu")
SEED = 11


@dataclass
class Toy:
    """A preset built on the CPU."""

    model: BeamModel
    weights: WeightSource
    precision: Precision
    theirs: Any

    def inputs(self, phase: Phase, seed: int = SEED) -> dict[str, Tensor]:
        return self.model.inputs(phase, CPU, seed, self.precision)

    def step(self, phase: Phase) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        program = self.model.program(phase)
        return Executor(program, lambda call: bind_reference(call, self.weights, self.precision))

    def call(self, phase: Phase, region: str, layer: int) -> Call:
        return next(c for c in self.model.program(phase).calls if c.region.name == region and c.layer == layer)

    def run(self, phase: Phase, region: str, layer: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One region's reference with the toy's weights, alone."""
        return bind_reference(self.call(phase, region, layer), self.weights, self.precision)(*inputs)


def make_toy(preset: str, **changes: Any) -> Toy:
    workload = load_workloads()[preset].model_copy(update=changes)
    model = build(workload)
    weights = model.weights(CPU, SEED, workload.precision)
    theirs = transformers_model(model.shape, weights, CPU, workload.precision.storage)
    return Toy(model, weights, workload.precision, theirs)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def toy() -> Toy:
    return make_toy("beam-tiny")


@pytest.fixture(scope="session")
def toy_bf16() -> Toy:
    return make_toy("beam-tiny-bf16")


@pytest.fixture(scope="session")
def narrow() -> Toy:
    """The FP32 toy with a window of 4, for its edge."""
    config = {**load_workloads()["beam-tiny"].config, "sliding_window": 4}
    return make_toy("beam-tiny", config=config, page_size=4)
