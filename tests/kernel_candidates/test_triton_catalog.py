"""The CUDA candidates without a GPU: judged under Triton's interpreter, and compiled for Hopper at one rank's sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.beam import build
from harness import guard
from harness.arms import adapter, site_of
from harness.candidate import Candidate, load
from harness.executor import bind_reference
from harness.program import TensorSpec, region_names, role
from harness.workload import Phase, load_workloads

triton = pytest.importorskip("triton", reason="Triton is not installed here")

ROOT = Path(__file__).parents[2] / "kernel_candidates"
OWN = [entry["file"] for entry in tomllib.loads((ROOT / "catalog.toml").read_text()).get("cuda", [])]
JITTED = [file for file in OWN if "@triton.jit" in (ROOT / file).read_text()]
PHASES = ("decode-b1", "verify-b1x8", "decode-b32", "prefill-8x2048")
SHARED_BYTES = 227 * 1024
"""What one block can have on a Hopper multiprocessor."""
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[int, list[str]]]:
    """File -> (cases judged, refusals), from two processes side by side."""
    env = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    script = Path(__file__).with_name("interpreted.py")
    running = [
        subprocess.Popen([sys.executable, script, *OWN[start::2]], env=env, stdout=subprocess.PIPE, text=True)
        for start in (0, 1)
        if OWN[start::2]
    ]
    found: dict[str, tuple[int, list[str]]] = {}
    for process in running:
        out, _ = process.communicate(timeout=280)
        assert process.returncode == 0
        found |= json.loads(out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("file", OWN)
def test_the_numerics_gate_passes_it(file: str, verdicts: Mapping[str, tuple[int, list[str]]]) -> None:
    cases, wrong = verdicts[file]
    assert cases
    assert wrong == []


class MetaWeights(dict[str, Tensor]):
    """One rank's weights as shapes and dtypes alone."""

    def __init__(self, spec: Callable[[str], TensorSpec]) -> None:
        self.spec = spec

    def __missing__(self, name: str) -> Tensor:
        spec = self.spec(name)
        self[name] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return self[name]


class Rank:
    """One rank of TP8 on torch's meta device: every site's shapes, and no data."""

    def __init__(self) -> None:
        self.workload = load_workloads()["beam-tp8-rank-12"]
        self.model = build(self.workload)
        spec = self.model.weights(torch.device("cpu"), 0, self.workload.precision).spec
        self.weights = MetaWeights(spec)
        self.recorded: dict[str, dict[str, Tensor]] = {}

    def values(self, phase: Phase) -> dict[str, Tensor]:
        if phase.name not in self.recorded:
            precision = self.workload.precision
            env = self.model.inputs(phase, torch.device("meta"), 0, precision)
            for call in self.model.program(phase).calls:
                made = bind_reference(call, self.weights, precision)(*[env[name] for name in call.inputs])
                env.update(zip(call.outputs, made, strict=True))
            self.recorded[phase.name] = env
        return self.recorded[phase.name]

    def run(self, candidate: Candidate, phase: Phase) -> None:
        """Prepares and runs the candidate at one site of each kind; its outputs must have the baseline's shapes."""
        program, _ = self.model.program(phase).substitute(candidate.rewrite.name, candidate.rewrite.replaces)
        values = self.values(phase)
        kinds = {(region_names(s.calls), s.calls[0].attrs.get("window")): s for s in program.substitutions}
        for sub in kinds.values():
            given = {role(name, sub.layer): TensorSpec.of(values[name]) for name in sub.inputs}
            wanted = {role(name, sub.layer): TensorSpec.of(values[name]) for name in sub.outputs}
            site = site_of(
                sub.calls, given, wanted, self.weights,
                phase=phase, tokens=phase.tokens, device="meta", dtype=self.workload.dtype,
            )  # fmt: skip
            bound = adapter(candidate, site, candidate.prepare(site), sub.inputs, sub.layer)
            made = bound(*[values[name] for name in sub.inputs])
            assert [TensorSpec.of(tensor) for tensor in made] == list(wanted.values())


class Compiled:
    """Stands for a jitted kernel: a launch compiles it for Hopper with the launch's own arguments and runs nothing."""

    done: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size <= (2**31 - 1 if axis == 0 else 65535) for axis, size in enumerate(grid)), grid

        def launch(*args: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False)) | named
            assert set(given) == set(self.kernel.arg_names)
            signature, constants, hints = self.specialise(given)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            key = f"{self.kernel.__name__} {signature} {constants} {options}"
            if key not in self.done:
                source = triton.compiler.ASTSource(self.kernel, signature, constants, hints)
                target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
                self.done[key] = triton.compile(source, target=target, options=options)
                assert self.done[key].metadata.shared <= SHARED_BYTES

        return launch

    def specialise(self, given: Mapping[str, Any]) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
        """(types, constants, divisibility) of the arguments, as Triton's own launch would choose them."""
        signature, constants, hints = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            if isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                hints[(index,)] = [["tt.divisibility", 16]]
        return signature, constants, hints


@pytest.fixture(scope="module")
def rank() -> Rank:
    return Rank()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Candidate]]:
    """Loads a candidate whose kernels compile where they would be launched."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")

    def loaded(file: str) -> Candidate:
        candidate = load(ROOT / file)
        for name, value in list(vars(candidate.module).items()):
            if isinstance(value, triton.runtime.jit.JITFunction) and name.endswith("_kernel"):
                setattr(candidate.module, name, Compiled(value))
        return candidate

    with torch.no_grad():
        yield loaded


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("file", JITTED)
def test_it_compiles_for_hopper(file: str, rank: Rank, hopper: Callable[[str], Candidate]) -> None:
    candidate = hopper(file)
    phases = [rank.workload.phase(name) for name in PHASES]
    applicable = [
        p for p in phases if candidate.rewrite.applies(tokens=p.tokens, dtype="bf16", device="cuda", phase=p.kind)
    ]
    assert applicable
    for phase in applicable:
        rank.run(candidate, phase)


def test_the_catalog_is_whole() -> None:
    candidates = {file: load(ROOT / file) for file in OWN}
    assert len(OWN) == len(set(OWN))
    names = [candidate.rewrite.name for candidate in candidates.values()]
    assert len(names) == len(set(names))
    for file, candidate in candidates.items():
        assert "cuda" in candidate.rewrite.devices
        assert candidate.rewrite.kernels
        assert not guard.inspect(ROOT / file)
        assert "Predicts: " in candidate.module.__doc__
