"""What this machine can run: tools, devices, memory, and the command that mends what is missing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from harness import device, profiling
from harness.arms import build_model
from harness.errors import OptimizeError, UsageError
from harness.schema import Record
from harness.workload import Workload

PACKAGES = ("harness", "agents", "baselines", "kernel_candidates")


class Finding(Record):
    """One thing looked at. `bad` means that nothing runs without it."""

    what: str
    state: Literal["ok", "missing", "bad"]
    detail: str
    mend: str = ""


class WorkloadRow(Record):
    """A phase of a workload: what a step moves, computes and needs, and whether this machine has room."""

    workload: str
    phase: str
    decides: bool
    tokens: int
    bytes: int
    flops: int
    weight_bytes: int
    fits: str


def check_packages() -> None:
    """Raises UsageError where another distribution's package of the same name stands before ours on the path."""
    root = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [Path(p).resolve() for p in (spec.submodule_search_locations or [])] if spec else []
        if root / name not in places[:1]:
            found = places[0] if places else "nowhere"
            raise UsageError(
                f"package {name} is found at {found}, not at {root / name}: another distribution has a package of that "
                "name; install optimize into an environment of its own (`make`, pipx or `uv tool`)"
            )


def examine() -> list[Finding]:
    """Everything `optimize doctor` says, most basic first."""
    findings = [Finding(what="Python", state="ok", detail=sys.version.split()[0]), *_torch(), *_compilers()]
    findings += [_triton(), _git(), _user_namespaces(), _transformers(), _memory()]
    return findings


def _torch() -> list[Finding]:
    torch_itself = Finding(what="torch", state="ok", detail=torch.__version__)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return [torch_itself, Finding(what="GPU", state="ok", detail=names)]
    return [
        torch_itself,
        Finding(
            what="GPU",
            state="missing",
            detail="torch sees none: the tiny workloads run, Beam's real sizes do not",
            mend="on a machine with a GPU: a driver that `nvidia-smi` shows, and a CUDA build of torch",
        ),
    ]


def _compilers() -> list[Finding]:
    found = []
    for tool, use, mend in (
        ("g++", "C++ candidates", "apt-get install g++"),
        ("nvcc", "CUDA candidates", "install the CUDA toolkit and put its bin folder on PATH"),
    ):
        path = shutil.which(tool)
        detail = f"{path}, for {use}" if path else f"not on PATH: {use} fail to build"
        found.append(Finding(what=tool, state="ok" if path else "missing", detail=detail, mend="" if path else mend))
    return found


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding(what="triton", state="missing", detail="not installed", mend="pip install triton")
    return Finding(what="triton", state="ok", detail="runs on a GPU; on a CPU only its interpreter does")


def _git() -> Finding:
    path = shutil.which("git")
    if not path:
        return Finding(
            what="git", state="missing", detail="kept rungs stay in the run's folder", mend="apt-get install git"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return Finding(what="git", state="ok", detail=version)


def _user_namespaces() -> Finding:
    if shutil.which("bwrap"):
        return Finding(
            what="bubblewrap", state="ok", detail="present; candidates run in processes of their own either way"
        )
    return Finding(
        what="bubblewrap",
        state="missing",
        detail="candidates run in plain processes, with this user's rights: judge only files you would run",
        mend="apt-get install bubblewrap",
    )


def _transformers() -> Finding:
    if importlib.util.find_spec("transformers") is None:
        return Finding(
            what="transformers",
            state="missing",
            detail="needed for the transformers peer and the oracle's own tests only",
            mend="pip install 'transformers>=5.21'",
        )
    return Finding(what="transformers", state="ok", detail="present")


def _memory() -> Finding:
    target = device.resolve("auto")
    return Finding(
        what="memory", state="ok", detail=f"{device.available_memory(target) / 2**30:.1f} GiB free on {target}"
    )


def workload_rows(workload: Workload, target: torch.device, said: Callable[[str], None]) -> list[WorkloadRow]:
    """Costs of each phase, counted on meta tensors, and whether the weights have room on `target`."""
    rows = []
    for phase in workload.phases:
        said(f"counting {workload.name} {phase.name}")
        try:
            total = profiling.cost_on_meta(build_model(workload), phase, workload.precision)
            flops, moved, weights = total.flops, total.least_bytes, total.weight_bytes
            fits = _fits(workload, target, weights)
        except OptimizeError as error:
            flops = moved = weights = 0
            fits = f"no: {error}"
        rows.append(
            WorkloadRow(
                workload=workload.name,
                phase=phase.name,
                decides=phase.decides,
                tokens=phase.tokens,
                bytes=moved,
                flops=flops,
                weight_bytes=weights,
                fits=fits,
            )
        )
    return rows


def _fits(workload: Workload, target: torch.device, weight_bytes: int) -> str:
    if target.type not in workload.devices:
        return f"no: needs {' or '.join(workload.devices)}"
    free = device.available_memory(target)
    if weight_bytes * 1.1 > free:
        return f"no: {free / 2**30:.0f} GiB free"
    return "yes"
