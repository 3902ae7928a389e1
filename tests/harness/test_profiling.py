"""Attribution of a step's time, on traces written by hand as a GPU's look and on real steps of a CPU."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from harness import profiling, roofline, trace
from harness.errors import DataError
from harness.executor import Bound, bind_reference
from harness.program import (
    FP32,
    Attrs,
    Call,
    Cost,
    Outputs,
    Program,
    Region,
    Step,
    Weights,
)
from harness.schema import Ceilings, Profile
from harness.workload import load_workloads

CPU = torch.device("cpu")
CEILINGS = Ceilings(
    device="here", copy_bytes_per_s=1e10, read_bytes_per_s=1e10, flops_per_s={"bf16": 1e11, "fp32": 1e11}
)
GEMM = "nvjet_tst_64x8"


def span(category: str, name: str, start: float, took: float, tid: object = 1, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": took, "args": args}


def launch(at: float, correlation: int, tid: object = 1, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    category = "cuda_driver" if name.startswith("cuL") else "cuda_runtime"
    return span(category, name, at, 2, tid, correlation=correlation)


def kernel(start: float, took: float, correlation: int, name: str = GEMM, **args: object) -> dict[str, Any]:
    return span("kernel", name, start, took, "stream 7", correlation=correlation, **args)


STEP = span("user_annotation", trace.STEP, 1000, 1000)
TWO_REGIONS = [
    STEP,
    span("user_annotation", "region:0", 1010, 100),
    span("user_annotation", "region:1", 1120, 100),
]


def attributed(tmp_path: Path, events: Sequence[dict[str, Any]], steps: int = 2) -> trace.Attribution:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    return trace.attribute(trace.read(path), steps, gpu=True)


def times(found: trace.Attribution) -> dict[int, float]:
    return {index: time.us for index, time in found.steps.items()}


def test_one_kernel_name_in_two_regions_stays_two(tmp_path: Path) -> None:
    found = attributed(
        tmp_path,
        [
            *TWO_REGIONS,
            launch(1020, 1),
            launch(1130, 2, name="cuLaunchKernelEx"),
            kernel(1200, 30, 1),
            kernel(1240, 50, 2),
        ],
    )
    assert times(found) == {0: 30, 1: 50}
    assert found.steps[0].kernels == {GEMM: 30}
    assert found.problems == ()
    assert found.unattributed_us == 0


def test_copies_fills_and_graphs_belong_to_their_launch(tmp_path: Path) -> None:
    events = [
        launch(1020, 1, name="cudaMemcpyAsync"),
        launch(1022, 2, name="cudaMemsetAsync"),
        launch(1130, 3, name="cudaGraphLaunch"),
        span("gpu_memcpy", "Memcpy DtoD", 1200, 5, "stream 7", correlation=1),
        span("gpu_memset", "Memset", 1210, 6, "stream 7", correlation=2),
        kernel(1220, 7, 3, "a"),
        kernel(1230, 8, 3, "b"),
    ]
    found = attributed(tmp_path, [*TWO_REGIONS, *events])
    assert times(found) == {0: 11, 1: 15}
    assert [found.steps[i].launches for i in (0, 1)] == [2, 2]


def test_warm_steps_and_slower_steps_do_not_count(tmp_path: Path) -> None:
    warm = [span("user_annotation", "region:0", 10, 100), launch(20, 8), kernel(40, 500, 8)]
    slow = [
        span("user_annotation", trace.STEP, 3000, 5000),
        span("user_annotation", "region:0", 3010, 100),
        launch(3020, 9),
        kernel(3100, 900, 9),
    ]
    found = attributed(tmp_path, [*warm, *TWO_REGIONS, launch(1020, 1), kernel(1200, 30, 1), *slow])
    assert times(found) == {0: 30}
    assert found.step_us == 1000


def test_a_lost_launch_is_unattributed_and_said(tmp_path: Path) -> None:
    found = attributed(tmp_path, [*TWO_REGIONS, launch(1020, 1), kernel(1200, 30, 1), kernel(1240, 50, 2)])
    assert times(found) == {0: 30}
    assert found.unattributed_us == 50
    assert found.problems == ("1 device events have no launch in the trace",)


def test_a_kernel_without_a_launch_record_is_placed_by_its_operator(tmp_path: Path) -> None:
    op = span("cpu_op", "aten::mm", 1130, 5, **{"External id": 77})
    found = attributed(tmp_path, [*TWO_REGIONS, op, kernel(1240, 50, 2, **{"External id": 77})])
    assert times(found) == {1: 50}
    assert found.problems == ()


def test_a_lost_kernel_is_said(tmp_path: Path) -> None:
    found = attributed(tmp_path, [*TWO_REGIONS, launch(1020, 1), launch(1130, 2), kernel(1200, 30, 1)])
    assert found.problems == ("1 kernel launches have no device event in the trace",)


def test_a_trace_without_device_events_is_said(tmp_path: Path) -> None:
    assert attributed(tmp_path, TWO_REGIONS).problems == ("the trace holds no device event of the step",)


def test_a_launch_between_regions_or_from_another_thread_is_unattributed(tmp_path: Path) -> None:
    events = [launch(1115, 1), launch(1020, 2, tid=99), launch(1021, 3), kernel(1200, 3, 1), kernel(1210, 4, 2)]
    found = attributed(tmp_path, [*TWO_REGIONS, *events, kernel(1220, 5, 3)])
    assert times(found) == {0: 5}
    assert found.unattributed_us == 7
    assert found.problems == ()


def test_overlapping_kernels_count_the_time_that_passed(tmp_path: Path) -> None:
    """The second was started early and waits for the first: 40 us passed, not 65."""
    found = attributed(
        tmp_path, [*TWO_REGIONS, launch(1020, 1), launch(1130, 2), kernel(1200, 30, 1), kernel(1205, 35, 2)]
    )
    assert times(found) == {0: 30, 1: 10}


def test_a_nested_annotation_of_a_regions_name_changes_nothing(tmp_path: Path) -> None:
    inner = [span("user_annotation", "region:1", 1015, 20), span("user_annotation", "region:x", 1016, 5)]
    found = attributed(tmp_path, [*TWO_REGIONS, *inner, launch(1018, 1), kernel(1200, 30, 1)])
    assert times(found) == {0: 30}
    assert found.problems == ()


def test_a_missing_or_doubled_range_is_said(tmp_path: Path) -> None:
    work = [launch(1020, 1), kernel(1200, 30, 1)]
    again = span("user_annotation", "region:1", 1300, 10)
    assert "1 of 3 steps" in attributed(tmp_path, [*TWO_REGIONS, *work], steps=3).problems[0]
    assert "the first is 1" in attributed(tmp_path, [*TWO_REGIONS, again, *work]).problems[0]


def test_parts_longer_than_the_step_are_said(tmp_path: Path) -> None:
    found = attributed(tmp_path, [*TWO_REGIONS, launch(1020, 1), kernel(1200, 1500, 1)])
    assert found.problems == ("the parts sum to 1.500 ms in a step of 1.000 ms",)


def test_a_gzipped_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TWO_REGIONS}).encode()))
    assert len(trace.read(path)) == 3


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{"ph": "X", "dur": 1}]}', '{"traceEvents": 3}', "{}"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match="is not a profiler's trace"):
        trace.read(tmp_path / "t.json")
    with pytest.raises(DataError, match="is not a profiler's trace"):
        trace.read(tmp_path / "absent.json")


def test_a_trace_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="optimize:step"):
        trace.attribute([], 1, gpu=False)


def scaled(precision: object, weights: Weights, attrs: Attrs, rows: Tensor) -> Outputs:
    return (rows * attrs["by"],)


def product(precision: object, weights: Weights, attrs: Attrs, rows: Tensor) -> Outputs:
    return (rows @ weights["weight"].T,)


def moved(inputs: Sequence[Tensor], outputs: Outputs, weights: Weights, attrs: Attrs) -> Cost:
    tensors = (*inputs, *outputs, *weights.values())
    return Cost(sum(t.numel() * t.element_size() for t in tensors), 100)


SCALE = Region("scale", ("x",), ("y",), scaled, moved)
PRODUCT = Region("product", ("x",), ("y",), product, moved, weights=("weight",), matmul=True)
WEIGHTS = {"w": torch.randn(256, 256)}
VALUES = {"x": torch.randn(64, 256)}
ROWS_BYTES, WEIGHT_BYTES = 64 * 256 * 4, 256 * 256 * 4


def chain() -> Program:
    """x -> scale -> product -> scale -> product -> out, one layer each pair."""
    calls = (
        Call(SCALE, 0, ("x",), ("0.a",), attrs={"by": 2.0}),
        Call(PRODUCT, 0, ("0.a",), ("1.hidden",), ("w",)),
        Call(SCALE, 1, ("1.hidden",), ("1.a",), attrs={"by": 0.5}),
        Call(PRODUCT, 1, ("1.a",), ("out",), ("w",)),
    )
    return Program(calls, ("x",), ("out",))


def bind(step: Step) -> Bound:
    if isinstance(step, Call):
        return bind_reference(step, WEIGHTS, FP32)
    return lambda rows: ((rows * step.calls[0].attrs["by"]) @ WEIGHTS["w"].T,)


def profiled(program: Program, how: Callable[[Step], Bound] = bind, keep: Path | None = None) -> Profile:
    return profiling.profile_step(
        program=program,
        bind=how,
        values=VALUES,
        weights=WEIGHTS,
        workload="chain",
        phase="decode-b1",
        precision=FP32,
        device=CPU,
        ceilings=CEILINGS,
        trace=keep,
    )


def test_a_real_step_adds_up() -> None:
    found = profiled(chain())
    assert found.complete
    assert found.captured_ms is None
    assert [(r.region, r.calls, r.launches) for r in found.regions] == [("scale", 2, 2), ("product", 2, 4)]
    total = sum(r.time_ms for r in found.regions)
    assert 0 < total < found.step_ms
    assert total + found.unattributed_ms == pytest.approx(found.step_ms)
    for region in found.regions:
        assert sum(region.kernels.values()) == pytest.approx(region.time_ms)
    assert "aten::mm" in found.regions[1].kernels
    assert "aten::mm" not in found.regions[0].kernels


def test_a_regions_counts_and_floor_are_its_calls_sum() -> None:
    scale, matrix = profiled(chain()).regions
    assert scale.bytes == 2 * 2 * ROWS_BYTES
    assert matrix.bytes == 2 * (2 * ROWS_BYTES + WEIGHT_BYTES)
    assert (scale.flops, matrix.flops) == (200, 200)
    assert scale.floor_ms == pytest.approx(scale.bytes / 1e10 * 1e3)


def test_a_rewrite_stands_under_its_own_label_without_the_traffic_it_saves() -> None:
    program, _ = chain().substitute("scaled_product", [("scale", "product")])
    (only,) = profiled(program).regions
    assert only.region == "scaled_product: scale + product"
    assert only.calls == 2
    assert only.bytes == 2 * (2 * ROWS_BYTES + WEIGHT_BYTES)
    assert only.flops == 400


def test_an_input_that_several_calls_of_a_run_read_is_read_once() -> None:
    calls = (
        Call(PRODUCT, 0, ("x",), ("0.q",), ("w",)),
        Call(PRODUCT, 0, ("x",), ("0.k",), ("w",)),
    )
    program = Program(calls, ("x",), ("0.q", "0.k")).replace(0, 2, "merged")
    counted = profiling.count_costs(program, WEIGHTS, FP32, VALUES)
    (merged,) = program.substitutions
    assert counted.of(merged, 0).bytes == 3 * ROWS_BYTES + 2 * WEIGHT_BYTES
    assert counted.floor_ms(merged, 0, CEILINGS) == pytest.approx(counted.of(merged, 0).bytes / 1e10 * 1e3)


def test_annotations_inside_a_region_do_not_double_its_time() -> None:
    def nested(step: Step) -> Bound:
        bound = bind(step)

        def run(*args: Tensor) -> Outputs:
            with record_function("region:0"), record_function("mine"):
                return bound(*args)

        return run

    found = profiled(chain(), nested)
    assert found.complete
    assert sum(r.time_ms for r in found.regions) <= found.step_ms


class Seen(TorchDispatchMode):
    """Passes every operator on, as a logging or counting mode does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_active_dispatch_mode_does_not_double_time() -> None:
    with Seen():
        found = profiled(chain())
    assert found.complete
    total = sum(r.time_ms for r in found.regions)
    assert total + found.unattributed_ms == pytest.approx(found.step_ms)
    assert all(ms >= 0 for r in found.regions for ms in r.kernels.values())


def test_a_take_that_does_not_add_up_is_taken_once_more_and_then_said() -> None:
    """A rewrite that writes the harness's own annotation leaves a step without ranges."""
    runs = 0

    def forged(step: Step) -> Bound:
        bound = bind(step)

        def run(*args: Tensor) -> Outputs:
            nonlocal runs
            runs += step.layer == 0
            with record_function(trace.STEP):
                return bound(*args)

        return run

    found = profiled(chain(), forged)
    assert not found.complete
    assert "4 of 4 steps have no range of their own" in found.reason
    assert runs == 2 * (1 + 2 * (1 + profiling.STEPS["cpu"]))
    with pytest.raises(DataError, match="never ranked"):
        roofline.gaps(found, CEILINGS)


def test_the_trace_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    profiled(chain(), keep=tmp_path / "traces" / "step.json.gz")
    assert trace.read(tmp_path / "traces" / "step.json.gz")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take seconds for a step of milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("phase_name", ["decode-b1", "prefill-2x128"])
def test_the_toy_beam_is_profiled_and_ranked(one_thread: None, phase_name: str) -> None:
    workload = load_workloads()["beam-tiny"]
    model = importlib.import_module(workload.model).build(workload)
    phase, precision = workload.phase(phase_name), workload.precision
    weights = model.weights(CPU, 3, precision)
    program = model.program(phase)
    found = profiling.profile_step(
        program=program,
        bind=lambda step: bind_reference(step, weights, precision),
        values=model.inputs(phase, CPU, 3, precision),
        weights=weights,
        workload=workload.name,
        phase=phase.name,
        precision=precision,
        device=CPU,
        ceilings=CEILINGS,
    )
    assert found.complete, found.reason
    assert sum(r.calls for r in found.regions) == len(program.calls)
    assert {r.region for r in found.regions} == {call.region.name for call in program.calls}
    ranked = roofline.gaps(found, CEILINGS)
    assert ranked[0].gap_ms >= ranked[-1].gap_ms
    assert sum(gap.share for gap in ranked) <= 1.0


def meta_totals(name: str, phase: str) -> profiling.StepTotals:
    workload = load_workloads()[name]
    model = importlib.import_module(workload.model).build(workload)
    return profiling.cost_on_meta(model, workload.phase(phase), workload.precision)


def test_a_full_size_step_is_counted_without_memory() -> None:
    """BEAM.md's figures for one rank of TP8: 117 GiB of weights, 5.93 GB and 1.39 ms a decode step at 4.25 TB/s."""
    card = Ceilings(
        device="a card", copy_bytes_per_s=4.25e12, read_bytes_per_s=4.25e12, flops_per_s={"bf16": 780e12, "fp32": 50e12}
    )
    totals = meta_totals("beam-tp8-rank", "decode-b1")
    assert totals.weight_bytes / 2**30 == pytest.approx(117, abs=0.5)
    assert totals.least_bytes / 1e9 == pytest.approx(5.93, abs=0.02)
    assert totals.floor_ms(card) == pytest.approx(1.395, abs=0.01)
    assert totals.least_bytes < totals.bytes


def test_meta_counts_agree_with_a_run(one_thread: None) -> None:
    workload = load_workloads()["beam-tiny"]
    model = importlib.import_module(workload.model).build(workload)
    phase, precision = workload.phase("decode-b1"), workload.precision
    values: Mapping[str, Tensor] = model.inputs(phase, CPU, 3, precision)
    counted = profiling.count_costs(model.program(phase), model.weights(CPU, 3, precision), precision, values)
    totals = meta_totals("beam-tiny", "decode-b1")
    assert sum(cost.flops for cost in counted.costs) == totals.flops
    assert sum(cost.bytes for cost in counted.costs) == totals.bytes
