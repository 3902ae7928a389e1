"""What the parent and a child say to each other: one JSON object a line; tensors travel as safetensors files.

The parent asks, the child answers each request once. A child started for a candidate is never trusted: its answers are
times and file names, and what they mean is judged in the parent.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from harness.schema import Ceilings, Profile, Record
from harness.workload import Workload

Storage = Literal["bf16", "fp32"]


class Open(Record):
    """Makes the child a bench of `workload`: arms are lists of candidate files, applied in order to the baseline."""

    op: Literal["open"] = "open"
    workload: Workload
    device: str
    seed: int
    threads: int
    cores: tuple[int, ...] = ()
    arms: dict[str, tuple[str, ...]]


class Build(Record):
    """Imports `file` and finds its sites in every phase."""

    op: Literal["build"] = "build"
    file: str


class Span(Record):
    """A run of the baseline's calls: `calls[start:stop]` of `phase`."""

    phase: str
    start: int
    stop: int


class SiteCase(Record):
    """One input set at one site, for the candidate to run: tensors by role in `inputs`, its outputs go to `outputs`."""

    span: Span
    case: str
    storage: Storage
    inputs: str
    outputs: str
    output_specs: dict[str, tuple[tuple[int, ...], str]]


class RunSites(Record):
    """Runs the candidate's own function on recorded inputs, twice each."""

    op: Literal["run_sites"] = "run_sites"
    file: str
    cases: tuple[SiteCase, ...]


class RecordSites(Record):
    """Asks a trusted child for inputs and expected values at `spans` of one phase (see oracle.py)."""

    op: Literal["record"] = "record"
    phase: str
    spans: tuple[Span, ...]
    seeds: tuple[int, ...]
    adversarial: bool
    storages: tuple[Storage, ...]
    directory: str


class RecordStep(Record):
    """Asks a trusted child for a whole step's choices and logits, in storage precision and in FP64."""

    op: Literal["record_step"] = "record_step"
    phase: str
    seed: int
    path: str


class RunStep(Record):
    """One eager step of an arm; `forced` is a file of choices, `poison` a site whose outputs become NaN."""

    op: Literal["run_step"] = "run_step"
    arm: str
    phase: str
    seed: int
    path: str
    rewrite: str | None = None
    forced: str | None = None
    poison: int | None = None


class ListKernels(Record):
    """Device kernels launched inside the sites of `rewrite` in one profiled step."""

    op: Literal["list_kernels"] = "list_kernels"
    arm: str
    phase: str
    rewrite: str


class Measure(Record):
    """Times slots of `arms` in the order given; each slot gets fresh tokens from its own seed."""

    op: Literal["measure"] = "measure"
    phase: str
    slots: tuple[tuple[str, int], ...]
    """(arm, token seed)"""
    slot_ms: float
    warm_ms: float
    logits: str | None = None


class TakeProfile(Record):
    op: Literal["profile"] = "profile"
    arm: str
    phase: str
    ceilings: Ceilings
    trace: str | None = None


class Peer(Record):
    """Adds a peer as an arm of its name: `baseline_eager` is arm `of` uncaptured, others are the model's to make."""

    op: Literal["peer"] = "peer"
    name: str
    phase: str
    captured: bool
    of: str = "baseline"


Request = Annotated[
    Open | Build | RunSites | RecordSites | RecordStep | RunStep | ListKernels | Measure | TakeProfile | Peer,
    Field(discriminator="op"),
]


class SitesOfPhase(Record):
    """Where a candidate runs in one phase."""

    phase: str
    spans: tuple[Span, ...]
    layers: tuple[int, ...]
    displaced: tuple[str, ...] = ()


class Built(Record):
    """A candidate's own declaration, as the child read it."""

    kind: Literal["built"] = "built"
    name: str
    regions: tuple[tuple[str, ...], ...]
    backend: str
    target: str
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    tokens: tuple[int, int]
    phases: tuple[str, ...]
    kernels: tuple[str, ...]
    deterministic: bool
    summary: str


class CaseRun(Record):
    """What a child says of one case: inputs whose bytes changed, outputs that differ between its two runs."""

    touched: tuple[str, ...] = ()
    repeat_differs: tuple[str, ...] = ()


class SitesRun(Record):
    kind: Literal["sites_run"] = "sites_run"
    cases: tuple[CaseRun, ...]


class RecordedCase(Record):
    """One case at one site, as a trusted child left it: inputs for the candidate, expectations for the judge."""

    span: Span
    layer: int
    region: str
    case: str
    storage: Storage
    inputs: str
    expected: str
    output_specs: dict[str, tuple[tuple[int, ...], str]]
    rows: bool = False
    """Whether only the sampled rows of the outputs are expected (their indices are in the file)."""
    choice: str | None = None
    choice_error: float = 0.0


class Recorded(Record):
    kind: Literal["recorded"] = "recorded"
    cases: tuple[RecordedCase, ...]


class StepRun(Record):
    kind: Literal["step_run"] = "step_run"
    calls: int
    sites: int
    finite: bool


class Kernels(Record):
    kind: Literal["kernels"] = "kernels"
    sites: int
    by_site: tuple[tuple[str, ...], ...]
    """Kernel names launched inside each site, in order."""


class Slots(Record):
    """Milliseconds per step of each slot, and how many steps a slot held."""

    kind: Literal["slots"] = "slots"
    ms: tuple[float, ...]
    replays: int
    wall_ms: float
    """Host time over all slots' steps, for the cross-check."""
    sm_clock_mhz: tuple[int | None, ...] = ()
    tainted: tuple[str, ...] = ()
    persistent_bytes: int = 0
    """Device memory that the candidates' `prepare` holds on to."""


class Opened(Record):
    kind: Literal["opened"] = "opened"
    sites: dict[str, dict[str, int]]
    """By arm and phase: substituted sites."""
    displaced: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """By arm: rewrites that a later one lifted out at some site."""


class Profiled(Record):
    kind: Literal["profiled"] = "profiled"
    profile: Profile


class Ready(Record):
    """The child's first line: it has imported torch and made its device context."""

    kind: Literal["ready"] = "ready"
    pid: int
    note: str = ""


class Failed(Record):
    """The request failed; `blame` says whose code raised: the candidate's, its build's, or the harness's."""

    kind: Literal["failed"] = "failed"
    blame: Literal["candidate", "harness", "build"]
    error: str
    detail: str


Reply = Annotated[
    Built | SitesRun | Recorded | StepRun | Kernels | Slots | Opened | Profiled | Ready | Failed,
    Field(discriminator="kind"),
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)
