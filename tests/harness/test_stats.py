"""Samples to intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import stats
from harness.errors import DataError
from harness.schema import Block, Launch

TIMES = st.floats(0.01, 1000, allow_nan=False)
ORDERS = st.sampled_from(["ABBA", "BAAB"])
BLOCKS = st.builds(lambda order, ms: Block(order=order, ms=ms), ORDERS, st.tuples(TIMES, TIMES, TIMES, TIMES))


def launch(index: int, *blocks: Block) -> Launch:
    return Launch(index=index, seed=index, blocks={"decode": blocks})


def block(baseline: float, candidate: float, order: str = "ABBA", tainted: str = "") -> Block:
    ms = tuple(baseline if arm == "A" else candidate for arm in order)
    return Block(order=order, ms=ms, tainted=tainted)


@pytest.mark.parametrize("order", ["ABBA", "BAAB"])
def test_a_faster_candidate_is_positive_in_either_order(order: str) -> None:
    assert stats.block_log_ratio(block(2.0, 1.0, order)) == pytest.approx(math.log(2))


def test_a_drift_that_is_linear_within_a_block_cancels() -> None:
    drifting = Block(order="ABBA", ms=tuple(math.exp(0.1 * slot) for slot in range(4)))
    assert stats.block_log_ratio(drifting) == pytest.approx(0, abs=1e-12)


@settings(deadline=None)
@given(BLOCKS)
def test_swapping_the_arms_flips_the_sign(one: Block) -> None:
    swapped = one.model_copy(update={"order": "BAAB" if one.order == "ABBA" else "ABBA"})
    assert stats.block_log_ratio(swapped) == pytest.approx(-stats.block_log_ratio(one), abs=1e-12)


def test_a_launch_is_the_median_of_its_clean_blocks() -> None:
    blocks = [block(1.0, math.exp(-gain)) for gain in (0.01, 0.02, 0.9)]
    assert stats.launch_log_ratio(launch(0, *blocks), "decode") == pytest.approx(0.02)
    blocks[2] = block(1.0, math.exp(-0.9), tainted="throttled")
    assert stats.launch_log_ratio(launch(0, *blocks), "decode") == pytest.approx(0.015)


def test_a_launch_without_a_clean_block_says_why() -> None:
    with pytest.raises(DataError, match=r"process 4 .* decode .*throttled"):
        stats.launch_log_ratio(launch(4, block(1, 1, tainted="throttled")), "decode")
    with pytest.raises(DataError, match="was not measured"):
        stats.launch_log_ratio(launch(4), "decode")


@pytest.mark.parametrize("ms", [0.0, -1.0, math.inf, math.nan])
def test_what_is_not_a_time_is_an_error(ms: float) -> None:
    with pytest.raises(DataError, match="positive and finite"):
        stats.block_log_ratio(Block(order="ABBA", ms=(1.0, ms, 1.0, 1.0)))


def test_the_multiples_that_the_rule_was_simulated_with() -> None:
    assert stats.t_multiple(6, 0.0003) == pytest.approx(7.67, abs=0.005)
    assert stats.t_multiple(12, 0.0008) == pytest.approx(4.16, abs=0.005)


def test_the_interval_covers_the_truth_95_times_in_100() -> None:
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        launches = [launch(i, block(8.0, 8.0 * math.exp(-gain))) for i, gain in enumerate(draw.normal(0.02, 0.004, 6))]
        found = stats.estimate(launches, "decode")
        hits += found.low <= 0.02 <= found.high
    assert 0.92 <= hits / 400 <= 0.98
    assert found.processes == 6
    assert found.baseline_ms == pytest.approx(8.0)
    assert found.candidate_ms == pytest.approx(8.0 * math.exp(-0.02), rel=0.01)


def test_one_process_proves_nothing_and_its_interval_can_be_stored() -> None:
    found = stats.estimate([launch(0, block(2.0, 1.0))], "decode")
    assert found.low < 0 < found.high
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_skewness_and_drift_see_what_they_should() -> None:
    skew, sd = stats.skewness([0.0] * 11 + [-1.0])
    assert skew < -3 * sd
    assert stats.skewness([0.3] * 6)[0] == 0
    change, t = stats.drift([0.01 * i + 0.0001 * (-1) ** i for i in range(12)])
    assert change == pytest.approx(0.11, rel=0.01)
    assert t > 50
    assert stats.drift([0.3] * 6) == (0.0, 0.0)


def test_an_estimate_uses_the_processes_that_have_clean_blocks_and_counts_them() -> None:
    launches = [launch(i, block(2.0, 1.0, tainted="throttled" if i == 3 else "")) for i in range(6)]
    assert stats.estimate(launches, "decode").processes == 5
    with pytest.raises(DataError, match="throttled"):
        stats.estimate(launches[3:4], "decode")
