"""Which device kernels a rewrite's sites launch, read from torch.profiler: the proof that a declared kernel ran."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness import messages as m
from harness.arms import Bench
from harness.program import Bound, Executor, Step, Substitution
from harness.workload import Phase


def list_kernels(bench: Bench, arm: str, phase: Phase, rewrite: str) -> m.Kernels:
    """Kernel names launched inside each site of `rewrite` in one eager step, in order; empty lists on a CPU."""
    program, candidates, _ = bench.substitute(phase, bench.arm_files[arm])
    sites = program.sites(rewrite)
    inner = bench.bind(phase, candidates)

    def bind(step: Step) -> Bound:
        bound = inner(step)
        if not (isinstance(step, Substitution) and step.rewrite == rewrite):
            return bound
        label = f"site:{step.start}"

        def ranged(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with record_function(label):
                return bound(*args)

        return ranged

    executor = Executor(program, bind)
    values = bench.fresh_values(phase, bench.seed)
    with torch.no_grad():
        executor(values)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device.type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            executor(values)
            if bench.device.type == "cuda":
                torch.cuda.synchronize(bench.device)
    found: dict[str, list[str]] = {f"site:{site.start}": [] for site in sites}
    for event in profiler.events():
        parent = event
        while parent is not None and parent.name not in found:
            parent = parent.cpu_parent
        if parent is not None:
            found[parent.name] += [kernel.name for kernel in event.kernels]
    return m.Kernels(sites=len(sites), by_site=tuple(tuple(names) for names in found.values()))
