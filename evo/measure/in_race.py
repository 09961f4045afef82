"""The examination of contenders during a race.

A candidate that is gated honestly and then timed may still do nothing under the clock. So while it is timed, things
happen between its samples that it cannot foresee and cannot tell from any other call, and what it makes of them is
compared: bit for bit with what it made of the same data before, or with a float64 reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from evo.evaluation import Check
from evo.measure._timed_data import TimedData
from evo.measure._witness import Part, Version, Witness
from evo.measure.reference import Expected, findings, poison, verdict

__all__ = ["Examination", "Examined"]

_SUMMED_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
"""Of the outputs so much is summed after a sample that is examined, in sets next to each other that are picked anew for
each race."""

_NUDGED_BYTES, _NUDGED_SETS = {"cuda": 128 << 20, "cpu": 8 << 20}, 32
"""And so much of that is nudged before it, the rest wiped."""

_TIMED = "in a timed call"
_LATER = "in a timed call, after its inputs had changed"
_OTHER = "another result than on the same data before (in a timed call)"


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A contender of a race: a call for each set, and the sets in the order that a sample calls them in. Only sets with a
    neighbour among them can be looked at many at a time."""

    name: str
    calls: Sequence[Callable[[], object]]
    order: tuple[int, ...]
    judged: bool = True
    """Else it only meets what the others meet."""

    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) of the longest rows of neighbours, all of them called."""
        found: list[tuple[int, int]] = []
        for index in sorted(set(self.order)):
            if found and found[-1][1] == index:
                found[-1] = found[-1][0], index + 1
            else:
                found.append((index, index + 1))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """Something to be judged when the race is over. values: of `findings`, and how many of all `size` elements are NaN
    where `output` is but a part of them."""

    values: torch.Tensor
    where: str
    output: torch.Tensor
    expected: Expected
    size: int

    def judge(self, values: Sequence[float]) -> tuple[float | None, str]:
        """(largest error, reason for refusal or "")."""
        error, reason = verdict((values[0], values[1], values[2]), self.output, self.expected)
        if values[3:] and values[3]:
            error, reason = None, f"{values[3]:.0f} of {self.size} elements are NaN or were never written"
        return error, f"{self.expected.name}: {reason} ({self.where})" if reason else ""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Sums of outputs, to be compared when the race is over. now, before: int64 [sets, outputs]; skipped: of the sets."""

    now: torch.Tensor
    before: torch.Tensor
    skipped: frozenset[int]

    def differ(self, now: Sequence[int], before: Sequence[int]) -> bool:
        outputs = self.now.shape[1]
        return any(
            a != b and i // outputs not in self.skipped for i, (a, b) in enumerate(zip(now, before, strict=True))
        )


@dataclass(kw_only=True)
class _Progress:
    """How far the examination of one contender is."""

    contender: Examined
    runs: tuple[tuple[int, int], ...]
    """(first, last + 1) of the sets that a sample calls."""
    summed: tuple[tuple[int, int], ...]
    """And of those whose outputs are summed."""
    samples: int = 0
    due: int = 0
    """Which of a pair of samples is examined; neither if it is 2."""
    sums: list[torch.Tensor] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    witness: Witness | None = None
    version: Version | None = None
    examined: bool = False
    findings: list[_Finding] = field(default_factory=list)
    compared: list[_Sums] = field(default_factory=list)
    verdicts: dict[bool, Check] = field(default_factory=dict)


class Examination:
    """A `clock.Examiner` of some contenders: in every round, or by `share` of the pairs of rounds in one of the two,
    and in the first pair after those `spared` always. A GPU's races are so short that they can do with fewer.

    Before every sample the outputs of the sets that it calls are wiped, so that nobody finds his result there and is spared
    computing it. Before one that is examined some of them are nudged instead: a few elements are changed by a unit in the
    last place, which nobody sees who does not write them anew. After it the outputs must be, bit for bit, what they were
    after the warm-up. And for one of the witnesses, in turn:

    - exchange: its inputs are others, all of them or one slice, and its outputs still hold the result of those before;
    - poison: its outputs are NaN.

    What it then holds is compared with the reference.

    On a CPU the set that was called last is summed first, at once: its call has to be done by then.
    """

    def __init__(
        self, data: TimedData, contenders: Sequence[Examined], seed: int, share: float | None = None, spared: int = 0
    ) -> None:
        self._data, self._rng, self._share, self._spared = data, random.Random(seed), share, spared
        self._progress = {c.name: self._begin(c) for c in contenders}

    def _begin(self, contender: Examined) -> _Progress:
        data, order = self._data, contender.order
        around = self._rng.choice(order)
        runs = contender.runs()
        within = next(r for r in runs if r[0] <= around < r[1])
        summed = [data.span(_SUMMED_BYTES, within, around, self._rng)]
        if data.device.type == "cpu":
            summed.insert(0, (order[-1], order[-1] + 1))
        return _Progress(contender=contender, runs=runs, summed=tuple(summed))

    def _is_due(self, p: _Progress) -> bool:
        if self._share is None:
            return True
        pair = p.samples // 2 - self._spared
        if p.samples % 2 == 0:
            p.due = self._rng.randrange(2) if pair == 0 or (pair > 0 and self._rng.random() < self._share) else 2
        p.samples += 1
        return p.due == (p.samples - 1) % 2

    def warmed_up(self, name: str) -> None:
        if (p := self._progress.get(name)) is not None and p.contender.judged:
            p.sums = [self._data.arena.output_sums(*span) for span in p.summed]

    def before(self, name: str) -> None:
        p = self._progress.get(name)
        if p is None:
            return
        p.examined = p.contender.judged and self._is_due(p)
        p.witness = p.version = None
        if not p.examined:
            self._wipe(p, [])
            return
        if not p.kinds:
            p.kinds = ["exchange", "poison"]
            self._rng.shuffle(p.kinds)
        kind = p.kinds.pop()
        nudged = [self._part(span) for span in p.summed if span[1] - span[0] > 1 or self._rng.random() < 0.5]
        called = [w for w in self._data.witnesses if w.index in p.contender.order]
        if kind == "exchange":
            called = [w for w in called if w.versions]
        p.witness = self._rng.choice(called) if called else None
        if p.witness is not None and kind == "exchange":
            p.version = self._rng.choice(p.witness.versions)
            p.version.apply(p.witness.memory)
        stale = [] if p.version is None or p.witness is None else [(p.witness.index, p.witness.index + 1)]
        self._wipe(p, [*nudged, *stale])
        for span in nudged:
            self._data.nudge(*span)
        if p.witness is not None and p.version is None:
            for e in p.witness.expected:
                poison(p.witness.memory.outputs[e.name], all_finite=e.all_finite)

    def _wipe(self, p: _Progress, but: Sequence[tuple[int, int]]) -> None:
        """The outputs of all sets that a sample calls, but for some."""
        word = self._rng.getrandbits(63)
        for first, last in p.runs:
            at = first
            for start, end in sorted(b for b in but if first <= b[0] < last):
                self._data.arena.wipe(at, start, word)
                at = max(at, end)
            self._data.arena.wipe(at, last, word)

    def after(self, name: str) -> None:
        """Leaves the data as they were before `before`."""
        p = self._progress.get(name)
        if p is None or not p.examined:
            return
        exchanged = p.witness.index if p.witness is not None and p.version is not None else None
        p.compared += self._sum(p, exchanged)
        if p.witness is not None:
            parts, where = (p.witness.parts, _TIMED) if p.version is None else (p.version.parts, _LATER)
            for output, choices in parts.items():
                p.findings.append(_find(p.witness.memory.outputs[output], self._rng.choice(choices), where))
        if p.witness is not None and p.version is not None:
            p.version.revert(p.witness.memory)
            p.contender.calls[p.witness.index]()

    def complaint(self, name: str, *, ran_last: bool) -> Check:
        """What is to be said of a contender when the race is over. ran_last: whether its outputs are still there. Asked
        again it says the same: what is looked at is drawn once."""
        verdicts = self._progress[name].verdicts
        if ran_last not in verdicts:
            verdicts[ran_last] = self._judge(self._progress[name], ran_last)
        return verdicts[ran_last]

    def _judge(self, p: _Progress, ran_last: bool) -> Check:
        data = self._data
        found, compared = list(p.findings), list(p.compared)
        if ran_last and p.sums:
            compared += self._sum(p)
        found += self._compare_witnesses() if ran_last else []
        values = torch.cat([*(f.values for f in found), data.changes()[None]]).tolist()
        sums = torch.cat([t.flatten() for c in compared for t in (c.now, c.before)]).tolist() if compared else []
        if values[-1]:
            reason = data.changed() or "its data were changed"
            return Check(case="timed", passed=False, reason=f"{reason} (in a timed call)", data_changed=True)
        check, at = Check(case="timed", passed=True), 0
        for f in found:
            count = f.values.numel()
            error, reason = f.judge(values[at : at + count])
            at += count
            e = f.expected
            check = replace(check, error=error, allowed=e.largest_allowed, torch_error=e.torch_error)
            if reason:
                return replace(check, passed=False, reason=reason)
        at = 0
        for c in compared:
            count = c.now.numel()
            if c.differ(sums[at : at + count], sums[at + count : at + 2 * count]):
                return replace(check, passed=False, reason=_OTHER)
            at += 2 * count
        return check

    def _compare_witnesses(self) -> list[_Finding]:
        """Of both, as the last call left them: whole on a GPU; on a CPU rows that are picked, and NaN anywhere."""
        whole = self._data.device.type == "cuda"
        return [
            _find(w.memory.outputs[e.name], Part(expected=e) if whole else self._rng.choice(w.parts[e.name]), _TIMED)
            for w in self._data.witnesses
            for e in w.expected
        ]

    def _part(self, span: tuple[int, int]) -> tuple[int, int]:
        around = self._rng.randrange(*span)
        most = min(_NUDGED_SETS, max(1, (span[1] - span[0]) // 2))  # others have to be wiped
        return self._data.span(_NUDGED_BYTES, span, around, self._rng, most)

    def _sum(self, p: _Progress, exchanged: int | None = None) -> list[_Sums]:
        """Of the sets that were summed after the warm-up; without the one whose inputs are others."""
        return [
            _Sums(
                now=self._data.arena.output_sums(first, last),
                before=sums,
                skipped=frozenset(() if exchanged is None else (exchanged - first,)),
            )
            for (first, last), sums in zip(p.summed, p.sums, strict=True)
        ]


def _find(output: torch.Tensor, part: Part, where: str) -> _Finding:
    whole = part.at is None and output.device.type == "cuda"
    seen = output if whole else part.of(output)
    values = findings(seen, part.expected)
    if part.at is not None and part.expected.all_finite:
        values.append(output.isnan().sum().double())  # unwritten elements are looked for everywhere
    return _Finding(
        values=torch.stack(values), where=where, output=seen, expected=part.expected, size=output.numel()
    )
