"""Runs Triton candidates interpreted, on a toy Beam's own sites, and prints what the numerics gate would say.

A process of its own: Triton decides at import whether it interprets. `python interpreted.py FILE...` prints one JSON
object, file -> [cases judged, refusals]. Two gaps of the interpreter are filled: it truncates FP32 to BF16, where a
device rounds to nearest even, and multiplies the bit patterns of BF16 operands of a dot.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from baselines.beam import build
from harness import numerics
from harness.arms import CastWeights, adapter, is_cache, site_of
from harness.candidate import Candidate, load
from harness.executor import Bound, bind_reference, run_references
from harness.program import FP64, PRECISIONS, Precision, Substitution, TensorSpec, role, run_label
from harness.workload import Phase, load_workloads

ROOT = Path(__file__).parents[2] / "kernel_candidates"
CPU, SEED = torch.device("cpu"), 5
CONFIG = {
    "vocab_size": 80,
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "num_experts": 24,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
}
"""Sizes that are no powers of two wherever the model allows it; layers 0 to 2 dense and sliding, 3 sparse, 4 full."""
PHASES = (
    Phase(name="decode", kind="decode", batch=1, context=21),
    Phase(name="ragged decode", kind="decode", batch=3, context=30, ragged=True),
    Phase(name="verify", kind="verify", batch=2, context=26, query_len=3, ragged=True),
    Phase(name="ragged prefill", kind="prefill", batch=2, context=14, ragged=True),
)
LONG = (
    Phase(name="long prefill", kind="prefill", batch=1, context=75),
    Phase(name="long decode", kind="decode", batch=1, context=160),
)
"""For kernels that change form with the number of tokens or keys; recorded inputs only."""
Values = dict[str, Tensor]


def round_to_nearest(data: Any, source: Any, target: Any, mode: Any, _inner: Any = interpreter._convert_float) -> Any:
    if (source, target) == (tl.float32, tl.bfloat16):
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
    return _inner(data, source, target, mode)


def dot(builder: Any, a: Any, b: Any, *rest: Any, _inner: Any = interpreter.InterpreterBuilder.create_dot) -> Any:
    wide = [builder.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)]
    return _inner(builder, *wide, *rest)


interpreter._convert_float = round_to_nearest
interpreter.InterpreterBuilder.create_dot = dot


class Toy:
    """The toy in BF16 and, by phase, every value of one step of its baseline."""

    def __init__(self) -> None:
        workload = load_workloads()["beam-tiny-bf16"]
        self.workload = workload.model_copy(update={"config": workload.config | CONFIG, "layers": 5, "page_size": 4})
        self.model = build(self.workload)
        self.weights = self.model.weights(CPU, SEED, self.workload.precision)
        self.recorded: dict[str, Values] = {}

    def values(self, phase: Phase) -> Values:
        """Values by name; caches as they are before the step."""
        if phase.name not in self.recorded:
            inputs = self.model.inputs(phase, CPU, SEED, self.workload.precision)
            env = fresh(inputs)
            for call in self.model.program(phase).calls:
                made = bind_reference(call, self.weights, self.workload.precision)(*[env[name] for name in call.inputs])
                env.update(zip(call.outputs, made, strict=True))
            self.recorded[phase.name] = env | {name: inputs[name] for name in inputs if is_cache(name)}
        return self.recorded[phase.name]

    def sites(self, candidate: Candidate, phase: Phase) -> tuple[Substitution, ...]:
        """The last site of every kind: regions, and attributes other than the depth's."""
        program = self.model.program(phase)
        program, _ = program.substitute(candidate.rewrite.name, candidate.rewrite.replaces)
        kinds = {}
        for sub in program.substitutions:
            attrs = [[v for k, v in call.attrs.items() if k != "residual_index"] for call in sub.calls]
            kinds[f"{run_label(sub.calls)} {attrs}"] = sub
        return tuple(kinds.values())

    def cases(self, sub: Substitution, inputs: Values) -> Iterator[tuple[str, Values]]:
        """The recorded inputs, the regions' own cases that can be posed at the run's edges, and one row."""
        yield "recorded", inputs
        generator = torch.Generator().manual_seed(SEED)
        for call in sub.calls:
            if call.region.cases is None or not all(name in inputs for name in call.inputs):
                continue
            weights = {key: self.weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
            given = [inputs[name].clone() for name in call.inputs]
            for name, changed in call.region.cases(given, weights, call.attrs, generator):
                yield name, inputs | dict(zip(call.inputs, changed, strict=True))
        if all(call.region.rowwise for call in sub.calls):
            yield "one row", {name: tensor[:1].clone() for name, tensor in inputs.items()}

    def judge(self, candidate: Candidate) -> tuple[int, list[str]]:
        """(cases judged, refusals) over all phases and storages that the candidate declares."""
        rewrite = candidate.rewrite
        results, wrong = [], []
        for phase in (*PHASES, *LONG):
            if not rewrite.applies(tokens=phase.tokens, dtype="bf16", device="cuda", phase=phase.kind):
                continue
            for sub in self.sites(candidate, phase):
                inputs = {name: self.values(phase)[name] for name in sub.inputs}
                posed = self.cases(sub, inputs) if phase in PHASES else [("recorded", inputs)]
                for name, case in posed:
                    results += [self.result(candidate, phase, sub, name, case, kind) for kind in rewrite.when.dtype]
                wrong += self.without_rows(candidate, phase, sub, inputs)
        wrong += [f"{r.region}, {r.case}, {r.output}: {r.reason}" for r in numerics.judge(results) if not r.ok]
        return len(results), wrong

    def bound(
        self, candidate: Candidate, phase: Phase, sub: Substitution, given: Values, outputs: Values, storage: str
    ) -> Bound:
        """The candidate prepared for a site of these inputs and outputs."""
        site = site_of(
            sub.calls,
            {role(name, sub.layer): TensorSpec.of(given[name]) for name in sub.inputs},
            {role(name, sub.layer): TensorSpec.of(outputs[name]) for name in sub.outputs},
            self.weights if storage == "bf16" else CastWeights(self.weights),
            phase=phase,
            tokens=phase.tokens,
            device="cpu",
            dtype=storage,
        )
        return adapter(candidate, site, candidate.prepare(site), sub.inputs, sub.layer)

    def without_rows(self, candidate: Candidate, phase: Phase, sub: Substitution, inputs: Values) -> list[str]:
        """Refusals of the candidate's empty outputs where rows are independent and there are none."""
        if not all(call.region.rowwise for call in sub.calls):
            return []
        recorded = self.values(phase)
        wanted = {name: recorded[name][:0] for name in sub.outputs}
        bound = self.bound(candidate, phase, sub, {n: t[:0] for n, t in inputs.items()}, wanted, "bf16")
        made = dict(zip(sub.outputs, bound(*[t[:0] for t in inputs.values()]), strict=True))
        return [f"{sub}, no rows, {n}: {list(t.shape)}" for n, t in made.items() if t.shape != wanted[n].shape]

    def result(
        self, candidate: Candidate, phase: Phase, sub: Substitution, case: str, inputs: Values, storage: str
    ) -> numerics.Result:
        """What the candidate makes of `inputs` stored in `storage`, beside the references and the oracle."""
        layer, precision = sub.layer, PRECISIONS[storage]
        given = {name: widened(t, precision) for name, t in inputs.items()}
        stored, exact = fresh(given), {name: widened(t, FP64) for name, t in fresh(given).items()}
        reference = run_references(sub.calls, self.weights, precision, stored)
        oracle = run_references(sub.calls, self.weights, FP64, exact)
        bound = self.bound(candidate, phase, sub, given, reference, storage)
        names = [role(name, layer) for name in sub.outputs]
        runs = [fresh(given) for _ in range(2 if case == "recorded" else 1)]
        made = [dict(zip(names, bound(*mine.values()), strict=True)) for mine in runs]
        return numerics.Result(
            expected=numerics.Expected(
                region=run_label(sub.calls),
                layer=layer,
                case=f"{case}, {phase.name}, {storage}",
                storage=storage,
                reference={role(name, layer): reference[name] for name in sub.outputs},
                oracle={role(name, layer): oracle[name] for name in sub.outputs},
                before={role(name, layer): given[name] for name in sub.mutates},
                cache_reference={role(name, layer): stored[name] for name in sub.mutates},
                cache_oracle={role(name, layer): exact[name] for name in sub.mutates},
                choice=self.choice(sub, stored | reference, exact | oracle, precision),
            ),
            outputs=made[0],
            caches={role(name, layer): runs[0][name] for name in sub.mutates},
            touched=tuple(name for name in given if not is_cache(name) and not same(runs[0][name], given[name])),
            repeat_differs=tuple(name for name in made[0] if not same(made[0][name], made[-1][name])),
            deterministic=True,
        )

    def choice(self, sub: Substitution, stored: Values, exact: Values, precision: Precision) -> numerics.Choice | None:
        """What a run that ends in a choice is judged with, from the references' values and the oracle's."""
        call = sub.calls[-1]
        decision = call.region.decision
        if decision is None:
            return None
        weights = {key: self.weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
        truth = decision.scores(FP64, weights, call.attrs, *[exact[name] for name in call.inputs])
        theirs = decision.scores(precision, weights, call.attrs, *[stored[name] for name in call.inputs])
        error = float((theirs.double() - truth).abs().max()) if truth.numel() else 0.0
        return numerics.Choice(truth, error, decision.ids, decision, weights, call.attrs)


def widened(tensor: Tensor, precision: Precision) -> Tensor:
    narrower = tensor.is_floating_point() and tensor.dtype.itemsize < precision.storage.itemsize
    return tensor.to(precision.storage) if narrower else tensor


def fresh(values: Mapping[str, Tensor]) -> Values:
    return {name: tensor.clone() for name, tensor in values.items()}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.numel() else True


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    toy = Toy()
    with torch.no_grad():
        print(json.dumps({file: toy.judge(load(ROOT / file)) for file in sys.argv[1:]}))  # noqa: T201


if __name__ == "__main__":
    main()
