"""Honest rewrites pass and subtle faults do not, on Beam's own regions, in BF16 and in the FP32 lift."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.beam import experts, regions
from harness import budget, numerics
from harness.program import BF16, FP32, FP64, PRECISIONS, Precision, Region
from harness.schema import OutputError

HIDDEN = 512
HEAD = 128
EXPERTS = 256
ROWS = 48
SEEDS = 6
Rewrite = Callable[..., tuple[Tensor, ...]]
"""`rewrite(precision, weights, attrs, *inputs)`, as a region's reference."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Many small products: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize else tensor


def expected(
    region: Region, weights: Mapping[str, Tensor], attrs: Mapping[str, Any], inputs: Sequence[Tensor], storage: str
) -> numerics.Expected:
    precision = PRECISIONS[storage]
    wide = [widened(t, torch.float64) for t in inputs]
    choice = None
    if region.decision is not None:
        exact = region.decision.scores(FP64, weights, attrs, *wide)
        near = region.decision.scores(precision, weights, attrs, *inputs)
        error = float((near.double() - exact).abs().max()) if exact.numel() else 0.0
        vectors = {name: t for name, t in weights.items() if t.dim() == 1}
        choice = numerics.Choice(exact, error, region.decision.ids, region.decision, vectors, attrs)
    return numerics.Expected(
        region=region.name,
        layer=3,
        case="recorded seed 1",
        storage=storage,
        reference=dict(zip(region.outputs, region.reference(precision, weights, attrs, *inputs), strict=True)),
        oracle=dict(zip(region.outputs, region.reference(FP64, weights, attrs, *wide), strict=True)),
        choice=choice,
    )


def result(case: numerics.Expected, outputs: Mapping[str, Tensor], **changes: Any) -> numerics.Result:
    plain = {"caches": {}, "touched": (), "repeat_differs": (), "deterministic": True}
    return numerics.Result(expected=case, outputs=outputs, **(plain | changes))


def simple(oracle: Tensor, reference: Tensor, candidate: Tensor, case: str = "recorded seed 1") -> numerics.Result:
    made = numerics.Expected("norm", 0, case, "bf16", {"out": reference}, {"out": oracle})
    return result(made, {"out": candidate})


def wrong(results: Sequence[numerics.Result]) -> list[OutputError]:
    return [record for record in numerics.judge(results) if not record.ok]


class Setting:
    """A region with weights, attributes and inputs of a seed and a number of rows."""

    def __init__(
        self,
        region: Region,
        inputs: Callable[[int, int], list[Tensor]],
        weights: Mapping[str, Tensor] | None = None,
        attrs: Mapping[str, Any] | None = None,
        wide: int = 99,
    ) -> None:
        self.region = region
        self.inputs = inputs
        self.weights = weights or {}
        self.attrs = attrs or {}
        self.wide = wide
        """Inputs from this index on are FP32 in a BF16 model too."""

    def faults(self, rewrite: Rewrite, storage: str, rows: int = ROWS) -> list[OutputError]:
        """What the judge finds in recorded and adversarial cases."""
        precision = PRECISIONS[storage]
        drawn = [self.inputs(seed, rows) for seed in range(SEEDS)]
        stored = [[t if i >= self.wide else t.to(precision.storage) for i, t in enumerate(ins)] for ins in drawn]
        if self.region.cases is not None:
            generator = torch.Generator().manual_seed(7)
            first = [t.clone() for t in stored[0]]
            stored += [list(ins) for _, ins in self.region.cases(first, self.weights, self.attrs, generator)]
        results = []
        for ins in stored:
            made = rewrite(precision, self.weights, self.attrs, *ins)
            case = expected(self.region, self.weights, self.attrs, ins, storage)
            results.append(result(case, dict(zip(self.region.outputs, made, strict=True))))
        return wrong(results)


def rope_inputs(seed: int, rows: int) -> list[Tensor]:
    tables = regions.ROPE_TABLE.reference(FP32, {}, {"rope_theta": 1e4, "head_dim": HEAD}, torch.arange(rows) + 900)
    return [normal(seed, rows, 4, HEAD), normal(seed + 50, rows, 1, HEAD), *tables]


def two_rows(seed: int, rows: int) -> list[Tensor]:
    return [normal(seed, rows, HIDDEN), normal(seed + 50, rows, HIDDEN)]


ROUTER_ATTRS = {"num_groups": 8, "topk_groups": 4, "top_k": 8, "norm_topk_prob": True, "num_experts": EXPERTS}


def router(bias: Tensor) -> Setting:
    weights = {"weight": normal(1, EXPERTS, HIDDEN) * 0.05, "correction_bias": bias}
    return Setting(experts.ROUTER, lambda seed, rows: [normal(seed, rows, HIDDEN)], weights, ROUTER_ATTRS)


SETTINGS = {
    "norm": Setting(
        regions.INPUT_NORM,
        lambda seed, rows: [normal(seed, rows, HIDDEN)],
        {"weight": (1 + 0.3 * normal(2, HIDDEN)).bfloat16()},
        {"eps": 1e-6},
    ),
    "residual": Setting(regions.FEEDFORWARD_RESIDUAL_ADD, two_rows, attrs={"residual_index": 103}),
    "softcap": Setting(
        regions.LOGIT_SOFTCAP, lambda seed, rows: [10 * normal(seed, rows, HIDDEN)], attrs={"softcap": 30.0}
    ),
    "gate": Setting(regions.OUTPUT_GATE, two_rows, {"bias": normal(3, 4).bfloat16()}, {"head_dim": HEAD}),
    "swiglu": Setting(regions.MLP_SWIGLU, two_rows),
    "rope": Setting(regions.ROPE, rope_inputs, wide=2),
    "ssmax_scale": Setting(regions.SSMAX_SCALE, lambda seed, rows: [torch.arange(rows) * 37 + seed], wide=0),
    "router": router(0.1 * normal(4, EXPERTS)),
    "router near 9": router(9 + 0.2 * torch.linspace(0, 1, EXPERTS)),
    "router at -2": router(-2 + 0.1 * normal(5, EXPERTS)),
}


def truncated(values: Tensor, precision: Precision) -> Tensor:
    """FP32 to BF16 by cutting off bits."""
    if precision.storage != torch.bfloat16:
        return values.to(precision.storage)
    return (values.contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()


def norm(p: Precision, w: Any, a: Any, x: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    wide, weight = x.float(), w["weight"].float()
    if kind == "one chain":
        total = (wide * wide).cumsum(-1)[:, -1:]
        return ((wide * weight * torch.rsqrt(total / x.shape[-1] + a["eps"])).to(p.storage),)
    scaled = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + a["eps"])
    if kind == "rounds before the weight":
        return ((weight.bfloat16() * scaled.bfloat16()).to(p.storage),)
    if kind == "truncating store":
        return (truncated(scaled * weight, p),)
    return ((scaled * weight).to(p.storage),)


def residual(p: Precision, w: Any, a: Any, x: Tensor, r: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    n = a["residual_index"] + (kind == "index one too high")
    own, stream = 1 / math.sqrt(n), math.sqrt((n - 1) / n)
    if kind == "index one too high":
        return (x * own + r * stream,)
    total = x.float() * own + r.float() * stream
    return (truncated(total, p) if kind == "truncating store" else total.to(p.storage),)


def softcap(p: Precision, w: Any, a: Any, x: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    cap, wide = a["softcap"], x.float()
    if kind == "expm1":
        grown = torch.expm1(2 * (wide / cap).clamp(-20, 20))
        return (cap * (grown / (grown + 2)),)
    once = cap * torch.tanh(wide / cap)
    if kind == "BF16":
        return ((cap * torch.tanh((wide / cap).bfloat16())).float(),)
    return ({"dropped": wide, "doubled": cap * torch.tanh(once / cap)}[kind],)


def gate(p: Precision, w: Any, a: Any, x: Tensor, g: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    shape = (x.shape[0], -1, a["head_dim"])
    bias = w["bias"].float()[None, :, None] * (kind != "no bias")
    opened = 1 / (1 + torch.exp2(-math.log2(math.e) * (g.float().view(shape) + bias)))
    return ((x.float().view(shape) * opened).flatten(1).to(p.storage),)


def swiglu(p: Precision, w: Any, a: Any, g: Tensor, u: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    activated = g.float() / (1 + torch.exp2(-math.log2(math.e) * g.float()))
    if kind == "rounds the activation":
        activated = activated.bfloat16().float()
    return ((activated * u.float()).to(p.storage),)


def rope(p: Precision, w: Any, a: Any, q: Tensor, k: Tensor, c: Tensor, s: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    if kind == "BF16 tables":
        c, s = c.bfloat16().float(), s.bfloat16().float()
    cos, sin = (t[:, None, : HEAD // 2] for t in (c, s))
    turned = []
    for heads in (q, k):
        low, high = heads.float().chunk(2, dim=-1)
        turned.append(torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(p.storage))
    return tuple(turned)


def ssmax_scale(p: Precision, w: Any, a: Any, positions: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    contexts = (positions.float() + (kind != "no + 1")) / 2048
    return (torch.exp2(0.1 * torch.log2(1 + contexts)),)


def route(p: Precision, w: Any, a: Any, x: Tensor, *, kind: str) -> tuple[Tensor, ...]:
    weight, bias = w["weight"], w["correction_bias"]
    logits = sum((x[:, k : k + 16].float() @ weight[:, k : k + 16].T for k in range(0, HIDDEN, 16)), torch.zeros(()))
    if kind == "BF16 product":
        logits = F.linear(x.bfloat16(), weight.bfloat16()).float()
    scores = torch.sigmoid(torch.as_tensor(logits))
    choice = scores + (bias.bfloat16().float() if kind == "BF16 bias" else bias)
    groups = a["num_groups"]
    best = choice.view(len(x), groups, -1).topk(2, -1)[0].sum(-1).topk(a["topk_groups"], -1)[1]
    stays = (
        torch.zeros(len(x), groups, dtype=torch.bool).scatter_(1, best, True).repeat_interleave(EXPERTS // groups, 1)
    )
    ids = choice.masked_fill(~stays, 0.0 if kind == "zero mask" else -math.inf).topk(a["top_k"], -1)[1].flip(-1)
    chosen = scores.gather(1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * (2.5 if kind == "scaled twice" else 1)


HONEST = [
    ("norm", norm, "one chain"),
    ("norm", norm, "division"),
    ("residual", residual, "fused"),
    ("softcap", softcap, "expm1"),
    ("gate", gate, "fused"),
    ("swiglu", swiglu, "exp2"),
    ("rope", rope, "by halves"),
    ("ssmax_scale", ssmax_scale, "exp2"),
    ("router", route, "sums of 16, ids in reverse"),
    ("router near 9", route, "sums of 16, ids in reverse"),
    ("router at -2", route, "sums of 16, ids in reverse"),
]
FAULTS = [
    ("norm", norm, "rounds before the weight", "both"),
    ("norm", norm, "truncating store", "bf16"),
    ("residual", residual, "index one too high", "both"),
    ("residual", residual, "truncating store", "bf16"),
    ("softcap", softcap, "dropped", "both"),
    ("softcap", softcap, "doubled", "both"),
    ("softcap", softcap, "BF16", "both"),
    ("gate", gate, "no bias", "both"),
    ("swiglu", swiglu, "rounds the activation", "both"),
    ("rope", rope, "BF16 tables", "both"),
    ("ssmax_scale", ssmax_scale, "no + 1", "both"),
    ("router", route, "BF16 product", "both"),
    ("router", route, "scaled twice", "both"),
    ("router near 9", route, "BF16 bias", "both"),
    ("router at -2", route, "zero mask", "both"),
]


@pytest.mark.parametrize("rows", [1, 7, ROWS])
@pytest.mark.parametrize("storage", ["bf16", "fp32"])
@pytest.mark.parametrize(("setting", "rewrite", "kind"), HONEST)
def test_an_honest_rewrite_is_right(setting: str, rewrite: Rewrite, kind: str, storage: str, rows: int) -> None:
    assert SETTINGS[setting].faults(functools.partial(rewrite, kind=kind), storage, rows) == []


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
@pytest.mark.parametrize(("setting", "rewrite", "kind", "where"), FAULTS)
def test_a_subtle_fault_is_wrong(setting: str, rewrite: Rewrite, kind: str, where: str, storage: str) -> None:
    found = SETTINGS[setting].faults(functools.partial(rewrite, kind=kind), storage)
    assert bool(found) == (where in (storage, "both"))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_zeros_are_wrong_and_the_reference_is_right(name: str, storage: str) -> None:
    setting = SETTINGS[name]
    assert setting.faults(setting.region.reference, storage) == []

    def zeros(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(t) for t in setting.region.reference(*args))

    assert setting.faults(zeros, storage)


def test_only_the_bias_rule_sees_a_truncating_store_beside_a_coarse_baseline() -> None:
    """The baseline rounds twice more, so that truncation is inside the RMSE budget and the largest error."""
    oracle = normal(0, 64, HIDDEN).double()
    coarse = oracle * (1 + 2**-8 * (torch.rand(64, HIDDEN, generator=torch.Generator().manual_seed(1)) - 0.5) * 2)
    reference = coarse.bfloat16()
    cut = truncated(oracle.float(), BF16)
    (record,) = wrong([simple(oracle, reference, cut)])
    assert record.error is not None
    assert record.budget is not None
    assert record.error < record.budget
    assert "biased towards zero" in record.reason
    assert wrong([simple(oracle, reference, oracle.bfloat16())]) == []


def test_104_truncating_adds_are_wrong_at_each_step_and_at_the_end_of_the_stack() -> None:
    stream = {"honest": normal(0, 64, HIDDEN).bfloat16()}
    stream |= {"cut": stream["honest"], "reference": stream["honest"], "oracle": stream["honest"].double()}
    steps_wrong = 0
    for n in range(2, 106):
        branch = normal(n, 64, HIDDEN).bfloat16()
        attrs = {"residual_index": n}
        ask = expected(regions.FEEDFORWARD_RESIDUAL_ADD, {}, attrs, [branch, stream["cut"]], "bf16")
        stream["cut"] = residual(BF16, {}, attrs, branch, stream["cut"], kind="truncating store")[0]
        steps_wrong += bool(wrong([result(ask, {"hidden": stream["cut"]})]))
        stream["honest"] = residual(BF16, {}, attrs, branch, stream["honest"], kind="fused")[0]
        add = functools.partial(regions.FEEDFORWARD_RESIDUAL_ADD.reference, BF16, {}, attrs)
        stream["reference"] = add(branch, stream["reference"])[0]
        exact = functools.partial(regions.FEEDFORWARD_RESIDUAL_ADD.reference, FP64, {}, attrs)
        stream["oracle"] = exact(branch.double(), stream["oracle"])[0]
    assert steps_wrong == 104
    at_end = functools.partial(numerics.judge_step, reference=stream["reference"], oracle=stream["oracle"], phase="d")
    assert at_end(stream["honest"]).ok
    assert not at_end(stream["cut"]).ok


def test_tiny_outputs_are_judged_at_their_own_scale() -> None:
    oracle = 1e-5 * normal(0, 64, HIDDEN).double()
    reference = oracle.bfloat16()
    assert wrong([simple(oracle, reference, torch.zeros_like(reference))])
    assert wrong([simple(oracle, reference, (oracle * 1.01).bfloat16())])
    assert wrong([simple(oracle, reference, reference.clone())]) == []


def test_tiny_rows_beside_large_ones_are_not_lost() -> None:
    oracle = normal(0, 64, HIDDEN).double()
    oracle[5] *= 1e-6
    candidate = oracle.bfloat16()
    assert wrong([simple(oracle, oracle.bfloat16(), candidate)]) == []
    candidate[5] = 0
    (record,) = wrong([simple(oracle, oracle.bfloat16(), candidate)])
    assert "rows are lost, the worst at [5]" in record.reason


def test_a_small_bad_case_is_not_diluted_by_a_large_fine_one() -> None:
    large, small = normal(0, 64, HIDDEN).double(), normal(1, 1, HIDDEN).double()
    bad = small.bfloat16() * 1.02
    results = [
        simple(large, large.bfloat16(), large.bfloat16()),
        simple(small, small.bfloat16(), bad, "fresh seed 2"),
        simple(small * 1e4, (small * 1e4).bfloat16(), (small * 1e4).bfloat16(), "loud"),
    ]
    (record,) = wrong(results)
    assert record.case == "fresh seed 2"


def test_small_cases_are_pooled_and_the_worst_one_is_named() -> None:
    cases = [normal(seed, 1, HIDDEN).double() for seed in range(8)]
    results = [simple(o, o.bfloat16(), o.bfloat16(), f"fresh seed {i}") for i, o in enumerate(cases)]
    (record,) = numerics.judge(results)
    assert record.ok
    assert record.case == "fresh seed 0 (and 7 more)"
    off = cases[3].bfloat16()
    off[0, 17] += 0.5
    results[3] = simple(cases[3], cases[3].bfloat16(), off, "fresh seed 3")
    (record,) = wrong(results)
    assert record.case == "fresh seed 3 (and 7 more)"
    assert record.place == (0, 17)


def test_a_copy_is_a_copy() -> None:
    values = normal(0, 4, HIDDEN).bfloat16()
    off = values.clone()
    off[2, 3] = torch.nextafter(off[2, 3].float(), torch.tensor(9.0)).bfloat16() * 1.01
    assert wrong([simple(values.double(), values, values.clone())]) == []
    assert wrong([simple(values.double(), values, off)])


@pytest.mark.parametrize("elements", [1, 2, 8, 100, 1000])
def test_small_samples_do_not_refuse_honest_roundings(elements: int) -> None:
    """Two independent chains of three BF16 roundings, judged against each other."""
    for seed in range(60):
        x, y, z = (normal(100 * seed + i, 1, elements) for i in range(3))
        oracle = x.double().bfloat16().double() * y.bfloat16().double() + z.bfloat16().double()
        reference = x.bfloat16() * y.bfloat16() + z.bfloat16()
        candidate = (oracle.float()).bfloat16()
        assert wrong([simple(oracle, reference, candidate)]) == []


def test_shapes_dtypes_names_and_inputs() -> None:
    values = normal(0, 4, HIDDEN).bfloat16()
    case = simple(values.double(), values, values).expected
    found = {
        "shape [2, 512] where [4, 512]": result(case, {"out": values[:2]}),
        "dtype torch.float32 where torch.bfloat16": result(case, {"out": values.float()}),
        "returned no such output": result(case, {}),
        "not an output of this run": result(case, {"out": values, "more": values}),
        "input hidden was written to": result(case, {"out": values}, touched=("hidden",)),
        "differs bitwise": result(case, {"out": values}, repeat_differs=("out",)),
    }
    for reason, made in found.items():
        (record,) = wrong([made])
        assert reason in record.reason
    assert wrong([result(case, {"out": values}, repeat_differs=("out",), deterministic=False)]) == []


def test_no_rows_leave_shape_and_dtype_to_judge() -> None:
    none = torch.zeros(0, HIDDEN, dtype=torch.bfloat16)
    assert wrong([simple(none.double(), none, none)]) == []
    assert wrong([simple(none.double(), none, none.float())])
    assert SETTINGS["router"].faults(SETTINGS["router"].region.reference, "bf16", rows=0) == []


def test_integers_are_exact() -> None:
    order = torch.arange(100)
    made = order.clone()
    made[40] = 41
    (record,) = wrong([simple(order, order, made)])
    assert record.place == (40,)
    assert wrong([simple(order, order, order.clone())]) == []


def test_the_pattern_of_what_is_not_finite_is_the_baselines() -> None:
    oracle = normal(0, 64, HIDDEN).double()
    reference = oracle.bfloat16()
    candidate = reference.clone()
    candidate[3, 4] = math.nan
    (record,) = wrong([simple(oracle, reference, candidate)])
    assert (record.place, record.reason[:10]) == ((3, 4), "1 elements")
    assert wrong([simple(oracle, candidate, candidate.clone())]) == []
    repaired = wrong([simple(oracle, candidate, reference)])
    assert repaired == [], "finite and right where the baseline overflowed"
    broken = reference.clone()
    broken[3, 4] = 99.0
    assert wrong([simple(oracle, candidate, broken)])
    assert wrong([simple(oracle, candidate, candidate * 1.05)])


def test_a_case_that_defeats_the_baseline_asks_for_agreement() -> None:
    oracle = 1e-3 * normal(0, 64, HIDDEN).double()
    reference = (oracle + 4e-4 * normal(1, 64, HIDDEN)).bfloat16()
    other = (oracle + 4e-4 * normal(2, 64, HIDDEN)).bfloat16()
    assert wrong([simple(oracle, reference, other)]) == []
    assert wrong([simple(oracle, reference, oracle.bfloat16())]) == []
    assert wrong([simple(oracle, reference, torch.zeros_like(reference))])
    hopeless = (oracle + 4e-3 * normal(3, 64, HIDDEN)).bfloat16()
    assert "vanishes" in wrong([simple(oracle, hopeless, torch.zeros_like(reference))])[0].reason


def cache_result(change: Callable[[Tensor], None], dtype: torch.dtype = torch.bfloat16) -> list[OutputError]:
    """Pages [4, 2, 16, 256] with NaN in unused rows; the baseline writes two rows of page 1."""
    before = normal(0, 4, 2, 16, 256).to(dtype)
    before[3] = math.nan
    oracle = before.double()
    oracle[1, :, 5] = 0.3 * normal(1, 2, 256).double()
    reference = before.clone()
    reference[1, :, 5] = oracle[1, :, 5].to(dtype)
    made = reference.clone()
    change(made)
    case = numerics.Expected("c", 0, "r", "bf16", {}, {}, {"cache": before}, {"cache": reference}, {"cache": oracle})
    return wrong([result(case, {}, caches={"cache": made})])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_caches(dtype: torch.dtype) -> None:
    def neighbour(made: Tensor) -> None:
        made[1, 0, 6, 9] *= 2

    def payload(made: Tensor) -> None:
        bits = made.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        bits[3, 1, 2, 7] ^= 1

    def late(made: Tensor) -> None:
        made[1, 1, 5, 20] = 3.0

    def unwritten(made: Tensor) -> None:
        made[1, 1, 5] = 0.0

    assert cache_result(lambda made: None, dtype) == []
    for change, place in ((neighbour, (1, 0, 6, 9)), (payload, (3, 1, 2, 7))):
        (record,) = cache_result(change, dtype)
        assert "outside the written slots" in record.reason
        assert record.place == place
    assert cache_result(late, dtype)[0].place == (1, 1, 5, 20)
    assert "rows are lost, the worst at [1, 1, 5]" in cache_result(unwritten, dtype)[0].reason


def test_a_tie_may_be_broken_either_way_and_is_counted() -> None:
    setting = SETTINGS["router"]
    rows = normal(0, 4, HIDDEN)
    case = expected(setting.region, setting.weights, setting.attrs, [rows], "fp32")
    assert case.choice is not None
    ids, weights = case.reference["expert_ids"].clone(), case.reference["expert_weights"].clone()
    spare = next(e for e in range(EXPERTS) if e not in ids[2] and e // 32 == int(ids[2, -1]) // 32)
    scores = case.choice.scores.clone()
    bias = setting.weights["correction_bias"].double()
    scores[2, spare] = scores[2, ids[2, -1]] + bias[ids[2, -1]] - bias[spare] - 1e-8
    tied = numerics.Choice(**(vars(case.choice) | {"scores": scores}))
    case = numerics.Expected(**(vars(case) | {"choice": tied}))
    ids[2, -1] = spare
    weights = tied.decision.resolve(scores, tied.weights, tied.attrs, ids)["expert_weights"].float()
    records = numerics.judge([result(case, {"expert_ids": ids, "expert_weights": weights})])
    assert all(record.ok for record in records)
    assert any(record.reason.startswith("1 of 4 tokens chose otherwise") for record in records)
    ids[2, -1] = ids[2, 0]
    assert (
        "chose what no rounding explains"
        in wrong([result(case, {"expert_ids": ids, "expert_weights": weights})])[0].reason
    )


def test_a_whole_step() -> None:
    oracle = normal(0, 8, 2048).double()
    reference = (oracle + 0.01 * normal(1, 8, 2048)).float()
    alike, worse = ((oracle + size * normal(2, 8, 2048)).float() for size in (0.011, 0.014))
    assert numerics.judge_step(alike, reference, oracle, phase="decode-b1").ok
    record = numerics.judge_step(worse, reference, oracle, phase="decode-b1")
    assert not record.ok
    assert record.region == "step of decode-b1"
    exact = oracle.float()
    assert numerics.judge_step(exact * (1 + 2**-20), exact, oracle, phase="decode-b1").ok
    assert not numerics.judge_step(exact * (1 + 2**-16), exact, oracle, phase="decode-b1").ok
    alike[3, 7] = math.nan
    assert numerics.judge_step(alike, reference, oracle, phase="decode-b1").place == (3, 7)
    assert not numerics.judge_step(exact[:4], exact, oracle, phase="decode-b1").ok


def test_one_long_fp32_sum_is_honest() -> None:
    rows, weight = normal(0, 64, 2048), normal(1, 128, 2048)
    oracle = rows.double() @ weight.double().T
    chain = torch.zeros(64, 128)
    for k in range(2048):
        chain = torch.addcmul(chain, rows[:, k : k + 1], weight[:, k])
    assert wrong([simple(oracle, rows @ weight.T, chain)]) == []
    tf32 = rows.bfloat16().float() @ weight.bfloat16().float().T
    assert wrong([simple(oracle, rows @ weight.T, tf32)])


def test_rms_does_not_leave_fp64() -> None:
    assert budget.rms(torch.tensor([3e-200, 4e-200], dtype=torch.float64)) == pytest.approx(math.sqrt(12.5) * 1e-200)
    assert budget.rms(torch.zeros(0)) == 0
