"""Floating outputs against the oracle: which cases set a budget, which are pooled, and what is wrong with each.

Pure. A case with POOL_ELEMENTS stands alone, smaller ones of one output and of like scale are pooled in order. Beside
the bounds of budget.py stand the pattern of what is not finite, and rows: a row that the baseline gets right and the
candidate loses is WRONG however small it is beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import budget as b
from harness.budget import UNDERFLOW, rms, row_rms
from harness.schema import OutputError

POOL_SCALE = 4.0
"""Small cases are pooled only while their rms values are within this factor: a large case must not hide a tiny one."""
NO_BUDGET = 0.1
"""A case in which the baseline errs by more than this fraction of rms(oracle) sets no budget."""
LOST_ROW = 0.25
LOST_ROW_WIDTH = 16
"""A narrower row has too few elements to be judged by itself."""


@dataclass(frozen=True)
class Piece:
    """One floating output of one case: three FP64 tensors of equal shape, and `label`, the record of a right one.

    `shape` is the output's own; `rows` are the rows of its last dimension that the tensors hold, where not all.
    """

    label: OutputError
    storage: str
    dtype: torch.dtype
    candidate: Tensor
    reference: Tensor
    oracle: Tensor
    shape: tuple[int, ...]
    rows: Tensor | None = None

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(t).all()) for t in (self.candidate, self.reference, self.oracle))

    def place(self, flat: int) -> tuple[int, ...]:
        """The index, in the output's own shape, of an element of this piece."""
        if self.rows is not None:
            width = self.shape[-1]
            flat = int(self.rows[flat // width]) * width + flat % width
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), self.shape)) if self.shape else ()

    def verdict(self, wrong: str, **numbers: Any) -> OutputError:
        """The record with `wrong` as its reason; right where that is empty."""
        return self.label.model_copy(update={"ok": not wrong, "reason": wrong, **numbers})


def judge_pieces(pieces: Sequence[Piece]) -> tuple[OutputError, ...]:
    """A record for every piece that is judged alone, then one for every pool."""
    records: list[OutputError] = []
    budgeted: list[Piece] = []
    for piece in pieces:
        wrong = pattern_fault(piece) or _lost_row(piece)
        if wrong is not None:
            records.append(wrong)
        elif _sets_budget(piece):
            budgeted.append(piece)
        else:
            records.append(agreement(piece))
    return (*records, *(judge_pool(pool) for pool in _pools(budgeted)))


def pattern_fault(piece: Piece) -> OutputError | None:
    """NaN and infinities must stand where the baseline has them, or where the oracle rounded to the dtype has."""
    made, stored = _kinds(piece.candidate), _kinds(piece.reference)
    if torch.equal(made, stored):
        return None
    differs = (made != stored) & (made != _kinds(piece.oracle.to(piece.dtype).double()))
    if not differs.any():
        return None
    flat = int(differs.flatten().nonzero()[0])
    place = piece.place(flat)
    mine, theirs = float(piece.candidate.flatten()[flat]), float(piece.reference.flatten()[flat])
    count = int(differs.sum())
    return piece.verdict(f"{count} elements: {mine:g} at {list(place)} where the baseline has {theirs:g}", place=place)


def _lost_row(piece: Piece) -> OutputError | None:
    """A row (of the last dimension) that the baseline gets within a tenth and the candidate misses by a quarter."""
    if piece.oracle.dim() < 2 or piece.oracle.shape[-1] < LOST_ROW_WIDTH or not piece.finite:
        return None
    oracle = piece.oracle.flatten(0, -2)
    size = row_rms(oracle)
    theirs, mine = (row_rms(t.flatten(0, -2) - oracle) for t in (piece.reference, piece.candidate))
    allowed = torch.maximum(LOST_ROW * size, 4 * theirs)
    lost = (size > UNDERFLOW) & (theirs <= NO_BUDGET * size) & (mine > allowed)
    if not lost.any():
        return None
    row = int((mine / size).where(lost, 0.0).argmax())
    inside = int((piece.candidate.flatten(0, -2)[row] - oracle[row]).abs().argmax())
    place = piece.place(row * oracle.shape[-1] + inside)
    return piece.verdict(
        f"{int(lost.sum())} rows are lost, the worst at {list(place[:-1])}: RMSE {float(mine[row]):.3e} in a row of "
        f"rms {float(size[row]):.3e} that the baseline gets within {float(theirs[row]):.1e}",
        error=float(mine[row]),
        budget=float(allowed[row]),
        reference_error=float(theirs[row]),
        place=place,
    )


def _sets_budget(piece: Piece) -> bool:
    return piece.finite and rms(piece.reference - piece.oracle) <= max(NO_BUDGET * rms(piece.oracle), UNDERFLOW)


def agreement(piece: Piece) -> OutputError:
    """A case whose baseline is not to be trusted. By the triangle inequality a candidate as good as the baseline is
    within budget + e(baseline) of it; one that vanishes beside both baseline and oracle is WRONG. Where the baseline
    alone is not finite, the candidate must be within a tenth of the oracle."""
    finite = [torch.isfinite(t) for t in (piece.candidate, piece.reference, piece.oracle)]
    rescued = finite[0] & ~finite[1] & finite[2]
    far = rescued & ((piece.candidate - piece.oracle).abs() > NO_BUDGET * piece.oracle.abs() + UNDERFLOW)
    if far.any():
        place = piece.place(int(far.flatten().nonzero()[0]))
        return piece.verdict(
            f"finite at {list(place)} where the baseline is not, and a tenth or more off the oracle", place=place
        )
    at = finite[0] & finite[1] & finite[2]
    if not at.any():
        return piece.verdict("")
    mine, theirs, oracle = piece.candidate[at], piece.reference[at], piece.oracle[at]
    apart, own = mine - theirs, rms(theirs - oracle)
    budget = b.rmse_budget(own, oracle, piece.dtype) + own
    peak = 1.5 * b.peak_budget(theirs - oracle, oracle, piece.dtype)
    error, worst = rms(apart), int(apart.abs().argmax())
    place = piece.place(int(at.flatten().nonzero()[worst]))
    what = ""
    if error > budget:
        what = f"RMSE {error:.3e} to the baseline, which itself errs by {own:.3e}: more than {budget:.3e}"
    elif float(apart[worst].abs()) > peak:
        error, budget = float(apart[worst].abs()), peak
        what = f"{error:.3e} from the baseline at {list(place)}, allowed {peak:.3e}"
    elif rms(mine) < 0.5 * min(rms(theirs), rms(oracle)) - UNDERFLOW:
        what = (
            f"rms {rms(mine):.3e} where baseline and oracle have {rms(theirs):.3e} and {rms(oracle):.3e}: it vanishes"
        )
    return piece.verdict(what, error=error, budget=budget, reference_error=own, place=place)


def _pools(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Cases of the same output, in order: one with POOL_ELEMENTS alone, smaller ones of like scale together."""
    done: list[list[Piece]] = []
    filling: dict[tuple[object, ...], list[list[Piece]]] = {}
    for piece in pieces:
        if piece.oracle.numel() >= b.POOL_ELEMENTS:
            done.append([piece])
            continue
        at = (piece.label.region, piece.label.layer, piece.label.output, piece.storage, piece.dtype)
        own = filling.setdefault(at, [])
        scale = rms(piece.oracle)
        pool = next((p for p in own if _alike(scale, rms(p[0].oracle))), None)
        if pool is None:
            pool = []
            own.append(pool)
        pool.append(piece)
        if sum(p.oracle.numel() for p in pool) >= b.POOL_ELEMENTS:
            own.remove(pool)
            done.append(pool)
    return done + [pool for own in filling.values() for pool in own]


def _alike(one: float, other: float) -> bool:
    return one == other == 0 or (0 < one <= POOL_SCALE * other and other <= POOL_SCALE * one)


def judge_pool(pool: Sequence[Piece], *, whole_step: bool = False) -> OutputError:
    """The three rules on one pool of finite pieces: RMSE, largest error, bias. A whole step answers for the first."""
    oracle = torch.cat([p.oracle.flatten() for p in pool])
    mine = torch.cat([(p.candidate - p.oracle).flatten() for p in pool])
    theirs = torch.cat([(p.reference - p.oracle).flatten() for p in pool])
    dtype = pool[0].dtype
    error, own = rms(mine), rms(theirs)
    budget = b.rmse_budget(own, oracle, dtype)
    worst = int(mine.abs().argmax())
    piece, inside = _owner(pool, worst)
    place = piece.place(inside)
    value = f"{float(piece.candidate.flatten()[inside]):.6g} at {list(place)} where {float(oracle[worst]):.6g} is right"
    peak = b.peak_budget(theirs, oracle, dtype)
    what = ""
    if error > budget:
        what = (
            f"RMSE {error:.3e} exceeds the budget {budget:.3e} (baseline {own:.3e}, {oracle.numel()} elements); {value}"
        )
    elif not whole_step and float(mine[worst].abs()) > peak:
        error, own, budget = float(mine[worst].abs()), float(theirs.abs().max()), peak
        what = f"largest error {error:.3e} exceeds {peak:.3e} (baseline {own:.3e}); {value}"
    elif not whole_step:
        my_chunks = torch.cat([b.chunk_means(p.candidate - p.oracle, p.oracle) for p in pool])
        their_chunks = torch.cat([b.chunk_means(p.reference - p.oracle, p.oracle) for p in pool])
        what = b.bias_fault(my_chunks, their_chunks, max(own, b.fp32_floor(oracle, dtype)))
    blamed = piece if what else pool[0]
    case = blamed.label.case + (f" (and {len(pool) - 1} more)" if len(pool) > 1 else "")
    return blamed.verdict(what, case=case, error=error, budget=budget, reference_error=own, place=place)


def _owner(pool: Sequence[Piece], flat: int) -> tuple[Piece, int]:
    for piece in pool:
        if flat < piece.oracle.numel():
            return piece, flat
        flat -= piece.oracle.numel()
    raise IndexError(flat)


def _kinds(tensor: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return tensor.isnan() * 1 + tensor.isposinf() * 2 + tensor.isneginf() * 3
