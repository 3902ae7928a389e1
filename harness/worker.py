"""The child: answers the parent's requests, one at a time. The only importer of candidate code.

Started by sandbox.py as `python -P -m harness.worker`. It imports torch and makes its device context before it says it
is ready, so that processes of one confirm can start side by side; what it answers are times and file names.
"""

from __future__ import annotations

import functools
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness import messages as m
from harness import oracle, timing
from harness.arms import Bench, CandidateFault, adapter, prepare, site_of
from harness.errors import CandidateError, ProgramError
from harness.profiling import attribute_step, profile_step
from harness.program import Step, Substitution, TensorSpec, role
from harness.schema import Profile


class Worker:
    """State of one child and a method per request."""

    def __init__(self) -> None:
        self.bench: Bench
        self.timer: timing.Timer

    def open(self, request: m.Open) -> m.Opened:
        if request.cores:
            os.sched_setaffinity(0, request.cores)
        torch.set_num_threads(request.threads)
        self.bench = Bench(request.workload, torch.device(request.device), request.seed)
        self.bench.arm_files = dict(request.arms)
        self.timer = timing.Timer(self.bench)
        sites: dict[str, dict[str, int]] = {}
        displaced: dict[str, tuple[str, ...]] = {}
        for arm, files in request.arms.items():
            sites[arm] = {}
            for phase in request.workload.phases:
                program, _, lifted = self.bench.substitute(phase, files)
                sites[arm][phase.name] = len(program.substitutions)
                displaced[arm] = tuple(dict.fromkeys((*displaced.get(arm, ()), *lifted)))
        return m.Opened(sites=sites, displaced=displaced)

    def build(self, request: m.Build) -> m.Built:
        candidate = self.bench.candidate(request.file)
        rewrite = candidate.rewrite
        when = rewrite.when
        summary = (candidate.module.__doc__ or "").strip().split("\n\n")
        return m.Built(
            name=rewrite.name,
            regions=rewrite.replaces,
            backend=rewrite.backend,
            target=rewrite.target,
            dtypes=when.dtype,
            devices=rewrite.devices,
            tokens=when.tokens,
            phases=when.phases,
            kernels=rewrite.kernels,
            deterministic=rewrite.deterministic,
            summary=" ".join(" ".join(summary[:2]).split())[:600],
        )

    def run_sites(self, request: m.RunSites) -> m.SitesRun:
        return m.SitesRun(cases=tuple(self._run_case(request.file, case) for case in request.cases))

    def _run_case(self, file: str, case: m.SiteCase) -> m.CaseRun:
        """Runs the candidate twice from equal inputs; writes the first run's outputs and caches."""
        bench = self.bench
        candidate = bench.candidate(file)
        phase = bench.workload.phase(case.span.phase)
        program = bench.model.program(phase)
        calls = program.calls[case.span.start : case.span.stop]
        reads, _ = program.edges(case.span.start, case.span.stop)
        layer = calls[0].layer
        mutated = {name for call in calls for name in call.mutates}
        stored = load_file(case.inputs)
        inputs = {name: stored[role(name, layer)].to(bench.device) for name in reads}
        outputs = {k: TensorSpec(shape, getattr(torch, dtype)) for k, (shape, dtype) in case.output_specs.items()}
        site = site_of(
            calls,
            {role(name, layer): TensorSpec.of(t) for name, t in inputs.items()},
            outputs,
            bench.lifted_weights(case.storage),
            phase=phase,
            tokens=_tokens(inputs, phase.tokens),
            device=bench.device.type,
            dtype=case.storage,
        )
        state = prepare(candidate, site)
        bound = adapter(candidate, site, state, reads, layer)
        runs = []
        touched: dict[str, None] = {}
        for _ in range(2):
            args = {name: tensor.clone() for name, tensor in inputs.items()}
            with torch.no_grad():
                made = dict(zip(outputs, bound(*args.values()), strict=True))
            _settle(bench.device)
            for name, tensor in made.items():
                if tensor.device.type != bench.device.type:
                    raise CandidateFault("run", ValueError(f"output {name} is on {tensor.device}, not {bench.device}"))
            caches = {role(name, layer): args[name] for name in mutated}
            changed = (name for name in reads if name not in mutated and not _same_bytes(args[name], inputs[name]))
            touched.update(dict.fromkeys(role(name, layer) for name in changed))
            runs.append({f"out.{k}": v for k, v in made.items()} | {f"cache.{k}": v for k, v in caches.items()})
        save_file({name: _cpu(tensor) for name, tensor in runs[0].items()}, case.outputs)
        differs = tuple(name.partition(".")[2] for name in runs[0] if not _same_bytes(runs[0][name], runs[1][name]))
        return m.CaseRun(touched=tuple(touched), repeat_differs=differs)

    def record_sites(self, request: m.RecordSites) -> m.Recorded:
        return m.Recorded(cases=oracle.record_sites(self.bench, request))

    def record_step(self, request: m.RecordStep) -> m.StepRun:
        return oracle.record_step(self.bench, request)

    def run_step(self, request: m.RunStep) -> m.StepRun:
        """One eager step with the recorded choices forced and, where asked, one site's outputs poisoned."""
        phase = self.bench.workload.phase(request.phase)
        arm = self.bench.arm(request.arm, phase)
        forced = load_file(request.forced, str(self.bench.device)) if request.forced else {}
        values = self.bench.fresh_values(phase, request.seed)
        seen: list[Substitution] = []

        def observe(_: int, step: Step, args: list[Tensor], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if isinstance(step, Substitution) and step.rewrite == request.rewrite:
                if request.poison == len(seen):
                    made = tuple(_poisoned(tensor) for tensor in made)
                    for name, tensor in zip(step.inputs, args, strict=True):
                        if name in step.mutates:
                            tensor.fill_(float("nan"))
                seen.append(step)
            return tuple(forced.get(name, value) for name, value in zip(step.outputs, made, strict=True))

        with torch.no_grad():
            made = arm.executor(values, observe)
        _settle(self.bench.device)
        save_file({name: _cpu(value) for name, value in made.items()}, request.path)
        finite = all(bool(torch.isfinite(value).all()) for value in made.values())
        return m.StepRun(calls=len(arm.executor.steps), sites=len(seen), finite=finite)

    def list_kernels(self, request: m.ListKernels) -> m.Kernels:
        """What each site of a rewrite launches in one profiled eager step: the proof that a declared kernel ran."""
        bench = self.bench
        phase = bench.workload.phase(request.phase)
        program, candidates, _ = bench.substitute(phase, bench.arm_files[request.arm])
        found = attribute_step(
            program, bench.bind(phase, candidates), bench.fresh_values(phase, bench.seed), bench.device
        )
        by_site = [
            tuple(found.steps[index].kernels) if index in found.steps else ()
            for index, step in enumerate(program.steps())
            if isinstance(step, Substitution) and step.rewrite == request.rewrite
        ]
        return m.Kernels(sites=len(by_site), by_site=tuple(by_site))

    def measure(self, request: m.Measure) -> m.Slots:
        phase = self.bench.workload.phase(request.phase)
        with torch.no_grad():
            times = self.timer.measure(phase, request.slots, request.slot_ms, request.warm_ms)
        if request.logits is not None:
            last = {arm: self.timer.stepper(arm, phase).outputs for arm in dict.fromkeys(a for a, _ in request.slots)}
            save_file(
                {f"{arm}.{name}": _cpu(value) for arm, made in last.items() for name, value in made.items()},
                request.logits,
            )
        held = self.bench.persistent_bytes
        return m.Slots(ms=times.ms, replays=times.replays, wall_ms=times.wall_ms, persistent_bytes=held)

    def profile(self, request: m.TakeProfile) -> m.Profiled:
        return m.Profiled(profile=take_profile(self.bench, self.timer, request))

    def peer(self, request: m.Peer) -> m.Opened:
        """Adds a peer's step as an arm named after it: captured where `captured`, else run eagerly."""
        bench = self.bench
        phase = bench.workload.phase(request.phase)
        values = bench.values(phase, bench.seed)
        with torch.no_grad():
            if request.name == "baseline_eager":
                step: Callable[[], dict[str, Tensor]] = functools.partial(bench.arm(request.of, phase).executor, values)
            else:
                step = bench.model.peer(request.name, phase, bench.weights, values, bench.workload.precision)
            step()  # compiles, or fails, here and not in the first slot
            self.timer.add(request.name, phase, self.timer.wrap(lambda _: step(), values, captured=request.captured))
        return m.Opened(sites={})


def take_profile(bench: Bench, timer: timing.Timer, request: m.TakeProfile) -> Profile:
    phase = bench.workload.phase(request.phase)
    program, candidates, _ = bench.substitute(phase, bench.arm_files[request.arm])
    captured = None
    with torch.no_grad():
        if bench.device.type == "cuda":
            slots = tuple((request.arm, seed) for seed in range(5))
            times = timer.measure(phase, slots, 20.0, 200.0).ms
            captured = sorted(times)[len(times) // 2]
        return profile_step(
            program=program,
            bind=bench.bind(phase, candidates),
            values=bench.values(phase, bench.seed),
            weights=bench.weights,
            workload=bench.workload.name,
            phase=phase.name,
            precision=bench.workload.precision,
            device=bench.device,
            ceilings=request.ceilings,
            trace=Path(request.trace) if request.trace else None,
            captured_ms=captured,
        )


def _tokens(inputs: dict[str, Tensor], default: int) -> int:
    """Rows of a site's inputs: those of its first activation, where it has one."""
    for name, tensor in inputs.items():
        if "." in name and tensor.is_floating_point() and not name.endswith("_cache"):
            return int(tensor.shape[0])
    return default


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        raise CandidateFault("run", TypeError(f"outputs must be plain tensors, not {type(tensor).__name__}"))
    return tensor.detach().cpu().contiguous().clone()


def _poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else torch.zeros_like(tensor)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (t.detach().contiguous() for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) if a.numel() else True


def failure(error: BaseException) -> m.Failed:
    """What went wrong, and whose fault it is."""
    detail = "".join(traceback.format_exception(error))[-4000:]
    if isinstance(error, CandidateFault):
        if isinstance(error.cause, CandidateError):  # the message says all; no line of the candidate raised
            detail = ""
        compiler = type(error.cause).__module__.startswith(("triton", "subprocess")) or error.stage != "run"
        return m.Failed(blame="build" if compiler else "candidate", error=str(error), detail=detail)
    if isinstance(error, CandidateError | ProgramError):
        return m.Failed(blame="build", error=str(error), detail="")
    return m.Failed(blame="harness", error=f"{type(error).__name__}: {error}", detail=detail)


def main() -> None:
    """Serves requests until the parent closes the channel."""
    channel = socket.socket(fileno=int(os.environ.pop("OPTIMIZE_CHANNEL")))
    stream = channel.makefile("rwb")

    def say(reply: Any) -> None:
        stream.write(reply.model_dump_json().encode() + b"\n")
        stream.flush()

    worker = Worker()
    methods: dict[str, Callable[[Any], Any]] = {
        name: getattr(worker, name)
        for name in (
            "open",
            "build",
            "run_sites",
            "record_step",
            "run_step",
            "list_kernels",
            "measure",
            "profile",
            "peer",
        )
    } | {"record": worker.record_sites}
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    say(m.Ready(pid=os.getpid()))
    for line in stream:
        request = m.REQUEST.validate_json(line)
        try:
            reply = methods[request.op](request)
        except Exception as error:
            reply = failure(error)
        say(reply)


if __name__ == "__main__":
    main()
