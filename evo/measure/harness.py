"""The harness of one workload: what a device process keeps between its candidates, to gate them and to time them beside
baselines."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from evo.errors import KernelError, LaunchError, UsageError
from evo.evaluation import BOOTSTRAP_SAMPLES, Build, Check, Evaluation, Status, Timing
from evo.measure import FAILING, NO_MEMORY, NO_TIME, RaceRequest, RaceResult, Request
from evo.measure.cases import MOST_BYTES, random_case_of
from evo.measure.clock import CLOSE, USUAL_RACES, Protocol, calls_for, race, sets_for, summarise, usual_us
from evo.measure.far import far_checks
from evo.measure.gate import Gate, Invocation, PreparedCase
from evo.measure.order import begins_early
from evo.measure.race_check import RaceCheck, TimedData
from evo.measure.reference import stated_outputs
from evo.measure.roofline import roofline_of
from evo.problem.genome import Genome
from evo.problem.kernel import Baseline, Case, Kernel, LaunchSequence, Workload
from evo.runtime.tolerance import compare
from evo.targets import Loaded, Replay, Session, classify, find_target


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A racer: a call for each buffer set. A baseline has no invocation."""

    calls: Sequence[Callable[[], object]]
    invocation: Invocation | None = None


_FAR_ON_CPU = 1.25
"""On a quiet machine the median of a race was at most 1.1 times a contender's least sample. When something else took memory
bandwidth, calls took 1.4 to 2.5 times as long for seconds, without having waited for a core."""

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
"""Least bytes of all buffer sets, by whether the target shares its cores: 0.25 ms at 4 TB/s, some ms at 50 GB/s."""
_LONG_SAMPLE_US = 30_000.0
"""Length of a CPU's sample beyond which it need not walk over three times the cache."""
_PATIENCE = 3
"""Number of a search's races in a row with too few undisturbed rounds after which those are no longer waited for, until a
race is undisturbed: on a machine that is never quiet, each candidate would wait in vain."""
_REASON_CHARACTERS = 200
"""Length of the error that is reported of a baseline that does not run."""
_REFERENCE_BYTES = 64
"""Bytes of each output element for a reference in float64, its bounds and an error, and temporaries."""
_AT_SIZE_SHARE = 0.03
"""Share of a search's time for random cases of the size that is timed."""
_DRAWING_S = 12.0
"""Longest time for a candidate's random cases: a third of the gate's."""
_LEAST_SETS = 5
"""Sets that memory must hold: two that are raced, their contents before, and one that is drawn anew."""
_CASE_BYTES = 24
"""Bytes of a random case for each byte that it moves, in 16 bits: its memory, and a reference in float64."""
_CASE_SETS = 4
"""Sets that a random case of the size that is timed holds: its memory and inputs, twice."""


class TimingHarness:
    """Times binaries for one workload, beside its baselines, over rotating buffers."""

    def __init__(self, kernel: Kernel, target: str, workload: Workload, session: Session, seed: int) -> None:
        self.kernel, self._target, self._workload, self._session = kernel, target, workload, session
        self._machine = find_target(target)
        self._shares_cores = self._machine.shares_cores
        self._seed = seed
        self.gate = Gate(kernel, target, session, seed)
        self._replays: dict[tuple[Protocol, int], Replay] = {}
        """Replays of the reference, by protocol and number of sets."""
        self.ready: set[str] = set()
        """Parts of the data that have been made: "gate", "timing", "case"."""
        self._all_s, self._at_size_s = 0.0, 0.0
        """Seconds of all work on candidates, and of that on random cases of the size that is timed."""
        self._draws = 0
        self._case: PreparedCase | None = None
        self._timed_data_changed = False
        self._in_vain = 0
        self._reference_us: deque[float] = deque(maxlen=USUAL_RACES)
        """Medians of the reference in the last races of a search."""

    @cached_property
    def set_count(self) -> int:
        """Number of buffer sets. Raises UsageError if two, and the reference of one, do not fit the memory that is free."""
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
        """Memory that judging takes beyond the memory that is held: results that the samples of two contenders keep; and the
        data, until they are made."""
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
        """Races the entries over the buffer sets: all of them (cold), or one (hot). Also checks whether those named in
        `checked` did their work. incumbent, reference_us: see `clock.race`."""
        all_calls = {name: e.calls if protocol.cold else e.calls[:1] for name, e in entries.items()}
        replays: dict[str, Replay] = {}
        try:
            for name, calls in all_calls.items():
                replays[name] = self._replay(calls, protocol, kept=name == reference)
            workspaces = {n: i.workspace if (i := entries[n].invocation) is not None else None for n in checked}
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
        """Whether the data have changed, so that no other candidate can be judged in this process."""
        return self.gate.data_changed or self._timed_data_changed

    def begins_early(self, candidate: Contender) -> str:
        """Why a contender that may begin early is refused at this size, where it does not wait for its inputs; empty if it
        waits. Raises LaunchError."""
        assert candidate.invocation is not None
        reason = begins_early(self._session, self.data.arena.sets[0], candidate.invocation, self._workload)
        return reason and f"{reason} (at the size that is timed)"

    def impossible(self, timings: Sequence[Timing], contender: str) -> str:
        """Why one of a contender's times is impossible; empty if none is."""
        cost = self.kernel.cost(self._workload)
        own = (t for t in timings if t.contender == contender)
        reasons = (roofline_of(self._session).refusal(t.median_us, cost, in_cache=t.protocol == "hot") for t in own)
        return next(filter(None, reasons), "")

    def check_baseline(self, baseline: Baseline) -> str:
        """Why a baseline cannot be raced: it does not run here, or its own result is wrong; empty if it can."""
        try:
            whose = f"baseline {baseline.name!r}"
            got = stated_outputs(self.kernel, whose, baseline.call, self.data.inputs, self._workload)
            self._session.synchronize()
        except Exception as error:  # another implementation may lack anything
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
        """A sample: calls one after another over the sets. kept: for the next race, too."""
        key = (protocol, len(calls))
        if kept and key in self._replays:
            return self._replays[key]
        count = calls_for(
            protocol,
            self._session.estimate_us(calls[0]),
            sets=len(calls),
            set_bytes=self.kernel.cost(self._workload).bytes,
            cache_bytes=self._session.limits.cache_bytes,
            # Where arithmetic is slow, it is enough that the cache is cleared before a sample.
            longest_us=_LONG_SAMPLE_US if self._shares_cores else math.inf,
        )
        replay = self._session.record([calls[i % len(calls)] for i in range(count)])
        if kept:
            self._replays[key] = replay
        return replay

    # -- a candidate ----------------------------------------------------------------------------------------------

    def measure(self, request: Request, gated: Callable[[Evaluation], None] = lambda found: None) -> Evaluation:
        """Loads one binary, runs it on the gate's cases up to the first refusal, and, if the request asks for times and it
        passes, times it and checks the timed calls. gated: called with the gate's findings before the timing."""
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
        self._all_s += seconds
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
        return self._judged(found, checks, time.perf_counter() - started)

    def _judged(self, found: Evaluation, checks: tuple[Check, ...], seconds: float) -> Evaluation:
        left_out, seconds = dict(self.gate.left_out), found.gate_seconds + seconds
        found = replace(found, checks=found.checks + checks, left_out=left_out, gate_seconds=seconds)
        return found if checks[-1].passed else _refused(found, Status.WRONG)

    # -- a random case of the size that is timed -----------------------------------------------------------------------

    def lacks(self, part: str) -> bool:
        """Whether a part of the data has to be made; a case is made anew whenever that is affordable."""
        return part not in self.ready or (part == "case" and self._affords_case)

    @property
    def _affords_case(self) -> bool:
        return self._at_size_s <= _AT_SIZE_SHARE * self._all_s

    def draw_case(self) -> None:
        """Draws other inputs for races and another random case of the size that is timed, as long as there is memory. The
        first time does not count."""
        started, self._draws = time.perf_counter(), self._draws + 1
        self._case = None
        if "data" in vars(self) and self._draws > 1:
            self.data.draw()
        if self._machine.has_room(_CASE_SETS * self._set_bytes + self._reference_bytes):
            case = random_case_of(self.kernel, self._target, self._workload, self._seed + self._draws)
            self._case = next(self._drawn((case,)), None)
            self._session.synchronize()
        self._at_size_s += time.perf_counter() - started if self._draws > 1 else 0.0

    def _drawn(self, cases: Iterable[Case]) -> Iterator[PreparedCase]:
        """The cases with their data, without those that the gate then has in `left_out`."""
        ends = time.perf_counter() + _DRAWING_S
        for case in cases:
            try:
                moved = self.kernel.cost(case.workload).bytes
                fits = moved <= MOST_BYTES or self._machine.has_room(_CASE_BYTES * moved)
                why = NO_TIME if time.perf_counter() > ends else "" if fits else NO_MEMORY
                if not why:
                    yield self.gate.prepare(case, kept=False)
            except KernelError:  # its own function fails at a workload that its statement allows
                why = FAILING
            if why:
                self.gate.left_out[case.name] = why

    def _gate_at_size(self, request: Request, loaded: Loaded, found: Evaluation) -> Evaluation:
        """Raises LaunchError."""
        if self._case is None or not (request.cases or self._affords_case):
            return found
        started = time.perf_counter()
        checks = self.gate.run(loaded, request.genome.parameters, (), (self._case,))
        seconds = time.perf_counter() - started
        self._at_size_s += seconds
        return self._judged(found, checks, seconds)

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
        """Times a candidate beside the reference; and again beside the incumbent too, if it comes close to that."""
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
        with closing(loaded):
            other = self.candidate(loaded, self.sequence(loaded, incumbent.genome))
            timings, checks = race({"candidate": candidate, "incumbent": other, **entries}, reference_us=usual)
        return timings, checks["candidate"]

    def race(self, request: RaceRequest) -> RaceResult:
        """Times contenders and baselines interleaved. Each contender is checked in the race."""
        started = time.perf_counter()
        refused: dict[str, str] = {}
        timings: list[Timing] = []
        log, lost = "", False
        try:
            with ExitStack() as loaded:
                timings, log, lost = self._race(request, refused, loaded)
        except LaunchError as error:
            log, lost = str(error), not self._answers()
        return RaceResult(
            timings=tuple(t for t in timings if t.contender not in refused),
            refused=tuple(refused.items()),
            log=log,
            seconds=time.perf_counter() - started,
            device_lost=lost,
        )

    def _race(self, request: RaceRequest, refused: dict[str, str], loaded: ExitStack) -> tuple[list[Timing], str, bool]:
        """Timings, log, and whether the data have changed. Raises LaunchError. refused: is told the refused entries. loaded:
        closes the contenders."""
        reference = self.kernel.reference_baseline
        contenders: dict[str, Contender] = {}
        baselines: dict[str, Contender] = {}
        for name, genome, built in request.contenders:
            try:
                code = loaded.enter_context(closing(self._load(built)))
                candidate = self.candidate(code, self.sequence(code, genome))
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

        def time_all(protocol: Protocol) -> tuple[Timing, ...]:
            usual = request.reference_us if protocol.cold else math.inf
            entries = {**contenders, **baselines}
            timings, checks = self.time(entries, protocol, reference.name, checked=tuple(contenders), reference_us=usual)
            refused.update({name: check.reason for name, check in checks.items() if not check.passed})
            return timings

        protocol = _PROTOCOLS["final", self._shares_cores]
        protocol = replace(protocol, limit_s=min(protocol.limit_s, request.limit_s))
        timings = list(time_all(protocol))
        # A set leaves room in the cache, so that a second call finds all of it there.
        fits_cache = 2 * self.kernel.cost(self._workload).bytes <= self._session.limits.cache_bytes
        if request.hot and fits_cache and not self.data_changed and not timings[0].disturbed:
            timings += time_all(replace(protocol, name="hot", cold=False))
        if self.data_changed:  # the race does not tell which of several did that; a race of each alone does
            log = next(iter(refused.values()))
            if len({built.binary for _, _, built in request.contenders}) > 1:
                refused.clear()
            return [], log, True
        for name in contenders.keys() - refused.keys():
            if reason := self.impossible(timings, name):
                refused[name] = reason
        return timings, "", False

    def _answers(self) -> bool:
        """Whether the device answers: most CUDA errors are sticky, and the context reports the same error for ever."""
        try:
            self._session.synchronize()
        except LaunchError:
            return False
        return True


def _refused(found: Evaluation, status: Status) -> Evaluation:
    """The evaluation, refused for its last check."""
    last = found.checks[-1]
    return replace(found, status=status, log=last.reason if status is Status.IMPOSSIBLE else f"{last.case}: {last.reason}")
