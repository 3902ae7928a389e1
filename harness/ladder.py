"""Every rung of a stack re-measured, interleaved slot by slot in the same processes, with peers as arms of their own.

What a run's rungs brought is read from here, not added up from their confirms: the steps of one ladder add up to the
whole, and what they leave is an explicit residual.
"""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from harness import messages as m
from harness.errors import WorkerError
from harness.judge import Judge, time_slots
from harness.sandbox import Child
from harness.schema import Ladder, LadderArm

BASELINE = "baseline"


@dataclass(frozen=True)
class PeerSpec:
    """A peer to be measured beside the rungs: its name, whether its step is captured, and its deadline in seconds."""

    name: str
    captured: bool
    deadline_s: float = 420


def measure(
    judge: Judge,
    stack: Sequence[tuple[str, str]],
    phase: str,
    *,
    processes: int,
    rounds: int,
    ends: bool = False,
    peers: Sequence[PeerSpec] = (),
    floor_ms: float | None = None,
    command: str = "",
) -> Ladder:
    """Measures the baseline, the first k of `stack` (name, file) for each k, and peers.

    Each of `processes` fresh processes, one after the other, times `rounds` slots an arm, arms in a new random order
    every round. A peer that cannot run says why in its note.
    """
    started = datetime.now(UTC)
    rungs = {name: tuple(file for _, file in stack[: i + 1]) for i, (name, _) in enumerate(stack)}
    if ends and stack:
        rungs = {f"all {len(stack)} rungs": tuple(file for _, file in stack)}
    arms = {BASELINE: (), **rungs}
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in (*arms, *(peer.name for peer in peers))}
    ready: dict[str, str] = {}
    failed: dict[str, str] = {}
    for index in range(processes):  # one at a time: where weights nearly fill the device, no other may hold a context
        judge.said(f"ladder {phase} {index + 1}/{processes}")
        seed = judge.draw("ladder", phase, index)
        with judge.spawn(f"ladder-{phase}-{index}", "ladder") as child:
            child.ask(judge.opening(arms, seed), m.Opened, judge.limits.build_s)
            time_slots(judge, child, phase, [(name, seed) for name in arms])  # theirs is the memory, peers get the rest
            able = [peer.name for peer in peers if peer.name not in failed and _add(child, peer, phase, ready, failed)]
            for name, times in _rounds(judge, child, phase, [*arms, *able], rounds, seed).items():
                samples[name].append(times)
    notes = ready | failed
    kinds = {name: "baseline" if name == BASELINE else "rung" for name in arms} | {peer.name: "peer" for peer in peers}
    return Ladder(
        workload=judge.workload.name,
        phase=phase,
        device=judge.device,
        floor_ms=floor_ms,
        arms=tuple(
            LadderArm(name=name, kind=kinds[name], samples_ms=tuple(times), note=notes.get(name, ""))  # type: ignore[arg-type]
            for name, times in samples.items()
        ),
        started=started.isoformat(timespec="seconds"),
        seconds=round((datetime.now(UTC) - started).total_seconds(), 3),
        command=command,
    )


def _add(child: Child, peer: PeerSpec, phase: str, ready: dict[str, str], failed: dict[str, str]) -> bool:
    """Whether the child made the peer's step; how it went is noted in `ready`, why it could not in `failed`."""
    start = time.monotonic()
    try:
        child.ask(m.Peer(name=peer.name, phase=phase, captured=peer.captured), m.Opened, peer.deadline_s)
    except WorkerError as error:
        if error.kind in ("timed_out", "crashed"):
            raise
        failed[peer.name] = textwrap.shorten(f"cannot run: {str(error).splitlines()[0]}", 160, placeholder=" ...")
        return False
    form = "captured" if peer.captured else "not captured"
    ready[peer.name] = f"{form}; made ready in {time.monotonic() - start:.0f} s"
    return True


def _rounds(
    judge: Judge, child: Child, phase: str, arms: Sequence[str], rounds: int, seed: int
) -> dict[str, tuple[float, ...]]:
    draw = random.Random(seed)
    order = [name for _ in range(rounds) for name in draw.sample(list(arms), len(arms))]
    slots = tuple((name, judge.draw("slot", seed, i)) for i, name in enumerate(order))
    answer = time_slots(judge, child, phase, slots)
    return {name: tuple(ms for ms, arm in zip(answer.ms, order, strict=True) if arm == name) for name in arms}
