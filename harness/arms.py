"""Arms: the same model, weights and inputs under different programs.

A `Bench` lives in one process. It holds the weights once, loads candidate files, applies them in order to the
baseline's program of each phase, and gives executors. Nothing here measures or judges.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.candidate import Candidate, Site, load
from harness.errors import CandidateError
from harness.executor import Bound, Executor, bind_reference
from harness.program import (
    FP32,
    Call,
    Precision,
    Program,
    Step,
    Substitution,
    TensorSpec,
    region_names,
    role,
)
from harness.workload import Model, Phase, Workload


class CandidateFault(CandidateError):
    """The candidate's own code raised, or broke the contract (a CandidateError); `stage` is import, prepare or run."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        kind = "" if isinstance(cause, CandidateError) else f"{type(cause).__name__}: "
        super().__init__(f"{stage}: {kind}{cause}")
        self.stage = stage
        self.cause = cause


def build_model(workload: Workload) -> Model:
    """The workload's model, built by the package it names."""
    model: Model = importlib.import_module(workload.model).build(workload)
    return model


class Named(dict[str, Any]):
    """What a site holds by name; a name that is not there is answered with those that are."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name} is not among {', '.join(self) or 'none'}")


def site_of(
    calls: Sequence[Call],
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    weights: Mapping[str, Tensor],
    *,
    phase: Phase,
    tokens: int,
    device: str,
    dtype: str,
) -> Site:
    """The site that a run of calls is, with inputs and outputs by role and weights and attributes by region."""
    named: dict[str, Tensor] = {}
    attrs: dict[str, Any] = {}
    layer = calls[0].layer
    for call, region in zip(calls, region_names(calls), strict=True):
        named |= {f"{region}.{key}": weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
        attrs |= {f"{region}.{key}": value for key, value in call.attrs.items()}
    caches = tuple(dict.fromkeys(role(name, layer) for call in calls for name in call.inputs if is_cache(name)))
    return Site(
        run=region_names(calls),
        layer=layer,
        phase=phase.kind,
        tokens=tokens,
        device=device,
        dtype=dtype,
        inputs={key: spec for key, spec in inputs.items() if key not in caches},
        outputs=outputs,
        caches=caches,
        weights=Named(named),
        attrs=Named(attrs),
    )


def is_cache(value: str) -> bool:
    """Whether a value is state that outlives the step: named `<layer>.<something>_cache`."""
    return value.endswith("_cache")


class CastWeights(Mapping[str, Tensor]):
    """Another mapping's weights in FP32, for the FP32 lift of a BF16 model."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        return self._source[name].to(torch.float32)

    def __iter__(self) -> Any:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def adapter(candidate: Candidate, site: Site, state: Any, values: Sequence[str], layer: int) -> Bound:
    """The candidate's `run` as a bound step: inputs in order to dicts by role, outputs back in the site's order."""
    roles = tuple(role(name, layer) for name in values)
    caches = frozenset(site.caches)
    plain = tuple((index, name) for index, name in enumerate(roles) if name not in caches)
    held = tuple((index, name) for index, name in enumerate(roles) if name in caches)
    outputs = tuple(site.outputs)
    expected = dict.fromkeys(outputs).keys()
    run = candidate.run

    def bound(*args: Tensor) -> tuple[Tensor, ...]:
        try:
            made = run({name: args[i] for i, name in plain}, {name: args[i] for i, name in held}, state)
        except Exception as error:
            raise CandidateFault("run", error) from error
        if not isinstance(made, dict):
            raise CandidateFault("run", CandidateError(f"returned {type(made).__name__}, not a dict of outputs"))
        if made.keys() != expected:
            found, wanted = (", ".join(map(str, names)) or "none" for names in (made, outputs))
            raise CandidateFault(
                "run", CandidateError(f"returned the outputs {found}; it must return exactly {wanted}")
            )
        return tuple([made[name] for name in outputs])

    return bound


@dataclasses.dataclass
class Arm:
    """One program of one phase, bound and ready."""

    program: Program
    executor: Executor
    displaced: tuple[str, ...]


class Bench:
    """The workload's model on a device, with one set of weights and any number of arms."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        self.workload = workload
        self.device = device
        self.seed = seed
        self.model = build_model(workload)
        self.weights = self.model.weights(device, seed, workload.precision)
        self.arm_files: dict[str, tuple[str, ...]] = {}
        self._candidates: dict[str, Candidate] = {}
        self._arms: dict[tuple[str, str], Arm] = {}
        self._specs: dict[str, dict[str, TensorSpec]] = {}
        self._values: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._states: dict[tuple[str, str, int], Bound] = {}
        self.persistent_bytes = 0

    def candidate(self, file: str) -> Candidate:
        """Loads a candidate file once. Raises CandidateFault with stage `import`."""
        if file not in self._candidates:
            try:
                self._candidates[file] = load(Path(file))
            except CandidateError:
                raise
            except Exception as error:
                raise CandidateFault("import", error) from error
        return self._candidates[file]

    def values(self, phase: Phase, seed: int) -> dict[str, Tensor]:
        """The program's inputs for `seed`, made once and held: caches are written in place by steps."""
        key = (phase.name, seed)
        if key not in self._values:
            self._values = {k: v for k, v in self._values.items() if k[0] != phase.name}
            self._values[key] = self.model.inputs(phase, self.device, seed, self.workload.precision)
        return self._values[key]

    def fresh_values(self, phase: Phase, seed: int, precision: Precision | None = None) -> dict[str, Tensor]:
        return self.model.inputs(phase, self.device, seed, precision or self.workload.precision)

    def specs(self, phase: Phase) -> dict[str, TensorSpec]:
        """Shape and dtype of every value of the baseline's step, from one run of it."""
        if phase.name not in self._specs:
            program = self.model.program(phase)
            values = self.values(phase, self.seed)
            found = {name: TensorSpec.of(tensor) for name, tensor in values.items()}

            def observe(_: int, step: Step, __: list[Tensor], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                found.update({name: TensorSpec.of(t) for name, t in zip(step.outputs, made, strict=True)})
                return made

            with torch.no_grad():
                Executor(program, self.bind(phase))(values, observe)
            self._specs[phase.name] = found
        return self._specs[phase.name]

    def substitute(self, phase: Phase, files: Sequence[str]) -> tuple[Program, dict[str, Candidate], tuple[str, ...]]:
        """(program, candidates by rewrite name, names displaced) after applying `files` in order."""
        program = self.model.program(phase)
        by_name: dict[str, Candidate] = {}
        displaced: dict[str, None] = {}
        tokens = phase.tokens
        for file in files:
            candidate = self.candidate(file)
            rewrite = candidate.rewrite
            if rewrite.name in by_name:
                raise CandidateError(f"two rewrites of one stack are named {rewrite.name}; rename one")
            by_name[rewrite.name] = candidate
            if rewrite.applies(tokens=tokens, dtype=self.workload.dtype, device=self.device.type, phase=phase.kind):
                program, lifted = program.substitute(rewrite.name, rewrite.replaces)
                displaced.update(dict.fromkeys(sub.rewrite for sub in lifted))
        return program, by_name, tuple(displaced)

    def bind(self, phase: Phase, candidates: Mapping[str, Candidate] | None = None) -> Callable[[Step], Bound]:
        """How to make a program's steps ready; a candidate's state is prepared once per site and shared by arms."""

        def bind(step: Step) -> Bound:
            if isinstance(step, Call):
                return bind_reference(step, self.weights, self.workload.precision)
            assert candidates is not None
            return self._prepared(phase, step, candidates[step.rewrite])

        return bind

    def _prepared(self, phase: Phase, sub: Substitution, candidate: Candidate) -> Bound:
        key = (phase.name, str(candidate.path), sub.start)
        if key not in self._states:
            specs = self.specs(phase)
            layer = sub.layer
            site = site_of(
                sub.calls,
                {role(name, layer): specs[name] for name in sub.inputs},
                {role(name, layer): specs[name] for name in sub.outputs},
                self.weights,
                phase=phase,
                tokens=phase.tokens,
                device=self.device.type,
                dtype=self.workload.dtype,
            )
            before = _allocated(self.device)
            state = prepare(candidate, site)
            self.persistent_bytes += max(_allocated(self.device) - before, 0)
            self._states[key] = adapter(candidate, site, state, sub.inputs, layer)
        return self._states[key]

    def arm(self, name: str, phase: Phase) -> Arm:
        """The named arm's executor for a phase. Raises CandidateFault where a candidate's prepare raises."""
        key = (name, phase.name)
        if key not in self._arms:
            program, candidates, displaced = self.substitute(phase, self.arm_files[name])
            executor = Executor(program, self.bind(phase, candidates))
            self._arms[key] = Arm(program, executor, displaced)
        return self._arms[key]

    def lifted_weights(self, storage: str) -> Mapping[str, Tensor]:
        """Weights for a site judged in `storage`: the workload's own, or the same values in FP32."""
        same = storage == self.workload.dtype
        return self.weights if same or self.workload.precision is FP32 else CastWeights(self.weights)


def prepare(candidate: Candidate, site: Site) -> Any:
    try:
        return candidate.prepare(site)
    except Exception as error:
        raise CandidateFault("prepare", error) from error


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
