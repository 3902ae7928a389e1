"""The attempts as a CSV, one row each: for a spreadsheet or a notebook."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from harness.report.rows import AttemptRow, RunData, attempt_rows

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a cell that begins so for a formula."""
COLUMNS = {
    "attempt": "int64",
    "name": "string",
    "status": "string",
    "regions": "string",
    "backend": "string",
    "kind": "string",
    "target": "string",
    "baseline_ms": "float64",
    "candidate_ms": "float64",
    "log_ratio": "float64",
    "log_ratio_low": "float64",
    "log_ratio_high": "float64",
    "processes": "Int64",
    "reason": "string",
    "failed_gate": "string",
    "file": "string",
    "file_sha256": "string",
    "commit": "string",
    "parent": "string",
    "displaced": "string",
    "sites": "string",
    "agent": "string",
    "model": "string",
    "tokens": "int64",
    "cost_usd": "float64",
    "alpha_spent": "float64",
    "persistent_bytes": "int64",
    "workspace_bytes": "int64",
    "started": "string",
    "seconds": "float64",
    "device": "string",
    "baseline_hash": "string",
}


def csv(data: RunData) -> str:
    """One row an attempt; a missing or non-finite number is an empty cell."""
    frame = pd.DataFrame([_cells(row) for row in attempt_rows(data)], columns=list(COLUMNS))
    numbers = frame.select_dtypes("number").columns
    frame[numbers] = frame[numbers].replace([math.inf, -math.inf], math.nan)
    return str(frame.astype(COLUMNS).to_csv(index=False, lineterminator="\n"))


def _cells(row: AttemptRow) -> dict[str, Any]:
    attempt, estimate, change = row.attempt, row.estimate, row.change
    own = {name: getattr(attempt, name) for name in COLUMNS if name in type(attempt).model_fields}
    made = own | {
        "status": row.status,
        "kind": row.family,
        "regions": " | ".join(" + ".join(run) for run in attempt.regions),
        "baseline_ms": estimate.baseline_ms if estimate else None,
        "candidate_ms": estimate.candidate_ms if estimate else None,
        "log_ratio": change.mean if change else None,
        "log_ratio_low": change.low if change else None,
        "log_ratio_high": change.high if change else None,
        "processes": estimate.processes if estimate else None,
        "reason": attempt.decision.reason,
        "failed_gate": next((gate.gate.value for gate in attempt.gates if not gate.passed), None),
        "commit": row.commit.commit if row.commit else None,
        "displaced": " ".join(attempt.displaced),
        "sites": " ".join(f"{phase}={count}" for phase, count in attempt.sites.items()),
        "alpha_spent": attempt.decision.alpha_spent,
    }
    return {name: f"'{v}" if isinstance(v, str) and v.startswith(FORMULA) else v for name, v in made.items()}
