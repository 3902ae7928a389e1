"""The keep rule: what it may never do, what it does on average, and what it says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import decide, stats
from harness.decide import Rule
from harness.errors import DataError
from harness.schema import Block, Decision, Launch, Status

RULE = Rule()
STEP_MS = 8.0
GAINS = st.lists(st.floats(-0.2, 0.2), min_size=12, max_size=12)


def launches(gains: Sequence[float], **others: Sequence[float]) -> list[Launch]:
    """One block a launch and phase; `gains` are the target's, `others` the guards'."""
    phases = {"decode": gains, **others}
    return [
        Launch(index=i, seed=i, blocks={phase: (_block(values[i]),) for phase, values in phases.items()})
        for i in range(len(gains))
    ]


def _block(gain: float) -> Block:
    return Block(order="ABBA", ms=(STEP_MS, *[STEP_MS * math.exp(-gain)] * 2, STEP_MS))


def decided(gains: Sequence[float], rule: Rule = RULE, **others: Sequence[float]) -> Decision:
    answer = decide.confirm(launches(gains, **others), "decode", tuple(others), rule)
    assert answer is not None
    return answer


def around(mean: float, spread: float = 0.002, size: int = 12) -> list[float]:
    """Symmetric about the mean, in no order, with this standard deviation."""
    signs = np.array([1, -1, -1, 1, 1, -1, -1, 1, -1, 1, 1, -1][:size], dtype=float)
    values = signs * np.linspace(0.5, 1.5, size)
    return list(mean + spread * (values - values.mean()) / values.std(ddof=1))


@settings(deadline=None)
@given(st.floats(0.01, 100), st.integers(1, 6))
def test_identical_samples_are_never_kept(ms: float, blocks: int) -> None:
    same = [
        Launch(index=i, seed=i, blocks={"decode": tuple(Block(order="ABBA", ms=(ms,) * 4) for _ in range(blocks))})
        for i in range(12)
    ]
    answer = decide.confirm(same, "decode", (), RULE)
    assert answer is not None
    assert answer.status is not Status.KEPT
    assert not decide.screen(same[0], "decode", RULE).passed


@settings(deadline=None)
@given(GAINS, st.floats(0, 0.3), st.booleans())
def test_slowing_every_slot_by_the_same_factor_never_turns_a_discard_into_a_keep(
    gains: list[float], slower: float, guarded: bool
) -> None:
    others = {"prefill": gains} if guarded else {}
    slow = [gain - slower for gain in gains]
    slow_others = {"prefill": slow} if guarded else {}
    if decided(slow, **slow_others).status is Status.KEPT:
        assert decided(gains, **others).status is Status.KEPT


@settings(deadline=None)
@given(GAINS)
def test_a_candidate_and_its_reverse_are_not_both_kept(gains: list[float]) -> None:
    kept = [decided([sign * gain for gain in gains]).status is Status.KEPT for sign in (1, -1)]
    assert not all(kept)


@settings(deadline=None)
@given(GAINS)
def test_the_answer_does_not_depend_on_when_it_is_asked_for(gains: list[float]) -> None:
    all_launches = launches(gains)
    answers = [decide.confirm(all_launches[:n], "decode", (), RULE) for n in range(13)]
    first = next(answer for answer in answers if answer is not None)
    assert answers[-1] == first
    assert [answer is None for answer in answers[:6]] == [True] * 6
    assert len(first.looks) == (1 if answers[6] is not None else 2)


def test_a_clear_win_is_kept_at_six_and_a_loss_rejected_there() -> None:
    win, loss = decided(around(0.02)), decided(around(-0.004))
    assert (win.status, len(win.looks), win.alpha_spent) == (Status.KEPT, 1, 0.0003)
    assert (loss.status, len(loss.looks)) == (Status.REJECTED, 1)
    assert win.looks[0].bound == pytest.approx(
        win.looks[0].mean - stats.t_multiple(6, 0.0003) * win.looks[0].standard_error
    )


def test_a_small_win_needs_twelve_and_both_alphas_are_spent() -> None:
    answer = decided(around(0.005, 0.003))
    assert [look.verdict for look in answer.looks] == ["continue", "keep"]
    assert answer.status is Status.KEPT
    assert answer.alpha_spent == pytest.approx(0.0011)


def test_a_gain_that_is_not_proven_or_too_small_is_inconclusive() -> None:
    noisy, small = decided(around(0.004, 0.01)), decided(around(0.0025, 0.0001))
    assert noisy.status is small.status is Status.INCONCLUSIVE
    assert "not proven" in noisy.reason
    assert "below the floor of +0.30%" in small.reason


def test_lucky_launches_do_not_pass_the_floor_of_the_standard_error() -> None:
    answer = decide.confirm(launches([0.0035] * 6), "decode", (), RULE)
    assert answer is None


def test_a_guarded_phase_that_is_worse_stops_a_win_and_is_named() -> None:
    answer = decided(around(0.03), prefill=around(-0.02))
    assert answer.status is Status.INCONCLUSIVE
    assert "prefill may be worse by more than 1.0%" in answer.reason
    assert [look.verdict for look in answer.looks] == ["continue", "continue"]
    assert decide.confirm(launches(around(0.03)[:6], prefill=around(-0.02)[:6]), "decode", ("prefill",), RULE) is None
    assert decided(around(0.03), prefill=around(-0.003)).status is Status.KEPT


def test_a_noisy_guard_may_recover_with_more_launches() -> None:
    guard = [-0.03, 0.02, -0.02, 0.02, -0.01, 0.01] + [0.0] * 6
    answer = decided(around(0.03), RULE, prefill=guard)
    assert [look.verdict for look in answer.looks] == ["continue", "continue"] or answer.status is Status.KEPT


def test_left_skew_drift_and_wild_spread_are_said_and_cost_the_win() -> None:
    skewed = decided([0.012] * 5 + [0.0115] * 6 + [0.001])
    assert "left-skewed" in skewed.reason
    drifting = decided([0.0005 * i + 0.0002 * (-1) ** i for i in range(12)])
    assert "drift" in drifting.reason
    assert drifting.status is not Status.KEPT
    wild = decided(around(0.9, 0.4))
    assert "spread" in wild.reason
    assert wild.status is Status.INCONCLUSIVE


def test_a_launch_without_clean_blocks_is_inconclusive_and_says_so() -> None:
    spoiled = launches(around(0.02))
    blocks = tuple(block.model_copy(update={"tainted": "throttled"}) for block in spoiled[2].blocks["decode"])
    spoiled[2] = spoiled[2].model_copy(update={"blocks": {"decode": blocks}})
    answer = decide.confirm(spoiled, "decode", (), RULE)
    assert answer is not None
    assert answer.status is Status.INCONCLUSIVE
    assert "throttled" in answer.reason


def test_needed_counts_up_to_the_next_look() -> None:
    made = launches(around(0.0))
    assert [decide.needed(made[:n]) for n in (0, 1, 5, 6, 7, 12)] == [6, 5, 1, 6, 5, 0]
    assert decide.needed([], decide.calibrated(RULE, made, ("decode",))) == 3


def test_the_screen_asks_for_its_gain() -> None:
    assert decide.screen(launches([0.0031])[0], "decode", RULE).passed
    dropped = decide.screen(launches([0.0029])[0], "decode", RULE)
    assert not dropped.passed
    assert "+0.29%" in dropped.reason


def test_a_calibration_keeps_a_big_win_at_three_and_never_takes_the_noise_as_smaller() -> None:
    rule = decide.calibrated(RULE, launches(around(0, 0.004)), ("decode",))
    assert sum(alpha for _, alpha in rule.looks) <= 0.001
    big = decided([0.02, 0.021, 0.019], rule)
    assert (big.status, big.alpha_spent) == (Status.KEPT, 0.0002)
    assert big.looks[0].standard_error == pytest.approx(0.004 / math.sqrt(3), rel=0.02)
    assert decide.confirm(launches([0.006, 0.006, 0.006]), "decode", (), rule) is None
    assert decide.confirm(launches([-0.006, -0.006, -0.006]), "decode", (), rule) is None
    with pytest.raises(DataError, match="at least 6"):
        decide.calibrated(RULE, launches([0.0] * 5), ("decode",))


def simulated(count: int, gain: float, seed: int) -> np.ndarray:
    """[count, 12] launch log ratios: 0.5% a slot with heavy tails, 2% of slots +2%, shared drift of 0.5% over a launch,
    0.3% of placement per process and arm; 6 randomised blocks, median."""
    draw = np.random.default_rng(seed)
    shape = (count, 12, 6, 4)
    slots = draw.standard_t(4, shape) * 0.005 / math.sqrt(2)
    slots += 0.02 * (draw.random(shape) < 0.02)
    slots += np.cumsum(draw.standard_normal((count, 12, 24)) * 0.005 / math.sqrt(24), axis=-1).reshape(shape)
    order = np.where(draw.random((*shape[:3], 1)) < 0.5, 1, -1) * np.array([1, -1, -1, 1])
    blocks = (slots * order).sum(-1) / 2
    return np.asarray(np.median(blocks, -1) + draw.standard_normal(shape[:2]) * 0.003 * math.sqrt(2) + gain)


def kept_share(ratios: np.ndarray) -> float:
    """By the t rule alone, vectorised."""
    kept = np.zeros(len(ratios), dtype=bool)
    live = ~kept
    for size, alpha in RULE.looks:
        seen = ratios[:, :size]
        mean = seen.mean(1)
        error = np.maximum(seen.std(1, ddof=1) / math.sqrt(size), RULE.se_floor)
        kept |= live & (mean - stats.t_multiple(size, alpha) * error > 0) & (mean >= RULE.min_gain)
        live &= mean >= 0
    return float(kept.mean())


def test_the_vectorised_rule_is_the_rule() -> None:
    ratios = simulated(150, 0.006, seed=3)
    single = [decided(list(row)).status is Status.KEPT for row in ratios]
    assert np.mean(single) == pytest.approx(kept_share(ratios), abs=0.05)


def test_false_keeps_and_power() -> None:
    assert kept_share(np.concatenate([simulated(10_000, 0.0, seed=seed) for seed in range(3)])) <= 0.0015
    assert kept_share(simulated(3_000, 0.01, seed=9)) >= 0.95
    assert kept_share(simulated(3_000, 0.02, seed=10)) >= 0.999
