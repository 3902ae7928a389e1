"""Workloads and their phases, read from `workloads.toml` and, beside it, a file of the user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from harness.candidate import PhaseKind
from harness.errors import UsageError
from harness.program import PRECISIONS, Precision, Program, TensorSpec

PRESETS = Path(__file__).with_name("workloads.toml")


class Phase(BaseModel):
    """One kind of step: `batch` sequences of `query_len` new tokens (prefill: `context` each) and `context` in all.

    `ragged` gives the sequences unequal lengths and makes the last row of a decode a padding row. `logits` says
    whether a prefill computes the last token's logits of each sequence, as servers do, or all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: PhaseKind
    batch: int
    context: int
    query_len: int = 1
    ragged: bool = False
    decides: bool = False
    logits: Literal["last", "all"] = "last"

    @property
    def tokens(self) -> int:
        """Rows of a step, padding included; a ragged prefill has fewer real ones."""
        return self.batch * (self.context if self.kind == "prefill" else self.query_len)


class Workload(BaseModel):
    """A model at a size: which package builds it, its dtype, layers, share of ranks, and the phases."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model: str
    title: str
    dtype: Literal["fp32", "bf16"]
    ranks: int = 1
    rank_of: int = 1
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    layers: int
    page_size: int = 16
    checkpoint: Path | None = None
    config: dict[str, Any] = {}
    phases: tuple[Phase, ...]

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.dtype]

    def phase(self, name: str) -> Phase:
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise UsageError(f"{self.name} has no phase {name!r}; it has {', '.join(p.name for p in self.phases)}")

    @property
    def deciding(self) -> tuple[Phase, ...]:
        return tuple(phase for phase in self.phases if phase.decides)


class WeightSource(Mapping[str, Tensor]):
    """Weights by the checkpoint's names, made or read on first use and then held; `forget` drops what nothing needs."""

    def spec(self, name: str) -> TensorSpec:
        """The tensor's shape and dtype, without making it."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        raise NotImplementedError


class Model(Protocol):
    """What the harness needs of a model; `baselines/beam` is one, tests have another."""

    def program(self, phase: Phase) -> Program: ...

    def weights(self, device: torch.device, seed: int, precision: Precision) -> WeightSource:
        """Random ones of `seed`, or the checkpoint's, as stored under `precision` (a router's stay FP32)."""
        ...

    def inputs(self, phase: Phase, device: torch.device, seed: int, precision: Precision) -> dict[str, Tensor]:
        """The program's inputs by name for one step: tokens, lengths, pages, slots and filled caches."""
        ...

    def tokens(self, phase: Phase, seed: int) -> Tensor:
        """Fresh token ids [T] int64 on the CPU: what changes from one timed slot to the next."""
        ...

    def peer(
        self, name: str, phase: Phase, weights: Mapping[str, Tensor], values: Mapping[str, Tensor], precision: Precision
    ) -> Callable[[], dict[str, Tensor]]:
        """One step of the named peer over static `values`; raises UsageError where this model has no such peer."""
        ...


def load_workloads(extra: Path | None = None) -> dict[str, Workload]:
    """Every workload by name; those of `extra` come after the presets and may build on them."""
    raw: dict[str, dict[str, Any]] = {}
    for path in (PRESETS, *([extra] if extra else [])):
        try:
            raw.update(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"cannot read workloads from {path}: {error}") from error
    return {name: _build(name, raw) for name in raw}


def _build(name: str, raw: Mapping[str, dict[str, Any]]) -> Workload:
    chain = [name]
    while base := raw[chain[-1]].get("base"):
        if base not in raw or base in chain:
            raise UsageError(f"workload {chain[-1]}: base {base!r} is not another workload; known: {', '.join(raw)}")
        chain.append(base)
    merged: dict[str, Any] = {}
    for link in reversed(chain):
        merged |= {key: value for key, value in raw[link].items() if key != "base"}
    try:
        return Workload(name=name, **merged)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"workload {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
