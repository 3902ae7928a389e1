"""Profile, choose, propose, evaluate, decide, keep, record."""

from __future__ import annotations

from harness.brief import Agent
from harness.schema import Attempt
from harness.session import Session


def run(session: Session, agent: Agent) -> str:
    """Runs until the budget is spent or the agent has nothing to propose; says which.

    Every attempt stands in the ledger before the next begins, so a run that is killed resumes with nothing lost.
    """
    session.settle()
    for phase in session.judge.workload.deciding:
        session.profile(phase.name)
    while not (reason := session.budget_left()):
        proposal = agent.propose(session.brief())
        if proposal is None:
            return "the agent has nothing more to propose"
        attempt: Attempt = session.evaluate(proposal)
        session.record(attempt)
        session.judged(attempt)
    return reason


def finish(session: Session, rounds: int) -> None:
    """The kept stack's profiles and, unless `rounds` is 0, a ladder of each deciding phase that has none yet."""
    if not session.stack():
        return
    phases = [phase.name for phase in session.judge.workload.deciding]
    for phase in phases:
        session.profile(phase)
    missing = [phase for phase in phases if rounds and not session.climbed(phase)]
    session.climb(missing, processes=3, rounds=rounds, peers=[], command=session.config.command)
