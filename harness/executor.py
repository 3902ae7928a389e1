"""Runs a program: its steps made ready once, then called over a flat list of value slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from harness.program import Call, Outputs, Precision, Program, Step

Bound = Callable[..., Outputs]
"""A step made ready: takes its input values in order, gives its output values in order."""
Observer = Callable[[int, Step, list[Tensor], Outputs], Outputs]
"""`observe(index, step, inputs, outputs) -> outputs`, called after each step; may replace the outputs."""


class Executor:
    """Runs a program's bound steps over a flat list of value slots; a value is dropped after its last reader.

    Costs well under 1 us a step beyond the step itself (tests/test_program.py measures it).
    """

    def __init__(self, program: Program, bind: Callable[[Step], Bound]) -> None:
        self.program = program
        self.steps = tuple(program.steps())
        slots: dict[str, int] = {name: index for index, name in enumerate(program.inputs)}
        for step in self.steps:
            for name in step.outputs:
                slots.setdefault(name, len(slots))
        last: dict[str, int] = {}
        for index, step in enumerate(self.steps):
            last.update(dict.fromkeys((*step.inputs, *step.outputs), index))
        keep = set(program.outputs) | set(program.inputs)
        self._slots = slots
        self._plan = []
        for index, step in enumerate(self.steps):
            names = dict.fromkeys((*step.inputs, *step.outputs))
            dead = tuple(slots[name] for name in names if last[name] == index and name not in keep)
            ins, outs = (tuple(slots[name] for name in names) for names in (step.inputs, step.outputs))
            self._plan.append((bind(step), ins, outs, dead))

    def __call__(self, values: Mapping[str, Tensor], observe: Observer | None = None) -> dict[str, Tensor]:
        """Runs the step on the program's inputs, by name; returns the program's outputs, by name."""
        env: list[Any] = [values[name] for name in self.program.inputs]
        env.extend([None] * (len(self._slots) - len(env)))
        if observe is None:
            for fn, ins, outs, dead in self._plan:
                for slot, value in zip(outs, fn(*[env[i] for i in ins]), strict=True):
                    env[slot] = value
                for slot in dead:
                    env[slot] = None
        else:
            for index, (fn, ins, outs, dead) in enumerate(self._plan):
                args = [env[i] for i in ins]
                for slot, value in zip(outs, observe(index, self.steps[index], args, fn(*args)), strict=True):
                    env[slot] = value
                for slot in dead:
                    env[slot] = None
        return {name: env[self._slots[name]] for name in self.program.outputs}


def bind_reference(call: Call, weights: Mapping[str, Tensor], precision: Precision) -> Bound:
    """A call's reference with its weights, attributes and precision filled in."""
    own = {role_: weights[name] for role_, name in zip(call.region.weights, call.weights, strict=True)}
    return functools.partial(call.region.reference, precision, own, call.attrs)


def run_references(
    calls: Sequence[Call], weights: Mapping[str, Tensor], precision: Precision, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The composed references of a run on named values: every value made, by name. Mutated inputs are written."""
    env = dict(values)
    for call in calls:
        made = bind_reference(call, weights, precision)(*[env[name] for name in call.inputs])
        env.update(zip(call.outputs, made, strict=True))
    return {name: env[name] for call in calls for name in call.outputs}
