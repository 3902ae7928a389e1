"""Outputs of a candidate against the FP64 oracle and the baseline's own error: right or WRONG, and where.

Pure: tensors on the CPU in, records out. An error is candidate minus the unrounded oracle, in the output's own units;
the baseline's error on the same inputs sets the budget. Here stands what is exact (names, shapes, dtypes, integers,
inputs and cache bytes that must not change) and the choice of experts; accuracy.py judges the floating values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.accuracy import Piece, agreement, judge_pieces, judge_pool, pattern_fault
from harness.program import Decision
from harness.schema import OutputError

CHOICE_RESOLUTION = 2.0**-21
"""Of the largest score or bias: what FP32 sums of scores and biases leave undecided, four roundings of a sum of two."""
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Choice:
    """What a run that chooses (a router) is judged with: `scores` [T, E] of the FP64 oracle, `ids` an output role."""

    scores: Tensor
    reference_error: float
    ids: str
    decision: Decision
    weights: Mapping[str, Tensor]
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """One case of one run of regions, by role: the baseline's outputs as stored, the oracle's in FP64 (integers as they
    are), and the mutated caches before the call, after the baseline and after the oracle."""

    region: str
    layer: int
    case: str
    storage: str
    reference: Mapping[str, Tensor]
    oracle: Mapping[str, Tensor]
    before: Mapping[str, Tensor] = field(default_factory=dict)
    cache_reference: Mapping[str, Tensor] = field(default_factory=dict)
    cache_oracle: Mapping[str, Tensor] = field(default_factory=dict)
    choice: Choice | None = None


@dataclass(frozen=True)
class Result:
    """What a candidate made of a case. `touched` are inputs that changed without being declared mutated,
    `repeat_differs` outputs that differ bitwise between two runs on equal inputs."""

    expected: Expected
    outputs: Mapping[str, Tensor]
    caches: Mapping[str, Tensor]
    touched: tuple[str, ...]
    repeat_differs: tuple[str, ...]
    deterministic: bool


def judge(results: Sequence[Result]) -> tuple[OutputError, ...]:
    """A record for every output of every case, or of every pool of small cases; `ok` where it is right."""
    records: list[OutputError] = []
    pieces: list[Piece] = []
    for result in results:
        for found in _compare(result):
            if isinstance(found, OutputError):
                records.append(found)
            else:
                pieces.append(found)
    return (*records, *judge_pieces(pieces))


def judge_step(candidate: Tensor, reference: Tensor, oracle: Tensor, *, phase: str) -> OutputError:
    """A whole step's logits: the RMSE against FP64 at most 1.25 times the baseline's own, or the floor of an output."""
    expected = Expected(f"step of {phase}", -1, "whole step, choices forced", "", {}, {})
    wrong = _unlike(candidate, reference)
    if wrong:
        return _record(expected, "logits", wrong)
    piece = _piece(expected, "logits", candidate, reference, oracle, reference)
    if not reference.numel():
        return piece.label
    fault = pattern_fault(piece)
    if fault is not None:
        return fault
    return judge_pool((piece,), whole_step=True) if piece.finite else agreement(piece)


def _compare(result: Result) -> Iterator[OutputError | Piece]:
    """Verdicts on everything that is exact, and the floating outputs still to be judged."""
    expected = result.expected
    for name in result.touched:
        yield _record(
            expected, name, f"input {name} was written to: declare it mutated in its region or leave it alone"
        )
    for name in result.repeat_differs if result.deterministic else ():
        yield _record(
            expected, name, "differs bitwise between two runs on equal inputs; declare deterministic=False if meant"
        )
    for name in sorted(result.outputs.keys() - expected.reference.keys()):
        yield _record(expected, name, f"not an output of this run, which gives {', '.join(expected.reference)}")
    oracle, reference = dict(expected.oracle), dict(expected.reference)
    if expected.choice is not None:
        yield from _judge_choice(result, oracle, reference)
    for name, stored in reference.items():
        if expected.choice is not None and name == expected.choice.ids:
            continue
        yield _compare_output(expected, name, result.outputs.get(name), stored, oracle[name], expected.reference[name])
    for name in expected.before:
        yield from _compare_cache(expected, name, result.caches.get(name))


def _compare_output(
    expected: Expected, name: str, made: Tensor | None, stored: Tensor, oracle: Tensor, like: Tensor
) -> OutputError | Piece:
    """`like` has the shape and dtype that are asked for; `stored` is the baseline's answer, in it or in FP64."""
    if made is None:
        return _record(expected, name, "the candidate returned no such output")
    wrong = _unlike(made, like)
    if wrong:
        return _record(expected, name, wrong)
    if not like.numel():
        return _record(expected, name, "")
    if not like.is_floating_point():
        return _exact(expected, name, made, stored)
    return _piece(expected, name, made, stored, oracle, like)


def _piece(
    expected: Expected,
    name: str,
    made: Tensor,
    stored: Tensor,
    oracle: Tensor,
    like: Tensor,
    rows: Tensor | None = None,
) -> Piece:
    three = (made.double(), stored.double(), oracle.double())
    return Piece(_record(expected, name, ""), expected.storage, like.dtype, *three, tuple(like.shape), rows)


def _compare_cache(expected: Expected, name: str, made: Tensor | None) -> Iterator[OutputError | Piece]:
    """Rows (of the last dimension) in which the baseline changed anything, as an output; all others bit by bit."""
    before, stored = expected.before[name], expected.cache_reference[name]
    wrong = "the candidate returned no such cache" if made is None else _unlike(made, before)
    if made is None or wrong:
        yield _record(expected, name, wrong)
        return
    if not before.numel():
        return
    width = before.shape[-1] if before.dim() else 1
    old, new, theirs = (_raw(t).reshape(-1, width) for t in (before, made, stored))
    written = (old != theirs).any(-1)
    strayed = (old != new) & ~written[:, None]
    if strayed.any():
        flat = int(strayed.flatten().nonzero()[0])
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), before.shape))
        count = int(strayed.any(-1).sum())
        reason = f"{count} cache rows outside the written slots were changed, the first at {list(place)}"
        yield _record(expected, name, reason, place=place)
    elif not before.is_floating_point():
        yield _exact(expected, name, made, stored)
    elif not written.any():
        yield _record(expected, name, "")
    else:
        rows = written.nonzero().flatten()
        three = [t.reshape(-1, width)[rows] for t in (made, stored, expected.cache_oracle[name])]
        yield _piece(expected, name, three[0], three[1], three[2], before, rows)


def _judge_choice(result: Result, oracle: dict[str, Tensor], reference: dict[str, Tensor]) -> Iterator[OutputError]:
    """Judges the ids and points `oracle` and `reference` at this choice: what depends on it is measured against its own
    FP64 values, with the baseline's error as it is at the baseline's ids. Drops what no sound choice decides."""
    expected = result.expected
    choice = expected.choice
    assert choice is not None
    decision, made, stored = choice.decision, result.outputs.get(choice.ids), reference[choice.ids]
    prefix = choice.ids.removesuffix(decision.ids)
    theirs = decision.resolve(choice.scores, choice.weights, choice.attrs, stored)
    wrong = "the candidate returned no such output" if made is None else _unlike(made, stored)
    if made is None or wrong or not stored.numel():
        yield _record(expected, choice.ids, wrong)
        sound = not wrong
    else:
        verdict = _flips(expected, choice, made, stored)
        yield verdict
        sound = verdict.ok
    for role, at_theirs in theirs.items():
        name = prefix + role
        if name not in reference:
            continue
        if made is None or not sound:
            del reference[name]
            continue
        mine = decision.resolve(choice.scores, choice.weights, choice.attrs, made)[role].double()
        oracle[name] = mine
        reference[name] = reference[name].double() - at_theirs.double() + mine


def _flips(expected: Expected, choice: Choice, made: Tensor, stored: Tensor) -> OutputError:
    """ids [T, k], compared as a set a token; another set is right where the FP64 scores nearly tie."""
    differs = (made.long().sort(-1)[0] != stored.long().sort(-1)[0]).any(-1)
    if not differs.any():
        return _record(expected, choice.ids, "")
    shortfall = functools.partial(choice.decision.shortfall, choice.scores, choice.weights, choice.attrs)
    vectors = [t for t in choice.weights.values() if t.dim() == 1]
    sizes = [t.double().abs().max() for t in (choice.scores, *vectors) if t.numel()]
    own = shortfall(stored)
    own_largest = float(own[torch.isfinite(own)].max()) if torch.isfinite(own).any() else 0.0
    resolution = CHOICE_RESOLUTION * float(max(sizes))
    allowed = max(2 * choice.reference_error, 2 * own_largest, resolution)
    gap = torch.where(differs, shortfall(made), torch.zeros_like(own))
    bad = ~((gap == 0) | (gap < allowed))
    count, tokens = int(differs.sum()), len(differs)
    if bad.any():
        token = int(bad.nonzero()[0])
        took, right, short = made[token].tolist(), stored[token].tolist(), float(gap[token])
        return _record(
            expected,
            choice.ids,
            f"{int(bad.sum())} of {tokens} tokens chose what no rounding explains: token {token} took {took} "
            f"for {right}, {short:.2e} of score short where {allowed:.2e} is a tie",
            error=short if math.isfinite(short) else None,
            budget=allowed,
            place=(token,),
        )
    largest = float(gap.max())
    note = f"{count} of {tokens} tokens chose otherwise, all in a tie: {largest:.2e} of score, allowed {allowed:.2e}"
    return _record(expected, choice.ids, "", note=note, error=largest, budget=allowed)


def _unlike(made: Tensor, like: Tensor) -> str:
    if made.shape != like.shape:
        return f"shape {list(made.shape)} where {list(like.shape)} is asked for"
    if made.dtype != like.dtype:
        return f"dtype {made.dtype} where {like.dtype} is asked for"
    return ""


def _exact(expected: Expected, name: str, made: Tensor, stored: Tensor) -> OutputError:
    differs = made != stored
    if not differs.any():
        return _record(expected, name, "")
    place = tuple(int(i) for i in differs.nonzero()[0])
    mine, theirs = made[place].item(), stored[place].item()
    count = int(differs.sum())
    return _record(
        expected, name, f"{count} integers differ: {mine} at {list(place)} where {theirs} is right", place=place
    )


def _raw(tensor: Tensor) -> Tensor:
    """The bits, as integers of the same width: NaN payloads and the sign of zero count."""
    return tensor.contiguous().view(RAW[tensor.dtype.itemsize])


def _record(
    expected: Expected,
    output: str,
    wrong: str,
    *,
    note: str = "",
    error: float | None = None,
    budget: float | None = None,
    reference_error: float | None = None,
    place: tuple[int, ...] | None = None,
) -> OutputError:
    """`wrong` says what is wrong, and is empty where nothing is; `note` goes with what is right."""
    return OutputError(
        region=expected.region,
        layer=expected.layer,
        case=expected.case,
        output=output,
        ok=not wrong,
        error=error,
        budget=budget,
        reference_error=reference_error,
        place=place,
        reason=wrong or note,
    )
