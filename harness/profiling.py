"""Program -> Profile: the time of every region in one real step, and the bytes and FLOPs it cannot do without.

The step runs eagerly under torch.profiler, each bound step inside a range of its own; trace.py splits the time over
them. On a GPU the milliseconds are those of its kernels, which the captured step runs too; only launching differs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler

from harness import trace as traces
from harness.device import device_name
from harness.executor import Bound, Executor, bind_reference
from harness.program import Call, Cost, Outputs, Precision, Program, Step, Substitution, run_label
from harness.roofline import floor_ms
from harness.schema import Ceilings, Profile, RegionTime
from harness.workload import Model, Phase

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
STEPS = {"cpu": 5, "cuda": 2}
"""Steps to choose the least disturbed of; a GPU's are steadier, and one holds tens of thousands of events."""

Bind = Callable[[Step], Bound]


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Costs of the baseline's calls by call index, with the dtype of each one's arithmetic and every value's bytes."""

    costs: tuple[Cost, ...]
    dtypes: tuple[str, ...]
    value_bytes: Mapping[str, int]

    def of(self, step: Step, index: int) -> Cost:
        """The cost of a step whose first call is `calls[index]`.

        A substitution's is its calls' without the traffic between them: an input is read once, an output written
        once, and what is made and used inside moves nothing. Mutated values keep what their calls count.
        """
        if isinstance(step, Call):
            return self.costs[index]
        parts = self.costs[index : index + len(step.calls)]
        made = {name for call in step.calls for name in call.outputs}
        reads = [name for call in step.calls for name in dict.fromkeys(call.inputs) if name not in step.mutates]
        saved = sum(self.value_bytes[name] for name in reads)
        saved -= sum(self.value_bytes[name] for name in set(reads) - made)
        saved += sum(self.value_bytes[name] for name in made - set(step.outputs))
        least = sum(self.value_bytes[name] for name in step.outputs)
        moved = sum(part.bytes for part in parts)
        return Cost(max(moved - saved, least), sum(part.flops for part in parts))

    def floor_ms(self, step: Step, index: int, ceilings: Ceilings) -> float:
        """The step's floor: of a call its own; of a run its traffic against the sum of its products' times."""
        if isinstance(step, Call):
            return floor_ms(self.costs[index].bytes, self.costs[index].flops, self.dtypes[index], ceilings)
        span = range(index, index + len(step.calls))
        memory_ms = floor_ms(self.of(step, index).bytes, 0, self.dtypes[index], ceilings)
        return max(memory_ms, sum(floor_ms(0, self.costs[i].flops, self.dtypes[i], ceilings) for i in span))


def count_costs(
    program: Program, weights: Mapping[str, Tensor], precision: Precision, values: Mapping[str, Tensor]
) -> StepCosts:
    """Runs the program's references, substitutions put aside, and asks each region's cost on what it met.

    Works on meta tensors, where a count that depends on values is the largest or the expected one.
    """
    plain = dataclasses.replace(program, substitutions=())
    costs: list[Cost] = []
    dtypes: list[str] = []
    sizes = {name: _bytes(tensor) for name, tensor in values.items()}

    def observe(_: int, step: Step, inputs: list[Tensor], outputs: Outputs) -> Outputs:
        assert isinstance(step, Call)
        own = {role: weights[name] for role, name in zip(step.region.weights, step.weights, strict=True)}
        costs.append(step.region.cost(inputs, outputs, own, step.attrs))
        matrices = [weight.dtype for weight in own.values() if weight.ndim >= 2]
        dtypes.append(DTYPES[matrices[0] if matrices else precision.storage])
        sizes.update(zip(step.outputs, map(_bytes, outputs), strict=True))
        return outputs

    def bind(step: Step) -> Bound:
        assert isinstance(step, Call)
        return bind_reference(step, weights, precision)

    with torch.no_grad():
        Executor(plain, bind)(values, observe)
    return StepCosts(tuple(costs), tuple(dtypes), sizes)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclasses.dataclass(frozen=True)
class StepTotals:
    """One step in all: its calls, what they move and compute one by one, and the least that any fusion leaves."""

    calls: int
    bytes: int
    flops: int
    least_bytes: int
    """Weights, caches, inputs and outputs alone: no traffic between regions."""
    weight_bytes: int
    """Every weight the program names, read in this step or not."""
    floor_ms: Callable[[Ceilings], float]
    """The step's floor on a device of these ceilings, everything fused."""


def cost_on_meta(model: Model, phase: Phase, precision: Precision) -> StepTotals:
    """A phase's totals without memory or a device: the references run on meta tensors."""
    program = model.program(phase)
    meta = torch.device("meta")
    source = model.weights(meta, 0, precision)
    specs = {name: source.spec(name) for call in program.calls for name in call.weights}
    weights = {name: torch.empty(spec.shape, dtype=spec.dtype, device=meta) for name, spec in specs.items()}
    counted = count_costs(program, weights, precision, model.inputs(phase, meta, 0, precision))
    whole = Substitution("step", 0, program.calls, program.inputs, program.outputs)
    return StepTotals(
        calls=len(program.calls),
        bytes=sum(cost.bytes for cost in counted.costs),
        flops=sum(cost.flops for cost in counted.costs),
        least_bytes=counted.of(whole, 0).bytes,
        weight_bytes=sum(spec.bytes for spec in specs.values()),
        floor_ms=functools.partial(counted.floor_ms, whole, 0),
    )


def profile_step(
    *,
    program: Program,
    bind: Bind,
    values: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    workload: str,
    phase: str,
    precision: Precision,
    device: torch.device,
    ceilings: Ceilings,
    trace: Path | None = None,
    captured_ms: float | None = None,
) -> Profile:
    """One warm step's time by region. `trace` keeps the Chrome trace: a warm step, then `STEPS` of them.

    A take that does not add up, or lost events, is taken once more; then the profile says `complete=False` and why.
    """
    costs = count_costs(program, weights, precision, values)
    found = attribute_step(program, bind, values, device, trace)
    regions = _regions(tuple(program.steps()), found, costs, ceilings)
    return Profile(
        workload=workload,
        phase=phase,
        device=device_name(device),
        regions=regions,
        unattributed_ms=found.unattributed_us / 1e3,
        step_ms=found.step_us / 1e3,
        captured_ms=captured_ms,
        complete=not found.problems,
        reason="; ".join(found.problems),
        launches=sum(region.launches for region in regions),
    )


def attribute_step(
    program: Program, bind: Bind, values: Mapping[str, Tensor], device: torch.device, trace: Path | None = None
) -> traces.Attribution:
    """A warm step's time and kernels by step index; taken once more where the first take has problems."""
    executor = Executor(program, functools.partial(_ranged, bind, itertools.count()))
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        _run(executor, values, device)
        path = trace or Path(scratch) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            _take(executor, values, device, path)
            found = traces.attribute(traces.read(path), len(executor.steps), gpu=device.type == "cuda")
            if not found.problems:
                break
    return found


def _ranged(bind: Bind, numbers: Iterator[int], step: Step) -> Bound:
    """The bound step inside an annotation that trace.py knows it by; an executor binds steps in their order."""
    bound = bind(step)
    label = f"{traces.REGION}{next(numbers)}"

    def ranged(*args: Tensor) -> Outputs:
        with record_function(label):
            return bound(*args)

    return ranged


def _run(executor: Executor, values: Mapping[str, Tensor], device: torch.device) -> None:
    executor(values)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _take(executor: Executor, values: Mapping[str, Tensor], device: torch.device, path: Path) -> None:
    """Profiles a warm step and those that may count, and writes the trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profiler(activities=activities) as taken:
        _run(executor, values, device)
        for _ in range(STEPS[device.type]):
            with record_function(traces.STEP):
                _run(executor, values, device)
    taken.export_chrome_trace(str(path))


def label_of(step: Step) -> str:
    """The name a step's time stands under: its region, or the rewrite and the run it replaces."""
    return f"{step.rewrite}: {run_label(step.calls)}" if isinstance(step, Substitution) else step.region.name


def _regions(
    steps: tuple[Step, ...], found: traces.Attribution, costs: StepCosts, ceilings: Ceilings
) -> tuple[RegionTime, ...]:
    """Steps of one label added up, in the order in which the labels first run."""
    groups: dict[str, list[tuple[int, int, Step]]] = defaultdict(list)
    first = 0
    for index, step in enumerate(steps):
        groups[label_of(step)].append((index, first, step))
        first += len(step.calls) if isinstance(step, Substitution) else 1
    made = []
    for label, members in groups.items():
        times = [found.steps.get(index, traces.StepTime()) for index, _, _ in members]
        parts = [costs.of(step, call) for _, call, step in members]
        kernels: dict[str, float] = defaultdict(float)
        for time in times:
            for kernel, us in time.kernels.items():
                kernels[kernel] += us / 1e3
        made.append(
            RegionTime(
                region=label,
                calls=len(members),
                launches=sum(time.launches for time in times),
                time_ms=sum(time.us for time in times) / 1e3,
                floor_ms=sum(costs.floor_ms(step, call, ceilings) for _, call, step in members),
                bytes=sum(part.bytes for part in parts),
                flops=sum(part.flops for part in parts),
                kernels=dict(sorted(kernels.items(), key=lambda item: -item[1])),
            )
        )
    return tuple(made)
