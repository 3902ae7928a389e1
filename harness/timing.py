"""Times steps of several arms, interleaved slot by slot, with fresh tokens in every slot.

On a GPU each arm's step is a CUDA graph over static inputs and a slot is a batch of replays between two events; on a
CPU a slot is a batch of steps read with `perf_counter_ns`. Timing functions are bound when this module is imported,
before any candidate is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

from harness.arms import Bench
from harness.workload import Phase

_synchronize = torch.cuda.synchronize
_Event = torch.cuda.Event
_replay = torch.cuda.CUDAGraph.replay
_elapsed_ms = torch.cuda.Event.elapsed_time
_record = torch.cuda.Event.record

MAX_REPLAYS = 4096
StepFunction = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class SlotTimes:
    """ms per step of each slot; `wall_ms` is the host's mean time per step, to be held against the events'."""

    ms: tuple[float, ...]
    replays: int
    wall_ms: float


class Stepper:
    """One arm's step of one phase, ready to be run again and again on the same static inputs."""

    def __init__(self, executor: StepFunction, values: dict[str, Tensor], device: torch.device) -> None:
        self.executor = executor
        self.values = values
        self.device = device
        self.outputs: dict[str, Tensor] = {}

    def run(self) -> None:
        self.outputs = self.executor(self.values)

    def time_ms(self, replays: int) -> float:
        """Host milliseconds per step over `replays` eager steps, device drained."""
        cuda = self.device.type == "cuda"
        if cuda:
            _synchronize(self.device)
        start = perf_counter_ns()
        for _ in range(replays):
            self.run()
        if cuda:
            _synchronize(self.device)
        return (perf_counter_ns() - start) / replays / 1e6


class GraphStepper(Stepper):
    """The step captured in a CUDA graph. All graphs of a process share one memory pool."""

    def __init__(self, executor: StepFunction, values: dict[str, Tensor], device: torch.device, pool: object) -> None:
        super().__init__(executor, values, device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.outputs = executor(values)
            self.outputs = {}
        torch.cuda.current_stream(device).wait_stream(stream)
        _synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):  # type: ignore[arg-type]
            self.outputs = executor(values)
        self._start, self._stop = _Event(enable_timing=True), _Event(enable_timing=True)

    def run(self) -> None:
        _replay(self.graph)

    def time_ms(self, replays: int) -> float:
        """Device milliseconds per step over `replays` replays, with every stream drained inside the timed region."""
        _synchronize(self.device)
        _record(self._start)
        for _ in range(replays):
            _replay(self.graph)
        _record(self._stop)
        _synchronize(self.device)
        return float(_elapsed_ms(self._start, self._stop)) / replays


class Timer:
    """The steppers of one process: arms by phase, sharing static inputs and, on a GPU, one graph memory pool."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._pool: object | None = None
        self._steppers: dict[tuple[str, str], Stepper] = {}

    def stepper(self, arm: str, phase: Phase) -> Stepper:
        key = (arm, phase.name)
        if key not in self._steppers:
            executor = self.bench.arm(arm, phase).executor
            values = self.bench.values(phase, self.bench.seed)
            self._steppers[key] = self.wrap(executor, values)
        return self._steppers[key]

    def wrap(self, executor: StepFunction, values: dict[str, Tensor], captured: bool = True) -> Stepper:
        if self.bench.device.type != "cuda" or not captured:
            return Stepper(executor, values, self.bench.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return GraphStepper(executor, values, self.bench.device, self._pool)

    def add(self, arm: str, phase: Phase, stepper: Stepper) -> None:
        """A peer's stepper under an arm name of its own."""
        self._steppers[(arm, phase.name)] = stepper

    def measure(self, phase: Phase, slots: Sequence[tuple[str, int]], slot_ms: float, warm_ms: float) -> SlotTimes:
        """Times `slots` of (arm, token seed) in order, each of at least `slot_ms`, after `warm_ms` of heat per arm.

        The number of steps in a slot is the same for every arm.
        """
        arms = tuple(dict.fromkeys(arm for arm, _ in slots))
        steppers = {arm: self.stepper(arm, phase) for arm in arms}
        slowest = max(self._heat(stepper, warm_ms) for stepper in steppers.values())
        fastest = min(stepper.time_ms(1) for stepper in steppers.values())
        replays = max(1, min(MAX_REPLAYS, round(slot_ms / max(min(fastest, slowest), 1e-3))))
        tokens = self.bench.values(phase, self.bench.seed)["token_ids"]
        times = []
        wall_ns = 0
        for arm, seed in slots:
            tokens.copy_(self.bench.model.tokens(phase, seed).to(tokens.device))
            if replays > 1:  # a step shorter than a slot begins its slot warm
                steppers[arm].run()
            if self.bench.device.type == "cuda":
                _synchronize(self.bench.device)
            start = perf_counter_ns()
            times.append(steppers[arm].time_ms(replays))
            wall_ns += perf_counter_ns() - start
        return SlotTimes(tuple(times), replays, wall_ns / 1e6 / replays / max(len(slots), 1))

    def _heat(self, stepper: Stepper, warm_ms: float) -> float:
        """Runs the step for `warm_ms`; the median ms per step."""
        start = perf_counter_ns()
        times = [stepper.time_ms(1)]
        while (perf_counter_ns() - start) / 1e6 < warm_ms and len(times) < 10_000:
            times.append(stepper.time_ms(1))
        return statistics.median(times)
