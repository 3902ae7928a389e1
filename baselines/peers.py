"""torch.compile of a program: the peer that every kernel of ours must beat.

The program is compiled by layer, once for each kind of layer: compiled whole, 52 layers take minutes and gain only the
seams, and the seams are laid so that a layer's last norm, residual add and the next layer's first norm stay in one
piece. The depth index is an argument, so that layers of one kind share the code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.program import Call, Precision, Program

INDEX = "residual_index"
SEAM = "input_norm"


@dataclass(frozen=True)
class Segment:
    """A run of calls compiled as one function."""

    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def segments(program: Program) -> tuple[Segment, ...]:
    """The program cut after each layer's first norm."""
    cuts = [0, *(i + 1 for i, call in enumerate(program.calls) if call.region.name == SEAM), len(program.calls)]
    return tuple(Segment(program.calls[a:b], *program.edges(a, b)) for a, b in itertools.pairwise(cuts) if b > a)


def compiled_step(
    program: Program,
    weights: Mapping[str, Tensor],
    precision: Precision,
    values: Mapping[str, Tensor],
    mode: str | None,
) -> Callable[[], dict[str, Tensor]]:
    """One step of the program through torch.compile, over static `values`."""
    torch._dynamo.config.cache_size_limit = 64
    kinds: dict[str, Any] = {}
    plan = []
    parts = segments(program)
    last_read = {name: i for i, part in enumerate(parts) for name in part.inputs}
    for at, segment in enumerate(parts):
        key = _kind(segment, weights)
        if key not in kinds:
            kinds[key] = torch.compile(_function(segment.calls, segment, precision), mode=mode)
        own = [[weights[name] for name in call.weights] for call in segment.calls]
        indices = [int(call.attrs[INDEX]) for call in segment.calls if INDEX in call.attrs]
        made_here = (*segment.inputs, *segment.outputs)
        dead = [n for n in made_here if last_read.get(n, at) == at and n not in values and n not in program.outputs]
        plan.append((segment, kinds[key], own, indices, dead))

    def step() -> dict[str, Tensor]:
        env = dict(values)
        for segment, function, own, indices, dead in plan:
            made = function([env[name] for name in segment.inputs], own, indices)
            env.update(zip(segment.outputs, made, strict=True))
            for name in dead:
                del env[name]
        return {name: env[name] for name in program.outputs}

    return step


def _function(calls: Sequence[Call], segment: Segment, precision: Precision) -> Callable[..., list[Tensor]]:
    """A function of (inputs, weights by call, depth indices) that runs the references of `calls` of any equal layer."""
    names: dict[str, int] = {name: i for i, name in enumerate(segment.inputs)}
    for call in calls:
        for name in call.outputs:
            names.setdefault(name, len(names))
    plan = [
        (c.region, [names[n] for n in c.inputs], [names[n] for n in c.outputs],
         {k: v for k, v in c.attrs.items() if k != INDEX}, INDEX in c.attrs)
        for c in calls
    ]  # fmt: skip
    keep = [names[name] for name in segment.outputs]

    def run(inputs: list[Tensor], own: list[list[Tensor]], indices: list[int]) -> list[Tensor]:
        env: dict[int, Tensor] = dict(enumerate(inputs))
        depth = 0
        for (region, ins, outs, attrs, indexed), tensors in zip(plan, own, strict=True):
            named = dict(zip(region.weights, tensors, strict=True))
            if indexed:
                attrs = attrs | {INDEX: indices[depth]}
                depth += 1
            made = region.reference(precision, named, attrs, *[env[i] for i in ins])
            env.update(zip(outs, made, strict=True))
        return [env[slot] for slot in keep]

    return run


def _kind(segment: Segment, weights: Mapping[str, Tensor]) -> str:
    """What two segments must share to run the same code: regions, attributes but the depth, and value wiring."""
    base = segment.calls[0].layer
    names = {name: str(i) for i, name in enumerate(segment.inputs)}
    for call in segment.calls:
        for name in call.outputs:
            names.setdefault(name, str(len(names)))
    return repr(
        [
            (c.region.name, c.layer - base, [names[n] for n in c.inputs], [names[n] for n in c.outputs],
             sorted((k, v) for k, v in c.attrs.items() if k != INDEX), [tuple(weights[n].shape) for n in c.weights])
            for c in segment.calls
        ]
    )  # fmt: skip
