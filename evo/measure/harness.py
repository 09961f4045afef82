"""What the device process keeps between candidates of one workload: buffers, references, baseline replays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import psutil
import torch

from evo.errors import UsageError
from evo.evaluation import Check, Timing
from evo.measure import Incumbent
from evo.measure._timed_data import TimedData
from evo.measure.buffers import same
from evo.measure.clock import Protocol, Samples, calls_for, cold_calls, race, sets_for, summarise
from evo.measure.gate import Gate, argument_values, as_outputs, compare
from evo.measure.in_race import Examination, Examined
from evo.measure.roofline import FloorGauge
from evo.problem.kernel import Baseline, Kernel, Launch, Workload
from evo.targets import Loaded, Replay, Session, find_target

__all__ = ["Contender", "TimingHarness"]

_WALK_BYTES = {False: 1 << 30, True: 1 << 28}
"""What the buffer sets hold at least, by whether the target shares its cores: a quarter of a millisecond at 4 TB/s,
some milliseconds at 50 GB/s."""

_LONG_SAMPLE_US = 30_000.0
"""A sample on a CPU need not walk over three times the cache if that takes longer."""

_PATIENCE = 3
"""After so many searching races in a row in which too little was clean, disturbed rounds are no longer taken again: on a
machine that is never quiet, each candidate would wait in vain. One clean race, and they are."""

_WITNESS_ROUNDS = 8
"""How often a finalist is called on the witnesses before a race, and after it."""

_REASON_CHARACTERS = 200
"""Of what a baseline says that does not run."""

_REFERENCE_BYTES = 80
"""Bytes an output element for the witnesses' references, their bounds and an error, in float64, and what is made on the
way."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One contender of a race: a call per buffer set."""

    name: str
    calls: Sequence[Callable[[], object]]
    owns_outputs: bool = True
    """Whether it writes the outputs of the buffer sets; a baseline returns others."""
    programmatic: bool = False
    """Whether it may begin before what is ahead of it has ended."""


class TimingHarness:
    """Times binaries for one workload, beside its baselines, over rotating buffers."""

    def __init__(self, kernel: Kernel, target: str, workload: Workload, session: Session, seed: int) -> None:
        self._kernel, self._target, self._workload, self._session = kernel, target, workload, session
        self._gate = Gate(kernel, target, session, seed)
        self._seed = seed
        self._random = random.Random(seed)
        self.floor = FloorGauge(session)
        self._replays: dict[tuple[str, int], tuple[Replay, tuple[int, ...]]] = {}
        self._examination: Examination | None = None
        self._incumbent: tuple[object, Loaded, Contender] | None = None
        self._call_us: dict[str, float] = {}
        self._in_vain = 0

    @property
    def gate(self) -> Gate:
        return self._gate

    @cached_property
    def set_count(self) -> int:
        """Raises UsageError if two sets, and the reference of one, do not fit the memory that is free."""
        set_bytes = self._kernel.cost(self._workload).bytes
        if self._session.device.type == "cuda":
            free, memory = torch.cuda.mem_get_info(self._session.device)
        else:
            free = memory = psutil.virtual_memory().available
        elements = sum(prod(self._workload.dim(d) for d in a.shape) for a in self._kernel.outputs(self._workload))
        needed = 3 * set_bytes + _REFERENCE_BYTES * elements
        if needed > free:
            raise UsageError(
                f"workload {self._workload.key} needs {needed / 2**30:.1f} GiB to be gated and timed, and"
                f" {free / 2**30:.1f} GiB are free on {self._session.info.name}; choose a smaller one"
            )
        walk_bytes = _WALK_BYTES[find_target(self._target).shares_cores]
        return sets_for(set_bytes, self._session.limits.cache_bytes, memory, walk_bytes)

    @property
    def fits_cache(self) -> bool:
        """Whether a set leaves room in the cache, so that a second call finds all of it there."""
        return 2 * self._kernel.cost(self._workload).bytes <= self._session.limits.cache_bytes

    @cached_property
    def data(self) -> TimedData:
        return TimedData(self._kernel, self._workload, self._session, self._gate, self.set_count, self._seed)

    def candidate(self, name: str, loaded: Loaded, launch: Launch) -> Contender:
        sets = self.data.arena.sets

        def bind(i: int) -> Callable[[], object]:
            values = argument_values(self._kernel, self._workload, sets[i].inputs, sets[i].outputs)
            return lambda: loaded(values, launch)

        calls = [bind(i) for i in range(self.set_count)]
        return Contender(name=name, calls=calls, programmatic=launch.programmatic)

    def baseline(self, baseline: Baseline) -> Contender:
        sets = self.data.arena.sets

        def bind(i: int) -> Callable[[], object]:
            return lambda: baseline.call(sets[i].inputs, self._workload)

        return Contender(name=baseline.name, calls=[bind(i) for i in range(self.set_count)], owns_outputs=False)

    def incumbent(self, incumbent: Incumbent) -> Contender | None:
        """The incumbent as a contender; it stays loaded until another takes its place. None if it has no build."""
        if incumbent.build is None or incumbent.build.binary is None:
            return None
        launch = self._kernel.launch(
            self._target, incumbent.genome.parameters, self._workload, self._session.limits
        )
        key = (incumbent.build.binary.code_hash, launch)
        if self._incumbent is None or self._incumbent[0] != key:
            self.drop_incumbent()
            loaded = self._session.load(incumbent.build.binary, self._kernel.entry)
            self._incumbent = (key, loaded, self.candidate("incumbent", loaded, launch))
        return self._incumbent[2]

    def prepare(self) -> None:
        """All that a race needs beside its contenders."""
        self._session.evict()
        assert self.data.witnesses
        self.floor.refusal(math.inf, self._kernel.cost(self._workload), in_cache=False)  # it measures when asked

    def drop_incumbent(self) -> None:
        if self._incumbent is not None:
            self._incumbent[1].close()
            self._incumbent = None

    def time(
        self,
        entries: Sequence[Contender],
        protocol: Protocol,
        reference: str | None,
        keep: frozenset[str] = frozenset(),
        sets: int | None = None,
        incumbent: float | None = None,
        examined: Sequence[str] = (),
        pick: int = 0,
        share: float | None = None,
    ) -> tuple[Timing, ...]:
        """Races the entries over the first `sets` buffer sets: all of them (cold), or one (hot).

        Replays of entries named in `keep` are kept for the next race. `incumbent`: see `clock.race`. `examined`: of
        whom it is seen to, in the race itself, that they do their work; `complaint` then says whether they did. `pick`
        decides when what is looked at, `share` how often (see `Examination`).
        """
        entries = [replace(e, calls=e.calls[:sets]) for e in entries]
        replays: dict[str, Replay] = {}
        own: list[Replay] = []
        orders = {}
        self._examination = None
        try:
            for entry in entries:
                replays[entry.name], orders[entry.name] = self._replay(entry, protocol, entry.name in keep, own)
            watched = [
                Examined(name=e.name, calls=e.calls, order=orders[e.name], judged=e.name in examined)
                for e in entries
                if e.owns_outputs
            ]
            if watched:
                # Who is far behind an incumbent is let go after the first pair of rounds, and need not be examined in
                # it.
                self._examination = Examination(
                    self.data, watched, self._seed ^ pick, share, spared=int(incumbent is not None)
                )
            self._session.clocks()  # what it counts is counted from here
            samples = race(
                self._session,
                replays,
                protocol,
                reference,
                incumbent=incumbent,
                examiner=self._examination,
                patient=self._in_vain < _PATIENCE or incumbent is None,
            )
            self._in_vain = self._in_vain + 1 if samples.disturbed else 0
            clocks = self._session.clocks()
            return tuple(
                self._summary(samples, e.name, replays, protocol, reference, clocks, len(e.calls)) for e in entries
            )
        finally:
            for replay in own:
                replay.close()

    def complaint(self, name: str, *, ran_last: bool = True) -> Check:
        """Whether a contender of the last race did its work in it. ran_last: whether the last of its calls were its."""
        assert self._examination is not None
        return self._examination.complaint(name, ran_last=ran_last)

    def try_witnesses(self, entry: Contender, pick: int) -> Check:
        """A contender that is called on the witnesses alone, again and again, as a race does it but untimed."""
        order = tuple(w.index for w in self.data.witnesses)
        examination = Examination(
            self.data, [Examined(name=entry.name, calls=entry.calls, order=order)], self._seed ^ pick
        )

        def call_all() -> None:
            for i in order:
                entry.calls[i]()
            self._session.synchronize()

        call_all()
        examination.warmed_up(entry.name)
        for _ in range(_WITNESS_ROUNDS):
            examination.before(entry.name)
            call_all()
            examination.after(entry.name)
        call_all()
        return examination.complaint(entry.name, ran_last=True)

    def reads_early(self, entry: Contender) -> str:
        """Whether one that may begin early waits for its inputs at this size, too: it is launched behind a kernel that
        writes them late, where others are until then. Empty if it does; raises LaunchError."""
        hazards = self._session.hazards if entry.programmatic else None
        if hazards is None:
            return ""
        witness = self.data.witnesses[0]
        memory, call = witness.memory, entry.calls[witness.index]
        call()
        right = {n: o.clone() for n, o in memory.outputs.items()}
        image = memory.before_outputs.clone()
        witness.versions[0].apply(memory)
        self.data.arena.wipe(witness.index, witness.index + 1, self._random.getrandbits(63))
        with hazards.write_late(memory.before_outputs, image):
            call()
        self._session.synchronize()
        if all(same(memory.outputs[n], o) for n, o in right.items()):
            return ""
        return "read an input before the kernel that writes it had ended (at the size that is timed)"

    def impossible(self, timings: Sequence[Timing], contender: str) -> str:
        """Why one of a contender's times cannot be; empty if they can."""
        cost = self._kernel.cost(self._workload)
        for t in timings:
            if t.contender != contender:
                continue
            if reason := self.floor.refusal(t.median_us, cost, in_cache=t.protocol == "hot"):
                return reason
        return ""

    def check_baseline(self, baseline: Baseline) -> str:
        """Why a baseline cannot be raced: it does not run here, or its own result is not right; empty if it can."""
        w = self.data.witnesses[0]
        try:
            result = baseline.call(w.memory.inputs, self._workload)
            self._session.synchronize()
        except Exception as error:  # what another implementation lacks is no fault of the race
            if baseline.role == "reference":
                raise
            reason = str(error).strip().partition("\n")[0]
            return f"it does not run here ({type(error).__name__}: {reason[:_REASON_CHARACTERS]})"
        got = as_outputs(self._kernel, self._workload, result)
        for e in w.expected:
            _, reason = compare(got[e.name], e) if e.name in got else (None, "")
            if reason:
                return reason
        return ""

    def _replay(
        self, entry: Contender, protocol: Protocol, keep: bool, own: list[Replay]
    ) -> tuple[Replay, tuple[int, ...]]:
        """Its calls, and the sets in the order that it walks over them."""
        if entry.name not in self._call_us or not keep:
            self._call_us[entry.name] = self._session.estimate_us(entry.calls[0])
        calls = self._calls(len(entry.calls), self._call_us[entry.name], protocol)
        if (entry.name, calls) in self._replays:
            return self._replays[entry.name, calls]
        order = self._walk(len(entry.calls), calls)
        replay = self._session.record([entry.calls[order[i % len(order)]] for i in range(calls)])
        if keep:
            self._replays[entry.name, calls] = replay, order
        else:
            own.append(replay)
        return replay, order

    def _walk(self, sets: int, calls: int) -> tuple[int, ...]:
        """Sets in an order of chance, no two walks alike: who could foresee the next call would fetch its data. The
        witnesses are among them; the others are neighbours, of which many can be examined at a time."""
        first = [w.index for w in self.data.witnesses if w.index < sets][:calls]
        others = [i for i in range(sets) if i not in first]
        count = max(1, min(calls, sets)) - len(first)
        start = self._random.randrange(len(others) - count + 1)
        order = [*first, *others[start : start + count]]
        self._random.shuffle(order)
        return tuple(order)

    def _calls(self, sets: int, call_us: float, protocol: Protocol) -> int:
        if not protocol.cold:
            return calls_for(call_us, protocol.sample_us, least=1, most=None)
        set_bytes = self._kernel.cost(self._workload).bytes
        least = cold_calls(sets, set_bytes, self._session.limits.cache_bytes)
        if find_target(self._target).shares_cores:  # where arithmetic is slow, the cache cleared before a sample must do
            least = max(2, min(least, math.ceil(_LONG_SAMPLE_US / max(call_us, 1e-3))))
        return calls_for(call_us, protocol.sample_us, least=least, most=sets)

    def _summary(
        self,
        samples: Samples,
        name: str,
        replays: Mapping[str, Replay],
        protocol: Protocol,
        reference: str | None,
        clocks: Mapping[str, float],
        sets: int,
    ) -> Timing:
        return summarise(
            samples,
            name,
            workload=self._workload.key,
            protocol=protocol.name,
            reference=reference,
            calls=replays[name].calls,
            sets=sets,
            clocks=clocks,
        )
