"""Floors, gaps and their ranking, on numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import roofline
from harness.errors import DataError
from harness.schema import Ceilings, Profile, RegionTime

H200 = Ceilings(
    device="a card", copy_bytes_per_s=4.0e12, read_bytes_per_s=4.25e12, flops_per_s={"bf16": 750e12, "fp32": 50e12}
)


def region(name: str, time_ms: float, floor_ms: float, *, launches: int = 1, moved: int = 0) -> RegionTime:
    return RegionTime(
        region=name, calls=1, launches=launches, time_ms=time_ms, floor_ms=floor_ms, bytes=moved, flops=0, kernels={}
    )


def profile(*regions: RegionTime, complete: bool = True, unattributed_ms: float = 0.0) -> Profile:
    return Profile(
        workload="beam-tiny",
        phase="decode-b1",
        device="a card",
        regions=regions,
        unattributed_ms=unattributed_ms,
        step_ms=100.0,
        captured_ms=None,
        complete=complete,
        reason="" if complete else "3 device events have no launch in the trace",
    )


def test_the_published_decode_floor() -> None:
    """5.93 GB at 4.25 TB/s are the 1.39 ms of one rank's decode step; its FLOPs are hidden behind them."""
    assert roofline.floor_ms(5_930_000_000, 12_000_000_000, "bf16", H200) == pytest.approx(1.395, abs=1e-3)


def test_a_product_is_held_against_its_rate() -> None:
    assert roofline.floor_ms(1000, 750_000_000_000, "bf16", H200) == pytest.approx(1.0)


def test_an_fp32_product_may_be_made_of_three_bf16_ones() -> None:
    assert roofline.floor_ms(0, 250_000_000_000, "fp32", H200) == pytest.approx(1.0)
    fast = H200.model_copy(update={"flops_per_s": {"bf16": 60e12, "fp32": 50e12}})
    assert roofline.floor_ms(0, 50_000_000_000, "fp32", fast) == pytest.approx(1.0)


def test_a_dtype_that_was_not_measured_names_those_that_were() -> None:
    with pytest.raises(DataError, match="no fp8 rate was measured on a card; measured: bf16, fp32"):
        roofline.floor_ms(1, 1, "fp8", H200)


def test_regions_are_ranked_by_what_they_could_lose() -> None:
    large_but_done = region("expert_down", 9.0, 8.5)
    small_but_far = region("router", 3.0, 0.1)
    found = roofline.gaps(profile(large_but_done, small_but_far, unattributed_ms=3.0), H200)
    assert [gap.region for gap in found] == ["router", "expert_down"]
    assert [gap.gap_ms for gap in found] == pytest.approx([2.9, 0.5])
    assert [gap.share for gap in found] == pytest.approx([0.2, 0.6])


def test_a_region_faster_than_its_floor_has_no_gap() -> None:
    assert roofline.gaps(profile(region("o_proj", 1.0, 1.1)), H200)[0].gap_ms == 0.0


def test_what_bounds_a_region() -> None:
    glue = region("qk_norm", 0.6, 0.01, launches=200, moved=4_000_000)
    weights = region("q_proj", 0.6, 0.4, launches=52, moved=1_700_000_000)
    product = region("expert_gate_up", 60.0, 50.0, launches=52, moved=1_000_000_000)
    slow = region("attention", 60.0, 1.0, launches=52, moved=4_250_000_000)
    bounds = {gap.region: gap.bound for gap in roofline.gaps(profile(glue, weights, product, slow), H200)}
    assert bounds == {"qk_norm": "launch", "q_proj": "memory", "expert_gate_up": "compute", "attention": "memory"}


def test_an_incomplete_profile_is_never_ranked() -> None:
    with pytest.raises(DataError, match=r"3 device events have no launch .* never ranked"):
        roofline.gaps(profile(region("router", 3.0, 0.1), complete=False), H200)


def test_a_profile_of_nothing_has_no_gaps() -> None:
    assert roofline.gaps(profile(), H200) == ()


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**15),
    st.sampled_from(["bf16", "fp32"]),
    st.floats(1.01, 10),
    st.booleans(),
)
def test_a_floor_never_rises_on_a_faster_device(moved: int, flops: int, dtype: str, by: float, reads: bool) -> None:
    name = "read_bytes_per_s" if reads else "copy_bytes_per_s"
    faster = H200.model_copy(
        update={name: getattr(H200, name) * by, "flops_per_s": {k: v * by for k, v in H200.flops_per_s.items()}}
    )
    assert roofline.floor_ms(moved, flops, dtype, faster) <= roofline.floor_ms(moved, flops, dtype, H200)
