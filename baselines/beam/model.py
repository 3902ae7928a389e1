"""A Beam workload as the harness asks for it: programs, weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baselines.beam.cache import step_inputs
from baselines.beam.checkpoint import CheckpointWeights
from baselines.beam.config import rank_shape, whole_shape
from baselines.beam.peer import Step, peer_step
from baselines.beam.program import beam_program
from baselines.beam.weights import RandomWeights, derived_seed
from harness.errors import UsageError
from harness.program import Precision, Program
from harness.workload import Phase, WeightSource, Workload


class BeamModel:
    """One rank's share of a workload's Beam; `rank` says whose of a checkpoint's weights."""

    def __init__(self, workload: Workload, rank: int = 0) -> None:
        self.workload, self.rank = workload, rank
        self.whole = whole_shape(workload)
        self.shape = rank_shape(workload)

    def program(self, phase: Phase) -> Program:
        if self.workload.ranks > 1:
            raise UsageError(
                f"{self.workload.name} runs {self.workload.ranks} ranks: its collectives need as many processes and "
                "are not built yet; beam-tp8-rank and beam-tp8-rank-12 run one rank's share without them"
            )
        return beam_program(self.shape, phase, self.workload.page_size)

    def weights(self, device: torch.device, seed: int, precision: Precision) -> WeightSource:
        """The checkpoint's where the workload names one, else random ones of `seed`; see `stored_dtype` for FP64."""
        own = self.workload.precision.storage
        if self.workload.checkpoint is not None:
            share = (self.rank, self.workload.rank_of)
            return CheckpointWeights(self.workload.checkpoint, self.whole, share, device, own, precision)
        return RandomWeights(self.shape, device, seed, own, precision)

    def inputs(self, phase: Phase, device: torch.device, seed: int, precision: Precision) -> dict[str, Tensor]:
        own = self.workload.precision.storage
        tokens = self.tokens(phase, seed)
        return step_inputs(self.shape, phase, self.workload.page_size, tokens, device, seed, own, precision.storage)

    def tokens(self, phase: Phase, seed: int) -> Tensor:
        """[T] int64 on the CPU, below the rank's vocabulary; padding rows have some too."""
        generator = torch.Generator().manual_seed(derived_seed(seed, phase.name, "tokens"))
        return torch.randint(self.shape.vocab_size, (phase.tokens,), generator=generator)

    def peer(
        self, name: str, phase: Phase, weights: Mapping[str, Tensor], values: Mapping[str, Tensor], precision: Precision
    ) -> Step:
        """One step of another implementation over static `values`; `peer.py` has their names."""
        return peer_step(name, self.shape, self.program(phase), phase, weights, values, precision)
