"""Weights read from a sharded safetensors directory: only what is asked for, and of it only one rank's share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baselines.beam.config import BeamShape
from baselines.beam.weights import HeldWeights, Weight, beam_weights, stored_dtype
from harness.errors import WeightsError
from harness.program import Precision

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LOSSLESS = {torch.bfloat16: ("BF16",), torch.float32: ("F32", "BF16", "F16")}
"""Stored dtypes that a wanted one holds exactly."""
EXPERTS_SUFFIX = ".mlp.experts."


class CheckpointWeights(HeldWeights):
    """A checkpoint's tensors under transformers' names; experts packed, or one by one as transformers saves them.

    Raises WeightsError that names the tensor, what was wanted and what was found: at once for a missing tensor, on
    first use for one of another shape or of a dtype the workload's cannot hold exactly.
    """

    def __init__(
        self,
        path: Path,
        whole: BeamShape,
        share: tuple[int, int],
        device: torch.device,
        workload: torch.dtype,
        precision: Precision,
    ) -> None:
        rank, ranks = share
        super().__init__(beam_weights(whole.for_rank(ranks)), stored_dtype(workload, precision))
        self._path, self._rank, self._ranks = path, rank, ranks
        self._device, self._workload = device, workload
        self._whole = beam_weights(whole)
        self._files = _tensor_files(path)
        self._open: dict[str, Any] = {}
        for name in self._whole:
            for part in self._parts(name):
                if part not in self._files:
                    raise WeightsError(f"{path} has no tensor {part}, which Beam's {name} needs")

    def _parts(self, name: str) -> list[str]:
        """Names under which the checkpoint stores a weight: itself, or its experts' one by one."""
        if name in self._files or EXPERTS_SUFFIX not in name:
            return [name]
        prefix, _, matrix = name.rpartition(".")
        matrices = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        experts = self._whole[name].shape[0]
        return [f"{prefix}.{expert}.{each}.weight" for expert in range(experts) for each in matrices]

    def _make(self, name: str) -> Tensor:
        whole = self._whole[name]
        parts = self._parts(name)
        spec = self.spec(name)
        if parts == [name]:
            made = self._read(name, whole.shape, whole, whole.split)
        else:
            rows, columns = whole.shape[1:]
            made = torch.empty(spec.shape, dtype=whole.dtype(self._workload))
            halves = len(parts) // whole.shape[0]
            split = "rows" if whole.split == "packed_rows" else whole.split
            target = made.view(len(parts), spec.shape[1] // halves, spec.shape[2])
            for index, part in enumerate(parts):
                target[index] = self._read(part, (rows // halves, columns), whole, split)
        return made.to(device=self._device, dtype=spec.dtype)

    def _read(self, part: str, shape: tuple[int, ...], whole: Weight, split: str) -> Tensor:
        """This rank's share of a stored tensor that must have `shape`, in the workload's dtype."""
        found = self._slice(part)
        wanted = whole.dtype(self._workload)
        if tuple(found.get_shape()) != shape:
            raise WeightsError(f"{part} in {self._path}: wanted shape {shape}, found {tuple(found.get_shape())}")
        if found.get_dtype() not in LOSSLESS[wanted]:
            raise WeightsError(
                f"{part} in {self._path}: wanted {' or '.join(LOSSLESS[wanted])}, found {found.get_dtype()}; "
                "choose a workload of the checkpoint's dtype"
            )
        return _share(found, shape, split, self._rank, self._ranks).to(wanted)

    def _slice(self, part: str) -> Any:
        file = self._files[part]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._path / file, framework="pt", device="cpu")
            return self._open[file].get_slice(part)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {part} from {self._path / file}: {error}") from error


def _share(found: Any, shape: tuple[int, ...], split: str, rank: int, ranks: int) -> Tensor:
    """One rank's part of a stored tensor, read without the rest where the file's layout allows it."""
    read: Callable[[Any], Tensor] = found.__getitem__
    if split == "none" or ranks == 1:
        return read(slice(None))
    if split == "columns":
        width = shape[-1] // ranks
        return read((..., slice(rank * width, (rank + 1) * width))).contiguous()
    axis = max(len(shape) - 2, 0)
    before = (slice(None),) * axis
    if split == "rows":
        height = shape[axis] // ranks
        return read((*before, slice(rank * height, (rank + 1) * height))).contiguous()
    half = shape[axis] // 2
    height = half // ranks
    starts = (rank * height, half + rank * height)
    return torch.cat([read((*before, slice(start, start + height))) for start in starts], dim=axis)


def _tensor_files(path: Path) -> dict[str, str]:
    """File name by tensor name, from the index or from the single file."""
    try:
        if (path / INDEX).exists():
            found: dict[str, str] = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return found
        with safe_open(path / SINGLE, framework="pt", device="cpu") as single:
            return dict.fromkeys(single.keys(), SINGLE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{path} holds neither a readable {INDEX} nor {SINGLE}: {error}") from error
