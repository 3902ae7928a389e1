"""Reflection's Beam as a program of regions: plain PyTorch, rounding where transformers does, over a paged KV cache."""

from __future__ import annotations

from baselines.beam.model import BeamModel
from harness.workload import Workload


def build(workload: Workload) -> BeamModel:
    """The model of a workload whose `model` is this package."""
    return BeamModel(workload)
