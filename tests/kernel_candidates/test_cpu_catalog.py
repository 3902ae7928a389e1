"""Every CPU candidate of the catalog on the toy Beam's own sites, judged as the numerics gate judges."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import guard, numerics
from harness.arms import Bench, adapter, is_cache, prepare, site_of
from harness.candidate import Candidate, load
from harness.executor import Executor, bind_reference, run_references
from harness.program import FP64, Substitution, TensorSpec, role
from harness.workload import Phase, load_workloads

ROOT = Path(__file__).parents[2] / "kernel_candidates"
CATALOG = [entry["file"] for entry in tomllib.loads((ROOT / "catalog.toml").read_text())["cpu"]]
WRONG = ["router/router_bf16.py"]
RIGHT = [file for file in CATALOG if file not in WRONG]
PRESETS = ("beam-tiny", "beam-tiny-bf16")
CPU, SEED = torch.device("cpu"), 5
EXTRA = (
    Phase(name="ragged decode", kind="decode", batch=4, context=100, ragged=True),
    Phase(name="verify", kind="verify", batch=3, context=90, query_len=4, ragged=True),
    Phase(name="ragged prefill", kind="prefill", batch=3, context=90, ragged=True),
)
Values = dict[str, Tensor]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the C++ candidates are built with g++")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _build_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIMIZE_BUILD_DIR", str(tmp_path_factory.mktemp("build")))
        yield


@pytest.fixture(scope="module")
def candidates(_build_folder: None) -> dict[str, Candidate]:
    return {file: load(ROOT / file) for file in CATALOG}


@pytest.fixture(scope="module", params=PRESETS)
def toy(request: pytest.FixtureRequest) -> Toy:
    return Toy(Bench(load_workloads()[request.param], CPU, SEED), {})


@dataclass
class Toy:
    """A preset's model and, by phase, every value of one step of its baseline."""

    bench: Bench
    recorded: dict[str, Values]

    def values(self, phase: Phase) -> Values:
        """Values by name; caches as they are before the step."""
        if phase.name not in self.recorded:
            inputs = self.bench.fresh_values(phase, SEED)
            env = {name: t.clone() for name, t in inputs.items()}
            for call in self.bench.model.program(phase).calls:
                made = bind_reference(call, self.bench.weights, self.bench.workload.precision)(
                    *[env[name] for name in call.inputs]
                )
                env.update(zip(call.outputs, made, strict=True))
            self.recorded[phase.name] = env | {name: inputs[name] for name in inputs if is_cache(name)}
        return self.recorded[phase.name]

    def sites(self, candidate: Candidate, phase: Phase) -> tuple[Substitution, ...]:
        """The first and the last site of every kind: regions, and attributes other than the depth's."""
        program = self.bench.model.program(phase)
        program, _ = program.substitute(candidate.rewrite.name, candidate.rewrite.replaces)
        kinds: dict[str, list[Substitution]] = {}
        for sub in program.substitutions:
            kind = [
                (call.region.name, call.layer - sub.layer, [v for k, v in call.attrs.items() if k != "residual_index"])
                for call in sub.calls
            ]
            kinds.setdefault(repr(kind), []).append(sub)
        return tuple({s.start: s for group in kinds.values() for s in (group[0], group[-1])}.values())

    def judge(self, candidate: Candidate, phase: Phase, cases: str = "recorded") -> list[str]:
        """What the numerics gate would refuse, nothing for a right candidate; `cases` `all` has adversarial ones."""
        results = []
        for sub in self.sites(candidate, phase):
            inputs = {name: self.values(phase)[name] for name in sub.inputs}
            posed = [("recorded", inputs), *(adversarial(self.bench, sub, inputs) if cases == "all" else ())]
            results += [self.result(candidate, phase, sub, name, case) for name, case in posed]
        assert results, f"{candidate.path.name} has no site in {phase.name}"
        return [f"{r.region}, {r.case}, {r.output}: {r.reason}" for r in numerics.judge(results) if not r.ok]

    def result(
        self, candidate: Candidate, phase: Phase, sub: Substitution, case: str, inputs: Values
    ) -> numerics.Result:
        """What the candidate makes of `inputs` at a site, beside what the references and the oracle make of them."""
        workload, weights, layer = self.bench.workload, self.bench.weights, sub.layer
        stored, exact = fresh(inputs), {name: wide(t) for name, t in fresh(inputs).items()}
        reference = run_references(sub.calls, weights, workload.precision, stored)
        oracle = run_references(sub.calls, weights, FP64, exact)
        site = site_of(
            sub.calls,
            {role(name, layer): TensorSpec.of(inputs[name]) for name in sub.inputs},
            {role(name, layer): TensorSpec.of(reference[name]) for name in sub.outputs},
            weights,
            phase=phase,
            tokens=phase.tokens,
            device="cpu",
            dtype=workload.dtype,
        )
        bound = adapter(candidate, site, prepare(candidate, site), sub.inputs, layer)
        given = [fresh(inputs), fresh(inputs)]
        made = [dict(zip(site.outputs, bound(*mine.values()), strict=True)) for mine in given]
        plain = [name for name in inputs if not is_cache(name)]
        return numerics.Result(
            expected=numerics.Expected(
                region=str(sub),
                layer=layer,
                case=case,
                storage=workload.dtype,
                reference={role(name, layer): reference[name] for name in sub.outputs},
                oracle={role(name, layer): oracle[name] for name in sub.outputs},
                before={role(name, layer): inputs[name] for name in sub.mutates},
                cache_reference={role(name, layer): stored[name] for name in sub.mutates},
                cache_oracle={role(name, layer): exact[name] for name in sub.mutates},
                choice=self.choice(sub, inputs),
            ),
            outputs=made[0],
            caches={role(name, layer): given[0][name] for name in sub.mutates},
            touched=tuple(name for name in plain if not same(given[0][name], inputs[name])),
            repeat_differs=tuple(name for name in made[0] if not same(made[0][name], made[1][name])),
            deterministic=candidate.rewrite.deterministic,
        )

    def choice(self, sub: Substitution, inputs: Values) -> numerics.Choice | None:
        call = sub.calls[-1]
        decision = call.region.decision
        if decision is None:
            return None
        weights = {key: self.bench.weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
        given = [inputs[name] for name in call.inputs]
        exact = decision.scores(FP64, weights, call.attrs, *[wide(t) for t in given])
        theirs = decision.scores(self.bench.workload.precision, weights, call.attrs, *given)
        error = float((theirs.double() - exact).abs().max()) if exact.numel() else 0.0
        return numerics.Choice(exact, error, decision.ids, decision, weights, call.attrs)


def wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def fresh(values: Mapping[str, Tensor]) -> Values:
    return {name: tensor.clone() for name, tensor in values.items()}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.numel() else True


def adversarial(bench: Bench, sub: Substitution, inputs: Values) -> Iterator[tuple[str, Values]]:
    """The cases of the run's regions that can be posed at its edges; one row and none where rows are independent."""
    generator = torch.Generator().manual_seed(SEED)
    for call in sub.calls:
        if call.region.cases is None or not all(name in inputs for name in call.inputs):
            continue
        weights = {key: bench.weights[name] for key, name in zip(call.region.weights, call.weights, strict=True)}
        originals = [inputs[name].clone() for name in call.inputs]
        for name, changed in call.region.cases(originals, weights, call.attrs, generator):
            yield f"{call.region.name}: {name}", inputs | dict(zip(call.inputs, changed, strict=True))
    if all(call.region.rowwise for call in sub.calls):
        for count in (1, 0):
            yield f"{count} rows", {name: tensor[:count].clone() for name, tensor in inputs.items()}


def applicable(candidate: Candidate, phases: Sequence[Phase], dtype: str) -> list[Phase]:
    return [
        phase
        for phase in phases
        if candidate.rewrite.applies(tokens=phase.tokens, dtype=dtype, device="cpu", phase=phase.kind)
    ]


@pytest.mark.parametrize("file", RIGHT)
def test_the_numerics_gate_passes_it(file: str, toy: Toy, candidates: Mapping[str, Candidate]) -> None:
    workload = toy.bench.workload
    for phase in applicable(candidates[file], workload.phases, workload.dtype):
        assert toy.judge(candidates[file], phase, "all") == []


@pytest.mark.parametrize("file", RIGHT)
def test_unequal_lengths_and_padding_rows(file: str, toy: Toy, candidates: Mapping[str, Candidate]) -> None:
    for phase in applicable(candidates[file], EXTRA, toy.bench.workload.dtype):
        assert toy.judge(candidates[file], phase) == []


def test_a_bf16_router_is_refused(toy: Toy, candidates: Mapping[str, Candidate]) -> None:
    wrong = toy.judge(candidates[WRONG[0]], toy.bench.workload.phase("prefill-2x128"))
    assert any("expert_ids" in reason for reason in wrong)


@pytest.mark.parametrize(("file", "kept"), [("router/router_one_pass_cpu.py", True), (WRONG[0], False)])
@pytest.mark.parametrize(("low", "high"), [(9.0, 9.2), (-2.0, -1.9)])
def test_distinct_biases_decide(
    file: str, kept: bool, low: float, high: float, candidates: Mapping[str, Candidate]
) -> None:
    """256 biases within 0.2 of each other, scores all tied: FP32 tells every expert apart, BF16 few. With negative ones
    a group masked with zeros would win."""
    bench = Bench(load_workloads()["beam-tiny"], CPU, SEED)
    toy = Toy(bench, {})
    generator = torch.Generator().manual_seed(SEED)
    for name in bench.weights:
        if name.endswith("e_score_correction_bias"):
            bench.weights[name].uniform_(low, high, generator=generator)
    phase = bench.workload.phase("prefill-2x128")
    sub = toy.sites(candidates[file], phase)[0]
    rows = {sub.inputs[0]: torch.zeros_like(toy.values(phase)[sub.inputs[0]])}
    result = toy.result(candidates[file], phase, sub, "tied scores", rows)
    refused = [record.reason for record in numerics.judge([result]) if not record.ok]
    assert (not refused) == kept, refused
    assert torch.equal(result.outputs["expert_ids"], result.expected.reference["expert_ids"]) == kept


@pytest.mark.parametrize("file", ["attention/attention_layer_cpu.py", "attention/decode_attention_cpu.py"])
def test_what_no_query_sees_cannot_leak(file: str, toy: Toy, candidates: Mapping[str, Candidate]) -> None:
    """NaN in every slot outside the sequences changes no output bit and stays where it was."""
    candidate, phase = candidates[file], EXTRA[0]
    for sub in toy.sites(candidate, phase):
        inputs = {name: toy.values(phase)[name] for name in sub.inputs}
        cache = f"{sub.layer}.kv_cache"
        page = inputs[cache].shape[2]
        seen = torch.zeros(inputs[cache].shape[0] * page, dtype=torch.bool)
        for length, table in zip(inputs["seq_lens"].tolist(), inputs["block_table"], strict=True):
            positions = torch.arange(length)
            seen[table.long()[positions // page] * page + positions % page] = True
        seen[:page] = True
        hidden = ~seen.view(-1, 1, page, 1)
        poisoned = inputs | {cache: inputs[cache].masked_fill(hidden, float("nan"))}
        clean, other = (toy.result(candidate, phase, sub, "", case) for case in (inputs, poisoned))
        for name in clean.outputs:
            assert same(clean.outputs[name], other.outputs[name])
        for name in other.caches:
            assert other.caches[name].isnan().equal(poisoned[cache].isnan())


def test_the_whole_catalog_in_its_order(candidates: Mapping[str, Candidate], toy: Toy) -> None:
    """All right ones at once: later fusions lift earlier ones out, and a decode step's logits stay the baseline's."""
    bench = toy.bench
    kept = [file for file in RIGHT if file not in ("norms/norm_float64.py", "experts/experts_looped.py")]
    for phase in bench.workload.phases:
        program, by_name, displaced = bench.substitute(phase, [str(ROOT / file) for file in kept])
        assert "kv_cache_update_in_place" in displaced
        logits = [
            Executor(p, bench.bind(phase, by_name))(bench.fresh_values(phase, SEED))["logits"]
            for p in (bench.model.program(phase), program)
        ]
        if bench.workload.dtype == "fp32":
            assert (logits[0] - logits[1]).abs().max() < 1e-3


def test_the_catalog_is_whole(candidates: Mapping[str, Candidate]) -> None:
    assert len(CATALOG) == len(set(CATALOG))
    names = [candidate.rewrite.name for candidate in candidates.values()]
    assert len(names) == len(set(names))
    for file, candidate in candidates.items():
        assert "cpu" in candidate.rewrite.devices
        assert not guard.inspect(ROOT / file)
        assert "Predicts: " in candidate.module.__doc__
