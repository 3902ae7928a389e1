"""The device a number belongs to: what it is, what it can do, and whether it is free."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

import filelock
import platformdirs
import psutil
import torch

from harness.clocks import driver_version, gpu_uuid
from harness.errors import DeviceError
from harness.schema import Ceilings, Fingerprint

DISTRIBUTION = "beam-optimize"
GPU_BUFFER_BYTES = 1 << 30
"""About twenty times an H200's L2."""
CPU_BUFFER_BYTES = 1 << 28
COMMAND_TIMEOUT_S = 10


def resolve(name: str | None) -> torch.device:
    """The device asked for: `cpu`, `cuda`, `cuda:1`; `auto` or None takes a GPU where one works, else the CPU.

    Raises DeviceError for a device that is not there or does not work.
    """
    if name in (None, "auto"):
        return torch.device("cpu") if _cuda_fault(0) else torch.device("cuda", 0)
    try:
        device = torch.device(str(name))
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is no device: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"{name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if fault := _cuda_fault(device.index or 0):
        raise DeviceError(f"{name} cannot be used: {fault}; use another device, or --device cpu")
    return torch.device("cuda", device.index or 0)


def _cuda_fault(index: int) -> str:
    """Why GPU `index` cannot be used; empty where it can."""
    if not torch.cuda.is_available():
        built = (
            f"this torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this torch is a CPU build"
        )
        return f"torch sees no GPU ({built})"
    if index >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} GPU(s), numbered from 0"
    try:
        torch.zeros(1, device=torch.device("cuda", index)).item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def available_memory(device: torch.device) -> int:
    """Bytes free on the device; for a CPU the less of the machine's and the control group's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return min(free, int(limit) - int(used)) if limit.isdigit() else free


def fingerprint(device: torch.device) -> Fingerprint:
    """Everything about this machine and its software that may move a number."""
    gpu = device.type == "cuda"
    return Fingerprint(
        device=device_name(device),
        device_kind="cuda" if gpu else "cpu",
        device_count=torch.cuda.device_count() if gpu else 1,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if gpu else psutil.virtual_memory().total,
        driver=driver_version() if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        os=platform.platform(),
        cpu=cpu_model(),
        threads=torch.get_num_threads(),
        compiler="; ".join(filter(None, (_version_line("g++"), _version_line("nvcc") if gpu else None))) or None,
        optimize=_version(DISTRIBUTION) or "not installed",
        git=_git_state(),
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_line(compiler: str) -> str | None:
    """The line of `--version` that holds the version: g++ writes it first, nvcc on the line with `release`."""
    path = shutil.which(compiler)
    lines = _output(path, "--version").splitlines() if path else []
    return next((line.strip() for line in lines if "release" in line), lines[0].strip() if lines else None)


def _git_state() -> str | None:
    """The commit of the checkout that this code runs from, `-dirty` where it was changed; None outside of one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    return (
        _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip() or None
    )


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy and read bandwidth and product rates, the best of warm runs on random data: 2-3 s."""
    copy_rate, read_rate = _bandwidths(device)
    return Ceilings(
        device=device_name(device),
        copy_bytes_per_s=copy_rate,
        read_bytes_per_s=read_rate,
        flops_per_s={"bf16": _product_rate(device, torch.bfloat16), "fp32": _product_rate(device, torch.float32)},
    )


def _bandwidths(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a large copy, both directions counted, and of the best of a few ways to read as much."""
    nbytes = min(GPU_BUFFER_BYTES if device.type == "cuda" else CPU_BUFFER_BYTES, available_memory(device) // 4)
    wide = 4096
    source = torch.rand(max(nbytes // 4 // wide, 1), wide, device=device)
    target, vector, half = torch.empty_like(source), torch.rand(wide, device=device), source.view(torch.bfloat16)
    nbytes = source.numel() * source.element_size()
    reads: tuple[Callable[[], object], ...] = (
        lambda: source.sum(),
        lambda: source.sum(dim=1),
        lambda: half.amax(),
        lambda: torch.mv(source, vector),
    )
    copy_s = _best_s(lambda: target.copy_(source), device)
    return 2 * nbytes / copy_s, nbytes / min(_best_s(read, device) for read in reads)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product."""
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    made = torch.empty_like(left)
    return 2 * side**3 / _best_s(lambda: torch.mm(left, right, out=made), device)


def _best_s(run: Callable[[], object], device: torch.device, budget_s: float = 0.25, at_most: int = 20) -> float:
    """Least seconds of a call, warm, over as many samples as fit the budget: three to `at_most`.

    The least and not the median: a floor made of a ceiling that a busy neighbour lowered would refuse honest work. A
    sample holds several calls where one is short, so that a GPU's first launch does not count.
    """
    with torch.no_grad():
        _timed_s(run, device, 1)
        calls = max(1, min(16, int(0.01 / max(_timed_s(run, device, 1), 1e-6))))
        end = perf_counter() + budget_s
        times = [_timed_s(run, device, calls) for _ in range(3)]
        while perf_counter() < end and len(times) < at_most:
            times.append(_timed_s(run, device, calls))
    return min(times)


def _timed_s(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds a call, over `calls` of them."""
    if device.type != "cuda":
        begin = perf_counter()
        for _ in range(calls):
            run()
        return (perf_counter() - begin) / calls
    with torch.cuda.device(device):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / calls


class DeviceLock:
    """One run on a device at a time: a file lock by GPU UUID, or `cpu`, that dies with its process.

    Use as a context manager. Raises DeviceError, naming the holder, where the device stays taken for `wait_s`.
    """

    def __init__(self, device: torch.device, wait_s: float = 0.0, folder: Path | None = None) -> None:
        self.device, self._wait_s = device, wait_s
        folder = folder or platformdirs.user_cache_path("optimize") / "locks"
        name = gpu_uuid(device) if device.type == "cuda" else "cpu"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeviceError(f"cannot keep device locks in {folder}: {error.strerror}; set XDG_CACHE_HOME") from error
        self._holder = folder / f"{name}.pid"
        self._lock = filelock.FileLock(folder / f"{name}.lock")

    def __enter__(self) -> Self:
        try:
            self._lock.acquire(timeout=self._wait_s)
        except filelock.Timeout as error:
            raise DeviceError(
                f"{self.device} is in use by another run of optimize (process {self._held_by()}): let it end, or "
                "choose another device with --device"
            ) from error
        self._holder.write_text(f"{os.getpid()}\n", encoding="ascii")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.unlink(missing_ok=True)
        self._lock.release()

    def _held_by(self) -> str:
        try:
            return self._holder.read_text(encoding="ascii").strip() or "unknown"
        except OSError:
            return "unknown"
