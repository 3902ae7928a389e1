"""The device: what it is, what it can do, who holds it, and what NVML's answers mean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import clocks, device
from harness.errors import DeviceError

CPU = torch.device("cpu")
HOLD = """
import sys, torch
from pathlib import Path
from harness.device import DeviceLock
with DeviceLock(torch.device("cpu"), folder=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(device.__file__).parents[1],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        try:
            with pytest.raises(
                DeviceError, match=f"cpu is in use by another run of optimize .process {child.pid}.*--device"
            ):
                device.DeviceLock(CPU, folder=tmp_path).__enter__()
        finally:
            child.kill()
            child.wait()
    with device.DeviceLock(CPU, folder=tmp_path):
        assert (tmp_path / "cpu.pid").read_text() == f"{os.getpid()}\n"


def test_a_lock_is_free_again_after_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with device.DeviceLock(CPU, folder=tmp_path):
            pass
    assert not (tmp_path / "cpu.pid").exists()


def test_a_lock_that_cannot_be_kept_names_what_mends_it(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DeviceError, match="set XDG_CACHE_HOME"):
        device.DeviceLock(CPU, folder=blocked / "locks")


def test_resolve_takes_what_is_there() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert device.resolve(None).type == device.resolve("auto").type == kind
    assert device.resolve("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "said"),
    [("gpu7!", "is no device"), ("mps", "is not supported"), ("cuda:99", "cannot be used: torch sees")],
)
def test_resolve_says_what_is_wrong(name: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        device.resolve(name)


def test_a_fingerprint_says_what_made_a_number() -> None:
    found = device.fingerprint(CPU)
    assert (found.device_kind, found.device_count, found.driver, found.cuda) == ("cpu", 1, None, None)
    assert found.torch == torch.__version__
    assert found.device == found.cpu != ""
    assert found.threads == torch.get_num_threads()
    assert found.memory_bytes > device.available_memory(CPU) > 0


def test_a_fingerprint_is_stable() -> None:
    assert device.fingerprint(CPU) == device.fingerprint(CPU)


@pytest.mark.slow
def test_ceilings_of_a_cpu_are_within_reason() -> None:
    found = device.measure_ceilings(CPU)
    for rate in (found.copy_bytes_per_s, found.read_bytes_per_s):
        assert 1e8 < rate < 2e12
    assert set(found.flops_per_s) == {"bf16", "fp32"}
    assert all(1e8 < rate < 1e15 for rate in found.flops_per_s.values())


@pytest.mark.gpu
def test_ceilings_of_a_gpu_order_as_they_must() -> None:
    found = device.measure_ceilings(device.resolve("cuda"))
    assert found.read_bytes_per_s > 0.45 * found.copy_bytes_per_s
    assert found.flops_per_s["bf16"] > found.flops_per_s["fp32"]


@pytest.mark.gpu
def test_a_gpu_is_sampled_in_under_a_millisecond() -> None:
    from time import perf_counter

    with clocks.ClockSampler(device.resolve("cuda")) as sampler:
        sampler.sample()
        start = perf_counter()
        found = [sampler.sample() for _ in range(20)][-1]
        assert (perf_counter() - start) / 20 < 1e-3
    assert found.sm_clock_mhz is not None
    assert found.throttle is not None


def test_a_cpu_has_no_clock_sample() -> None:
    with clocks.ClockSampler(CPU) as sampler:
        assert sampler.sample() == clocks.ClockSample()
        assert sampler.sample().tainted == ""


def test_throttling_taints_and_the_power_cap_alone_does_not() -> None:
    assert clocks.throttle_reasons(0x4 | 0x40 | 0x1) == ("power cap", "thermal, hardware")
    assert clocks.ClockSample(throttle=("power cap",)).tainted == ""
    assert clocks.ClockSample(throttle=("power cap", "power brake")).tainted == "power brake"
    assert clocks.ClockSample(other_pids=(12, 13)).tainted == "shared with process 12, 13"


def test_a_stranger_is_who_does_not_descend_from_the_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            mine, nobody = os.getpid(), 2**22 + 1
            assert clocks.strangers([mine, child.pid, nobody], mine) == ()
            assert clocks.strangers([mine, child.pid], child.pid) == (mine,)
        finally:
            child.kill()
