"""The report's arithmetic, its text, and the page in a real browser where there is one."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from markupsafe import escape

from harness import report
from harness.ledger import read_ledger
from harness.publish import write_report
from harness.report import palette, wording
from harness.report.rows import RunData, attempt_rows, climbs, region_tables
from harness.report.steps import climb
from harness.schema import (
    Attempt,
    Block,
    Ceilings,
    Commit,
    Decision,
    Estimate,
    Fingerprint,
    Gate,
    GateResult,
    Ladder,
    LadderArm,
    Launch,
    Look,
    OutputError,
    Profile,
    RegionTime,
    RunConfig,
    Status,
)
from harness.session import read_profiles

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEVICE = "NVIDIA H200"
SOURCE = '''"""One pass over the row.

Predicts: -6 us a layer.
"""

REWRITE = Rewrite(name="x")


def run(inputs, caches, state):
    return {"y": inputs["x"] < 2}
'''

# name | status | backend | target | run | decode factor | prefill factor | gate that fails | reason
PLAN = [
    tuple(word.strip() for word in line.split("|"))
    for line in """
merged_qkv_gate_proj|kept|torch|decode-b1|q_proj k_proj v_proj output_gate_proj|0.905|0.985||
norm_residual_torch|wrong|torch|decode-b1|post_attention_norm attention_residual_add|||numerics|11.4 times its budget
norm_residual|kept|triton|decode-b1|post_attention_norm attention_residual_add|0.86|0.955||
swiglu_inplace|inconclusive|triton|decode-b1|mlp_gate_proj mlp_up_proj|0.998|1|confirm|12 processes: mean +0.21%
fp32_router|kept|cuda|decode-b1|router|0.78|0.97||
sdpa_prefill|kept|library|prefill-8x2048|attention|1|0.79||
router_warp_vote|crashed|cuda|decode-b1|router expert_dispatch|||build|the worker died with signal 11 while importing it
norm_residual_norm|kept|triton|decode-b1|post_attention_norm attention_residual_add pre_feedforward_norm|0.83|0.93||
cached_logits|refused|torch|decode-b1|lm_head logit_softcap|||guard|line 14: a module-level dict keyed by data_ptr()
kv_update_rope|kept|triton|decode-b1|qk_norm rope kv_cache_update|0.885|0.965||
expert_wide_tiles|rejected|triton|prefill-8x2048|expert_gate_up expert_swiglu|||screen|screen: median -0.4%, below +0.3%
expert_decode_grouped_gemm_with_fused_combine|kept|triton|decode-b1|expert_gate_up expert_swiglu expert_down|0.72|0.99||
""".strip().splitlines()
]
BASE_MS = {"decode-b1": 8.951, "prefill-8x2048": 328.4}
FLOOR_MS = {"decode-b1": 1.874, "prefill-8x2048": 118.6}


def gates(
    status: Status, failing: Gate | None, reason: str, *, errors: tuple[OutputError, ...] = ()
) -> tuple[GateResult, ...]:
    took = dict(zip(Gate, (0.02, 6.4, 21.7, 14.1, 9.6, 33.0, 181.5), strict=True))
    made = []
    for gate in Gate:
        if gate is failing:
            made.append(
                GateResult(gate=gate, passed=False, seconds=took[gate], status=status, reason=reason, errors=errors)
            )
            break
        evidence = {"cases": 148, "storages": ["bf16", "fp32"]} if gate is Gate.NUMERICS else {}
        made.append(GateResult(gate=gate, passed=True, seconds=took[gate], evidence=evidence))
    return tuple(made)


def make_attempt(number: int, before: dict[str, float], parent: str | None) -> Attempt:
    """The attempt of `PLAN`, over a stack of the given times; kept rungs move `before`."""
    name, outcome, backend, target, run, *factors, gate, reason = PLAN[(number - 1) % len(PLAN)]
    status, failing = Status(outcome), Gate(gate) if gate else None
    measured = failing in (None, Gate.CONFIRM)
    estimates: list[Estimate] = []
    launches: tuple[Launch, ...] = ()
    if measured:
        for phase, factor in zip(before, map(float, factors), strict=True):
            if factor != 1.0 or phase == target:
                log = -math.log(factor)
                estimates.append(
                    Estimate(
                        phase=phase,
                        processes=6,
                        baseline_ms=before[phase],
                        candidate_ms=before[phase] * factor,
                        log_ratio=log,
                        low=log - 0.0021,
                        high=log + 0.0023,
                    )
                )
        block = Block(order="ABBA", ms=(before[target], before[target], before[target], before[target]))
        launches = tuple(Launch(index=i, seed=i, blocks={target: (block,) * 6}) for i in range(6))
    if status is Status.KEPT:
        gain = estimates[[e.phase for e in estimates].index(target)]
        reason = f"6 processes: {100 * math.expm1(gain.log_ratio):.1f}% faster, bound above zero; guards hold"
    wrong = OutputError(
        region="post_attention_norm",
        layer=3,
        case="last_layer, decode-b1, bf16",
        output="normed",
        ok=False,
        error=4.13e-3,
        budget=3.6e-4,
        reference_error=2.9e-4,
        place=(0, 1311),
        reason="maximum error",
    )
    looks = (
        (Look(processes=6, mean=0.1, standard_error=0.001, bound=0.09, alpha=0.0003, verdict="keep"),)
        if measured
        else ()
    )
    return Attempt(
        attempt=number,
        name=name,
        regions=(tuple(run.split()),),
        backend=backend,
        target=target,
        file=f"candidates/{number:03d}-{name}.py",
        file_sha256=f"{number:02d}" + "5e1f9c" * 10 + "ab",
        parent=parent,
        agent="anthropic",
        model="claude",
        tokens=41_300 + 977 * number,
        cost_usd=0.31 + 0.02 * number,
        summary="One pass over the row in place of three; predicted -6 us a layer at decode.",
        started=f"2026-11-28T{9 + number % 12:02d}:12:40+00:00",
        seconds=268.4 if measured else 31.2,
        gates=gates(status, failing, reason, errors=(wrong,) if status is Status.WRONG else ()),
        launches=launches,
        estimates=tuple(estimates),
        decision=Decision(status=status, reason=reason, looks=looks, alpha_spent=0.0003 if measured else 0.0),
        displaced=("norm_residual",) if name == "norm_residual_norm" else (),
        sites={"decode-b1": 104, "prefill-8x2048": 104} if measured else {},
        persistent_bytes=(3 << 20) * (number % 3),
        device=DEVICE,
        baseline_hash="b7c1" * 16,
    )


def make_ladder(attempts: tuple[Attempt, ...], phase: str, seed: int = 3) -> Ladder:
    """Processes with a shift of their own, slots with noise; peers near, far, and one that cannot run."""
    draw = random.Random(seed)
    shifts = [draw.gauss(1, 0.003) for _ in range(3)]

    def arm(name: str, kind: str, ms: float) -> LadderArm:
        slots = tuple(tuple(ms * shift * draw.gauss(1, 0.002) for _ in range(20)) for shift in shifts)
        return LadderArm.model_validate({"name": name, "kind": kind, "samples_ms": slots})

    now = BASE_MS[phase]
    arms = [arm("baseline", "baseline", now)]
    for attempt in attempts:
        if attempt.decision.status is Status.KEPT:
            factor = next((e.candidate_ms / e.baseline_ms for e in attempt.estimates if e.phase == phase), 1.0)
            now *= factor
            arms.append(arm(attempt.name, "rung", now))
    arms += [
        arm("torch.compile", "peer", BASE_MS[phase] * 0.71),
        arm("transformers_eager", "peer", BASE_MS[phase] * 4.3),
    ]
    arms.append(LadderArm(name="vllm", kind="peer", samples_ms=(), note="cannot run: no interpreter was named"))
    return Ladder(
        workload="beam-tp8-rank",
        phase=phase,
        device=DEVICE,
        floor_ms=FLOOR_MS[phase],
        arms=tuple(arms),
        started="2026-11-28T21:40:03+00:00",
        seconds=512.0,
        command="optimize ladder results/beam-1 -w beam-tp8-rank --peer torch.compile",
    )


def make_profiles(phase: str) -> tuple[Profile, Profile]:
    shares = {
        "embedding": 0.4,
        "input_norm": 6.1,
        "q_proj": 5.2,
        "k_proj": 1.6,
        "v_proj": 1.5,
        "output_gate_proj": 4.8,
        "qk_norm": 5.5,
        "rope": 4.4,
        "kv_cache_update": 3.9,
        "attention": 9.8,
        "o_proj": 4.6,
        "post_attention_norm": 6.4,
        "attention_residual_add": 3.2,
        "pre_feedforward_norm": 6.2,
        "router": 9.9,
        "expert_gate_up": 13.6,
        "expert_down": 7.7,
        "lm_head": 2.2,
        "logit_softcap": 0.3,
    }
    scale = BASE_MS[phase] / 100

    def region(name: str, ms: float, floor: float, calls: int = 52) -> RegionTime:
        return RegionTime(
            region=name, calls=calls, launches=calls * 3, time_ms=ms, floor_ms=floor, bytes=1 << 24, flops=1 << 30
        )

    before = tuple(region(name, share * scale, share * scale * 0.21) for name, share in shares.items())
    fused = "norm_residual_norm: post_attention_norm + attention_residual_add + pre_feedforward_norm"
    gone = ("post_attention_norm", "attention_residual_add")
    kept = tuple(r for r in before if r.region not in (*gone, "pre_feedforward_norm"))
    after = (
        *kept,
        region("pre_feedforward_norm", 0.1 * scale, 0.02 * scale, 1),
        region(fused, 2.9 * scale, 1.8 * scale),
    )

    def profile(regions: tuple[RegionTime, ...], step: float) -> Profile:
        return Profile(
            workload="beam-tp8-rank",
            phase=phase,
            device=DEVICE,
            regions=regions,
            unattributed_ms=2.7 * scale,
            step_ms=step * 1.2,
            captured_ms=step,
            complete=True,
            launches=2810,
        )

    return profile(before, BASE_MS[phase]), profile(after, BASE_MS[phase] * 0.4)


def make_run(attempts: int = 12, *, ladder: bool = True) -> RunData:
    """A run as a night on one GPU leaves it: kept rungs, failures of many kinds, ladders, profiles."""
    before, made, parent = dict(BASE_MS), [], None
    for number in range(1, attempts + 1):
        if number % len(PLAN) == 1:
            before = dict(BASE_MS)
        attempt = make_attempt(number, before, parent)
        made.append(attempt)
        if attempt.decision.status is Status.KEPT:
            parent = attempt.file_sha256
            before |= {e.phase: e.candidate_ms for e in attempt.estimates}
    kept = [a for a in made if a.decision.status is Status.KEPT]
    host = Fingerprint(
        device=DEVICE,
        device_kind="cuda",
        device_count=1,
        memory_bytes=141 << 30,
        driver="580.82",
        cuda="13.0",
        torch="2.13.0",
        triton="3.6.0",
        python="3.12.9",
        os="Linux 6.8",
        cpu="Xeon Platinum 8592+",
        threads=16,
        compiler="g++ 13.3",
        optimize="0.1.0",
        git="3f9e1c2",
    )
    ceilings = Ceilings(
        device=DEVICE, copy_bytes_per_s=4.02e12, read_bytes_per_s=4.31e12, flops_per_s={"bf16": 7.1e14, "fp32": 5.2e13}
    )
    config = RunConfig(
        run="2026-11-28-beam-tp8-rank-1",
        workload="beam-tp8-rank",
        agent="anthropic",
        model="claude",
        seed=7,
        attempts=40,
        hours=None,
        budget_usd=25.0,
        min_gain=0.003,
        repository=".",
        branch="optimize/beam-1",
        base_commit="9e2b11d0c4",
        baseline_hash="b7c1" * 16,
        fingerprint=host,
        ceilings=ceilings,
        command="optimize run -w beam-tp8-rank --agent anthropic --budget-usd 25",
        started="2026-11-28T09:02:11+00:00",
    )
    profiles = [make_profiles(phase) for phase in BASE_MS]
    return RunData(
        config=config,
        attempts=tuple(made),
        commits=tuple(
            Commit(attempt=a.attempt, commit=f"{a.attempt:04x}c0ffee{'e1' * 15}", branch="optimize/beam-1")
            for a in kept
        ),
        ladders=tuple(make_ladder(tuple(made), phase) for phase in BASE_MS) if ladder else (),
        before=tuple(before for before, _ in profiles),
        after=tuple(after for _, after in profiles),
        sources={a.file: SOURCE * 6 for a in made},
        notes=("One rank's share of 8, with no collectives.",),
    )


class Outline(HTMLParser):
    """What a page is made of: tags with their attributes, the ids, and unbalanced tags."""

    VOID = frozenset({"meta", "input", "br", "wbr", "rect", "path", "circle"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> ends another tag"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def summary_of(html: str) -> dict[str, Any]:
    """The embedded JSON; fails on NaN and infinities."""
    text = re.findall(r'<script type="application/json" id="summary">(.*?)</script>', html, re.S)[0]

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    loaded: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return loaded


def arm(name: str, kind: str, *processes: Sequence[float], note: str = "") -> LadderArm:
    return LadderArm.model_validate({"name": name, "kind": kind, "samples_ms": processes, "note": note})


def ladder_of(*arms: LadderArm, floor_ms: float | None = 1.0) -> Ladder:
    return Ladder(
        workload="beam-tp8-rank",
        phase="decode-b1",
        device=DEVICE,
        floor_ms=floor_ms,
        arms=arms,
        started="2026-11-28T21:40:03+00:00",
        seconds=1,
        command="",
    )


@pytest.fixture(scope="module")
def run() -> RunData:
    return make_run()


@pytest.fixture(scope="module")
def page(run: RunData) -> str:
    return report.render(run)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("phase", BASE_MS)
def test_steps_and_residual_add_up_to_first_minus_last(phase: str, seed: int) -> None:
    fall = climb(make_ladder(make_run().attempts, phase, seed))
    assert fall is not None
    gains = sum(step.gain.mean for step in fall.steps if step.gain)
    assert gains + fall.residual_ms == pytest.approx(fall.baseline.mean - fall.final.mean, abs=1e-9)
    assert abs(fall.residual_ms) < 0.01 * fall.baseline.mean


def test_a_gain_is_paired_by_round_so_drift_does_not_touch_it() -> None:
    drift = [1 + 0.1 * i for i in range(9)]
    fall = climb(
        ladder_of(
            arm("baseline", "baseline", [10 * d for d in drift], [10.0] * 9),
            arm("a", "rung", [10 * d - 1 for d in drift], [9.0] * 9),
        )
    )
    assert fall is not None and fall.steps[0].gain is not None
    gain = fall.steps[0].gain
    assert (gain.mean, gain.low, gain.high) == pytest.approx((1, 1, 1))


def test_intervals_are_students_t_over_processes() -> None:
    fall = climb(ladder_of(arm("baseline", "baseline", [10.0], [10.0], [10.0]), arm("a", "rung", [9.0], [8.0], [7.0])))
    assert fall is not None and fall.steps[0].gain is not None
    assert fall.steps[0].gain.low == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-3)


def test_one_process_has_no_interval_and_the_page_says_so(run: RunData) -> None:
    ladder = ladder_of(arm("baseline", "baseline", [10.0, 10.1]), arm("fp32_router", "rung", [9.0, 9.1]))
    fall = climb(ladder)
    assert fall is not None and fall.log_ratio.low is None
    assert "one process: no interval" in report.render(replace(run, ladders=(ladder,)))


def test_a_gain_within_the_noise_is_not_called_faster(run: RunData) -> None:
    base, rung = arm("baseline", "baseline", [10.0], [11.0], [9.0]), arm("fp32_router", "rung", [9.0], [11.2], [9.1])
    html = report.render(replace(run, ladders=(ladder_of(base, rung),)))
    assert "not told apart from no change" in html and '<b class="better">' not in html
    ends = [
        float(x)
        for x in re.findall(r'class="err" d="M[\d.]+ [\d.]+H([\d.]+)', report.waterfall_svg(ladder_of(base, rung)))
    ]
    assert ends and max(ends) <= 1080 - 236


def test_an_arm_without_samples_is_said_and_left_out() -> None:
    ladder = ladder_of(
        arm("baseline", "baseline", [10.0, math.nan, 10.0], [10.0]),
        arm("broken", "rung"),
        arm("good", "rung", [8.0, 1.0, 8.0], [8.0]),
        arm("peer", "peer", [math.nan]),
    )
    fall = climb(ladder)
    assert fall is not None
    assert fall.steps[0].gain is None and fall.steps[1].gain is not None
    assert (fall.steps[1].gain.mean, fall.final.mean, fall.peers[0].ms) == (2.0, 8.0, None)
    figure = report.waterfall_svg(ladder)
    assert figure.count("not measured") == 2 and "nan" not in figure.lower()


def test_a_ladder_without_a_baseline_is_no_figure() -> None:
    ladder = ladder_of(arm("baseline", "baseline"), arm("a", "rung", [1.0]))
    assert climb(ladder) is None
    assert report.waterfall_svg(ladder) == ""


def test_the_figure_is_xml_with_title_description_whiskers_floor_and_peers(run: RunData) -> None:
    figure = report.waterfall_svg(run.ladders[0], {"sdpa_prefill": "library"})
    root = ElementTree.fromstring(figure)
    assert root.attrib["role"] == "img"
    assert [child.tag.partition("}")[2] for child in root][:2] == ["title", "desc"]
    kept = len(run.kept())
    for word, count in {"Residual": 1, "Roofline floor": 1, "torch.compile": 1, "off the scale": 1, "vllm": 1}.items():
        assert len([t for t in root.iter() if t.tag.endswith("text") and (t.text or "").startswith(word)]) == count
    assert figure.count('class="err"') == kept + 2 + 1  # rungs, both ends, the legend's


def test_a_slower_rung_is_told_in_words() -> None:
    ladder = ladder_of(arm("baseline", "baseline", [5.0], [5.0]), arm("worse", "rung", [6.0], [6.0]))
    figure = report.waterfall_svg(ladder, {"worse": "triton"})
    assert "triton kernel, slower" in figure and "+1.000 ms" in figure


def test_numbers_as_people_read_them() -> None:
    assert [wording.ms(value) for value in (8.9514, 328.42, 0.04127, 0.0, 1234.5)] == [
        "8.951",
        "328.4",
        "0.04127",
        "0.000",
        "1,234",
    ]
    assert [wording.ms(value) for value in (None, math.nan, math.inf)] == [None] * 3
    assert wording.fixed(-0.0004, 3) == "0.000" and wording.fixed(-0.5, 1) == "\u22120.5"
    assert wording.ratio(math.log(2.7123)) == "2.712\u00d7"
    assert wording.ratio(math.inf) is None and wording.ratio(800.0) is None
    assert wording.between(0.1, None, 2) is None and wording.between(0.1, math.inf, 2, exp=True) is None
    assert wording.scaled(4.21e12, "B/s") == "4.21\u00a0TB/s" and wording.scaled(22 << 30, "B", 1024) == "22.0\u00a0GiB"


def test_every_attempt_stands_on_the_page_with_verdict_reason_and_command(run: RunData, page: str) -> None:
    for row in attempt_rows(run):
        assert f'id="attempt-{row.attempt.attempt}"' in page
        assert str(escape(row.attempt.decision.reason)) in page
        assert row.command in page and row.attempt.file_sha256 in page
    assert "0.0024</b> false keeps expected" in page
    assert "11.47\u00d7" in page  # the failing output's error over its budget
    assert page.count('<details class="file"') == len(run.kept())
    assert '<span class="p-k">def</span>' in page
    assert "<b>Read this first.</b> One rank&#39;s share of 8" in page


def test_the_page_is_whole_accessible_and_needs_no_network(page: str) -> None:
    outline = Outline(page)
    ids = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert all(attrs.get("scope") or not attrs for attrs in outline.all("th"))
    assert len(outline.all("table")) == len(outline.all("caption"))
    for attrs in outline.all("svg"):
        assert attrs.get("aria-hidden") == "true" or set((attrs["aria-labelledby"] or "").split()) <= set(ids)
    assert [attrs.get("type") for attrs in outline.all("script")] == ["application/json"]
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page) and "url(http" not in page and "@import" not in page
    fragments = [attrs["href"] or "" for attrs in outline.all("a") if (attrs["href"] or "").startswith("#")]
    assert {fragment[1:] for fragment in fragments} <= set(ids)
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_missing_and_infinite_numbers_are_dashes_and_json_nulls(run: RunData) -> None:
    bad = run.attempts[0].model_copy(
        update={
            "estimates": (
                Estimate(
                    phase="decode-b1",
                    processes=6,
                    baseline_ms=math.nan,
                    candidate_ms=0.0,
                    log_ratio=math.inf,
                    low=-math.inf,
                    high=math.nan,
                ),
            ),
            "decision": Decision(
                status=Status.KEPT,
                reason="",
                looks=(
                    Look(processes=6, mean=math.nan, standard_error=math.inf, bound=0, alpha=math.nan, verdict="keep"),
                ),
                alpha_spent=math.nan,
            ),
        }
    )
    lost = Profile(
        workload="w",
        phase="decode-b1",
        device="d",
        unattributed_ms=math.nan,
        step_ms=math.inf,
        captured_ms=None,
        complete=False,
        reason="lost events",
        regions=(RegionTime(region="r", calls=1, launches=1, time_ms=math.nan, floor_ms=math.inf, bytes=0, flops=0),),
    )
    data = replace(run, attempts=(bad,), ladders=(), before=(lost,), after=())
    html = report.render(data)
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", html, flags=re.S))
    assert summary_of(html)["attempts"] == [{"attempt": 1, "name": bad.name, "status": "kept"}]
    assert "profile is incomplete</b> (lost events)" in html
    row = pd.read_csv(io.StringIO(report.csv(data))).iloc[0]
    assert row[["baseline_ms", "log_ratio", "log_ratio_low"]].isna().all()


def test_text_from_an_agent_is_escaped_everywhere(run: RunData) -> None:
    evil = "</script><script>alert('1')</script><img src=x onerror=alert(2)>&\"'"
    bad = run.attempts[0].model_copy(
        update=dict.fromkeys(("name", "summary", "agent", "model", "target", "backend", "file"), evil)
        | {"regions": ((evil,),), "displaced": (evil,), "sites": {evil: 1}}
        | {"decision": Decision(status=Status.KEPT, reason=evil)}
        | {"gates": (GateResult(gate=Gate.GUARD, passed=True, seconds=0, reason=evil, evidence={evil: {evil: evil}}),)}
    )
    hostile = ladder_of(
        arm("baseline", "baseline", [2.0]), arm(evil, "rung", [1.0], note=evil), arm(evil, "peer", [3.0])
    )
    data = replace(run, attempts=(bad,), ladders=(hostile,), sources={evil: evil}, notes=(evil,))
    html = report.render(data)
    assert [attrs.get("type") for attrs in Outline(html).all("script")] == ["application/json"]
    assert not Outline(html).all("img")
    assert summary_of(html)["attempts"][0]["name"] == evil
    ElementTree.fromstring(report.waterfall_svg(hostile, {evil: "cuda"}))


def test_the_table_of_attempts_reads_back(run: RunData) -> None:
    frame = pd.read_csv(io.StringIO(report.csv(run)))
    assert list(frame["attempt"]) == [attempt.attempt for attempt in run.attempts]
    first = frame.iloc[0]
    assert (first["baseline_ms"], first["regions"]) == (8.951, "q_proj + k_proj + v_proj + output_gate_proj")
    assert first["log_ratio_low"] < first["log_ratio"] < first["log_ratio_high"]
    wrong = frame[frame["status"] == "wrong"].iloc[0]
    assert math.isnan(wrong["baseline_ms"]) and wrong["failed_gate"] == "numerics"


def test_a_spreadsheet_takes_no_cell_for_a_formula(run: RunData) -> None:
    sly = run.attempts[0].model_copy(update={"name": "=HYPERLINK(1)"})
    frame = pd.read_csv(io.StringIO(report.csv(replace(run, attempts=(sly,)))))
    assert frame.iloc[0]["name"] == "'=HYPERLINK(1)"


def test_regions_before_and_after_mark_what_changed(run: RunData) -> None:
    marks = {row.name: row.mark for row in region_tables(run)[0].rows if row.mark}
    assert marks == {
        "post_attention_norm": "replaced",
        "attention_residual_add": "replaced",
        "pre_feedforward_norm": "partly",
        "norm_residual_norm": "rewrite",
    }


def test_kinds_of_gain_are_told_apart_and_sum_to_the_whole(run: RunData) -> None:
    for made in climbs(run):
        assert {kind for kind, _, _ in made.kinds} == {"kernel", "library", "plain PyTorch"}
        assert sum(ms for _, _, ms in made.kinds) + made.fall.residual_ms == pytest.approx(made.fall.gained_ms)


def test_a_ladder_of_another_workload_is_no_headline(run: RunData) -> None:
    html = report.render(replace(run, ladders=(run.ladders[0].model_copy(update={"workload": "beam-tp8-rank-12"}),)))
    assert "on another workload: beam-tp8-rank-12" in html
    assert summary_of(html)["phases"] == {}


def test_without_a_ladder_the_confirms_stand_in_and_say_so() -> None:
    html = report.render(make_run(ladder=False))
    assert "No ladder has been measured for this phase" in html
    assert "kept rungs at their confirm stages" in html


def test_a_run_of_nothing_renders(run: RunData) -> None:
    html = report.render(replace(run, attempts=(), commits=(), ladders=(), before=(), after=(), notes=()))
    assert "No attempt has been made yet" in html and "No profile has been taken" in html


def test_write_leaves_three_files(run: RunData, tmp_path: Path) -> None:
    assert report.write(run, tmp_path) == tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.csv", "report.html", "waterfall.svg"]
    ElementTree.parse(tmp_path / "waterfall.svg")


def test_five_hundred_attempts_stay_below_five_megabytes() -> None:
    assert len(report.render(make_run(500)).encode()) < 5_000_000


def test_colours_are_legible_in_light_and_dark() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for theme in palette.PALETTE.split("@media"):
        colours = dict(re.findall(r"--(\w+):(#\w{6})", theme))
        for text in ("ink", "muted", "good", "bad", "warn", "link", "kernel"):
            for ground in ("paper", "ground", "soft"):
                high, low = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


PROBE = """<script>addEventListener("load", () => {
document.getElementById("show-kept").click();
const bodies = [...document.querySelectorAll(".attempts>tbody")];
const seen = bodies.filter(body => getComputedStyle(body).display != "none").length;
const page = document.documentElement;
parent.postMessage({width: innerWidth, overflow: page.scrollWidth - page.clientWidth, seen}, "*")})</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, and none is installed")
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_in_a_browser_the_page_fits_and_its_filter_works(page: str, run: RunData, tmp_path: Path, width: int) -> None:
    probed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", f"{PROBE}</body>")
    (tmp_path / "page.html").write_text(probed)
    (tmp_path / "frame.html").write_text(
        f'<iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe><pre id="got"></pre><script>'
        'addEventListener("message", e => {got.textContent = JSON.stringify(e.data)})</script>'
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [str(CHROMIUM), *flags, "--virtual-time-budget=8000", "--dump-dom", f"file://{tmp_path / 'frame.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    got = json.loads(re.findall(r'<pre id="got">(.*?)</pre>', dom)[0])
    assert got == {"width": width, "overflow": 0, "seen": len(run.kept())}


def test_a_report_is_the_same_wherever_the_run_lies_and_whenever_its_files_were_written(tmp_path: Path) -> None:
    """A clone keeps neither folder nor file times: the kept stack's profile is found by the stack."""
    committed = Path(__file__).resolve().parents[2] / "results" / "h200-tp8-rank-12"
    pages = []
    for order in (1, -1):
        run = tmp_path / f"copy{order}" / committed.name
        shutil.copytree(committed, run)
        for age, path in enumerate(sorted((run / "profiles").iterdir())[::order]):
            os.utime(path, (1_000_000 + age, 1_000_000 + age))
        pages.append(write_report(run, read_ledger(run / "ledger.jsonl")).read_bytes())
        _, after = read_profiles(run, read_ledger(run / "ledger.jsonl"))
        assert {profile.phase: round(profile.captured_ms or 0, 2) for profile in after} == {
            "decode-b1": 0.90,
            "prefill-8x2048": 59.42,
        }
    assert pages[0] == pages[1]
