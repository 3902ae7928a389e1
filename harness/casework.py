"""Recorded cases to verdicts: the candidate's outputs from the child, the expected ones from the parent's own files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from harness import messages as m
from harness.errors import WorkerError
from harness.numerics import Choice, Expected, Result, judge
from harness.placement import Placement
from harness.sandbox import Child
from harness.schema import OutputError


def judge_cases(
    child: Child, file: str, placement: Placement, cases: Sequence[m.RecordedCase], deadline_s: float
) -> tuple[OutputError, ...]:
    """Runs the cases in a child that is given the inputs alone, then compares here."""
    asked = tuple(
        m.SiteCase(
            span=case.span,
            case=case.case,
            storage=case.storage,
            inputs=case.inputs,
            outputs=f"{case.inputs}.made",
            output_specs=case.output_specs,
        )
        for case in cases
    )
    expected = [taken(case.expected) for case in cases]
    ran = child.ask(m.RunSites(file=file, cases=asked), m.SitesRun, deadline_s)
    if len(ran.cases) != len(cases):
        raise WorkerError("crashed", "the worker answered for another number of cases than it was given")
    return judge([_result(placement, *each) for each in zip(cases, asked, ran.cases, expected, strict=True)])


def taken(path: str) -> dict[str, Tensor]:
    """A file's tensors, the file removed: what candidates are compared with is never on a disk they can read."""
    held = load_file(path)
    Path(path).unlink()
    return held


def load_made(path: str | Path, names: Iterable[str] = ()) -> dict[str, Tensor]:
    """Tensors that a child wrote, `names` among them. Raises WorkerError where it did not, whatever it answered."""
    try:
        made = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WorkerError("crashed", f"the worker left no outputs that can be read: {error}") from error
    if missing := set(names) - set(made):
        raise WorkerError("crashed", f"the worker left no {', '.join(sorted(missing))} among its outputs")
    return made


def _result(
    placement: Placement, case: m.RecordedCase, asked: m.SiteCase, ran: m.CaseRun, expected: Mapping[str, Tensor]
) -> Result:
    made = load_made(asked.outputs)
    outputs = strip(made, "out.")
    if case.rows:
        rows = expected["rows"]
        whole = {name: tuple(shape) for name, (shape, _) in case.output_specs.items()}
        outputs = {name: t[rows] if tuple(t.shape) == whole.get(name) else t for name, t in outputs.items()}
    return Result(
        expected=Expected(
            region=case.region,
            layer=case.layer,
            case=f"{case.case}, {case.span.phase}, {case.storage}",
            storage=case.storage,
            reference=strip(expected, "ref."),
            oracle=strip(expected, "oracle."),
            before=strip(expected, "before."),
            cache_reference=strip(expected, "cacheref."),
            cache_oracle=strip(expected, "cacheoracle."),
            choice=_choice(placement, case, expected),
        ),
        outputs=outputs,
        caches={k: t for k, t in strip(made, "cache.").items() if f"before.{k}" in expected},
        touched=ran.touched,
        repeat_differs=ran.repeat_differs,
        deterministic=placement.built.deterministic,
    )


def _choice(placement: Placement, case: m.RecordedCase, expected: Mapping[str, Tensor]) -> Choice | None:
    call = placement.programs[case.span.phase].calls[case.span.stop - 1]
    if case.choice is None or call.region.decision is None:
        return None
    return Choice(
        scores=expected["scores"],
        reference_error=case.choice_error,
        ids=case.choice,
        decision=call.region.decision,
        weights=strip(expected, "vector."),
        attrs=call.attrs,
    )


def strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
