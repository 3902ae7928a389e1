"""What a candidate file is made of: a `Rewrite`, `prepare(site)` and `run(inputs, caches, state)`.

A candidate imports this module, torch, triton and the standard library's arithmetic, nothing else of the project.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from harness.errors import CandidateError
from harness.program import TensorSpec

Backend = Literal["torch", "triton", "cuda", "cpp", "library"]
PhaseKind = Literal["decode", "verify", "prefill"]
BACKEND_DEVICES = {
    "torch": ("cpu", "cuda"),
    "library": ("cpu", "cuda"),
    "cpp": ("cpu",),
    "triton": ("cuda",),
    "cuda": ("cuda",),
}


@dataclass(frozen=True)
class When:
    """Where a rewrite applies; elsewhere the harness runs the reference and counts it."""

    tokens: tuple[int, int] = (1, 65536)
    """Tokens in a step, both ends included."""
    dtype: tuple[str, ...] = ("bf16", "fp32")
    """Storage dtypes. A rewrite of a run without a matrix product must list fp32: it is judged there too."""
    device: tuple[str, ...] = ()
    """`cpu`, `cuda`; empty for what the backend runs on."""
    phases: tuple[PhaseKind, ...] = ("decode", "verify", "prefill")


@dataclass(frozen=True)
class Rewrite:
    """What a candidate file declares about itself.

    `replaces` are alternative runs of region names, the next layer's with `next.`; `target` is the phase kind that must
    gain. `kernels` are the device kernels a GPU profile must show at each site (Triton: the jitted functions' names).
    `deterministic` False declares run-to-run differences, which must then stay within the numerics budget.
    """

    name: str
    replaces: tuple[tuple[str, ...], ...]
    backend: Backend
    target: PhaseKind
    when: When = When()
    kernels: tuple[str, ...] = ()
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise CandidateError(f"REWRITE.name {self.name!r} must be an identifier, like norm_residual_norm")
        if not self.replaces or not all(self.replaces) or isinstance(self.replaces[0], str):
            raise CandidateError(f"{self.name}: replaces must be a tuple of runs, each a tuple of region names")
        if self.backend not in BACKEND_DEVICES:
            raise CandidateError(
                f"{self.name}: backend must be one of {', '.join(BACKEND_DEVICES)}, not {self.backend!r}"
            )
        if self.target not in ("decode", "verify", "prefill"):
            raise CandidateError(f"{self.name}: target must be decode, verify or prefill, not {self.target!r}")

    @property
    def devices(self) -> tuple[str, ...]:
        return self.when.device or BACKEND_DEVICES[self.backend]

    def applies(self, *, tokens: int, dtype: str, device: str, phase: str) -> bool:
        low, high = self.when.tokens
        return (
            low <= tokens <= high and dtype in self.when.dtype and device in self.devices and phase in self.when.phases
        )


@dataclass(frozen=True)
class Site:
    """One place where a rewrite runs: everything a kernel may specialise on.

    Keys of `weights` and `attrs` are `<region>.<role>`, with `next.` before the next layer's regions; those of `inputs`
    and `outputs` are value roles. `weights` are shared with every other program: never write them.
    """

    run: tuple[str, ...]
    layer: int
    phase: PhaseKind
    tokens: int
    device: str
    dtype: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    caches: tuple[str, ...]
    weights: Mapping[str, Tensor]
    attrs: Mapping[str, Any]


@dataclass
class Candidate:
    """A loaded candidate file. `prepare` and `run` are the file's own functions."""

    path: Path
    rewrite: Rewrite
    prepare: Callable[[Site], Any]
    run: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Any], Mapping[str, Tensor]]
    module: Any = field(repr=False)


def load(path: Path) -> Candidate:
    """Imports a candidate file and validates its shape. Runs the file's top level: only the child may call this.

    Raises CandidateError where the file lacks REWRITE, prepare or run; lets the file's own exceptions through.
    """
    name = f"candidate_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CandidateError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    rewrite = getattr(module, "REWRITE", None)
    if type(rewrite) is not Rewrite:
        raise CandidateError(f"{path.name} has no REWRITE = Rewrite(...)")
    for function in ("prepare", "run"):
        if not callable(getattr(module, function, None)):
            raise CandidateError(
                f"{path.name} has no function {function}; a candidate has prepare(site) and run(inputs, caches, state)"
            )
    return Candidate(path, rewrite, module.prepare, module.run, module)
