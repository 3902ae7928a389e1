"""What an agent is told and what it answers, and the protocol between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from harness.schema import Attempt, Gap


@dataclass(frozen=True)
class Brief:
    """The state of a run as an agent may see it. `gaps` profiles the kept stack when it is first called."""

    workload: str
    device: str
    attempt: int
    attempts: tuple[Attempt, ...]
    stack: tuple[str, ...]
    """Names of the kept rewrites, in order."""
    gaps: Callable[[], tuple[Gap, ...]]


@dataclass(frozen=True)
class Proposal:
    """A candidate file's bytes and who made them."""

    stem: str
    source: bytes
    agent: str
    model: str | None = None
    tokens: int = 0
    cost_usd: float = 0.0
    note: str = ""


class Agent(Protocol):
    """Proposes candidates; None ends the run."""

    def propose(self, brief: Brief) -> Proposal | None: ...
