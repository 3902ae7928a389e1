"""Makes the inputs and the expected values that candidates are judged by. Runs in a trusted child, never beside one.

The oracle of any run is the composed references of the regions it replaces, in FP64, on the very inputs that the
candidate gets. Inputs are those recorded at the run's edges in the baseline's step, fresh ones of other seeds, and
adversarial ones from the regions themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness import messages as m
from harness.arms import Bench, is_cache
from harness.executor import bind_reference, run_references
from harness.program import FP64, PRECISIONS, Call, Precision, Program, role, run_label

SAMPLED_ROWS = 1024
"""Outputs with more rows than this are judged on this many of them, the first and the last included."""

LARGE_BYTES = 32 << 20
"""Inputs of one run above this many bytes are a large snapshot: see `_cases`."""

Values = dict[str, Tensor]


def walk(
    program: Program,
    values: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    precision: Precision,
    forced: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[int, Values]]:
    """Runs the baseline's calls one by one; yields (index, values alive) before each call and once at the end.

    `forced` replaces the outputs it names (choices, so that two runs take the same experts).
    """
    env: Values = dict(values)
    last = {name: index for index, call in enumerate(program.calls) for name in (*call.inputs, *call.outputs)}
    for index, call in enumerate(program.calls):
        yield index, env
        made = bind_reference(call, weights, precision)(*[env[name] for name in call.inputs])
        for name, tensor in zip(call.outputs, made, strict=True):
            env[name] = forced[name] if forced and name in forced else tensor
        for name in {*call.inputs, *call.outputs}:
            if last[name] == index and name not in program.outputs:
                del env[name]
    yield len(program.calls), env


def record_sites(bench: Bench, request: m.RecordSites) -> tuple[m.RecordedCase, ...]:
    """Every case of every span: files of inputs and of expected values in `request.directory`."""
    phase = bench.workload.phase(request.phase)
    program = bench.model.program(phase)
    directory = Path(request.directory)
    directory.mkdir(parents=True, exist_ok=True)
    recorded: list[m.RecordedCase] = []
    starts: dict[int, list[m.Span]] = {}
    for span in request.spans:
        starts.setdefault(span.start, []).append(span)
    with torch.no_grad():
        for order, seed in enumerate(request.seeds):
            values = bench.fresh_values(phase, seed)
            for index, env in walk(program, values, bench.weights, bench.workload.precision):
                for span in starts.get(index, ()):
                    writer = CaseWriter(bench, program, span, directory)
                    inputs = {name: env[name].clone() for name in writer.reads}
                    recorded += _cases(writer, inputs, seed, order == 0, request)
                if index >= max(starts):
                    break
    return tuple(recorded)


def _cases(writer: CaseWriter, inputs: Values, seed: int, first: bool, request: m.RecordSites) -> list[m.RecordedCase]:
    """The cases made of one snapshot: as it is, adversarial ones on the first, each in every storage asked for.

    A large snapshot is judged whole and in the workload's own storage once. Where its rows are independent, some of
    them stand in for the rest in all other cases; where they are not, other cases are left to the smaller phases.
    """
    label = f"{'recorded' if first else 'fresh'} seed {seed}"
    small = inputs
    made = []
    if sum(t.nbytes for name, t in inputs.items() if not is_cache(name)) > LARGE_BYTES:
        if first:
            made.append(writer.write(label, inputs, request.storages[0]))
        if not writer.rowwise:
            return made
        rows = _sample(inputs, writer.span.start)
        small = {name: _rows(t, rows) for name, t in inputs.items()}
        label += f", {SAMPLED_ROWS} rows of it"
    cases = [(label, small)]
    if request.adversarial and first:
        cases += [(f"adversarial: {name}", case) for name, case in adversarial(writer, small, seed)]
    return made + [writer.write(name, case, storage) for name, case in cases for storage in request.storages]


def adversarial(writer: CaseWriter, inputs: Values, seed: int) -> Iterator[tuple[str, Values]]:
    """Cases of the run's regions that can be posed at the run's edges; one row and none where rows are independent."""
    generator = torch.Generator(device=writer.bench.device).manual_seed(seed)
    for call in writer.calls:
        if call.region.cases is None or not all(name in inputs for name in call.inputs):
            continue
        weights = {key: writer.bench.weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
        originals = [inputs[name] for name in call.inputs]
        for name, changed in call.region.cases([t.clone() for t in originals], weights, call.attrs, generator):
            yield f"{call.region.name}: {name}", inputs | dict(zip(call.inputs, changed, strict=True))
    if writer.rowwise:
        for count in (1, 0):
            yield f"{count or 'no'} row{'' if count else 's'}", {name: t[:count].clone() for name, t in inputs.items()}


class CaseWriter:
    """Runs the references of one span on given inputs and writes what the judge needs."""

    def __init__(self, bench: Bench, program: Program, span: m.Span, directory: Path) -> None:
        self.bench = bench
        self.span = span
        self.calls: Sequence[Call] = program.calls[span.start : span.stop]
        self.reads, self.writes = program.edges(span.start, span.stop)
        self.layer = self.calls[0].layer
        self.directory = directory
        self.rowwise = all(call.region.rowwise for call in self.calls)

    def write(self, case: str, inputs: Values, storage: m.Storage) -> m.RecordedCase:
        """Writes one case's inputs (for the candidate) and expectations (for the judge)."""
        precision = PRECISIONS[storage]
        given = {name: _cast(t, precision.storage) for name, t in inputs.items()}
        caches = tuple(dict.fromkeys(name for call in self.calls for name in call.mutates))
        reference_in = {name: t.clone() if name in caches else t for name, t in given.items()}
        oracle_in = {name: _cast(t.clone() if name in caches else t, torch.float64) for name, t in given.items()}
        reference = run_references(self.calls, self.bench.weights, precision, reference_in)
        oracle = run_references(self.calls, self.bench.weights, FP64, oracle_in)
        made = {name: reference[name] for name in self.writes}
        rows = _sample({**made}, self.span.start)
        expected = {f"ref.{self._role(n)}": _rows(t, rows) for n, t in made.items()}
        expected |= {f"oracle.{self._role(n)}": _rows(oracle[n], rows) for n in made}
        for name in caches:
            expected[f"before.{self._role(name)}"] = given[name]
            expected[f"cacheref.{self._role(name)}"] = reference_in[name]
            expected[f"cacheoracle.{self._role(name)}"] = oracle_in[name]
        choice, error = self._choice(precision, reference_in | reference, oracle_in | oracle, expected, rows)
        if rows is not None:
            expected["rows"] = rows
        stem = self.directory / f"{self.span.phase}-{self.span.start}-{self.span.stop}-{storage}-{_slug(case)}"
        save_file({self._role(n): _host(t) for n, t in given.items()}, f"{stem}.inputs")
        save_file({name: _host(t) for name, t in expected.items()}, f"{stem}.expected")
        return m.RecordedCase(
            span=self.span,
            layer=self.layer,
            region=run_label(self.calls),
            case=case,
            storage=storage,
            inputs=f"{stem}.inputs",
            expected=f"{stem}.expected",
            output_specs={
                self._role(n): (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in made.items()
            },
            rows=rows is not None,
            choice=choice,
            choice_error=error,
        )

    def _choice(
        self, precision: Precision, stored: Values, exact: Values, expected: Values, rows: Tensor | None
    ) -> tuple[str | None, float]:
        """For a run that ends in a choice: its FP64 scores, the vectors it uses, and the baseline's own error."""
        call = self.calls[-1]
        if call.region.decision is None:
            return None, 0.0
        weights = {key: self.bench.weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
        scores = call.region.decision.scores
        theirs = scores(precision, weights, call.attrs, *[stored[name] for name in call.inputs])
        truth = scores(FP64, weights, call.attrs, *[exact[name] for name in call.inputs])
        expected["scores"] = _rows(truth, rows)
        expected |= {f"vector.{key}": tensor for key, tensor in weights.items() if tensor.dim() == 1}
        error = float((theirs.double() - truth).abs().max()) if truth.numel() else 0.0
        return self._role(call.outputs[call.region.outputs.index(call.region.decision.ids)]), error

    def _role(self, name: str) -> str:
        return role(name, self.layer)


def record_step(bench: Bench, request: m.RecordStep) -> m.StepRun:
    """A whole step of the baseline: its choices go to `path`; its logits and those of FP64 with the same choices to
    `path`.expected."""
    phase = bench.workload.phase(request.phase)
    program = bench.model.program(phase)
    choices: Values = {}
    chosen = {name for call in program.calls if call.region.decision is not None for name in call.outputs}
    with torch.no_grad():
        values = bench.fresh_values(phase, request.seed)
        exact = {name: _cast(t.clone() if is_cache(name) else t, torch.float64) for name, t in values.items()}
        env: Values = {}
        for _, env in walk(program, values, bench.weights, bench.workload.precision):
            choices |= {name: env[name] for name in chosen & env.keys() if name not in choices}
        logits = {name: env[name] for name in program.outputs}
        forced = {name: _cast(t, torch.float64) for name, t in choices.items()}
        *_, (_, truth) = walk(program, exact, bench.weights, FP64, forced)
        expected = {f"ref.{n}": _host(t) for n, t in logits.items()}
        expected |= {f"oracle.{n}": _host(truth[n]) for n in logits}
    save_file({name: _host(t) for name, t in choices.items()}, request.path)
    save_file(expected, f"{request.path}.expected")
    finite = all(bool(torch.isfinite(t).all()) for t in logits.values())
    return m.StepRun(calls=len(program.calls), sites=0, finite=finite)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Activations and caches in `dtype`; integers and booleans as they are. FP32 values of a BF16 model (router
    weights, RoPE tables) are widened, never narrowed."""
    if not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype.itemsize >= dtype.itemsize else tensor.to(dtype)


def _sample(made: Values, seed: int) -> Tensor | None:
    """Row indices to judge, where the outputs have the same many rows; None to judge all of them."""
    counts = {tensor.shape[0] for tensor in made.values() if tensor.dim()}
    if len(counts) != 1 or (count := counts.pop()) <= SAMPLED_ROWS:
        return None
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: SAMPLED_ROWS - 2]
    rows: Tensor = torch.cat([drawn, torch.tensor([0, count - 1])]).unique()
    return rows


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows.to(tensor.device)]


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _slug(case: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in case)
