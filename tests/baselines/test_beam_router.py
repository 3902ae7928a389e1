"""The router's choice: which experts, and by how much a choice misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.beam.experts import ROUTER
from harness.program import BF16, FP64

ATTRS = {"num_groups": 8, "topk_groups": 4, "top_k": 8, "norm_topk_prob": True}
DECISION = ROUTER.decision


def weights(bias: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"weight": torch.randn(256, 64, generator=generator) / 8, "correction_bias": bias}


def rows(tokens: int = 64) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(6)).bfloat16()


def by_hand(scores: Tensor, bias: Tensor) -> list[set[int]]:
    """The chosen sets from the definition, token by token with sorted lists."""
    chosen = []
    for row in (scores + bias).tolist():
        groups = [row[start : start + 32] for start in range(0, 256, 32)]
        best = sorted(range(8), key=lambda g: -sum(sorted(groups[g])[-2:]))[:4]
        allowed = [expert for expert in range(256) if expert // 32 in best]
        chosen.append(set(sorted(allowed, key=lambda e: -row[e])[:8]))
    return chosen


def test_all_negative_choice_scores_stay_in_the_chosen_groups() -> None:
    own = weights(torch.full((256,), -2.0))
    ids, _ = ROUTER.reference(BF16, own, ATTRS, rows())
    scores = DECISION.scores(BF16, own, ATTRS, rows())
    assert [set(row) for row in ids.tolist()] == by_hand(scores, own["correction_bias"])


def test_close_biases_near_nine_keep_fp32_choices() -> None:
    bias = 9 + torch.linspace(0, 0.2, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(7))]
    assert bias.unique().numel() == 256 and bias.bfloat16().unique().numel() < 8
    own = weights(bias)
    scores = DECISION.scores(BF16, own, ATTRS, rows())
    want = by_hand(scores, bias)
    ids, _ = ROUTER.reference(BF16, own, ATTRS, rows())
    assert [set(row) for row in ids.tolist()] == want
    rounded, _ = ROUTER.reference(BF16, weights(bias.bfloat16().float()), ATTRS, rows())
    assert sum(set(row) != good for row, good in zip(rounded.tolist(), want, strict=True)) > 32


def test_weights_are_of_raw_scores_and_sum_to_one() -> None:
    own = weights(torch.randn(256, generator=torch.Generator().manual_seed(8)))
    ids, made = ROUTER.reference(BF16, own, ATTRS, rows())
    raw = torch.sigmoid(rows().float() @ own["weight"].T).gather(1, ids)
    torch.testing.assert_close(made, raw / raw.sum(-1, keepdim=True))
    resolved = DECISION.resolve(DECISION.scores(BF16, own, ATTRS, rows()), own, ATTRS, ids)
    assert torch.equal(resolved["expert_weights"], made)


@pytest.fixture
def judged() -> tuple[Any, Tensor, dict[str, Tensor]]:
    own = weights(torch.randn(256, generator=torch.Generator().manual_seed(9)) * 0.02)
    ids, _ = ROUTER.reference(FP64, own, ATTRS, rows().double())
    scores = DECISION.scores(FP64, own, ATTRS, rows().double())
    return (lambda picked: DECISION.shortfall(scores, own, ATTRS, picked)), ids, {"scores": scores, **own}


def test_the_right_choice_has_no_shortfall(judged: Any) -> None:
    shortfall, ids, _ = judged
    assert (shortfall(ids) == 0).all() and (shortfall(ids.flip(1)) == 0).all()


def test_the_ninth_expert_misses_by_its_gap(judged: Any) -> None:
    shortfall, ids, values = judged
    choice = values["scores"] + values["correction_bias"].double()
    used = torch.zeros(64, 8, dtype=torch.bool).scatter(1, ids // 32, True)
    allowed = used.repeat_interleave(32, dim=1).scatter(1, ids, False)
    ninth = choice.masked_fill(~allowed, -torch.inf).argmax(-1)
    wrong = ids.clone()
    wrong[:, -1] = ninth
    four = torch.zeros_like(used).scatter(1, wrong // 32, True).sum(-1) == 4
    assert four.sum() > 10
    gap = choice.gather(1, ids[:, -1:])[:, 0] - choice.gather(1, ninth[:, None])[:, 0]
    torch.testing.assert_close(shortfall(wrong)[four], gap[four])


def test_impossible_choices_miss_by_infinity(judged: Any) -> None:
    shortfall, ids, _ = judged
    repeated, outside, scattered = ids.clone(), ids.clone(), torch.arange(8).mul(32).expand(64, 8)
    repeated[:, 1], outside[:, 0] = repeated[:, 0], 256
    for wrong in (repeated, outside, scattered, outside - 257):
        assert shortfall(wrong).isinf().all()


def test_a_worse_group_misses_by_the_group_gap(judged: Any) -> None:
    shortfall, _, values = judged
    choice = values["scores"] + values["correction_bias"].double()
    groups = choice.view(64, 8, 32).topk(2)[0].sum(-1)
    ordered = groups.argsort(dim=-1, descending=True)
    kept = torch.cat((ordered[:, :3], ordered[:, 4:5]), dim=1)
    allowed = torch.zeros(64, 8, dtype=torch.bool).scatter(1, kept, True).repeat_interleave(32, dim=1)
    wrong = choice.masked_fill(~allowed, -torch.inf).topk(8)[1]
    uses = (wrong // 32 == ordered[:, 4:5]).any(-1)
    made = shortfall(wrong)
    gap = groups.gather(1, ordered[:, 3:4])[:, 0] - groups.gather(1, ordered[:, 4:5])[:, 0]
    assert uses.any() and (made[uses] >= 0).all()
    dropped = uses & (torch.zeros(64, 8, dtype=torch.bool).scatter(1, wrong // 32, True).sum(-1) == 4)
    torch.testing.assert_close(made[dropped], gap[dropped])
