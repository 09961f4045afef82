"""The harness of one workload: what a device process keeps between its candidates, to gate them and to time them beside
baselines.

All contenders of a race walk over the same buffer sets. Between their samples, untimed, they are checked (`RaceCheck`): a
kernel can be right in the gate and wrong where it is timed, at another size, behind other calls or by luck of a race.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

import torch

from evo.errors import KernelError, LaunchError, UsageError
from evo.evaluation import BOOTSTRAP_SAMPLES, Build, Check, Evaluation, Status, Timing
from evo.measure import FAILING, NO_MEMORY, NO_TIME, RaceRequest, RaceResult, Request
from evo.measure.buffers import HUGE, NAN, Arena, Layout, Workspace
from evo.measure.cases import MOST_BYTES, random_case_of
from evo.measure.clock import CLOSE, USUAL_RACES, Protocol, calls_for, race, sets_for, summarise, usual_us
from evo.measure.far import far_checks
from evo.measure.gate import (
    Gate,
    Invocation,
    PreparedCase,
    allocate_outputs,
    expected_outputs,
    figures,
    stated_outputs,
)
from evo.measure.order import begins_early
from evo.measure.roofline import roofline_of
from evo.problem.genome import Genome
from evo.problem.kernel import Baseline, Case, Kernel, LaunchSequence, Tensors, Workload
from evo.runtime.tolerance import Expected, compare, findings, verdict
from evo.targets import Loaded, Replay, Session, classify, find_target, target_of


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A racer: a call for each buffer set. A baseline has no invocation."""

    calls: Sequence[Callable[[], object]]
    invocation: Invocation | None = None


_FAR_ON_CPU = 1.25
"""When a machine was quiet, the median of a race was at most 1.1 times a contender's least sample, and nine of ten samples
below 1.2 times that. When something else took memory bandwidth, the same calls took 1.4 to 2.5 times as long for seconds,
some more than others, without having waited for a core. The clocks of a GPU vary by more."""

_PROTOCOLS = {
    ("search", False): Protocol(
        name="cold", min_rounds=6, max_rounds=10, sample_us=200.0, precision=0.015, limit_s=4.0
    ),
    ("search", True): Protocol(
        name="cold", min_rounds=4, max_rounds=6, sample_us=1500.0, precision=0.03, limit_s=4.0, far=_FAR_ON_CPU
    ),
    ("final", False): Protocol(
        name="final", min_rounds=30, max_rounds=60, sample_us=1000.0, precision=0.003,
        limit_s=20.0, least_rounds=BOOTSTRAP_SAMPLES, pause_s=0.5,
    ),
    ("final", True): Protocol(
        name="final", min_rounds=16, max_rounds=40, sample_us=4000.0, precision=0.01,
        limit_s=10.0, least_rounds=BOOTSTRAP_SAMPLES, pause_s=0.5, far=_FAR_ON_CPU,
    ),
}
"""Protocols, by stage and by whether the target shares its cores with everything else (and is therefore noisier)."""

_TRIGGERS_DEPENDENTS = (
    "the code lets the kernel after it start before it has ended (griddepcontrol.launch_dependents): its calls would"
    " overlap where they are timed, one behind the other, and hardly anywhere else"
)

_WALK_BYTES = {False: 1 << 30, True: 1 << 28}
"""The least that buffer sets hold, by whether the target shares its cores: a quarter of a millisecond at 4 TB/s,
some milliseconds at 50 GB/s."""

_LONG_SAMPLE_US = 30_000.0
"""A sample on a CPU need not walk over three times the cache if that takes longer."""

_PATIENCE = 3
"""Disturbed rounds are no longer taken again after so many races of a search in a row with too few undisturbed ones: on
a machine that is never quiet, each candidate would wait in vain. After one undisturbed race, they are."""

_REASON_CHARACTERS = 200
"""The length of the error that is told of a baseline that does not run."""

_REFERENCE_BYTES = 64
"""Bytes an output element for a reference in float64, its bounds and an error, and temporaries."""

_AT_SIZE_SHARE = 0.03
"""The share of a search's time for random cases of the size that is timed."""

_DRAWING_S = 12.0
"""The random cases of a candidate take at most this: a third of what a gate may take."""

_LEAST_SETS = 5
"""Two that are raced, what was in them, and what is drawn anew."""

_CASE_BYTES = 24
"""A random case takes so many for each byte that it moves, in 16 bits: its memory, and a reference in float64."""

_CASE_SETS = 4
"""A random case of the size that is timed holds so many: its memory and inputs, twice."""


class TimedData:
    """The data of races: `count` buffer sets with random inputs of their own, all between guards; and `inputs` that are
    drawn anew from race to race, with what is `expected` of them (`draw`)."""

    def __init__(self, kernel: Kernel, workload: Workload, session: Session, count: int, seed: int) -> None:
        self._kernel, self._workload, self._device = kernel, workload, session.device
        self._generator = torch.Generator(device=self._device).manual_seed(seed % 2**63)
        self._choice = random.Random(seed)
        self.draw()
        layout = Layout(self.inputs, allocate_outputs(kernel, workload, self._device))
        self.arena = Arena(layout, count, self._device)
        self.arena.bytes.fill_(NAN)
        for memory in self.arena.sets:
            memory.write(self._drawn())
        output_bytes = sum(s.end - s.start for s in layout.spans if s.is_output)
        self.summed_sets = max(1, target_of(self._device).summed_bytes // max(1, output_bytes))
        self._sums = self.arena.fixed_sums()

    def _drawn(self) -> Tensors:
        return self._kernel.inputs(self._workload, self._kernel.data[0], self._generator)

    def draw(self) -> None:
        """Other inputs, and their reference."""
        self.expected, self._compared = tuple[Expected, ...](), list[Expected]()  # their memory counts as free
        self.inputs = self._drawn()
        self.expected = expected_outputs(self._kernel, self.inputs, self._workload)
        most = target_of(self._device).compared_elements
        self._rows = {e.name: None if e.ties else _some_rows(e.reference, most) for e in self.expected}
        self._compared = [self._some(e) for e in self.expected]

    def of_two_sets(self, sets: int, run: Callable[[], object]) -> list[tuple[Expected, torch.Tensor]]:
        """Findings for each output, or some rows of it, after `run` with the drawn inputs in the first of `sets` sets and in
        any other, whose inputs are afterwards what they were. What is kept from earlier calls is kept of the first ones."""
        chosen = [self.arena.sets[i] for i in {0, self._choice.randrange(sets)}]
        before = [{n: t.clone() if t is not None else None for n, t in memory.inputs.items()} for memory in chosen]
        for memory in chosen:
            memory.write(self.inputs)
        run()
        found = []
        for memory, inputs in zip(chosen, before, strict=True):
            outputs = memory.outputs
            found += [(e, torch.stack(findings(_at(outputs[e.name], self._rows[e.name]), e))) for e in self._compared]
            memory.write(inputs)
        return found

    def _some(self, e: Expected) -> Expected:
        rows = self._rows[e.name]
        reference, finite, allowed = (_at(t, rows) for t in (e.reference, e.finite, e.allowed))
        return replace(e, reference=reference, finite=finite, allowed=allowed)

    def changed(self) -> str:
        """The inputs or guards of any set that are not as they were, in words; empty if all are."""
        return self.arena.changed(self._sums)


def _some_rows(output: torch.Tensor, most_elements: int) -> torch.Tensor | None:
    """Numbers of rows that hold about so many elements, spread evenly from the first to the last; None for all."""
    if output.numel() <= most_elements or output.ndim < 2:
        return None
    rows = output.numel() // output.shape[-1]
    number = min(rows, max(2, most_elements // output.shape[-1]))
    return torch.linspace(0, rows - 1, number, dtype=torch.float64, device=output.device).long()


def _at(output: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return output if rows is None else output.flatten(0, -2)[rows]


@dataclass(kw_only=True)
class _Progress:
    """The state of one contender in a race. Everything stays on the device until the verdict."""

    sets: int
    """How many of the sets its samples call."""
    workspace: Workspace | None
    samples: int = 0
    sums: torch.Tensor | None = None
    """The sums of the outputs in the first of these sets."""
    differs: list[torch.Tensor] = field(default_factory=list)


class RaceCheck:
    """Checks contenders in a race, untimed.

    Before the warm-up and the second sample of each pair, outputs and workspace are poisoned, with NaN or with a huge
    number; after it the outputs must have, bit for bit, the same sums as the first time. When the race is over, a sample is
    taken with other inputs in two sets, one of them chosen only now, whose outputs must be right in float64; and inputs
    and guards of all sets must be as they were.
    """

    def __init__(self, data: TimedData, checked: Mapping[str, tuple[int, Workspace | None]]) -> None:
        """checked: by contender, how many of the sets a sample of it calls, and its workspace."""
        self._data = data
        self.data_changed = False
        """Inputs or guards are not as they were; of which contender's doing is not told."""
        self._progress = {name: _Progress(sets=sets, workspace=own) for name, (sets, own) in checked.items()}

    def before(self, name: str) -> None:
        """Is called before a sample of a contender."""
        if (p := self._progress.get(name)) is not None and not p.samples % 2:
            self._poison(p, HUGE if p.samples // 2 % 3 else NAN)

    def after(self, name: str) -> None:
        """Is called after a sample of a contender."""
        if (p := self._progress.get(name)) is None:
            return
        p.samples += 1
        if p.samples % 2:
            sums = self._data.arena.output_sums(0, min(p.sets, self._data.summed_sets))
            p.sums = sums if p.sums is None else p.sums
            p.differs.append((sums != p.sums).any())

    def _poison(self, p: _Progress, byte: int) -> None:
        self._data.arena.poison(0, p.sets, byte)
        if p.workspace is not None:
            p.workspace.poison(byte)

    def verdict(self, name: str, replay: Replay) -> Check:
        """Whether a contender has done its work. Raises LaunchError. replay: its sample."""
        p = self._progress[name]
        check = Check(case="timed", passed=True)
        self._poison(p, NAN)
        found_of = self._data.of_two_sets(p.sets, replay.run_us)
        if reason := self._data.changed():
            self.data_changed = True
            return replace(check, passed=False, reason=f"{reason} (in a timed call)")
        if p.workspace is not None and (reason := p.workspace.changed()):
            return replace(check, passed=False, reason=f"{reason} (in a timed call)")
        for e, found in found_of:
            error, reason = verdict(tuple(found.tolist()), None, e)
            if reason or not e.exact:
                check = replace(check, **figures(error, e))
            if reason:
                return replace(check, passed=False, reason=f"{e.name}: {reason} (in a timed call)")
        if torch.stack(p.differs).any():
            return replace(check, passed=False, reason="another result on the same data (in a timed call)")
        return check


class _Share:
    """The time that a part of the work takes of all of it: as much as it may, and no more."""

    def __init__(self) -> None:
        self.all_s = self._own_s = 0.0
        self._last_s: dict[str, float] = {}

    def allows(self, what: str) -> bool:
        """Whether one more of these is within the share, if it takes as long as the last one."""
        return self._own_s + self._last_s.get(what, 0.0) <= _AT_SIZE_SHARE * self.all_s

    def spend(self, what: str, seconds: float, *, counts: bool = True) -> None:
        self._last_s[what] = seconds
        self._own_s += seconds if counts else 0.0


class TimingHarness:
    """Times binaries for one workload, beside its baselines, over rotating buffers."""

    def __init__(self, kernel: Kernel, target: str, workload: Workload, session: Session, seed: int) -> None:
        self.kernel, self._target, self._workload, self._session = kernel, target, workload, session
        self._machine = find_target(target)
        self._shares_cores = self._machine.shares_cores
        self._seed = seed
        self.gate = Gate(kernel, target, session, seed)
        self._replays: dict[tuple[Protocol, int], Replay] = {}
        """The reference's, by protocol and number of sets."""
        self.ready: set[str] = set()
        """See `lacks`."""
        self._share, self._draws = _Share(), 0
        self._case: PreparedCase | None = None
        self._timed_data_changed = False
        self._in_vain = 0
        self._reference_us: deque[float] = deque(maxlen=USUAL_RACES)
        """The reference's medians in the last races of a search."""

    @cached_property
    def set_count(self) -> int:
        """Raises UsageError if two sets, and the reference of one, do not fit the memory that is free."""
        needed, free = _LEAST_SETS * self._set_bytes + self._reference_bytes, self._machine.free_bytes()
        if needed > free:
            raise UsageError(
                f"workload {self._workload.key} needs {needed / 2**30:.1f} GiB to be gated and timed, and"
                f" {free / 2**30:.1f} GiB are free on {self._session.info.name}; choose a smaller one"
            )
        return self._sets(free)

    def _sets(self, free: int) -> int:
        memory = free if self._shares_cores else self._machine.memory_bytes()
        return sets_for(self._set_bytes, self._session.limits.cache_bytes, memory, _WALK_BYTES[self._shares_cores])

    @property
    def _set_bytes(self) -> int:
        return self.kernel.cost(self._workload).bytes

    @property
    def _reference_bytes(self) -> int:
        elements = sum(prod(self._workload.dim(d) for d in a.shape) for a in self.kernel.outputs(self._workload))
        return _REFERENCE_BYTES * elements

    @property
    def wanted_bytes(self) -> int:
        """Memory that judging takes beside what is held: results that the samples of two contenders keep; and the data,
        until they are made."""
        sets = self._sets(self._machine.free_bytes()) * self._set_bytes
        return 2 * sets if "data" in vars(self) else 3 * sets + self._reference_bytes

    @cached_property
    def data(self) -> TimedData:
        return TimedData(self.kernel, self._workload, self._session, self.set_count, self._seed)

    def prepare(self) -> None:
        """Makes all that a race needs beside its contenders."""
        self._case = None  # its memory counts as free
        self.ready.discard("case")
        self._session.evict()
        assert self.data.arena.sets
        roofline_of(self._session)

    def sequence(self, loaded: Loaded, genome: Genome) -> LaunchSequence:
        return self.gate.sequence(loaded, genome.parameters, self._workload)

    def candidate(self, loaded: Loaded, sequence: LaunchSequence) -> Contender:
        """Raises LaunchError if there is no room for its workspace."""
        invocation = Invocation(self.kernel, loaded, sequence, self._session)
        values = [invocation.values(self._workload, memory) for memory in self.data.arena.sets]
        return Contender(calls=[partial(invocation, v) for v in values], invocation=invocation)

    def baseline(self, baseline: Baseline) -> Contender:
        return Contender(calls=[partial(baseline.call, m.inputs, self._workload) for m in self.data.arena.sets])

    def time(
        self,
        entries: Mapping[str, Contender],
        protocol: Protocol,
        reference: str,
        *,
        incumbent: float | None = None,
        checked: Sequence[str] = (),
        reference_us: float = math.inf,
    ) -> tuple[tuple[Timing, ...], dict[str, Check]]:
        """Races the entries over the buffer sets: all of them (cold), or one (hot). Also whether those named in `checked`
        did their work in it. `incumbent`, `reference_us`: see `clock.race`."""
        all_calls = {name: e.calls if protocol.cold else e.calls[:1] for name, e in entries.items()}
        replays: dict[str, Replay] = {}
        try:
            for name, calls in all_calls.items():
                replays[name] = self._replay(calls, protocol, kept=name == reference)
            invocations = {n: entries[n].invocation for n in checked}
            workspaces = {n: i.workspace if i is not None else None for n, i in invocations.items()}
            sets = {n: min(len(all_calls[n]), replays[n].calls) for n in checked}
            race_check = RaceCheck(self.data, {n: (sets[n], workspaces[n]) for n in checked})
            samples = race(
                self._session,
                replays,
                protocol,
                reference,
                incumbent=incumbent,
                check=race_check,
                patient=self._in_vain < _PATIENCE or incumbent is None,
                reference_us=reference_us,
            )
            self._in_vain = self._in_vain + 1 if samples.disturbed else 0
            clocks = self._session.clocks()
            timings = tuple(
                summarise(
                    samples,
                    name,
                    workload=self._workload.key,
                    protocol=protocol.name,
                    reference=reference,
                    calls=replays[name].calls,
                    sets=len(calls),
                    clocks=clocks,
                )
                for name, calls in all_calls.items()
            )
            checks = {name: race_check.verdict(name, replays[name]) for name in checked}
        finally:
            for name, replay in replays.items():
                if name != reference:
                    replay.close()
        self._timed_data_changed = race_check.data_changed
        return timings, checks

    @property
    def data_changed(self) -> bool:
        """Whether no other candidate can be judged here any more."""
        return self.gate.data_changed or self._timed_data_changed

    def begins_early(self, candidate: Contender) -> str:
        """Whether a contender that may begin early waits for its inputs at this size, too. Empty if it does; raises
        LaunchError."""
        assert candidate.invocation is not None
        reason = begins_early(self._session, self.data.arena.sets[0], candidate.invocation, self._workload)
        return reason and f"{reason} (at the size that is timed)"

    def impossible(self, timings: Sequence[Timing], contender: str) -> str:
        """Why one of a contender's times cannot be; empty if they can."""
        cost = self.kernel.cost(self._workload)
        own = (t for t in timings if t.contender == contender)
        reasons = (roofline_of(self._session).refusal(t.median_us, cost, in_cache=t.protocol == "hot") for t in own)
        return next(filter(None, reasons), "")

    def check_baseline(self, baseline: Baseline) -> str:
        """Why a baseline cannot be raced: it does not run here, or its own result is not right; empty if it can."""
        try:
            whose = f"baseline {baseline.name!r}"
            got = stated_outputs(self.kernel, whose, baseline.call, self.data.inputs, self._workload)
            self._session.synchronize()
        except Exception as error:  # what another implementation lacks is no fault of the race
            if baseline.role == "reference":
                raise
            cause = error.__cause__ or error
            reason = str(cause).strip().partition("\n")[0]
            return f"it does not run here ({type(cause).__name__}: {reason[:_REASON_CHARACTERS]})"
        for e in self.data.expected:
            _, reason = compare(got[e.name], e) if e.name in got else (None, "")
            if reason:
                return reason
        return ""

    def _replay(self, calls: Sequence[Callable[[], object]], protocol: Protocol, *, kept: bool) -> Replay:
        """Its calls, one after another over the sets. kept: for the next race, too."""
        key = (protocol, len(calls))
        if kept and key in self._replays:
            return self._replays[key]
        count = calls_for(
            protocol,
            self._session.estimate_us(calls[0]),
            sets=len(calls),
            set_bytes=self.kernel.cost(self._workload).bytes,
            cache_bytes=self._session.limits.cache_bytes,
            # Where arithmetic is slow, the cache cleared before a sample must do.
            longest_us=_LONG_SAMPLE_US if self._shares_cores else math.inf,
        )
        replay = self._session.record([calls[i % len(calls)] for i in range(count)])
        if kept:
            self._replays[key] = replay
        return replay

    # -- a candidate ----------------------------------------------------------------------------------------------

    def measure(self, request: Request, gated: Callable[[Evaluation], None] = lambda found: None) -> Evaluation:
        """Loads one binary, runs it on the gate's cases up to the first refusal, and times it if it passes and that is asked
        for; then looks at what the timed calls wrote.

        gated: called between the gate and the timing, with what the gate has found.
        """
        started = time.perf_counter()
        found, loaded = Evaluation(status=Status.OK), None
        try:
            loaded = self._load(request.build)
            found = replace(found, load_seconds=time.perf_counter() - started)
            found = self._gate(request, loaded, found)
            if request.time and found.status is Status.OK:
                gated(found)
            if found.status is Status.OK and (request.time or request.cases):
                found = self._gate_at_size(request, loaded, found)
            if request.time and found.status is Status.OK:
                found = self._clock(request, loaded, found)
        except LaunchError as error:
            status = classify(str(error), Status.LOAD_ERROR if loaded is None else Status.LAUNCH_ERROR)
            found = replace(found, status=status, log=str(error), device_lost=not self._answers())
        finally:
            if loaded is not None:
                loaded.close()
        # A smaller case of one that fails may have broken the device.
        lost = found.device_lost or self.data_changed or (found.status is Status.WRONG and not self._answers())
        seconds = time.perf_counter() - started
        self._share.all_s += seconds
        return replace(found, seconds=seconds, device_lost=lost)

    def _load(self, build: Build | None) -> Loaded:
        """Raises LaunchError, also for code that must not be loaded."""
        assert build is not None
        assert build.binary is not None
        if build.binary.triggers_dependents:
            raise LaunchError(_TRIGGERS_DEPENDENTS)
        return self._session.load(build.binary, str(build.launch.get("entry", self.kernel.entry)))

    def _gate(self, request: Request, loaded: Loaded, found: Evaluation) -> Evaluation:
        """Raises LaunchError."""
        started = time.perf_counter()
        own, near = self.kernel.cases(request.target, request.workload), (c for c in request.cases if not c.far)
        point, far = request.genome.parameters, [c for c in request.cases if c.far]
        self.gate.left_out = {}
        checks = self.gate.run(loaded, point, own, self._drawn(near), thorough=bool(request.cases))
        if checks[-1].passed:
            checks += tuple(far_checks(self.gate, loaded, point, far))
        seconds = time.perf_counter() - started
        found = replace(found, checks=checks, left_out=dict(self.gate.left_out), gate_seconds=seconds)
        return found if checks[-1].passed else _refused(found, Status.WRONG)

    # -- a random case of the size that is timed -----------------------------------------------------------------------

    def lacks(self, part: str) -> bool:
        """Whether data of this part are to be made: "gate", "timing", "case". A case anew whenever that is affordable."""
        return part not in self.ready or (part == "case" and self._share.allows("draw"))

    def draw_case(self) -> None:
        """Takes other inputs for races and another random case of the size that is timed, as long as there is memory."""
        started, self._draws = time.perf_counter(), self._draws + 1
        self._case = None
        if "data" in vars(self) and self._draws > 1:
            self.data.draw()
        if self._machine.has_room(_CASE_SETS * self._set_bytes + self._reference_bytes):
            case = random_case_of(self.kernel, self._target, self._workload, self._seed + self._draws)
            self._case = next(self._drawn((case,)), None)
            self._session.synchronize()
        self._share.spend("draw", time.perf_counter() - started, counts=self._draws > 1)

    def _drawn(self, cases: Iterable[Case]) -> Iterator[PreparedCase]:
        """The cases with their data, but for those that the gate then has in `left_out`."""
        ends = time.perf_counter() + _DRAWING_S
        for case in cases:
            try:
                moved = self.kernel.cost(case.workload).bytes
                fits = moved <= MOST_BYTES or self._machine.has_room(_CASE_BYTES * moved)
                why = NO_TIME if time.perf_counter() > ends else "" if fits else NO_MEMORY
                if not why:
                    yield self.gate.prepare(case, kept=False)
            except KernelError:  # at what its statement allows
                why = FAILING
            if why:
                self.gate.left_out[case.name] = why

    def _gate_at_size(self, request: Request, loaded: Loaded, found: Evaluation) -> Evaluation:
        """Raises LaunchError."""
        if self._case is None or not (request.cases or self._share.allows("run")):
            return found
        started = time.perf_counter()
        checks = self.gate.run(loaded, request.genome.parameters, (), (self._case,))
        seconds = time.perf_counter() - started
        self._share.spend("run", seconds)
        found = replace(found, checks=(*found.checks, *checks), gate_seconds=found.gate_seconds + seconds)
        return found if checks[-1].passed else _refused(found, Status.WRONG)

    def _clock(self, request: Request, loaded: Loaded, found: Evaluation) -> Evaluation:
        """Raises LaunchError."""
        started = time.perf_counter()
        candidate = self.candidate(loaded, self.sequence(loaded, request.genome))
        timings, check = self._time_candidate(request, candidate)
        status = Status.WRONG
        if check.passed and (reason := self.begins_early(candidate)):
            check = replace(check, passed=False, reason=reason)
        if check.passed and (reason := self.impossible(timings, "candidate")):
            check, status = replace(check, passed=False, reason=reason), Status.IMPOSSIBLE
        found = replace(found, checks=(*found.checks, check), timing_seconds=time.perf_counter() - started)
        return replace(found, timings=timings) if check.passed else _refused(found, status)

    def _time_candidate(self, request: Request, candidate: Contender) -> tuple[tuple[Timing, ...], Check]:
        """Times beside the reference; and again beside the incumbent too, if the candidate comes close to that."""
        reference = self.kernel.reference_baseline
        entries = {"candidate": candidate, reference.name: self.baseline(reference)}
        protocol, incumbent = _PROTOCOLS["search", self._shares_cores], request.incumbent
        ratio = incumbent.ratio if incumbent else None
        race = partial(self.time, protocol=protocol, reference=reference.name, checked=("candidate",))
        usual = usual_us([*self._reference_us])
        timings, checks = race(entries, incumbent=ratio, reference_us=usual)
        self._reference_us.append(timings[1].median_us)
        is_close = ratio is not None and (timings[0].ratio or 0.0) <= CLOSE * ratio
        if incumbent is None or incumbent.build is None or not is_close or not checks["candidate"].passed:
            return timings, checks["candidate"]
        try:
            loaded = self._load(incumbent.build)
        except LaunchError:  # no fault of the candidate, if the device still answers: it has its times
            if self._answers():
                return timings, checks["candidate"]
            raise
        try:
            other = self.candidate(loaded, self.sequence(loaded, incumbent.genome))
            timings, checks = race({"candidate": candidate, "incumbent": other, **entries}, reference_us=usual)
        finally:
            loaded.close()
        return timings, checks["candidate"]

    def race(self, request: RaceRequest) -> RaceResult:
        """Times contenders and baselines interleaved. Each contender is checked in the race."""
        started = time.perf_counter()
        reference = self.kernel.reference_baseline
        refused: dict[str, str] = {}
        contenders: dict[str, Contender] = {}
        baselines: dict[str, Contender] = {}
        loaded_all: list[Loaded] = []

        def result(timings: Sequence[Timing] = (), log: str = "", *, lost: bool = False) -> RaceResult:
            return RaceResult(
                timings=tuple(t for t in timings if t.contender not in refused),
                refused=tuple(refused.items()),
                log=log,
                seconds=time.perf_counter() - started,
                device_lost=lost,
            )

        def time_all(protocol: Protocol) -> tuple[Timing, ...]:
            entries = {**contenders, **baselines}
            usual = request.reference_us if protocol.cold else math.inf
            timings, checks = self.time(entries, protocol, reference.name, checked=tuple(contenders), reference_us=usual)
            refused.update({name: check.reason for name, check in checks.items() if not check.passed})
            return timings

        try:
            for name, genome, built in request.contenders:
                try:
                    loaded_all.append(self._load(built))
                    candidate = self.candidate(loaded_all[-1], self.sequence(loaded_all[-1], genome))
                    if reason := self.begins_early(candidate):
                        refused[name] = reason
                    else:
                        contenders[name] = candidate
                except LaunchError as error:
                    refused[name] = str(error)
                    if not self._answers():
                        raise
            for name in dict.fromkeys((reference.name, *request.baselines)):
                baseline = self.kernel.baseline(name)
                if not baseline.runs_on(request.target):
                    continue
                reason = "" if baseline.role == "ceiling" else self.check_baseline(baseline)
                if reason and name != reference.name:
                    refused[name] = reason
                else:
                    baselines[name] = self.baseline(baseline)
            protocol = _PROTOCOLS["final", self._shares_cores]
            protocol = replace(protocol, limit_s=min(protocol.limit_s, request.limit_s))
            timings = list(time_all(protocol))
            # A set leaves room in the cache, so that a second call finds all of it there.
            fits_cache = 2 * self.kernel.cost(self._workload).bytes <= self._session.limits.cache_bytes
            if request.hot and fits_cache and not self.data_changed and not timings[0].disturbed:
                timings += time_all(replace(protocol, name="hot", cold=False))
            if self.data_changed:  # by which of several, the race does not tell; each alone does
                log = next(iter(refused.values()))
                if len({built.binary for _, _, built in request.contenders}) > 1:
                    refused.clear()
                return result(log=log, lost=True)
            for name in contenders.keys() - refused.keys():
                if reason := self.impossible(timings, name):
                    refused[name] = reason
            return result(timings)
        except LaunchError as error:
            return result(log=str(error), lost=not self._answers())
        finally:
            for loaded in loaded_all:
                loaded.close()

    def _answers(self) -> bool:
        """Most CUDA errors of a kernel are sticky: the context is lost and reports the same error for ever."""
        try:
            self._session.synchronize()
        except LaunchError:
            return False
        return True


def _refused(found: Evaluation, status: Status) -> Evaluation:
    """The evaluation, refused for its last check."""
    last = found.checks[-1]
    return replace(found, status=status, log=last.reason if status is Status.IMPOSSIBLE else f"{last.case}: {last.reason}")
