"""Results of gates as records: how a gate says that it passed, or what failed and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.schema import Gate, GateResult, OutputError, Status


def describe(errors: Sequence[OutputError]) -> str:
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{first.region} at layer {first.layer}, {first.case}, output {first.output}: {first.reason}{more}"


def passed(
    gate: Gate,
    *,
    reason: str = "",
    errors: tuple[OutputError, ...] = (),
    evidence: Mapping[str, object] | None = None,
) -> GateResult:
    return GateResult(gate=gate, passed=True, seconds=0, reason=reason, errors=errors, evidence=dict(evidence or {}))


def failed(
    gate: Gate,
    status: Status,
    reason: str,
    *,
    errors: tuple[OutputError, ...] = (),
    evidence: Mapping[str, object] | None = None,
) -> GateResult:
    return GateResult(
        gate=gate, passed=False, seconds=0, status=status, reason=reason, errors=errors, evidence=dict(evidence or {})
    )
