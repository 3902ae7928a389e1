"""A step is a program: a flat list of calls to named regions, with named values between them.

Nothing here knows a model, a file or a device. Value names are `<layer>.<role>` for a layer's values and plain
`<role>` for those of the whole step; `<layer>.hidden` is the input of that layer, so the last region of layer 3
writes `4.hidden`, and fusing across a layer boundary needs no special case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Precision:
    """Where values are stored and in what reductions and products of elements are computed.

    A reference rounds to `storage` exactly where the model rounds, and keeps `compute` in between. The oracle is
    `FP64`, which never rounds.
    """

    storage: torch.dtype
    compute: torch.dtype


BF16 = Precision(torch.bfloat16, torch.float32)
FP32 = Precision(torch.float32, torch.float32)
FP64 = Precision(torch.float64, torch.float64)
PRECISIONS = {"bf16": BF16, "fp32": FP32, "fp64": FP64}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call must move and compute at the least: bytes read once and written once, and FLOPs (2 per MAC)."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Attrs = Mapping[str, Any]
Weights = Mapping[str, Tensor]
Outputs = tuple[Tensor, ...]
Reference = Callable[..., Outputs]
"""`reference(precision, weights, attrs, *inputs) -> outputs`: weights by role as stored (the reference casts them),
inputs in the order of `Region.inputs`, outputs as a tuple in the order of `Region.outputs`."""
CostModel = Callable[[Sequence[Tensor], Outputs, Weights, Attrs], Cost]
Cases = Callable[[Sequence[Tensor], Weights, Attrs, torch.Generator], Iterable[tuple[str, Sequence[Tensor]]]]


@dataclass(frozen=True)
class Decision:
    """How to judge a region that chooses (a router): a different choice is right where the scores nearly tie."""

    ids: str
    """The output role that holds the choice, [tokens, chosen] integers."""
    scores: Callable[..., Tensor]
    """`scores(precision, weights, attrs, *inputs)` -> [tokens, options], what the choice is made of."""
    shortfall: Callable[[Tensor, Weights, Attrs, Tensor], Tensor]
    """`shortfall(scores, weights, attrs, ids)` -> [tokens]: by how much, in score units, the worst chosen option
    misses being right, over all stages of the choice; 0 where the choice is the right one."""
    resolve: Callable[[Tensor, Weights, Attrs, Tensor], dict[str, Tensor]]
    """`resolve(scores, weights, attrs, ids)`: the region's other outputs as they should be, given this choice."""


@dataclass(frozen=True)
class Region:
    """One named step of a layer, with its plain-PyTorch reference.

    `inputs`, `outputs` and `weights` are roles. `mutates` are input roles written in place. `rowwise` says that row t
    of each output depends on row t of the inputs alone, so that any subset of rows is a valid input. `matmul` marks a
    tensor-core product: such a rewrite need not take FP32 storage. `cases` yields adversarial inputs of its own.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reference: Reference
    cost: CostModel
    weights: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    rowwise: bool = False
    matmul: bool = False
    decision: Decision | None = None
    cases: Cases | None = None


@dataclass(frozen=True)
class Call:
    """One execution of a region: value names in the order of the region's roles, weight names, static attributes."""

    region: Region
    layer: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    attrs: Attrs = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.region.name} of layer {self.layer}"

    @property
    def mutates(self) -> tuple[str, ...]:
        return tuple(self.inputs[self.region.inputs.index(role)] for role in self.region.mutates)


@dataclass(frozen=True)
class Substitution:
    """A contiguous run of calls, replaced by the rewrite named `rewrite`."""

    rewrite: str
    start: int
    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.calls)

    @property
    def layer(self) -> int:
        return self.calls[0].layer

    @property
    def mutates(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for call in self.calls for name in call.mutates))

    def __str__(self) -> str:
        return f"{self.rewrite} at layer {self.layer} ({run_label(self.calls)})"


Step = Call | Substitution


def role(value: str, layer: int) -> str:
    """A value's name as a rewrite at `layer` sees it: `5.hidden` is `hidden` at layer 5 and `next.hidden` at 4."""
    prefix, _, rest = value.rpartition(".")
    if not prefix:
        return rest
    if int(prefix) == layer:
        return rest
    if int(prefix) == layer + 1:
        return f"next.{rest}"
    raise ProgramError(f"value {value} is neither of layer {layer} nor of the next: a run spans two layers at most")


def region_names(calls: Sequence[Call]) -> tuple[str, ...]:
    """Region names of a run as a candidate writes them: those of the next layer carry `next.`."""
    return tuple("next." * (call.layer - calls[0].layer) + call.region.name for call in calls)


def run_label(calls: Sequence[Call]) -> str:
    return " + ".join(region_names(calls))


@dataclass(frozen=True)
class Program:
    """The calls of one step, the values it starts from and the values it gives; and the substitutions in force."""

    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    substitutions: tuple[Substitution, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.inputs)
        for call in self.calls:
            for name in call.inputs:
                if name not in known:
                    raise ProgramError(f"{call} reads {name}, which no call before it writes")
            for name in call.outputs:
                if name in known:
                    raise ProgramError(f"{call} writes {name} a second time: values are single-assignment")
            known.update(call.outputs)
        missing = [name for name in self.outputs if name not in known]
        if missing:
            raise ProgramError(f"no call writes the program's output {missing[0]}")

    def steps(self) -> Iterator[Step]:
        """Calls and substitutions in execution order."""
        at = 0
        for sub in self.substitutions:
            yield from self.calls[at : sub.start]
            yield sub
            at = sub.stop
        yield from self.calls[at:]

    def edges(self, start: int, stop: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(inputs, outputs) of the run `calls[start:stop]`: what it reads from before, what is read after it.

        A choice (`Region.decision`) is always an output, so that the judge can force and compare it.
        """
        run = self.calls[start:stop]
        made: dict[str, None] = {}
        reads: dict[str, None] = {}
        kept: set[str] = set(self.outputs)
        for call in run:
            reads.update(dict.fromkeys(name for name in call.inputs if name not in made))
            made.update(dict.fromkeys(call.outputs))
            if call.region.decision is not None:
                kept.add(call.outputs[call.region.outputs.index(call.region.decision.ids)])
        kept.update(name for call in self.calls[stop:] for name in call.inputs)
        return tuple(reads), tuple(name for name in made if name in kept)

    def find(self, pattern: Sequence[str]) -> list[int]:
        """Start indices of the runs that match region names (`next.` for the layer after the first's)."""
        plain = [name.removeprefix("next.") for name in pattern]
        found = []
        for start in range(len(self.calls) - len(plain) + 1):
            run = self.calls[start : start + len(plain)]
            if all(call.region.name == name for call, name in zip(run, plain, strict=True)) and region_names(
                run
            ) == tuple(pattern):
                found.append(start)
        return found

    def replace(
        self, start: int, stop: int, rewrite: str, *, outputs: Iterable[str] | None = None, displace: bool = False
    ) -> Program:
        """This program with `calls[start:stop]` run by `rewrite`.

        Raises ProgramError, naming the call, for a run that is empty or leaves the program, one that overlaps a
        substitution in force (unless `displace` lifts that one out), and declared `outputs` (roles) that are not
        exactly the run's.
        """
        if not 0 <= start < stop <= len(self.calls):
            raise ProgramError(f"calls {start} to {stop} are not a run of this program of {len(self.calls)} calls")
        calls = self.calls[start:stop]
        reads, writes = self.edges(start, stop)
        sub = Substitution(rewrite, start, calls, reads, writes)
        roles = [role(name, sub.layer) for name in (*reads, *writes)][len(reads) :]
        if outputs is not None and set(outputs) != set(roles):
            wrong = sorted(set(outputs) ^ set(roles))
            raise ProgramError(
                f"{rewrite} at {calls[0]}: outputs must be exactly {', '.join(roles)}; {', '.join(wrong)} differs"
            )
        kept = []
        for other in self.substitutions:
            if other.stop <= start or stop <= other.start:
                kept.append(other)
            elif not displace:
                clash = self.calls[max(start, other.start)]
                raise ProgramError(f"{rewrite} overlaps {other.rewrite} at {clash}: lift that one out first")
        return replace(self, substitutions=tuple(sorted([*kept, sub], key=lambda s: s.start)))

    def replace_calls(self, indices: Sequence[int], rewrite: str) -> Program:
        """As `replace`, for a list of call indices, which must be contiguous; names the call left out."""
        for before, after in itertools.pairwise(indices):
            if after != before + 1:
                raise ProgramError(
                    f"{rewrite}: {self.calls[before + 1]} lies between the replaced calls but is not replaced; "
                    "a run has no gaps"
                )
        return self.replace(indices[0], indices[-1] + 1, rewrite)

    def substitute(self, rewrite: str, patterns: Iterable[Sequence[str]]) -> tuple[Program, tuple[Substitution, ...]]:
        """(new program, displaced substitutions): `rewrite` at every match of any pattern, longest pattern first."""
        taken: set[int] = set()
        new = self
        for pattern in sorted(patterns, key=len, reverse=True):
            for start in self.find(pattern):
                span = range(start, start + len(pattern))
                if taken.isdisjoint(span):
                    taken.update(span)
                    new = new.replace(start, span.stop, rewrite, displace=True)
        kept = {(sub.rewrite, sub.start) for sub in new.substitutions}
        return new, tuple(sub for sub in self.substitutions if (sub.rewrite, sub.start) not in kept)

    def sites(self, rewrite: str) -> tuple[Substitution, ...]:
        return tuple(sub for sub in self.substitutions if sub.rewrite == rewrite)
