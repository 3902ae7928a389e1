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
