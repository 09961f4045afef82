"""What the device process keeps between candidates of one workload: buffers, references, baseline replays."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import psutil
import torch

from evo.errors import UsageError
from evo.evaluation import Check, Timing
from evo.executors import Rival
from evo.floor import FloorGauge
from evo.gate import Expected, Gate, allocate_outputs, argument_values, as_outputs, compare, poison
from evo.kernel import Baseline, Kernel, Launch, Tensors, Workload
from evo.targets import Loaded, Replay, Session, find_target
from evo.timing import Protocol, Samples, calls_for, cold_calls, estimate_us, race, sets_for, summarise

__all__ = ["Bench", "Contender"]

_SAMPLED_ELEMENTS = 1 << 18
"""On a CPU, how many elements of a timed output are compared with the reference: all of them would take longer
than the timing. Rows are picked anew for every candidate; unwritten elements are looked for everywhere."""


_WALK_BYTES = {False: 1 << 30, True: 1 << 28}
"""What the buffer sets hold at least, by whether the target shares its cores: a quarter of a millisecond at 4 TB/s,
some milliseconds at 50 GB/s."""

_REFERENCE_BYTES = 80
"""Bytes an output element for three references, their bounds and an error, in float64, and what is made on the way."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One contender of a race: a call per buffer set."""

    name: str
    calls: Sequence[Callable[[], object]]


@dataclass(kw_only=True)
class _Witness:
    """A buffer set whose outputs are verified. `versions`: the data that its inputs hold in turn, if they change;
    `expected`: for each of them."""

    index: int
    versions: tuple[Tensors, ...]
    expected: Sequence[tuple[Expected, ...]]
    current: int = 0


class Bench:
    """Times binaries for one workload, beside its baselines, over rotating buffers."""

    def __init__(self, kernel: Kernel, target: str, workload: Workload, session: Session, seed: int) -> None:
        self._kernel, self._target, self._workload, self._session = kernel, target, workload, session
        self._gate = Gate(kernel, target, session, seed)
        self._generator = torch.Generator(device=session.device).manual_seed(seed % 2**63)
        self._floor = FloorGauge(session)
        self._random = random.Random(seed)
        self._replays: dict[tuple[str, int], Replay] = {}
        self._rival: tuple[object, Loaded, Contender] | None = None
        self._call_us: dict[str, float] = {}

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
        needed = 2 * set_bytes + _REFERENCE_BYTES * elements
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
    def inputs(self) -> list[Tensors]:
        """Fresh random inputs for every set: equal data in all of them would be kinder than life."""
        data = self._kernel.data[0]
        return [self._kernel.inputs(self._workload, data, self._generator) for _ in range(self.set_count)]

    @cached_property
    def outputs(self) -> list[dict[str, torch.Tensor]]:
        return [allocate_outputs(self._kernel, self._workload, self._session.device) for _ in self.inputs]

    @cached_property
    def witnesses(self) -> tuple[_Witness, ...]:
        """Two of the sets that every cold sample uses, picked at random; the first has two kinds of data."""
        used = cold_calls(self.set_count, self._kernel.cost(self._workload).bytes, self._session.limits.cache_bytes)
        first, second = self._random.sample(range(max(2, used)), 2)
        data = self._kernel.data[0]
        fresh = self._kernel.inputs(self._workload, data, self._generator)
        return (self._witness(first, (self._copy(self.inputs[first]), fresh)), self._witness(second, ()))

    def _witness(self, index: int, versions: tuple[Tensors, ...]) -> _Witness:
        data = versions or (self.inputs[index],)
        return _Witness(
            index=index, versions=versions, expected=[self._gate.expect(d, self._workload) for d in data]
        )

    @staticmethod
    def _copy(tensors: Tensors) -> Tensors:
        return {n: t.clone() if t is not None else None for n, t in tensors.items()}

    def candidate(self, name: str, loaded: Loaded, launch: Launch) -> Contender:
        def bind(i: int) -> Callable[[], object]:
            values = argument_values(self._kernel, self._workload, self.inputs[i], self.outputs[i])
            return lambda: loaded(values, launch)

        return Contender(name=name, calls=[bind(i) for i in range(self.set_count)])

    def baseline(self, baseline: Baseline) -> Contender:
        def bind(i: int) -> Callable[[], object]:
            return lambda: baseline.call(self.inputs[i], self._workload)

        return Contender(name=baseline.name, calls=[bind(i) for i in range(self.set_count)])

    def rival(self, rival: Rival) -> Contender | None:
        """The rival as a contender; it stays loaded until another takes its place. None if it has no build."""
        if rival.build is None or rival.build.binary is None:
            return None
        launch = self._kernel.launch(
            self._target, rival.genome.parameters, self._workload, self._session.limits
        )
        key = (rival.build.binary.code_hash, launch)
        if self._rival is None or self._rival[0] != key:
            self.drop_rival()
            loaded = self._session.load(rival.build.binary, self._kernel.entry)
            self._rival = (key, loaded, self.candidate("rival", loaded, launch))
        return self._rival[2]

    def drop_rival(self) -> None:
        if self._rival is not None:
            self._rival[1].close()
            self._rival = None

    def time(
        self,
        entries: Sequence[Contender],
        protocol: Protocol,
        reference: str | None,
        keep: frozenset[str] = frozenset(),
        sets: int | None = None,
        rival: float | None = None,
        surprise: bool = False,
    ) -> tuple[Timing, ...]:
        """Races the entries over the first `sets` buffer sets: all of them (cold), or one (hot).

        Replays of entries named in `keep` are kept for the next race. `rival`: see `evo.timing.race`. `surprise`:
        poison the witnesses' outputs and give one of them other data, after the warm-up: what a candidate remembers
        from earlier calls is then wrong.
        """
        entries = [Contender(name=e.name, calls=e.calls[:sets]) for e in entries]
        replays: dict[str, Replay] = {}
        own: list[Replay] = []
        try:
            for entry in entries:
                replays[entry.name] = self._replay(entry, protocol, entry.name in keep, own)
            self._session.clocks()  # what it counts is counted from here
            samples = race(
                self._session,
                replays,
                protocol,
                reference,
                rival=rival,
                before=self.surprise if surprise else None,
            )
            clocks = self._session.clocks()
            return tuple(
                self._summary(samples, e.name, replays, protocol, reference, clocks, len(e.calls)) for e in entries
            )
        finally:
            for replay in own:
                replay.close()

    def surprise(self) -> None:
        """Other data for the first witness, and poison in the outputs of all."""
        witness = self.witnesses[0]
        witness.current = 1 - witness.current
        for name, tensor in witness.versions[witness.current].items():
            if tensor is not None and (used := self.inputs[witness.index][name]) is not None:
                used.copy_(tensor)
        for w in self.witnesses:
            for e in w.expected[w.current]:
                poison(self.outputs[w.index][e.name], all_finite=e.all_finite)

    def call_witnesses(self, entry: Contender) -> None:
        """One call on each witness, with what `surprise` did before it."""
        self.surprise()
        for w in self.witnesses:
            entry.calls[w.index]()
        self._session.synchronize()

    def verify_timed(self, pick: int) -> Check:
        """Were the outputs right that the timed calls wrote for the witnesses? `pick` varies the rows compared."""
        for w in self.witnesses:
            for e in w.expected[w.current]:
                output = self.outputs[w.index][e.name]
                whole = output.numel() <= _SAMPLED_ELEMENTS or self._session.device.type == "cuda"
                seen, wanted = (output, e) if whole else _sampled(output, e, pick)
                error, reason = compare(seen, wanted)
                if not reason and not whole and bool(output.isnan().any()) and e.all_finite:
                    reason = "elements are NaN or were never written"
                if reason:
                    return Check(
                        case="timed",
                        passed=False,
                        error=error,
                        allowed=e.largest_allowed,
                        reason=f"{e.name}: {reason}",
                    )
        return Check(case="timed", passed=True, error=error, allowed=e.largest_allowed, torch_error=e.torch_error)

    def impossible(self, timings: Sequence[Timing], contender: str) -> str:
        """Why one of a contender's times cannot be; empty if they can."""
        cost = self._kernel.cost(self._workload)
        for t in timings:
            if t.contender != contender:
                continue
            if reason := self._floor.refusal(t.median_us, cost, in_cache=t.protocol == "hot"):
                return reason
        return ""

    def check_baseline(self, baseline: Baseline) -> str:
        """Why a baseline's own result is not comparable; empty when it is right."""
        w = self.witnesses[0]
        got = as_outputs(self._kernel, self._workload, baseline.call(self.inputs[w.index], self._workload))
        for e in w.expected[w.current]:
            _, reason = compare(got[e.name], e) if e.name in got else (None, "")
            if reason:
                return reason
        return ""

    def _replay(self, entry: Contender, protocol: Protocol, keep: bool, own: list[Replay]) -> Replay:
        if entry.name not in self._call_us or not keep:
            self._call_us[entry.name] = estimate_us(entry.calls[0], self._session)
        calls = self._calls(len(entry.calls), self._call_us[entry.name], protocol)
        if (entry.name, calls) in self._replays:
            return self._replays[entry.name, calls]
        replay = self._session.record([entry.calls[i % len(entry.calls)] for i in range(calls)])
        if keep:
            self._replays[entry.name, calls] = replay
        else:
            own.append(replay)
        return replay

    def _calls(self, sets: int, call_us: float, protocol: Protocol) -> int:
        if not protocol.cold:
            return calls_for(call_us, protocol.sample_us, least=1, most=None)
        set_bytes = self._kernel.cost(self._workload).bytes
        least = cold_calls(sets, set_bytes, self._session.limits.cache_bytes)
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


def _sampled(output: torch.Tensor, expected: Expected, pick: int) -> tuple[torch.Tensor, Expected]:
    rows = output.reshape(-1, output.shape[-1])
    count = max(2, _SAMPLED_ELEMENTS // rows.shape[1])
    generator = torch.Generator().manual_seed(pick)
    index = torch.randint(0, rows.shape[0], (count,), generator=generator)
    index[0], index[-1] = 0, rows.shape[0] - 1
    wide = output.shape[-1]

    def at(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(-1, wide)[index]

    return at(rows), Expected(
        name=expected.name,
        reference=at(expected.reference),
        finite=at(expected.finite),
        allowed=at(expected.allowed),
        torch_error=expected.torch_error,
        largest_allowed=expected.largest_allowed,
        all_finite=expected.all_finite,
    )
