"""Records that cross the seams: proposals, builds, checks, timings, evaluations. Plain, frozen, picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from evo.errors import EngineError
from evo.problem.genome import Genome


class Status(StrEnum):
    """The end of an evaluation. Only OK and SAME_CODE may carry times."""

    OK = "ok"
    SAME_CODE = "same_code"
    """Machine code equal to an earlier candidate's; its measurement is reused, not repeated."""
    RENDER_ERROR = "render_error"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    LOAD_ERROR = "load_error"
    LAUNCH_ERROR = "launch_error"
    WRONG = "wrong"
    """The gate has refused the candidate."""
    TIMEOUT = "timeout"
    CRASH = "crash"
    """The device process died."""
    ILLEGAL_ADDRESS = "illegal_address"
    MISALIGNED_ADDRESS = "misaligned_address"
    TRAP = "trap"
    """A device-side trap, assert or illegal instruction; on a CPU abort() or an illegal instruction."""
    OUT_OF_MEMORY = "out_of_memory"
    IMPOSSIBLE = "impossible"
    """The time is faster than the memory or the arithmetic of the device allows: the code cannot have done the work."""

    @property
    def passed(self) -> bool:
        return self in (Status.OK, Status.SAME_CODE)


PASSED = tuple(status.value for status in Status if status.passed)
"""The statuses that count as passed, as a database has them."""


@dataclass(frozen=True)
class Parent:
    """A candidate that a proposal came from: its order in the run, and its part in the making."""

    order: int
    role: str = "parent"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A sampler's proposal. `parents` name earlier proposals of the same run by order."""

    genome: Genome
    operator: str
    parents: tuple[Parent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of work. build_seconds: of all builders together, which work in parallel. device_seconds: of the
    device process; the last three are parts of it."""

    build_seconds: float = 0.0
    device_seconds: float = 0.0
    load_seconds: float = 0.0
    gate_seconds: float = 0.0
    timing_seconds: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(kw_only=True)
class Candidate:
    """A proposal with its place in a run, and what the search loop knows of it from `ask` to `tell`.

    order: in the run, from 0. task: number of the workload it is tried on. Two are equal if their proposal and place are.
    """

    order: int
    task: int
    proposal: Proposal
    build: Build | None = field(default=None, compare=False)
    """The build of a candidate in flight; a finished candidate does not keep its binary."""
    code: bytes | None = field(default=None, compare=False)
    """Digest of the machine code and of how it is launched: equal code launched differently is not a duplicate."""
    first_measurement: Evaluation | None = field(default=None, compare=False)
    """The first measurement, while the candidate is measured a second time because its timing was disturbed."""
    costs: Costs = field(default_factory=Costs, compare=False)
    status: Status | None = field(default=None, compare=False)
    """None while it is in flight."""
    ratio: float | None = field(default=None, compare=False)
    """Cold time over the reference's."""
    disturbed: bool = field(default=False, compare=False)
    """Something slowed its timing down: the ratio cannot make it the best."""


@dataclass(frozen=True, kw_only=True)
class Binary:
    """Compiled code and what the compiler said of it. None where a target has no such figure."""

    code: bytes
    code_hash: str
    """sha256 of the machine code itself, not of the container around it."""
    stand_in: bytes = b""
    """The same for the device that measures, where `code` is for an architecture of which that runs no machine code."""
    log: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    smem_static_bytes: int | None = None
    stack_bytes: int | None = None
    triggers_dependents: bool = False
    """Whether the code can let the kernel after it start before it has ended (griddepcontrol.launch_dependents)."""
    launch: Mapping[str, int | str | bool] = field(default_factory=dict, hash=False)
    """Fields of `LaunchPlan` that only its compilation could tell, such as smem_bytes, in place of what the kernel's `plan`
    gives."""

    @property
    def loadable(self) -> bytes:
        """What the device that measures loads."""
        return self.stand_in or self.code


@dataclass(frozen=True, kw_only=True)
class Build:
    """One compilation, successful or not."""

    status: Status
    arch: str
    compiler: str
    source_digest: str
    source: str = ""
    seconds: float = 0.0
    """Compile seconds; those of the original build when `cached`."""
    cached: bool = False
    log: str = ""
    binary: Binary | None = None
    smem_dynamic_bytes: int | None = None
    occupancy: float | None = None
    """Resident threads over the multiprocessor's limit, 0 to 1, from registers, shared memory and block size."""

    def __post_init__(self) -> None:
        if (self.binary is None) == (self.status is Status.OK):
            raise EngineError(f"a build with status {self.status} and binary={self.binary is not None}")

    @property
    def launch(self) -> Mapping[str, int | str | bool]:
        """What of its launch it has itself (`Binary.launch`)."""
        return self.binary.launch if self.binary else {}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One gate case: the largest error against float64, what was allowed, and why it failed if it did."""

    case: str
    passed: bool
    error: float | None = None
    """max |output - reference|; None where no number could be had, and of integers, which are right or wrong."""
    allowed: float | None = None
    torch_error: float | None = None
    reason: str = ""
    seed: int = 0


UNCHECKED = "not checked for"
"""Beginning of a line of a winner's log that names a check which it has not met, and why."""

AA_CONTROL = "twin"
"""The contender that is a second copy of the winner, in the race that confirms it."""

FINALIST = "finalist"
"""The contender under whose name a winner's time in the race of all finalists is kept, beside that of the race that
confirmed it."""

BOOTSTRAP_SAMPLES = 10
"""Least number of samples for an interval from a bootstrap."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One contender's time over another's; above 1, the other is faster. No interval where one of the two times has none.

    same_code: the two are the same machine code and share one measurement, so the gain is exactly 1.
    """

    PRINTED: ClassVar = ("tie",)
    gain: float
    low: float | None = None
    high: float | None = None
    same_code: bool = False

    @property
    def tie(self) -> bool | None:
        """Whether the interval holds 1, so that the gain may be chance; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= 1.0 <= self.high


def within_noise(ratio: float | None, noise: float | None) -> bool:
    """Whether a speed-up over a baseline is a tie: no further from 1 than the noise floor of its race. ratio: of the times,
    whose inverse the speed-up is."""
    return bool(ratio and noise is not None and abs(1 / ratio - 1) <= noise)


def is_disturbed(clocks: Mapping[str, Any] | None) -> bool:
    """Whether rounds that something slowed down are among a timing's samples. Such a figure is not sure: it is shown as no
    speed-up, confirms nothing, and ranks behind all sure ones. clocks: the timing's, also as a database has them."""
    return bool((clocks or {}).get("disturbed"))


def sure_speedup(ratio: float | None, disturbed: bool) -> float | None:
    """The speed-up that may be shown: the inverse of a ratio of times; None without one, and where it was disturbed."""
    return None if disturbed or not ratio else 1 / ratio


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A contender's time for one workload under one protocol.

    All times in microseconds a call. `low` and `high` bound the median with 95% confidence, those of fewer
    samples than `BOOTSTRAP_SAMPLES` with 1 - 2^(1 - n): they are the range, if one sample says nothing of the next.
    `ratio` is contender over reference baseline, sample by sample in interleaved rounds (below 1: faster).
    """

    workload: str
    contender: str
    """"candidate", "incumbent" (the best before it, in the same race), `AA_CONTROL` (a second copy of it), `FINALIST`, or a
    baseline's name."""
    protocol: str
    """"cold", "hot", "final"."""
    median_us: float
    low_us: float
    high_us: float
    samples_us: tuple[float, ...]
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    calls_per_sample: int = 1
    sets: int = 1
    """Buffer sets that a sample walks over."""
    clocks: dict[str, float] = field(default_factory=dict)
    """Clocks, temperature, power and other users as read beside the samples, where the device tells; and rounds that
    were discarded, or kept although something disturbed them."""

    @property
    def disturbed(self) -> bool:
        return is_disturbed(self.clocks)

    @property
    def speedup(self) -> float | None:
        """The reference's time over the contender's; None for the reference itself, and where it is not sure."""
        return sure_speedup(self.ratio, self.disturbed)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything that is known of one candidate. Illegal combinations cannot be built."""

    status: Status
    build: Build | None = None
    """None from a device process: whoever asked it has the build."""
    checks: tuple[Check, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons why cases could not be run, by name."""
    timings: tuple[Timing, ...] = ()
    log: str = ""
    same_code_as: int | None = None
    """Order of the candidate with equal machine code and launch; its verdict and times hold for this one too."""
    seconds: float = 0.0
    """Wall time in the device process. The next three are parts of it."""
    load_seconds: float = 0.0
    gate_seconds: float = 0.0
    timing_seconds: float = 0.0
    device_lost: bool = False
    """The device answers nothing any more, or the data that others are to be judged with are changed: the process must be
    replaced before anything else is measured."""

    def __post_init__(self) -> None:
        if self.timings and not (self.status.passed and self.checks and all(c.passed for c in self.checks)):
            raise EngineError(f"a candidate that did not pass the gate ({self.status}) cannot carry a time")
        if self.status is Status.SAME_CODE and self.same_code_as is None:
            raise EngineError("status same_code needs the candidate whose code it is")
        if self.status.passed and self.build is not None and self.build.status is not Status.OK:
            raise EngineError("a candidate whose build failed cannot have passed")

    def timing(self, protocol: str = "cold") -> Timing | None:
        return next((t for t in self.timings if t.contender == "candidate" and t.protocol == protocol), None)

    @property
    def score(self) -> float | None:
        """The minimised figure of a search: the cold time over the reference baseline's. None without a sure time."""
        timing = self.timing()
        return timing.ratio if timing and not timing.disturbed else None
