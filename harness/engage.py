"""The engagement proof: the candidate ran at every site, its outputs are used, and its kernels were launched.

A step is run eagerly with the candidate in it, then again with NaN in place of its outputs at single sites: where the
logits stay as they were, what it made was thrown away. On a GPU the profiler's launch list must bear out the kernels
that the file declares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness import messages as m
from harness.casework import load_made
from harness.gates import failed, passed
from harness.judge import Judge
from harness.placement import Placement
from harness.sandbox import Child
from harness.schema import Gate, GateResult, Status


def prove(judge: Judge, child: Child, built: m.Built, placement: Placement, attempt: int) -> GateResult:
    """The gate's result for arm B of `child`."""
    target = placement.target
    sites = len(placement.sites(target))
    path = judge.scratch / "step" / "engage"
    seed = judge.draw("engage", attempt)

    def step(poison: int | None) -> tuple[m.StepRun, dict[str, Tensor]]:
        request = m.RunStep(arm="B", phase=target, seed=seed, path=str(path), rewrite=built.name, poison=poison)
        ran = child.ask(request, m.StepRun, judge.limits.step_s)
        return ran, load_made(path, placement.programs[target].outputs)

    clean, logits = step(None)
    if clean.sites != sites:
        return failed(Gate.ENGAGE, Status.NOT_ENGAGED, f"ran at {clean.sites} of {sites} sites of {target}")
    for index in sorted({0, sites // 2, sites - 1}):
        _, poisoned = step(index)
        if all(torch.equal(poisoned[name], logits[name]) for name in logits):
            return failed(
                Gate.ENGAGE,
                Status.NOT_ENGAGED,
                f"NaN in place of its outputs at site {index + 1} of {sites} leaves the logits as they are: the "
                "outputs are not used",
            )
    evidence: dict[str, object] = {"sites": f"{sites} of {sites}", "poisoned": "logits followed"}
    if judge.device.startswith("cuda"):
        seen = child.ask(m.ListKernels(arm="B", phase=target, rewrite=built.name), m.Kernels, judge.limits.step_s)
        evidence["kernels"] = sorted({name for names in seen.by_site for name in names})
        missing = missing_kernels(built, seen)
        if missing:
            return failed(Gate.ENGAGE, Status.NOT_ENGAGED, missing, evidence=evidence)
    return passed(Gate.ENGAGE, evidence=evidence)


def missing_kernels(built: m.Built, seen: m.Kernels) -> str:
    """Why the launch list does not bear out the declaration; empty where it does."""
    if built.backend in ("triton", "cuda"):
        if not built.kernels:
            return "Rewrite.kernels is empty: name the device kernels that a profile must show"
        for number, names in enumerate(seen.by_site, start=1):
            if not any(kernel in name for kernel in built.kernels for name in names):
                return f"none of {', '.join(built.kernels)} was launched at site {number} of {seen.sites}"
    return ""
