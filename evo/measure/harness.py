"""The harness of one workload: what a device process keeps between its candidates, to gate them and to time them beside
baselines.

All contenders of a race walk over the same buffer sets. Between their samples, untimed, they are checked (`RaceCheck`): a
kernel can be right in the gate and wrong where it is timed, at another size, behind other calls or by luck of a race.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

import psutil
import torch

from evo.errors import HangError, LaunchError, UsageError
from evo.evaluation import BOOTSTRAP_SAMPLES, Build, Check, Evaluation, Status, Timing
from evo.measure import Incumbent, RaceRequest, RaceResult, Request
from evo.measure.buffers import HUGE, NAN, Arena, Layout
from evo.measure.clock import CLOSE, Protocol, calls_for, cold_calls, race, sets_for, summarise
from evo.measure.gate import Gate, allocate_outputs, argument_values, as_outputs, expected_outputs, reads_early
from evo.measure.roofline import Roofline
from evo.problem.genome import Genome
from evo.problem.kernel import Baseline, Kernel, Launch, Tensors, Workload
from evo.runtime.tolerance import Expected, compare, findings, verdict
from evo.targets import Loaded, Replay, Session, classify, find_target

__all__ = ["Calls", "RaceCheck", "TimedData", "TimingHarness"]

Calls = Sequence[Callable[[], object]]
"""What a contender of a race does: a call for each buffer set."""


_PROTOCOLS = {
    ("search", False): Protocol(
        name="cold", min_rounds=6, max_rounds=10, sample_us=200.0, precision=0.015, limit_s=4.0
    ),
    ("search", True): Protocol(
        name="cold", min_rounds=4, max_rounds=6, sample_us=1500.0, precision=0.03, limit_s=4.0
    ),
    ("final", False): Protocol(
        name="final",
        min_rounds=30,
        max_rounds=60,
        sample_us=1000.0,
        precision=0.003,
        limit_s=20.0,
        least_rounds=BOOTSTRAP_SAMPLES,
    ),
    ("final", True): Protocol(
        name="final",
        min_rounds=16,
        max_rounds=40,
        sample_us=4000.0,
        precision=0.01,
        limit_s=20.0,
        least_rounds=BOOTSTRAP_SAMPLES,
    ),
}
"""By stage and by whether the target shares its cores with everything else (and is therefore noisier)."""

_TRIGGERS_DEPENDENTS = (
    "the code lets the kernel after it start before it has ended (griddepcontrol.launch_dependents): its calls would"
    " overlap where they are timed, one behind the other, and hardly anywhere else"
)

_WALK_BYTES = {False: 1 << 30, True: 1 << 28}
"""What the buffer sets hold at least, by whether the target shares its cores: a quarter of a millisecond at 4 TB/s,
some milliseconds at 50 GB/s."""

_LONG_SAMPLE_US = 30_000.0
"""A sample on a CPU need not walk over three times the cache if that takes longer."""

_PATIENCE = 3
"""After so many races of a search in a row with too few undisturbed rounds, disturbed rounds are no longer taken again: on
a machine that is never quiet, each candidate would wait in vain. After one undisturbed race, they are."""

_REASON_CHARACTERS = 200
"""At most, of the error of a baseline that does not run."""

_REFERENCE_BYTES = 80
"""Bytes an output element for the reference buffer's two float64 references, their bounds and an error, and temporaries."""

_SUMMED_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
"""Outputs that are summed after a sample: those of the reference buffer and of as many sets behind it."""

_COMPARED_ELEMENTS = {"cuda": 1 << 62, "cpu": 1 << 18}
"""Elements of an output that are compared with float64 in a race: on a GPU all, on a CPU those of some rows."""


class TimedData:
    """What is timed on: `count` buffer sets with random inputs of their own, all between guards.

    Set 0 is the reference buffer: its outputs are known for two states of its inputs, `inputs[False]` and, while they are
    exchanged, `inputs[True]`.
    """

    def __init__(self, kernel: Kernel, workload: Workload, session: Session, count: int, seed: int) -> None:
        self.device = session.device
        generator = torch.Generator(device=self.device).manual_seed(seed % 2**63)

        def draw() -> Tensors:
            return kernel.inputs(workload, kernel.data[0], generator)

        own = draw()
        layout = Layout(own, allocate_outputs(kernel, workload, self.device))
        self.arena = Arena(layout, count, self.device)
        self.arena.bytes.fill_(NAN)
        for i, memory in enumerate(self.arena.sets):
            memory.write(draw() if i else own)
        self.inputs = {False: own, True: draw()}
        self.expected = {state: expected_outputs(kernel, inputs, workload) for state, inputs in self.inputs.items()}
        self._rows = {e.name: _some_rows(e.reference, _COMPARED_ELEMENTS[self.device.type]) for e in self.expected[False]}
        self._expected = {state: [self._some(e) for e in expected] for state, expected in self.expected.items()}
        output_bytes = sum(s.end - s.start for s in layout.spans if s.is_output)
        self.summed_sets = max(1, _SUMMED_BYTES[self.device.type] // max(1, output_bytes))
        self._sums = self.arena.fixed_sums()

    def findings(self, state: bool) -> list[tuple[Expected, torch.Tensor]]:
        """Of each output of the reference buffer, or of some rows of it."""
        outputs = self.arena.sets[0].outputs
        return [
            (e, torch.stack(findings(_at(outputs[e.name], self._rows[e.name]), e))) for e in self._expected[state]
        ]

    def _some(self, e: Expected) -> Expected:
        rows = self._rows[e.name]
        reference, finite, allowed = (_at(t, rows) for t in (e.reference, e.finite, e.allowed))
        return replace(e, reference=reference, finite=finite, allowed=allowed)

    def exchange_inputs(self, state: bool) -> None:
        """Writes one of the two states of the reference buffer's inputs."""
        self.arena.sets[0].write(self.inputs[state])

    def changed(self) -> str:
        """Which inputs or guards of any set are not as they were, in words; empty if all are."""
        return self.arena.changed(self._sums, self.arena.fixed_sums())


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
    """What is known of one contender in a race. Everything stays on the device until the verdict."""

    sets: int
    """How many of the sets its samples call."""
    samples: int = 0
    sums: dict[bool | None, torch.Tensor] = field(default_factory=dict)
    """Of the reference buffer's outputs, by the state of its inputs; and of the sets behind it."""
    differs: list[torch.Tensor] = field(default_factory=list)
    findings: list[tuple[Expected, torch.Tensor]] = field(default_factory=list)
    check: Check | None = None


class RaceCheck:
    """Checks contenders while they race, between their samples and untimed: after the warm-up, and after the second sample
    of each pair.

    Before such a sample the outputs are poisoned, with NaN or with a huge number, and every other time the inputs of the
    reference buffer are exchanged. Afterwards the outputs must have, bit for bit, the same sums as the first time on the
    same inputs, and those of the reference buffer must be right in float64. In the end the inputs and guards of all sets
    must be as they were.
    """

    def __init__(self, data: TimedData, sets: Mapping[str, int]) -> None:
        """sets: by contender to be checked, how many of the sets a sample of it calls."""
        self._data = data
        self.data_changed = False
        """Inputs or guards are not as they were; of which contender's doing is not told."""
        self._progress = {name: _Progress(sets=count) for name, count in sets.items()}

    def before(self, name: str) -> None:
        """Before a sample of a contender."""
        p = self._progress.get(name)
        if p is None or p.samples % 2:
            return
        number = p.samples // 2
        if exchanged := bool(number % 2):
            self._data.exchange_inputs(exchanged)
        self._data.arena.poison(0, p.sets, HUGE if number % 3 else NAN)

    def after(self, name: str) -> None:
        """After it. Leaves the inputs as they were before."""
        p = self._progress.get(name)
        if p is None:
            return
        p.samples += 1
        if not p.samples % 2:
            return
        data, exchanged = self._data, bool(p.samples // 2 % 2)
        sums = data.arena.output_sums(0, min(p.sets, data.summed_sets))
        if exchanged not in p.sums:
            p.findings += data.findings(exchanged)
        for whose, found in ((exchanged, sums[0]), (None, sums[1:])):
            p.differs.append((found != p.sums.setdefault(whose, found)).any())
        if exchanged:
            data.exchange_inputs(False)

    def verdict(self, name: str) -> Check:
        """Whether a contender has done its work. Asked again it says the same."""
        p = self._progress[name]
        if p.check is None:
            p.check = self._judge(p)
        return p.check

    def _judge(self, p: _Progress) -> Check:
        check = Check(case="timed", passed=True)
        if reason := self._data.changed():
            self.data_changed = True
            return replace(check, passed=False, reason=f"{reason} (in a timed call)")
        for number, (e, found) in enumerate(p.findings):
            error, reason = verdict(tuple(found.tolist()), None, e)
            check = replace(check, error=error, allowed=e.largest_allowed, torch_error=e.torch_error)
            if reason:
                later = ", after its inputs had changed" if number >= len(self._data.expected[False]) else ""
                return replace(check, passed=False, reason=f"{e.name}: {reason} (in a timed call{later})")
        if torch.stack(p.differs).any():
            return replace(check, passed=False, reason="another result on the same data (in a timed call)")
        return check


class TimingHarness:
    """Times binaries for one workload, beside its baselines, over rotating buffers."""

    def __init__(self, kernel: Kernel, target: str, workload: Workload, session: Session, seed: int) -> None:
        self.kernel, self._target, self._workload, self._session = kernel, target, workload, session
        self._shares_cores = find_target(target).shares_cores
        self._seed = seed
        self.gate = Gate(kernel, target, session, seed)
        self._roofline = Roofline(session)
        self._replays: dict[tuple[str, int], Replay] = {}
        self._call_us: dict[str, float] = {}
        self._check: RaceCheck | None = None
        self._incumbent: tuple[object, Loaded, Calls] | None = None
        self._in_vain = 0

    @cached_property
    def set_count(self) -> int:
        """Raises UsageError if two sets, and the reference of one, do not fit the memory that is free."""
        set_bytes = self.kernel.cost(self._workload).bytes
        if self._session.device.type == "cuda":
            free, memory = torch.cuda.mem_get_info(self._session.device)
        else:
            free = memory = psutil.virtual_memory().available
        elements = sum(prod(self._workload.dim(d) for d in a.shape) for a in self.kernel.outputs(self._workload))
        needed = 3 * set_bytes + _REFERENCE_BYTES * elements
        if needed > free:
            raise UsageError(
                f"workload {self._workload.key} needs {needed / 2**30:.1f} GiB to be gated and timed, and"
                f" {free / 2**30:.1f} GiB are free on {self._session.info.name}; choose a smaller one"
            )
        return sets_for(set_bytes, self._session.limits.cache_bytes, memory, _WALK_BYTES[self._shares_cores])

    @property
    def fits_cache(self) -> bool:
        """Whether a set leaves room in the cache, so that a second call finds all of it there."""
        return 2 * self.kernel.cost(self._workload).bytes <= self._session.limits.cache_bytes

    @cached_property
    def data(self) -> TimedData:
        return TimedData(self.kernel, self._workload, self._session, self.set_count, self._seed)

    def prepare(self) -> None:
        """Makes all that a race needs beside its contenders."""
        self._session.evict()
        assert self.data.arena.sets
        self._roofline.refusal(math.inf, self.kernel.cost(self._workload), in_cache=False)  # measured when first asked

    def launch(self, genome: Genome, workload: Workload | None = None) -> Launch:
        """For the workload that is timed, or for another."""
        return self.kernel.launch(self._target, genome.parameters, workload or self._workload, self._session.limits)

    def candidate(self, loaded: Loaded, launch: Launch) -> Calls:
        sets = self.data.arena.sets

        def bind(i: int) -> Callable[[], object]:
            values = argument_values(self.kernel, self._workload, sets[i].inputs, sets[i].outputs)
            return lambda: loaded(values, launch)

        return [bind(i) for i in range(self.set_count)]

    def baseline(self, baseline: Baseline) -> Calls:
        sets = self.data.arena.sets
        return [partial(baseline.call, sets[i].inputs, self._workload) for i in range(self.set_count)]

    def incumbent(self, incumbent: Incumbent) -> Calls | None:
        """The incumbent as a contender; it stays loaded until another takes its place. None if it has no build."""
        if incumbent.build is None or incumbent.build.binary is None:
            return None
        launch = self.launch(incumbent.genome)
        key = (incumbent.build.binary.code_hash, launch)
        if self._incumbent is None or self._incumbent[0] != key:
            if self._incumbent is not None:
                self._incumbent[1].close()
                self._incumbent = None
            loaded = self._session.load(incumbent.build.binary, self.kernel.entry)
            self._incumbent = (key, loaded, self.candidate(loaded, launch))
        return self._incumbent[2]

    def time(
        self,
        entries: Mapping[str, Calls],
        protocol: Protocol,
        reference: str,
        *,
        keep: str = "",
        sets: int | None = None,
        incumbent: float | None = None,
        checked: Sequence[str] = (),
    ) -> tuple[Timing, ...]:
        """Races the entries over the first `sets` buffer sets: all of them (cold), or one (hot).

        The replay of the entry named `keep` is kept for the next race. `incumbent`: see `clock.race`. The entries named in
        `checked` are checked in the race; `complaint` then has the verdict.
        """
        entries = {name: calls[:sets] for name, calls in entries.items()}
        replays: dict[str, Replay] = {}
        try:
            for name, calls in entries.items():
                replays[name] = self._replay(name, calls, protocol, keep=name == keep)
            called = {name: min(len(entries[name]), replays[name].calls) for name in checked}
            self._check = RaceCheck(self.data, called)
            self._session.clocks()  # what it counts is counted from here
            samples = race(
                self._session,
                replays,
                protocol,
                reference,
                incumbent=incumbent,
                check=self._check,
                patient=self._in_vain < _PATIENCE or incumbent is None,
            )
            self._in_vain = self._in_vain + 1 if samples.disturbed else 0
            clocks = self._session.clocks()
            return tuple(
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
                for name, calls in entries.items()
            )
        finally:
            for name, replay in replays.items():
                if name != keep:
                    replay.close()

    def complaint(self, name: str) -> Check:
        """Whether a contender of the last race did its work in it."""
        assert self._check is not None
        return self._check.verdict(name)

    @property
    def data_changed(self) -> bool:
        """Whether no other candidate can be judged here any more."""
        return self.gate.data_changed or (self._check is not None and self._check.data_changed)

    def reads_early(self, calls: Calls, *, programmatic: bool) -> str:
        """Whether a contender that may begin early waits for its inputs at this size, too. Empty if it does; raises
        LaunchError."""
        hazards = self._session.hazards if programmatic else None
        if hazards is None:
            return ""
        memory, others = self.data.arena.sets[0], self.data.inputs[True]
        reason = reads_early(hazards, memory, others, calls[0], self._session.synchronize)
        return reason and f"{reason} (at the size that is timed)"

    def impossible(self, timings: Sequence[Timing], contender: str) -> str:
        """Why one of a contender's times cannot be; empty if they can."""
        cost = self.kernel.cost(self._workload)
        own = (t for t in timings if t.contender == contender)
        reasons = (self._roofline.refusal(t.median_us, cost, in_cache=t.protocol == "hot") for t in own)
        return next(filter(None, reasons), "")

    def check_baseline(self, baseline: Baseline) -> str:
        """Why a baseline cannot be raced: it does not run here, or its own result is not right; empty if it can."""
        try:
            result = baseline.call(self.data.arena.sets[0].inputs, self._workload)
            self._session.synchronize()
        except Exception as error:  # what another implementation lacks is no fault of the race
            if baseline.role == "reference":
                raise
            reason = str(error).strip().partition("\n")[0]
            return f"it does not run here ({type(error).__name__}: {reason[:_REASON_CHARACTERS]})"
        got = as_outputs(self.kernel, self._workload, result)
        for e in self.data.expected[False]:
            _, reason = compare(got[e.name], e) if e.name in got else (None, "")
            if reason:
                return reason
        return ""

    def _replay(self, name: str, calls: Calls, protocol: Protocol, *, keep: bool) -> Replay:
        """Its calls, one after another over the sets."""
        if name not in self._call_us or not keep:
            self._call_us[name] = self._session.estimate_us(calls[0])
        count = self._count(len(calls), self._call_us[name], protocol)
        if (name, count) in self._replays:
            return self._replays[name, count]
        replay = self._session.record([calls[i % len(calls)] for i in range(count)])
        if keep:
            self._replays[name, count] = replay
        return replay

    def _count(self, sets: int, call_us: float, protocol: Protocol) -> int:
        if not protocol.cold:
            return calls_for(call_us, protocol.sample_us, least=1, most=None)
        set_bytes = self.kernel.cost(self._workload).bytes
        least = cold_calls(sets, set_bytes, self._session.limits.cache_bytes)
        if self._shares_cores:  # where arithmetic is slow, the cache cleared before a sample must do
            least = max(2, min(least, math.ceil(_LONG_SAMPLE_US / max(call_us, 1e-3))))
        return calls_for(call_us, protocol.sample_us, least=least, most=sets)

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
                found = self._clock(request, loaded, found)
        except HangError as error:
            found = replace(found, status=Status.TIMEOUT, log=str(error), device_lost=True)
            loaded = None  # unloading would wait for the launch
        except LaunchError as error:
            status = classify(str(error), Status.LOAD_ERROR if loaded is None else Status.LAUNCH_ERROR)
            found = replace(found, status=status, log=str(error), device_lost=not self._answers())
        finally:
            if loaded is not None:
                loaded.close()
        lost = found.device_lost or self.data_changed
        return replace(found, seconds=time.perf_counter() - started, device_lost=lost)

    def _load(self, build: Build | None) -> Loaded:
        """Raises LaunchError, also for code that must not be loaded."""
        assert build is not None
        assert build.binary is not None
        if build.binary.triggers_dependents:
            raise LaunchError(_TRIGGERS_DEPENDENTS)
        return self._session.load(build.binary, self.kernel.entry)

    def _gate(self, request: Request, loaded: Loaded, found: Evaluation) -> Evaluation:
        """Raises LaunchError."""
        started = time.perf_counter()
        cases = [
            (case, self.launch(request.genome, case.workload))
            for case in self.kernel.cases(request.target, request.workload)
        ]
        checks = self.gate.run(loaded, cases, launch_limit_s=request.launch_limit_s)
        found = replace(found, checks=checks, gate_seconds=time.perf_counter() - started)
        return found if all(c.passed for c in checks) else _refused(found, Status.WRONG)

    def _clock(self, request: Request, loaded: Loaded, found: Evaluation) -> Evaluation:
        """Raises LaunchError."""
        started = time.perf_counter()
        launch = self.launch(request.genome)
        candidate = self.candidate(loaded, launch)
        timings = self._time_candidate(request, candidate)
        timed = time.perf_counter()
        check, status = self.complaint("candidate"), Status.WRONG
        if check.passed and (reason := self.reads_early(candidate, programmatic=launch.programmatic)):
            check = replace(check, passed=False, reason=reason)
        if check.passed and (reason := self.impossible(timings, "candidate")):
            check, status = replace(check, passed=False, reason=reason), Status.IMPOSSIBLE
        found = replace(
            found,
            checks=(*found.checks, check),
            gate_seconds=found.gate_seconds + time.perf_counter() - timed,
            timing_seconds=timed - started,
        )
        return replace(found, timings=timings) if check.passed else _refused(found, status)

    def _time_candidate(self, request: Request, candidate: Calls) -> tuple[Timing, ...]:
        """Beside the reference; and again beside the incumbent too, if the candidate comes close to that."""
        reference = self.kernel.reference_baseline
        entries = {"candidate": candidate, reference.name: self.baseline(reference)}
        protocol, incumbent = _PROTOCOLS["search", self._shares_cores], request.incumbent
        ratio = incumbent.ratio if incumbent else None
        race = partial(self.time, protocol=protocol, reference=reference.name, keep=reference.name, checked=("candidate",))
        timings = race(entries, incumbent=ratio)
        is_close = ratio is not None and (timings[0].ratio or 0.0) <= CLOSE * ratio
        if incumbent is None or not is_close or not self.complaint("candidate").passed:
            return timings
        try:
            other = self.incumbent(incumbent)
        except LaunchError:  # no fault of the candidate, if the device still answers: it has its times
            if self._answers():
                return timings
            raise
        return timings if other is None else race({"candidate": candidate, "incumbent": other, **entries})

    def race(self, request: RaceRequest) -> RaceResult:
        """Times contenders and baselines interleaved. Each contender is checked in the race."""
        started = time.perf_counter()
        reference = self.kernel.reference_baseline
        refused: dict[str, str] = {}
        contenders: dict[str, Calls] = {}
        baselines: dict[str, Calls] = {}
        loaded_all: list[Loaded] = []

        def result(timings: Sequence[Timing] = (), log: str = "", *, lost: bool = False) -> RaceResult:
            return RaceResult(
                timings=tuple(t for t in timings if t.contender not in refused),
                refused=tuple(refused.items()),
                log=log,
                seconds=time.perf_counter() - started,
                device_lost=lost,
            )

        def time_all(protocol: Protocol, sets: int | None = None) -> tuple[Timing, ...]:
            entries = {**contenders, **baselines}
            timings = self.time(entries, protocol, reference.name, sets=sets, checked=tuple(contenders))
            checks = {name: self.complaint(name) for name in contenders}
            refused.update({name: check.reason for name, check in checks.items() if not check.passed})
            return timings

        try:
            for name, genome, built in request.contenders:
                launch = self.launch(genome)
                try:
                    loaded_all.append(self._load(built))
                    calls = self.candidate(loaded_all[-1], launch)
                    if reason := self.reads_early(calls, programmatic=launch.programmatic):
                        refused[name] = reason
                    else:
                        contenders[name] = calls
                except LaunchError as error:
                    refused[name] = str(error)
                    if not self._answers():
                        raise
            for name in dict.fromkeys((reference.name, *request.baselines)):
                baseline = self.kernel.baseline(name)
                if request.target not in baseline.targets:
                    continue
                reason = "" if baseline.role == "ceiling" else self.check_baseline(baseline)
                if reason and name != reference.name:
                    refused[name] = reason
                else:
                    baselines[name] = self.baseline(baseline)
            protocol = _PROTOCOLS["final", self._shares_cores]
            timings = list(time_all(protocol))
            if request.hot and self.fits_cache and not self.data_changed:
                timings += time_all(replace(protocol, name="hot", cold=False), sets=1)
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
    """By its last check."""
    last = found.checks[-1]
    return replace(found, status=status, log=last.reason if status is Status.IMPOSSIBLE else f"{last.case}: {last.reason}")
