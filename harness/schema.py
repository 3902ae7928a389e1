"""Every record that crosses a process or reaches disk: frozen, versioned, strict.

Times are stored in milliseconds per arm and slot; percentages are derived, never stored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1


class Record(BaseModel):
    """Base of all records: immutable, no unknown fields, NaN and infinities become null in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Gate(StrEnum):
    """The gates in the order in which a candidate meets them."""

    GUARD = "guard"
    BUILD = "build"
    NUMERICS = "numerics"
    SCREEN = "screen"
    ENGAGE = "engage"
    STEP_NUMERICS = "step_numerics"
    CONFIRM = "confirm"


class Status(StrEnum):
    """How an attempt ended."""

    KEPT = "kept"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"
    WRONG = "wrong"
    REFUSED = "refused"
    BUILD_FAILED = "build_failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    NOT_ENGAGED = "not_engaged"
    NO_CHANGE = "no_change"


EXIT_CODES: dict[Status, int] = {
    Status.KEPT: 0,
    Status.REJECTED: 1,
    Status.NOT_ENGAGED: 1,
    Status.NO_CHANGE: 1,
    Status.WRONG: 3,
    Status.INCONCLUSIVE: 4,
    Status.REFUSED: 6,
    Status.BUILD_FAILED: 7,
    Status.CRASHED: 7,
    Status.TIMED_OUT: 7,
}


class OutputError(Record):
    """One output of one case, judged: the errors are RMSE against the unrounded oracle, in the output's units."""

    region: str
    layer: int
    case: str
    output: str
    ok: bool
    error: float | None = None
    budget: float | None = None
    reference_error: float | None = None
    place: tuple[int, ...] | None = None
    reason: str = ""


class GateResult(Record):
    """One gate's verdict. A failed gate names the status that ends the attempt; evidence is for people and agents."""

    gate: Gate
    passed: bool
    seconds: float
    status: Status | None = None
    reason: str = ""
    errors: tuple[OutputError, ...] = ()
    evidence: dict[str, Any] = {}

    @model_validator(mode="after")
    def _failed_has_status(self) -> GateResult:
        if self.passed == (self.status is not None):
            raise ValueError("a failed gate has a status and a passed one has none")
        return self


class Block(Record):
    """Four slots of one phase in the order given: A is the current best, B the candidate. ms is per step."""

    order: Literal["ABBA", "BAAB"]
    ms: tuple[float, float, float, float]
    tainted: str = ""


class Launch(Record):
    """The blocks measured in one fresh process, by phase."""

    index: int
    seed: int
    blocks: dict[str, tuple[Block, ...]]


class Estimate(Record):
    """Both arms of one phase, from the confirm stage alone. `log_ratio` is ln(baseline/candidate): above 0 is faster"""

    phase: str
    processes: int
    baseline_ms: float
    candidate_ms: float
    log_ratio: float
    low: float
    high: float
    """95% interval of log_ratio."""


class Look(Record):
    """One pre-registered look of the confirm rule."""

    processes: int
    mean: float
    standard_error: float
    bound: float
    """mean minus the look's multiple of the standard error; the candidate is kept where it is above zero."""
    alpha: float
    verdict: Literal["keep", "reject", "continue"]


class Decision(Record):
    """The confirm rule's answer and what it was made of."""

    status: Status
    reason: str
    looks: tuple[Look, ...] = ()
    alpha_spent: float = 0.0


class Attempt(Record):
    """One ledger line: a candidate from proposal to verdict."""

    kind: Literal["attempt"] = "attempt"
    schema_version: int = SCHEMA_VERSION
    attempt: int
    name: str
    regions: tuple[tuple[str, ...], ...]
    backend: str
    target: str
    """The phase tested for gain, named before anything was measured."""
    file: str
    """Path inside the run directory of exactly the bytes that were measured."""
    file_sha256: str
    parent: str | None
    """sha256 of the newest rung kept before this attempt; null for the baseline."""
    agent: str
    model: str | None = None
    tokens: int = 0
    cost_usd: float = 0.0
    summary: str = ""
    """First paragraph of the file's docstring: what it does and predicts."""
    started: str
    """ISO 8601, UTC."""
    seconds: float
    gates: tuple[GateResult, ...]
    launches: tuple[Launch, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    decision: Decision
    displaced: tuple[str, ...] = ()
    """Kept rungs that this one lifted out at some site."""
    sites: dict[str, int] = {}
    """Sites replaced, by phase."""
    persistent_bytes: int = 0
    workspace_bytes: int = 0
    device: str
    baseline_hash: str

    @model_validator(mode="after")
    def _no_speedup_on_a_red_gate(self) -> Attempt:
        failed = [gate.gate for gate in self.gates if not gate.passed and gate.gate is not Gate.CONFIRM]
        if failed and (self.estimates or self.launches):
            raise ValueError(f"gate {failed[0]} failed, so this attempt cannot hold a measurement")
        if self.decision.status is Status.KEPT and not all(gate.passed for gate in self.gates):
            raise ValueError("a kept attempt has no failed gate")
        return self


class Commit(Record):
    """Written after a kept attempt's file reached git, or with the patch's path where it could not."""

    kind: Literal["commit"] = "commit"
    schema_version: int = SCHEMA_VERSION
    attempt: int
    commit: str | None
    branch: str
    patch: str | None = None
    reason: str = ""


class Repair(Record):
    """Written where a torn last line was cut off when the ledger was opened."""

    kind: Literal["repair"] = "repair"
    schema_version: int = SCHEMA_VERSION
    dropped_bytes: int
    saved_as: str


class LadderArm(Record):
    """One arm of a ladder: the baseline, a rung's stack, or a peer. ms per step of every slot, by process."""

    name: str
    kind: Literal["baseline", "rung", "peer"]
    samples_ms: tuple[tuple[float, ...], ...]
    note: str = ""


class Ladder(Record):
    """Every rung of a run re-measured, interleaved, in the same processes."""

    kind: Literal["ladder"] = "ladder"
    schema_version: int = SCHEMA_VERSION
    workload: str
    phase: str
    device: str
    floor_ms: float | None
    arms: tuple[LadderArm, ...]
    started: str
    seconds: float
    command: str


LedgerLine = Annotated[Attempt | Commit | Repair | Ladder, Field(discriminator="kind")]


class RegionTime(Record):
    """One region's share of one step."""

    region: str
    calls: int
    launches: int
    time_ms: float
    floor_ms: float
    bytes: int
    flops: int
    kernels: dict[str, float] = {}
    """Device kernels (GPU) or operators (CPU) and their ms."""


class Profile(Record):
    """Where one step's time goes. Regions' sum plus unattributed equals the profiled device time."""

    schema_version: int = SCHEMA_VERSION
    workload: str
    phase: str
    device: str
    regions: tuple[RegionTime, ...]
    unattributed_ms: float
    step_ms: float
    """Wall time of the profiled step."""
    captured_ms: float | None
    """The step as a CUDA graph, median of replays; null on a CPU."""
    complete: bool
    reason: str = ""
    launches: int = 0


class Ceilings(Record):
    """What this device can do, measured: bytes per second of a large copy (read + written) and of a large read."""

    device: str
    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    """Matrix product rate by dtype."""


class Gap(Record):
    """A region's distance to its floor: what the loop ranks."""

    region: str
    time_ms: float
    floor_ms: float
    gap_ms: float
    share: float
    bound: Literal["memory", "compute", "launch"]


class Fingerprint(Record):
    """The environment a number belongs to."""

    device: str
    device_kind: Literal["cpu", "cuda"]
    device_count: int
    memory_bytes: int
    driver: str | None
    cuda: str | None
    torch: str
    triton: str | None
    python: str
    os: str
    cpu: str
    threads: int
    compiler: str | None
    optimize: str
    git: str | None = None


class RunConfig(Record):
    """`run.json`: everything needed to go on with a run or to repeat it."""

    schema_version: int = SCHEMA_VERSION
    run: str
    workload: str
    workloads_file: str | None = None
    agent: str
    catalog: str | None = None
    """Folder of the catalog agent's files; null for the project's own, wherever it is installed."""
    only: tuple[str, ...] = ()
    """The catalog files to propose, by stem; all where empty."""
    phases: tuple[str, ...] = ()
    """The phases measured; all of the workload's where empty."""
    model: str | None = None
    seed: int
    attempts: int | None
    hours: float | None
    budget_usd: float | None
    min_gain: float
    """Smallest relative gain worth keeping, 0.003 by default."""
    repository: str | None
    branch: str | None
    base_commit: str | None
    baseline_hash: str
    fingerprint: Fingerprint
    ceilings: Ceilings
    command: str
    started: str
