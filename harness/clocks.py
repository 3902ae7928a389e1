"""How a GPU is clocked while something is timed, and who else is on it, through NVML; all None on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import torch

POWER_CAP = "power cap"
THROTTLE_REASONS = {
    0x004: POWER_CAP,
    0x008: "hardware slowdown",
    0x020: "thermal, software",
    0x040: "thermal, hardware",
    0x080: "power brake",
}
"""NVML's nvmlClocksEventReason* bits that slow kernels down; idle, sync boost and set clocks are not among them."""
PROCESSES_EVERY_S = 1.0


@dataclass(frozen=True)
class ClockSample:
    """One look at the device; a None is what the device or its driver does not tell."""

    sm_clock_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    other_pids: tuple[int, ...] | None = None
    """Processes on the GPU that are none of this run's, as far as this process's namespace shows them."""

    @property
    def tainted(self) -> str:
        """Why a slot timed now does not count; empty where it does.

        The power cap alone is no reason: long matrix products run at it, both arms alike.
        """
        reasons = [reason for reason in self.throttle or () if reason != POWER_CAP]
        if self.other_pids:
            reasons.append(f"shared with process {', '.join(map(str, self.other_pids))}")
        return "; ".join(reasons)


class ClockSampler:
    """Samples one device. Use as a context manager; on a CPU every sample is empty.

    `root_pid` is the process whose descendants are this run's own, by default this one. Processes are listed once a
    second at the most: that is NVML's slowest answer.
    """

    def __init__(self, device: torch.device, root_pid: int | None = None) -> None:
        self._root_pid = root_pid or os.getpid()
        self._nvml = _nvml() if device.type == "cuda" else None
        self._handle = self._ask("nvmlDeviceGetHandleByUUID", gpu_uuid(device)) if self._nvml else None
        self._others: tuple[int, ...] | None = None
        self._listed_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml = self._handle = None

    def sample(self) -> ClockSample:
        if self._handle is None or self._nvml is None:
            return ClockSample()
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self._handle)
        power_mw = self._ask("nvmlDeviceGetPowerUsage", self._handle)
        return ClockSample(
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", self._handle, self._nvml.NVML_CLOCK_SM),
            throttle=None if bits is None else throttle_reasons(bits),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=self._ask("nvmlDeviceGetTemperature", self._handle, self._nvml.NVML_TEMPERATURE_GPU),
            other_pids=self._other_pids(),
        )

    def _other_pids(self) -> tuple[int, ...] | None:
        if monotonic() - self._listed_at >= PROCESSES_EVERY_S:
            running = self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
            self._listed_at = monotonic()
            self._others = None if running is None else strangers([entry.pid for entry in running], self._root_pid)
        return self._others

    def _ask(self, function: str, *args: Any) -> Any:
        """NVML's answer, or None where this device or driver has none."""
        assert self._nvml is not None
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError:
            return None


def throttle_reasons(bits: int) -> tuple[str, ...]:
    return tuple(reason for bit, reason in THROTTLE_REASONS.items() if bits & bit)


def strangers(pids: list[int], root_pid: int) -> tuple[int, ...]:
    """Those of `pids` that exist here and are neither `root_pid` nor its descendants.

    In a container NVML lists the host's numbers: one that names no process here tells nothing and is left out.
    """
    return tuple(pid for pid in pids if Path(f"/proc/{pid}").exists() and root_pid not in _ancestry(pid))


def _ancestry(pid: int) -> set[int]:
    """`pid` and its ancestors."""
    seen: set[int] = set()
    while pid > 0 and pid not in seen:
        seen.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return seen


def gpu_uuid(device: torch.device) -> str:
    """`GPU-...` as NVML writes it, whatever CUDA_VISIBLE_DEVICES renumbers."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def driver_version() -> str | None:
    """NVIDIA's driver version; None where NVML cannot say."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _nvml() -> Any | None:
    """The NVML module, started, or None where there is no driver to talk to. Each start wants a shutdown."""
    import pynvml  # loads no library of its own before nvmlInit, but is of no use on a CPU

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
