"""How far each region is from what the device allows, and so which to work on. Pure functions of records."""

from __future__ import annotations

from typing import Literal

from harness.errors import DataError
from harness.schema import Ceilings, Gap, Profile, RegionTime

LAUNCH_MS = 0.010
"""Below this much time a launch, a region far from its floor is made of launches, not of work."""
BF16_PRODUCTS_OF_FP32 = 3
"""An FP32-accurate product is three BF16 ones (high by high, high by low, low by high)."""


def flops_per_s(dtype: str, ceilings: Ceilings) -> float:
    """The measured product rate for values of `dtype`; FP32's is the better of its own and a third of BF16's.

    Raises DataError for a dtype that was not measured.
    """
    rates = ceilings.flops_per_s
    if dtype not in rates:
        raise DataError(f"no {dtype} rate was measured on {ceilings.device}; measured: {', '.join(rates)}")
    if dtype == "fp32" and "bf16" in rates:
        return max(rates["fp32"], rates["bf16"] / BF16_PRODUCTS_OF_FP32)
    return rates[dtype]


def floor_ms(bytes_moved: int, flops: int, dtype: str, ceilings: Ceilings) -> float:
    """The least time for this much traffic and arithmetic: the slower of the two, each at its measured ceiling.

    Traffic is held against the faster of copying and reading, so that the floor stays one whatever the mix.
    """
    memory_s = bytes_moved / max(ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s)
    return max(memory_s, flops / flops_per_s(dtype, ceilings)) * 1e3


def bound_of(region: RegionTime, ceilings: Ceilings) -> Literal["memory", "compute", "launch"]:
    """What holds a region: its launches, where they are short and most of it is no work; else the higher floor."""
    if region.floor_ms < region.time_ms / 2 and region.time_ms < LAUNCH_MS * region.launches:
        return "launch"
    memory_ms = region.bytes / max(ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s) * 1e3
    return "compute" if region.floor_ms > 1.01 * memory_ms else "memory"


def gaps(profile: Profile, ceilings: Ceilings) -> tuple[Gap, ...]:
    """Regions by the milliseconds between them and their floors, largest first; `share` is of the profiled time.

    Raises DataError for an incomplete profile: it would rank what was lost last.
    """
    if not profile.complete:
        raise DataError(
            f"the profile of {profile.workload} {profile.phase} is incomplete ({profile.reason}) and is never ranked: "
            "profile again"
        )
    whole = sum(region.time_ms for region in profile.regions) + profile.unattributed_ms
    ranked = [
        Gap(
            region=region.region,
            time_ms=region.time_ms,
            floor_ms=region.floor_ms,
            gap_ms=max(region.time_ms - region.floor_ms, 0.0),
            share=region.time_ms / whole if whole else 0.0,
            bound=bound_of(region, ceilings),
        )
        for region in profile.regions
    ]
    return tuple(sorted(ranked, key=lambda gap: (-gap.gap_ms, gap.region)))
