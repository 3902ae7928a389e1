"""What every candidate of a run is judged with: the workload on a device, seeds, limits, children, and one launch.

A judge owns no verdicts: decide.py and numerics.py give those.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness import decide
from harness import messages as m
from harness.errors import DataError, WorkerError
from harness.sandbox import Child, R
from harness.schema import Block, Launch
from harness.workload import Model, Phase, Workload


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds and slot lengths in milliseconds."""

    build_s: float = 120
    numerics_s: float = 300
    step_s: float = 300
    measure_s: float = 300
    slot_ms: float = 25
    warm_ms: float = 150
    screen_blocks: int = 8
    confirm_blocks: int = 6


@dataclass
class Judge:
    """What all candidates of a run are judged with: workload, device, seed, rule, and a scratch folder."""

    workload: Workload
    model: Model
    device: str
    seed: int
    scratch: Path
    rule: decide.Rule = field(default_factory=decide.Rule)
    limits: Limits = field(default_factory=Limits)
    threads: int = 1
    cores: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    """Phases measured; all of the workload's where empty."""
    said: Callable[[str], None] = lambda _: None
    """Told what is going on, a line at a time."""
    _oracle: Child | None = field(default=None, repr=False)

    def draw(self, *words: object) -> int:
        """A seed that follows from the run's and from what it is for; the same after a resume."""
        text = "/".join(map(str, (self.seed, *words)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])

    def measured_phases(self) -> tuple[Phase, ...]:
        return tuple(p for p in self.workload.phases if not self.phases or p.name in self.phases)

    def opening(self, arms: Mapping[str, Sequence[str]], seed: int | None = None) -> m.Open:
        return m.Open(
            workload=self.workload,
            device=self.device,
            seed=self.seed if seed is None else seed,
            threads=self.threads,
            cores=self.cores,
            arms={name: tuple(files) for name, files in arms.items()},
        )

    def spawn(self, label: str, cache: str) -> Child:
        """A fresh child, starting. Compiled code goes to the folder `cache`, which the children of one candidate share
        and no other's see: a build that is killed leaves nothing behind for the next."""
        return Child(self.scratch / label, self.scratch / f"cache-{cache}")

    @contextmanager
    def child(
        self, arms: Mapping[str, Sequence[str]], label: str, cache: str = "baseline"
    ) -> Iterator[tuple[Child, m.Opened]]:
        """A fresh child with its arms opened; its scratch folder is removed afterwards."""
        with self.spawn(label, cache) as child:
            yield child, child.ask(self.opening(arms), m.Opened, self.limits.build_s)
        shutil.rmtree(child.scratch, ignore_errors=True)

    def oracle(self) -> Child:
        """The trusted child that records inputs and expected values; started on first use and kept."""
        if self._oracle is None or self._oracle.process.poll() is not None:
            self._oracle = self.spawn("oracle", "baseline")
            self._oracle.ask(self.opening({"A": ()}), m.Opened, self.limits.build_s)
        return self._oracle

    def ask_oracle(self, request: m.Request, reply_type: type[R], deadline_s: float) -> R:
        """The trusted child's answer. Raises DataError where it gives none: that is no verdict on a candidate."""
        try:
            return self.oracle().ask(request, reply_type, deadline_s)
        except WorkerError as error:
            raise DataError(f"the trusted child failed: {error}") from error

    def close(self) -> None:
        if self._oracle is not None:
            self._oracle.close()
            self._oracle = None
        shutil.rmtree(self.scratch, ignore_errors=True)


def measure_launch(
    judge: Judge, child: Child, phases: Sequence[str], *, blocks: int, index: int, label: str
) -> tuple[Launch, int]:
    """(the launch, bytes that candidates hold): arms A and B in random ABBA and BAAB blocks, fresh tokens a slot."""
    seed = judge.draw(label, index)
    flips = torch.randint(0, 2, (blocks,), generator=torch.Generator().manual_seed(seed)).tolist()
    orders = ["BAAB" if flip else "ABBA" for flip in flips]
    held = 0
    measured: dict[str, tuple[Block, ...]] = {}
    for phase in phases:
        arms = [arm for order in orders for arm in order]
        slots = tuple((arm, judge.draw(label, seed, phase, i)) for i, arm in enumerate(arms))
        answer = time_slots(judge, child, phase, slots)
        held = max(held, answer.persistent_bytes)
        measured[phase] = tuple(
            Block(order=order, ms=answer.ms[4 * i : 4 * i + 4])  # type: ignore[arg-type]
            for i, order in enumerate(orders)
        )
    return Launch(index=index, seed=seed, blocks=measured), held


def time_slots(judge: Judge, child: Child, phase: str, slots: Sequence[tuple[str, int]]) -> m.Slots:
    """Times slots in the child. Its times must be times, and fit inside this process's own clock: else WorkerError."""
    limits = judge.limits
    request = m.Measure(phase=phase, slots=tuple(slots), slot_ms=limits.slot_ms, warm_ms=limits.warm_ms)
    start = time.monotonic()
    answer = child.ask(request, m.Slots, limits.measure_s)
    wall_ms = (time.monotonic() - start) * 1e3
    if len(answer.ms) != len(slots) or not all(0 < ms < float("inf") for ms in answer.ms):
        raise WorkerError("crashed", "the worker's slot times are missing or not times")
    claimed = sum(answer.ms) * answer.replays
    if claimed > wall_ms * 1.02:
        raise WorkerError("crashed", f"the worker claims {claimed:.1f} ms within {wall_ms:.1f} ms of wall time")
    return answer
