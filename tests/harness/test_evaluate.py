"""Candidates that fail in every way there is, run in real children: what they are told, and that no trace stays."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from harness import messages as m
from harness.engage import missing_kernels
from harness.evaluate import Evaluation, Proposed
from harness.judge import Judge
from harness.schema import Gate, GateResult, Status
from harness.start import make_judge
from harness.workload import load_workloads

HERE = Path(__file__).parent
CANDIDATES = HERE / "candidates"
HONEST = CANDIDATES / "honest.py"
NORM = HERE.parent / "judged" / "right" / "norm.py"
SEED = 7
HONEST_ATTEMPT = 1
NUMBERS = itertools.count(100)
"""Attempts of faults: each draws seeds of its own."""


@dataclass(frozen=True)
class Fault:
    """A candidate and how it must end: at which gate, with which status, and with what in its reason."""

    file: str
    gate: Gate
    status: Status
    said: tuple[str, ...] = ()
    limits: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.file


FAULTS = (
    Fault("raises", Gate.NUMERICS, Status.CRASHED, ("run: ValueError: no kernel for 1 rows", "raises.py")),
    Fault("exits", Gate.NUMERICS, Status.CRASHED, ("exited with status 0", "about to leave")),
    Fault("segfaults", Gate.NUMERICS, Status.CRASHED, ("killed by SIGSEGV",)),
    Fault("garbles", Gate.NUMERICS, Status.CRASHED, ("the worker's answer is not one", "perfect")),
    Fault("forges", Gate.NUMERICS, Status.CRASHED, limits={"numerics_s": 10}),
    Fault("endless", Gate.NUMERICS, Status.TIMED_OUT, ("deadline", "round and round"), {"numerics_s": 2}),
    Fault("raises_at_import", Gate.BUILD, Status.BUILD_FAILED, ("import: RuntimeError: no compiler here",)),
    Fault("raises_in_prepare", Gate.NUMERICS, Status.BUILD_FAILED, ("prepare: ValueError: no kernel for layer 4",)),
    Fault("forgets_an_output", Gate.NUMERICS, Status.CRASHED, ("it must return exactly cos, sin",)),
    Fault("misnames_an_output", Gate.NUMERICS, Status.CRASHED, ("it must return exactly logits",)),
    Fault("returns_nothing", Gate.NUMERICS, Status.CRASHED, ("run: ",)),
)
ENDS_THE_CHILD = frozenset("exits segfaults forges endless".split())


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """One judge for all: what a candidate does must not show in the next one's verdict."""
    workload = load_workloads(HERE / "small.toml")["small"]
    judge = make_judge(workload, torch.device("cpu"), SEED, lambda _: None)
    judge.limits = dataclasses.replace(judge.limits, slot_ms=2, warm_ms=5, screen_blocks=3)
    yield judge
    judge.close()
    assert not judge.scratch.exists()


@pytest.fixture(scope="module")
def honest(judge: Judge) -> tuple[GateResult, ...]:
    """An honest candidate's results before anything went wrong."""
    results = evaluate_honest(judge)
    assert [(r.gate, r.status) for r in results] == [(gate, None) for gate in (Gate.GUARD, Gate.BUILD, Gate.NUMERICS)]
    return results


def evaluate_honest(judge: Judge) -> tuple[GateResult, ...]:
    """Its results but for the seconds taken. The attempt's number, and so every seed, is the same each time."""
    results = Evaluation(judge, proposed(HONEST, HONEST_ATTEMPT), {}).run(Gate.NUMERICS)
    return tuple(result.model_copy(update={"seconds": 0}) for result in results)


def proposed(file: Path, attempt: int | None = None) -> Proposed:
    return Proposed(next(NUMBERS) if attempt is None else attempt, file, file.name, "test")


def evaluate(judge: Judge, name: str, until: Gate = Gate.NUMERICS) -> GateResult:
    """The result that ended it."""
    return Evaluation(judge, proposed(CANDIDATES / f"{name}.py"), {}).run(until)[-1]


@pytest.fixture
def lenient(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """The judge with a screen that lets through whatever a busy machine makes of two equal arms."""
    monkeypatch.setattr(judge, "rule", dataclasses.replace(judge.rule, screen_gain=-100.0))
    return judge


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_ends_with_its_own_status_and_leaves_no_trace(
    judge: Judge, honest: tuple[GateResult, ...], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(judge, "limits", dataclasses.replace(judge.limits, **fault.limits))
        result = evaluate(judge, fault.file)
    assert (result.gate, result.status) == (fault.gate, fault.status)
    for words in fault.said:
        assert words in result.reason
    if fault.file in ENDS_THE_CHILD:
        assert evaluate_honest(judge) == honest


def test_an_unknown_region_is_answered_with_the_regions_there_are(judge: Judge) -> None:
    result = evaluate(judge, "unknown_region")
    assert (result.gate, result.status) == (Gate.BUILD, Status.BUILD_FAILED)
    wrong, _, known = result.reason.partition("; a step has ")
    assert wrong == "no region is named softcap_of_logits"
    (phase,) = judge.workload.phases
    assert set(known.split(", ")) == {call.region.name for call in judge.model.program(phase).calls}


def test_an_output_off_by_a_little_is_wrong_with_region_layer_case_and_budget(judge: Judge) -> None:
    result = evaluate(judge, "off_by_a_little")
    assert (result.gate, result.status) == (Gate.NUMERICS, Status.WRONG)
    error = result.errors[0]
    assert (error.region, error.layer, error.output) == ("post_attention_norm", 0, "attention_out_normed")
    assert "seed" in error.case and "decode-b1, fp32" in error.case
    assert error.error is not None and error.budget is not None and error.reference_error is not None
    assert error.reference_error < error.budget < error.error
    assert error.place is not None
    assert result.reason.startswith(f"post_attention_norm at layer 0, {error.case}, output attention_out_normed: ")
    assert f"exceeds the budget {error.budget:.3e}" in result.reason
    assert {e.layer for e in result.errors} == {0, 3}, "the first layer of the kind and the last are judged"


def test_an_input_that_is_written_is_named(judge: Judge) -> None:
    result = evaluate(judge, "writes_its_input")
    assert (result.gate, result.status) == (Gate.NUMERICS, Status.WRONG)
    assert result.errors[0].output == "attention_out"
    assert "input attention_out was written to" in result.reason


def test_one_nan_is_wrong_and_placed(judge: Judge) -> None:
    result = evaluate(judge, "one_nan")
    assert (result.gate, result.status) == (Gate.NUMERICS, Status.WRONG)
    assert result.errors[0].place == (0, 3)
    assert "nan at [0, 3]" in result.reason


def test_expected_values_are_out_of_a_candidates_reach(lenient: Judge) -> None:
    """A child is given inputs alone: no file that it can list beside them holds the answers, at a site or of a step."""
    result = evaluate(lenient, "looks_around", Gate.STEP_NUMERICS)
    assert result.passed, result.reason


def test_a_trusted_child_that_hangs_is_no_fault_of_the_candidate(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "limits", dataclasses.replace(judge.limits, numerics_s=1))
    os.kill(judge.oracle().process.pid, signal.SIGSTOP)
    result = evaluate(judge, "honest")
    assert (result.gate, result.status) == (Gate.NUMERICS, Status.INCONCLUSIVE)


def test_a_file_that_is_refused_is_never_run(judge: Judge, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    file = tmp_path / "refused.py"
    file.write_text(f"import socket\nfrom pathlib import Path\nPath({str(mark)!r}).touch()\n")
    (result,) = Evaluation(judge, proposed(file), {}).run()
    assert (result.gate, result.status) == (Gate.GUARD, Status.REFUSED)
    assert result.reason.startswith("line 1: import of socket")
    assert not mark.exists()


def test_a_slow_candidate_is_rejected_at_the_screen_with_its_loss(judge: Judge) -> None:
    result = evaluate(judge, "slow", Gate.CONFIRM)
    assert (result.gate, result.status) == (Gate.SCREEN, Status.REJECTED)
    assert result.evidence["median_log_ratio"] < 0
    assert "in decode-b1, below the screen's +0.30%" in result.reason


def test_outputs_from_memory_are_not_engaged(lenient: Judge) -> None:
    """Right at each site alone; in a step the last site answers from memory, whatever the first one gave it."""
    result = evaluate(lenient, "remembers_tokens", Gate.CONFIRM)
    assert (result.gate, result.status) == (Gate.ENGAGE, Status.NOT_ENGAGED)
    assert "at site 1 of 2 leaves the logits as they are" in result.reason


def test_outputs_that_nothing_reads_are_not_engaged(lenient: Judge) -> None:
    """An honest norm below a head that gives the same logits whatever comes in."""
    stack = {"constant_logits": str(CANDIDATES / "constant_logits.py")}
    result = Evaluation(lenient, proposed(NORM), stack).run()[-1]
    assert (result.gate, result.status) == (Gate.ENGAGE, Status.NOT_ENGAGED)
    assert "at site 1 of 4 leaves the logits as they are" in result.reason


def test_a_declaration_that_changes_between_processes_is_not_engaged(lenient: Judge) -> None:
    result = evaluate(lenient, "second_thoughts", Gate.CONFIRM)
    assert (result.gate, result.status) == (Gate.ENGAGE, Status.NOT_ENGAGED)
    assert result.reason == "ran at 0 of 1 sites of decode-b1"


def test_an_honest_candidate_is_engaged_and_right_in_a_whole_step(lenient: Judge) -> None:
    results = Evaluation(lenient, proposed(HONEST), {}).run(Gate.STEP_NUMERICS)
    assert [r.gate for r in results if r.passed] == list(Gate)[:-1]
    assert results[-2].evidence == {"sites": "1 of 1", "poisoned": "logits followed"}
    (error,) = results[-1].errors
    assert (error.ok, error.output) == (True, "logits")
    left = {path.name for path in lenient.scratch.iterdir() if not path.name.startswith("cache-")}
    assert left == {"oracle"}, "what one candidate leaves, the next can read"


def test_a_kept_rewrite_that_a_candidate_overlaps_is_displaced_and_named(lenient: Judge) -> None:
    stack = {"softcap": str(HONEST), "norm": str(NORM)}
    file = CANDIDATES / "slow_head.py"
    evaluation = Evaluation(lenient, proposed(file), stack)
    assert evaluation.run(Gate.SCREEN)[-1].passed
    assert evaluation.displaced == ("softcap",), "the norm stays"
    assert evaluation.arms() == {"A": (str(HONEST), str(NORM)), "B": (str(HONEST), str(NORM), str(file))}


def test_a_kept_rewrite_of_the_same_name_is_replaced(judge: Judge, tmp_path: Path) -> None:
    again = tmp_path / "softcap_again.py"
    again.write_bytes(HONEST.read_bytes())
    evaluation = Evaluation(judge, proposed(again), {"softcap": str(HONEST), "norm": str(NORM)})
    assert evaluation.run(Gate.BUILD)[-1].passed
    assert evaluation.arms() == {"A": (str(HONEST), str(NORM)), "B": (str(NORM), str(again))}


def test_an_honest_candidate_passes_after_all_of_these(judge: Judge, honest: tuple[GateResult, ...]) -> None:
    assert evaluate_honest(judge) == honest


@pytest.mark.parametrize(
    ("backend", "kernels", "by_site", "said"),
    [
        ("triton", ("norm_kernel",), (("norm_kernel",), ("fill", "norm_kernel")), ""),
        ("cuda", ("norm", "norm_tail"), (("void norm<float>(...)",), ("norm_tail_2",)), ""),
        ("triton", (), (("norm_kernel",),), "Rewrite.kernels is empty"),
        ("triton", ("norm_kernel",), (("norm_kernel",), ("aten_norm",)), "norm_kernel was launched at site 2 of 2"),
        ("cuda", ("norm", "tail"), ((),), "none of norm, tail was launched at site 1 of 1"),
        ("torch", (), (("anything",),), ""),
        ("library", ("named",), ((),), ""),
    ],
)
def test_kernels_that_a_profile_does_not_show_are_missed(
    backend: str, kernels: tuple[str, ...], by_site: tuple[tuple[str, ...], ...], said: str
) -> None:
    built = m.Built(
        name="norm",
        regions=(("input_norm",),),
        backend=backend,
        target="decode",
        dtypes=("bf16",),
        devices=("cuda",),
        tokens=(1, 8),
        phases=("decode",),
        kernels=kernels,
        deterministic=True,
        summary="",
    )
    missing = missing_kernels(built, m.Kernels(sites=len(by_site), by_site=by_site))
    assert said in missing and bool(said) == bool(missing)
