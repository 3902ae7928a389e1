"""Reads a profiler's Chrome trace and says which step of a program each microsecond belongs to.

A step's range is the `region:<index>` annotation that its bound function ran in. A GPU kernel, copy or fill belongs to
the step in whose range its launch stands, by correlation id, so that one kernel name in two regions stays two; time
that cannot be placed is unattributed, never guessed.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import DataError

STEP = "optimize:step"
"""The annotation around a step that may count: of several, the fastest is the least disturbed and counts alone."""
REGION = "region:"
BETWEEN = "(between operators)"
"""Host time of a region on a CPU that no operator covers: Python and dispatch."""
CLOCK_SLACK = 1.01
"""By how much the parts may exceed the step: host and device times come from two clocks."""

Thread = tuple[object, object]
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")


@dataclass(slots=True)
class StepTime:
    """What one step of a program took: microseconds, launches (top-level operators on a CPU), and us by kernel."""

    us: float = 0.0
    launches: int = 0
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, kernel: str, us: float) -> None:
        self.us += us
        self.launches += 1
        self.kernels[kernel] += us


@dataclass(frozen=True)
class Attribution:
    """Time by step index, what no step owns, the whole, and why the trace is not complete (empty where it is)."""

    steps: dict[int, StepTime]
    step_us: float
    """Host time of the counted step, the device drained at its end."""
    unattributed_us: float
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One complete event, microseconds; `correlation` joins a launch and its kernel, `external` a kernel and its op."""

    category: str
    name: str
    thread: Thread
    start: float
    stop: float
    correlation: int | None
    external: int | None


class Ranges:
    """Host ranges of the counted step: which step index, if any, a thread was in at a time."""

    def __init__(self, events: Iterable[Event]) -> None:
        marks = [event for event in events if event.category == "user_annotation"]
        whole = [event for event in marks if event.name == STEP]
        if not whole:
            raise DataError(f"the trace holds no {STEP} annotation: it is not one of a profiled step")
        self.step = min(whole, key=lambda e: e.stop - e.start)
        self.outer: list[Event] = []
        for event in sorted(marks, key=lambda e: (e.start, -e.stop)):
            named = event.name.startswith(REGION) and event.name[len(REGION) :].isdigit()
            nested = bool(self.outer) and event.start < self.outer[-1].stop
            if named and not nested and event.thread == self.step.thread and self.covers(event.start):
                self.outer.append(event)
        self._starts = [event.start for event in self.outer]

    def covers(self, at: float) -> bool:
        return self.step.start <= at < self.step.stop

    def index(self, thread: Thread, at: float) -> int | None:
        place = bisect.bisect_right(self._starts, at) - 1
        if place < 0 or thread != self.step.thread or at >= self.outer[place].stop:
            return None
        return step_index(self.outer[place])

    def problems(self, steps: int) -> list[str]:
        seen = Counter(step_index(event) for event in self.outer)
        wrong = [index for index in range(steps) if seen[index] != 1]
        if not wrong:
            return []
        return [f"{len(wrong)} of {steps} steps have no range of their own in the trace, the first is {wrong[0]}"]


def step_index(event: Event) -> int:
    return int(event.name[len(REGION) :])


def read(path: Path) -> list[Event]:
    """The complete events of a Chrome trace, plain or gzipped. Raises DataError for a file that is not one."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = json.loads(raw.decode("utf-8", "replace"), strict=False)["traceEvents"]
        return [_event(item) for item in found if item.get("ph") == "X" and "dur" in item]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a profiler's trace: {type(error).__name__}: {error}") from error


def _event(item: dict[str, Any]) -> Event:
    args = item.get("args", {})
    start = float(item["ts"])
    return Event(
        str(item.get("cat", "")),
        str(item["name"]),
        (item.get("pid"), item.get("tid")),
        start,
        start + float(item["dur"]),
        args.get("correlation"),
        args.get("External id"),
    )


def attribute(events: Sequence[Event], steps: int, *, gpu: bool) -> Attribution:
    """Splits the counted step's time over its `steps` bound steps: device time on a GPU, host time on a CPU."""
    ranges = Ranges(events)
    problems = ranges.problems(steps)
    step_us = ranges.step.stop - ranges.step.start
    if gpu:
        times, unattributed, lost = _device_time(events, ranges)
        problems += lost
    else:
        times = _host_time(events, ranges)
        unattributed = max(step_us - sum(time.us for time in times.values()), 0.0)
    problems += _unreconciled(sum(time.us for time in times.values()) + unattributed, step_us)
    return Attribution(times, step_us, unattributed, tuple(problems))


def _unreconciled(total_us: float, step_us: float) -> list[str]:
    """The parts of a step cannot take longer than the step."""
    if total_us <= CLOCK_SLACK * step_us:
        return []
    return [f"the parts sum to {total_us / 1e3:.3f} ms in a step of {step_us / 1e3:.3f} ms"]


def _device_time(events: Sequence[Event], ranges: Ranges) -> tuple[dict[int, StepTime], float, list[str]]:
    launches = {e.correlation: e for e in events if e.category in _LAUNCH and e.correlation}
    hosts = {e.external: e for e in events if e.category in ("cpu_op", "user_annotation") and e.external}
    work = [event for event in events if event.category in _DEVICE]
    done = {event.correlation for event in work}
    times: dict[int, StepTime] = defaultdict(StepTime)
    unattributed, orphans = 0.0, 0
    for event, own_us in _exclusive(work):
        host = launches.get(event.correlation or 0) or hosts.get(event.external or 0)
        if host is None:
            if ranges.covers(event.start):
                orphans += 1
                unattributed += own_us
        elif ranges.covers(host.start):
            index = ranges.index(host.thread, host.start)
            if index is None:
                unattributed += own_us
            else:
                times[index].add(event.name, own_us)
    silent = sum(
        "LaunchKernel" in e.name and ranges.covers(e.start) and e.correlation not in done for e in launches.values()
    )
    problems = []
    if orphans:
        problems.append(f"{orphans} device events have no launch in the trace")
    if silent:
        problems.append(f"{silent} kernel launches have no device event in the trace")
    if not times and not unattributed:
        problems.append("the trace holds no device event of the step")
    return times, unattributed, problems


def _exclusive(work: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Device events with the microseconds each adds to the busy time: overlap counts once, for the earlier event.

    A kernel that was started early and waits (programmatic dependent launch), or one on a second stream, would
    otherwise make the sum of the kernels exceed the time that passed.
    """
    busy = 0.0
    for event in sorted(work, key=lambda e: (e.start, e.stop)):
        yield event, max(event.stop - max(event.start, busy), 0.0)
        busy = max(busy, event.stop)


def _host_time(events: Iterable[Event], ranges: Ranges) -> dict[int, StepTime]:
    """A range's own duration, told apart by operator self time: an operator called by another is not counted twice."""
    times: dict[int, StepTime] = {}
    for outer in ranges.outer:
        time = times.setdefault(step_index(outer), StepTime())
        time.us += outer.stop - outer.start
        time.kernels[BETWEEN] += outer.stop - outer.start
    ops = [event for event in events if event.category == "cpu_op"]
    parents: list[Event] = []
    for op in sorted(ops, key=lambda e: (e.start, -e.stop)):
        index = ranges.index(op.thread, op.start)
        if index is None:
            continue
        while parents and parents[-1].stop <= op.start:
            parents.pop()
        time = times[index]
        took = op.stop - op.start
        time.kernels[op.name] += took
        time.kernels[parents[-1].name if parents else BETWEEN] -= took
        time.launches += not parents
        parents.append(op)
    return times
