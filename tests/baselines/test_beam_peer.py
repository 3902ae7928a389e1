"""Peers give the baseline's logits on the baseline's inputs, step after step."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from harness.errors import UsageError
from harness.workload import Phase

PHASES = (
    Phase(name="d", kind="decode", batch=2, context=150),
    Phase(name="v", kind="verify", batch=1, context=90, query_len=8),
    Phase(name="p", kind="prefill", batch=2, context=80),
)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.kind)
def test_transformers_gives_the_same_logits_each_time(toy: Any, phase: Phase) -> None:
    values = toy.inputs(phase)
    want = toy.step(phase)({name: value.clone() for name, value in values.items()})["logits"]
    step = toy.model.peer("transformers", phase, toy.weights, values, toy.precision)
    for _ in range(2):
        assert_close(step()["logits"], want, atol=2e-4, rtol=0)


def test_unknown_and_ragged_peers_are_refused(toy: Any) -> None:
    ragged = Phase(name="r", kind="decode", batch=3, context=60, ragged=True)
    values = toy.inputs(ragged)
    with pytest.raises(UsageError, match="it has transformers, torch_compile"):
        toy.model.peer("vllm", ragged, toy.weights, values, toy.precision)
    with pytest.raises(UsageError, match="ragged"):
        toy.model.peer("transformers", ragged, toy.weights, values, toy.precision)
