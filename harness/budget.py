"""How far from the oracle an honest rewrite may be: bounds on RMSE, largest error and bias from the baseline's own.

Pure. Errors are FP64 tensors of value minus unrounded oracle, in the output's units; dtypes are the output's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

POOL_ELEMENTS = 4096
REFERENCE_FACTOR = 1.25
ROUNDING_FACTOR = 1.05
SMALL_SAMPLE = 8.0
"""Below POOL_ELEMENTS the RMSEs of equally good roundings scatter by about 1.5 / sqrt(N) around each other (for normal
values): N elements are allowed this many / sqrt(N) more than 4,096 are, in units of the larger of baseline and
rounding. An exact baseline of representable values is allowed nothing."""
FP32_FLOOR = 2.0**-18
PEAK_FACTOR = 6.0
"""Normal errors of RMSE FP32_FLOOR have a largest of about this many floors; FP32 outputs are allowed it, or one long
FP32 sum, which is within the floor, would fail by its largest element."""
UNDERFLOW = 2.0**-100
"""Absolute: what is smaller comes of underflow, which a device may flush to zero at any step of a product."""
BIAS_FRACTION = 0.1
BIAS_Z = 6.0
BIAS_CHUNKS = 16
CHUNK = 128
"""Errors within a row share factors (a rounded softmax weight moves a whole head), so z counts chunks of a row of up to
this many elements, distinct ones only, and says nothing on fewer than BIAS_CHUNKS of them."""


def rms(tensor: Tensor) -> float:
    """Root mean square, scaled first so that 1e-200 and 1e200 do not leave FP64; 0 of nothing."""
    if not tensor.numel():
        return 0.0
    peak = float(tensor.abs().max())
    return peak * math.sqrt(float((tensor / peak).square().mean())) if 0 < peak < math.inf else peak


def row_rms(rows: Tensor) -> Tensor:
    """[rows, width] -> [rows]"""
    return rows.square().mean(-1).sqrt()


def fp32_floor(oracle: Tensor, dtype: torch.dtype) -> float:
    """What an FP32 output may err by, whatever the baseline does; 0 for a narrower one."""
    return FP32_FLOOR * rms(oracle) if dtype == torch.float32 else 0.0


def rmse_budget(own: float, oracle: Tensor, dtype: torch.dtype) -> float:
    """max(1.25 e(baseline), 1.05 e(oracle rounded once), floor), and the allowance of a small sample. `own` is
    e(baseline); not for an empty oracle."""
    rounded = oracle.to(dtype).double()
    safe = torch.isfinite(rounded)
    once = rms((rounded - oracle)[safe])
    scarce = max(0.0, SMALL_SAMPLE / math.sqrt(oracle.numel()) - SMALL_SAMPLE / math.sqrt(POOL_ELEMENTS))
    most = max(REFERENCE_FACTOR * own, ROUNDING_FACTOR * once, fp32_floor(oracle, dtype))
    return most + scarce * max(own, once) + UNDERFLOW


def peak_budget(theirs: Tensor, oracle: Tensor, dtype: torch.dtype) -> float:
    """Twice the baseline's largest error plus 2 ulp at the oracle's largest magnitude; `theirs` are its errors."""
    largest = float(oracle.abs().max())
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > UNDERFLOW else 0.0
    return 2 * float(theirs.abs().max()) + 2 * ulp + PEAK_FACTOR * fp32_floor(oracle, dtype) + UNDERFLOW


def chunk_means(error: Tensor, oracle: Tensor) -> Tensor:
    """Mean of sign(o) (c - o) over each chunk of each row: negative where magnitudes come out too small."""
    signed = oracle.sign() * error
    width = signed.shape[-1] if signed.dim() else 1
    if width > CHUNK and width % CHUNK == 0:
        width = CHUNK
    return signed.reshape(-1, width).mean(-1)


def bias_fault(mine: Tensor, theirs: Tensor, unit: float) -> str:
    """What is wrong with the candidate's chunk means beside the baseline's, or nothing. `unit` is e(baseline), or the
    FP32 floor where that is larger."""
    bias, reference_bias = float(mine.mean()), float(theirs.mean())
    distinct = len(set(mine.tolist()))
    allowed = abs(reference_bias) + BIAS_FRACTION * unit + UNDERFLOW
    if distinct < BIAS_CHUNKS or abs(bias) <= allowed:
        return ""
    z = bias / (float(mine.std()) / math.sqrt(distinct))
    if abs(z) <= BIAS_Z:
        return ""
    way = "towards zero" if bias < 0 else "away from zero"
    return (
        f"biased {way} by {abs(bias):.3e} (z {z:.1f}), allowed {allowed:.3e} (baseline {reference_bias:.1e}): "
        "a store that truncates, or a factor that is off"
    )
