"""The gate: is a candidate's output right? Nothing is timed, stored or exported that has not passed.

For every case the candidate gets copies of the inputs and poisoned outputs, each with guard zones on both sides, and
its result is compared with a float64 reference. Inputs and guards must be as before.

- A read beside an input shows: the guards hold NaN, and in some launches another value.
- The first case of a kernel is launched several times: in other memory, on other data in the same memory, again, and over
  the right result of other data in place of poison. Results on equal data must be equal bit for bit. This refuses results
  that depend on the number of launches, on addresses, on what the outputs held, or on the order of threads; also sums in no
  fixed order, as with atomics, where every result is within the tolerance: what does not repeat cannot be debugged.
- Where the session can do more (`evo.targets.Hazards`): shared memory holds NaN before every launch, a candidate that may
  start early runs behind a kernel that ends late, and one that passes results between blocks where few of them have room.

A verdict follows from the kernel, the genome, the seed and the cases that were drawn: the same launches on the same data
repeat it.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch

from evo.errors import EvoError, KernelError, LaunchError
from evo.evaluation import Check
from evo.measure import FAILING, UNLAUNCHABLE
from evo.measure.buffers import (
    GUARD_BYTES,
    HUGE,
    NAN,
    WIDE_GUARD_BYTES,
    ZERO,
    Layout,
    Memory,
    Operands,
    Workspace,
    bits,
    same,
    sum_of,
)
from evo.measure.cases import MOST_BYTES, draw_inputs, simpler
from evo.measure.order import begins_early, rooms
from evo.measure.reference import check_own, expected_outputs, figures
from evo.problem.kernel import Case, Kernel, Launch, LaunchSequence, Tensors, Workload
from evo.problem.space import Point
from evo.runtime.manifest import launchable
from evo.runtime.tolerance import FINDINGS, Expected, compare, findings, verdict
from evo.targets import Hazards, Session, Structure, find_target

_NUMBER = re.compile(r"[-\d.]+(e[-+]?\d+)?|\b(inf|nan)\b")
_SMALLER_CASES, _SMALLER_S = 100, 0.25
"""Number of smaller cases tried after a failure, and their time: a search has many failures, and a gate ends in a second."""
_REPEATS = 4
"""Number of launches that show whether the result of a trial is the same each time."""
_ODD_VALUE = 12288.0
"""A value that is exact in every dtype of 16 bits and more, and that no kernel writes."""

_CHANCE = "another result when launched again"

Call = Callable[[Sequence[object], Launch], None]
"""One launch of an entry point: `evo.targets.Loaded`, without its end."""


class Invocation:
    """How loaded code is called at one problem: its launches in order, over a workspace of its own."""

    def __init__(self, kernel: Kernel, call: Call, sequence: LaunchSequence, session: Session) -> None:
        """Raises LaunchError if there is no room for the workspace."""
        self.workspace = Workspace(kernel, sequence.workspace, session.device)
        self.launches = sequence.launches
        self._kernel, self._call = kernel, call
        places = {a.name: place for place, a in enumerate(kernel.arguments)}
        self._begun = [(places[a.name], places.get(a.initial)) for a in kernel.arguments if a.initial]
        self._passed = len(kernel.parameters)
        self._neighbours: Callable[[], AbstractContextManager[None]] = nullcontext

    def held(self, hazards: Hazards, room: int, *, spoiled: bool = False) -> Invocation:
        """The same call with room for only so many blocks of a launch at a time. spoiled: the contents of workspace do not
        last from one block to the next."""
        found = copy(self)
        found.launches = tuple(replace(launch, alone=True) if launch.cluster == 1 else launch for launch in self.launches)
        found._neighbours = partial(hazards.hold, room, self.workspace.bytes, self.workspace.left if spoiled else ())
        return found

    def values(self, workload: Workload, memory: Operands) -> tuple[object, ...]:
        """The arguments in order: tensors, None, numbers."""
        if memory.arguments is None:
            without = dict.fromkeys(a.name for a in self._kernel.arguments if a.kind == "workspace")
            memory.arguments = argument_values(self._kernel, workload, {**memory.inputs, **without}, memory.outputs)
        if not (own := self.workspace.tensors):
            return memory.arguments
        named = zip(self._kernel.arguments, memory.arguments, strict=True)
        return tuple(t if (t := own.get(a.name)) is not None and t.numel() else value for a, value in named)

    @property
    def fenced(self) -> bool:
        """Whether the code has fences, as `evo.targets.Loaded` says."""
        return bool(getattr(self._call, "fenced", True))

    def __call__(self, values: Sequence[object], first: int = 0, last: int | None = None) -> None:
        """Makes its launches, or some of them. Raises LaunchError."""
        if not first:
            self.workspace.zero()
            for place, of in self._begun:
                if isinstance(output := values[place], torch.Tensor):
                    if isinstance(begun := values[of] if of is not None else None, torch.Tensor):
                        output.copy_(begun)
                    else:
                        output.zero_()
        values = values[: self._passed] if self._begun else values
        with self._neighbours():
            for launch in self.launches[first:last]:
                self._call(values, launch)


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """One call of a candidate.

    memory: where it works. image: the contents of memory before the call. first: outputs of the first launch, which these
    must equal bit for bit; None if they are compared with `expected`. scratch: byte that fills the workspace before; None to
    leave it as it is. where: the difference from the first launch, in words. threads: number of a CPU's threads; 0 for all.
    begin, flags: `Gate._begin` and `_flags`, made repeatable where the trial serves many candidates: they are many small
    steps, each of which takes the host longer than the device.
    """

    memory: Memory
    image: Memory
    inputs: Tensors
    expected: tuple[Expected, ...]
    first: Mapping[str, torch.Tensor] | None = None
    scratch: int | None = NAN
    where: str = ""
    threads: int = 0
    begin: Callable[[], object] | None = None
    flags: Callable[[], torch.Tensor] | None = None

    @property
    def judged(self) -> list[Expected]:
        return [e for e in self.expected if self.memory.outputs[e.name].numel()]


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case with its data on the device; made once, used for every candidate. The first trial is the case itself. alone: it
    is so small that one thread makes and judges it, where several would only wait for each other."""

    case: Case
    seed: int
    trials: tuple[_Trial, ...]
    alone: bool = False


class Gate:
    """Prepares cases once per process and judges candidates on them."""

    def __init__(self, kernel: Kernel, target: str, session: Session, seed: int) -> None:
        self.kernel, self.target, self.session, self.seed = kernel, target, session, seed
        self._hazards, self._shares_cores = session.hazards, find_target(target).shares_cores
        self._prepared: dict[tuple[Case, bool], PreparedCase] = {}
        self._held: list[torch.Tensor] = []
        self._sum = 0
        self._sum_now: Callable[[], torch.Tensor] | None = None
        self.left_out: dict[str, str] = {}
        """Reasons why cases could not be run, by name; whoever asks for cases empties it."""
        self.data_changed = False
        """Whether the data that candidates are judged by have changed: a stray write can reach them past every guard."""

    def prepare(self, case: Case, *, repeated: bool = False, kept: bool = True) -> PreparedCase:
        """A case with its data. repeated: with the further launches of a kernel's first case. kept: for other candidates,
        too. Raises KernelError if PyTorch's own result of the first case is wrong."""
        if kept:
            if (case, repeated) not in self._prepared:
                made = self._make(case, repeated=repeated, kept=True)
                self._hold(made)
                trials = tuple(map(self._repeatable, made.trials))
                self._prepared[case, repeated] = replace(made, trials=trials)
            return self._prepared[case, repeated]
        shared = self._shares_cores
        alone = shared and self.kernel.cost(case.workload).bytes <= MOST_BYTES
        with threads_limited(1 if alone else 0):
            made = self._make(case, repeated=repeated, kept=False)
        # A case that is drawn for one candidate is called from fewer threads, too, as by a model.
        threads = 1 + made.seed % torch.get_num_threads() if shared else 0
        return replace(made, alone=alone, trials=tuple(replace(t, threads=threads) for t in made.trials))

    def _make(self, case: Case, *, repeated: bool, kept: bool) -> PreparedCase:
        seed = case_seed(self.seed, case)
        device = self.session.device
        generator = torch.Generator(device=device).manual_seed(seed)
        outputs = allocate_outputs(self.kernel, case.workload, device)

        def image(inputs: Tensors, expected: tuple[Expected, ...], guard: int) -> Memory:
            made = Memory(layout, device)
            made.fill(inputs, guard)
            for e in expected:
                poison(made.outputs[e.name], e, e.reference)
            return made

        data = draw_inputs(self.kernel, case, generator)
        wide = not self._shares_cores or repeated or not kept
        layout = Layout(data, outputs, case.offset, guard_bytes=WIDE_GUARD_BYTES if wide else GUARD_BYTES)
        expected = expected_outputs(self.kernel, data, case.workload, case.data)
        here, plain = Memory(layout, device), image(data, expected, NAN)
        trials = [_Trial(memory=here, image=plain, inputs=data, expected=expected)]
        if repeated:
            check_own(self.kernel, case, expected)
            other = draw_inputs(self.kernel, case, generator)
            wanted = expected_outputs(self.kernel, other, case.workload, case.data)
            there, odd = Memory(layout, device), image(data, expected, HUGE)
            stale = image(data, expected, HUGE)
            for e in wanted:
                stale.outputs[e.name].copy_(e.reference)
            new, changed = image(other, wanted, HUGE), "on other data in the same memory"
            over = "over the result of other data"
            first = {name: output.clone() for name, output in here.outputs.items()}
            again = _Trial(memory=there, image=odd, inputs=data, expected=expected, first=first, scratch=HUGE)
            trials += [
                replace(again, where="in other memory"),
                _Trial(memory=here, image=new, inputs=other, expected=wanted, scratch=None, where=changed),
                replace(again, image=plain, scratch=None, where="once more"),
                replace(again, memory=here, image=stale, where=over),
            ]
        return PreparedCase(case=case, seed=seed, trials=tuple(trials))

    def warm_up(self, workload: Workload) -> None:
        """Prepares every case, and runs it with a right result, and the first also with a wrong one.

        PyTorch loads a GPU kernel when it is first called, tens of milliseconds each: a gate of three milliseconds takes
        half a second in a new process. Limits of time would have to allow for that.
        """
        workspace = tuple((a.name, 1) for a in self.kernel.arguments if a.kind == "workspace")
        once = LaunchSequence(launches=(Launch(grid=(1, 1, 1), block=(1, 1, 1)),), workspace=workspace)
        for number, case in enumerate(self.kernel.cases(self.target, workload)):
            prepared = self.prepare(case, repeated=number == 0)
            self.check(partial(_write_reference, cycle(prepared.trials)), once, prepared)
            if number == 0:
                self.check(lambda values, launch: None, once, prepared)

    def _hold(self, prepared: PreparedCase) -> None:
        held = [t.image.bytes for t in prepared.trials]
        held += [given for t in prepared.trials for given in t.inputs.values() if given is not None]
        held += [x for t in prepared.trials for e in t.expected for x in (e.reference, e.finite, e.allowed)]
        new = [*{id(x): x for x in held}.values()]  # trials share their references
        self._held += new
        self._sum_now = None
        self._sum = (self._sum + int(sum_of(new))) % (1 << 64)

    def check(self, call: Call, sequence: LaunchSequence, prepared: PreparedCase, *, thorough: bool = False) -> Check:
        """Runs one case. A launch that fails raises LaunchError: it may have broken the device."""
        with threads_limited(1 if prepared.alone else 0):
            invocation, case = Invocation(self.kernel, call, sequence, self.session), prepared.case
            for number, trial in enumerate(prepared.trials, 1):
                found, of, reason = self._try(invocation, case, trial)
                if number == 1 or reason:  # the three figures belong to one launch
                    error, judged = found, of
                if reason:
                    wrong_result = reason.startswith(f"{judged.name}: ")
                    reason += f" (launch {number}, {trial.where})" if trial.where else ""
                    if wrong_result and (cause := self._cause(invocation, case, trial)):
                        reason += f"; {cause}"
                    break
                if number == 1:
                    for name, output in (prepared.trials[-1].first or {}).items():
                        output.copy_(trial.memory.outputs[name])
            outputs = prepared.trials[0].memory.outputs.values()
            if not reason and len(prepared.trials) > 1 and all(o.numel() for o in outputs):
                reason = self._try_late(invocation, prepared) or self._try_held(invocation, prepared, thorough)
        return Check(case=case.name, passed=not reason, **figures(error, judged), reason=reason, seed=prepared.seed)

    def run(
        self,
        call: Call,
        point: Point,
        cases: Sequence[Case],
        drawn: Iterable[PreparedCase] = (),
        *,
        thorough: bool = False,
    ) -> tuple[Check, ...]:
        """Checks on the kernel's own cases and then on those drawn for this candidate, in order, up to and including the
        first that fails; then, if there is one, the check of a smaller case that fails as well. Raises LaunchError, and
        KernelError where the kernel fails at a case of its own; a drawn case is in `left_out` then.

        point: the point of the search space whose code `call` is. thorough: hold back blocks of any candidate, in several
        ways."""
        checks: list[Check] = []
        own = (self.prepare(case, repeated=not number) for number, case in enumerate(cases))
        for prepared in chain(own, drawn):
            try:
                sequence = self.sequence(call, point, prepared.case.workload)
                if checks and not all(launchable(launch.grid) for launch in sequence.launches):
                    self.left_out[prepared.case.name] = UNLAUNCHABLE
                    continue
                checks.append(self.check(call, sequence, prepared, thorough=thorough))
            except LaunchError as error:
                raise LaunchError(f"case {prepared.case.name}: {error}") from error
            except KernelError:  # its own function fails at a workload that its statement allows
                if not checks or prepared.case in cases:
                    raise
                self.left_out[prepared.case.name] = FAILING
                continue
            if not checks[-1].passed:
                break
        if self._sum_now is None:
            self._sum_now = self.session.repeatable(partial(sum_of, self._held))
        self.data_changed = int(self._sum_now()) % (1 << 64) != self._sum
        if self.data_changed and checks[-1].passed:
            reason = "memory far from its inputs and outputs was written, by which others are judged"
            checks[-1] = replace(checks[-1], passed=False, reason=reason)
        elif not checks[-1].passed:
            later = len(prepared.trials) > 1 and "(launch " in checks[-1].reason
            smallest = self._smallest(call, point, prepared.case, checks[-1].reason, repeated=later)
            checks += [smallest] if smallest is not None else []
        return tuple(checks)

    def sequence(self, call: Call, point: Point, workload: Workload) -> LaunchSequence:
        """The launches of loaded code, which may have parts of them itself (`evo.targets.Loaded`)."""
        return self.kernel.sequence(self.target, point, workload, self.session.limits, getattr(call, "launch", {}))

    def _smallest(self, call: Call, point: Point, failed: Case, reason: str, *, repeated: bool) -> Check | None:
        """The check of the smallest and plainest case found that still fails for the same reason, numbers aside: one thing
        after another is made simpler, as in delta debugging (Zeller and Hildebrandt 2002). None if no other case fails."""
        found, case, tried, kind = None, failed, {failed}, _NUMBER.sub("", reason)
        deadline = time.thread_time() + _SMALLER_S  # so that a busy machine finds the same case
        simple: Case | None = case
        while simple is not None:
            for simple in simpler(self.kernel, self.target, case):
                if simple in tried:
                    continue
                if len(tried) > _SMALLER_CASES or time.thread_time() > deadline:
                    return found
                tried.add(simple)
                try:
                    prepared = self.prepare(simple, repeated=repeated, kept=False)
                    check = self.check(call, self.sequence(call, point, simple.workload), prepared)
                except (EvoError, RuntimeError, MemoryError):
                    return found  # a launch that fails may have broken the device
                if not check.passed and _NUMBER.sub("", check.reason) == kind:
                    found, case = check, simple
                    break
            else:
                simple = None
        return found

    def _repeatable(self, trial: _Trial) -> _Trial:
        again = self.session.repeatable
        return replace(trial, begin=again(partial(self._begin, trial)), flags=again(partial(_flags, trial)))

    def _begin(self, trial: _Trial, shared: int = NAN) -> None:
        """Writes the contents of memory, and of shared memory, before a launch."""
        trial.memory.bytes.copy_(trial.image.bytes)
        if self._hazards is not None:
            self._hazards.scrub(shared)

    def _launch(self, invocation: Invocation, case: Case, trial: _Trial, begin: Callable[[], object] | None) -> None:
        """One call on the contents of the trial's image. begin: None for the trial's own. Raises LaunchError."""
        memory = trial.memory
        if trial.scratch is not None:
            invocation.workspace.fill(trial.scratch)
        (begin or trial.begin or partial(self._begin, trial))()
        if all(o.numel() for o in memory.outputs.values()):
            values = invocation.values(case.workload, memory)
            with threads_limited(trial.threads):
                invocation(values)
            self.session.synchronize()

    def _try(self, invocation: Invocation, case: Case, trial: _Trial) -> tuple[float | None, Expected, str]:
        """(largest error, its output, reason for refusal or ""). If all outputs are right, the output is one with errors."""
        memory = trial.memory
        self._launch(invocation, case, trial, None)
        values = (trial.flags or partial(_flags, trial))().tolist()
        outside = torch.stack(invocation.workspace.changes()).tolist() if invocation.workspace.tensors else []
        outcome = values[len(memory.layout.fixed) :]
        error: float | None = 0.0
        last, reason = next((e for e in trial.expected if not e.exact), trial.expected[-1]), ""
        for i, e in enumerate(trial.judged):
            found: float | None = 0.0
            if trial.first is None:
                found, reason = verdict(tuple(outcome[FINDINGS * i : FINDINGS * (i + 1)]), memory.outputs[e.name], e)
            elif outcome[i]:
                found, reason = compare(memory.outputs[e.name], e)
                reason = reason or "result differs between repeats"
            if reason or not e.exact:
                error, last = found, e
            if reason:
                reason = f"{e.name}: {reason}"
                break
        if any(values[: len(memory.layout.fixed)]) or any(outside):
            reason = memory.changed(trial.image) or invocation.workspace.changed()
        return error, last, reason

    def _try_late(self, invocation: Invocation, prepared: PreparedCase) -> str:
        """Runs the first case once more, behind a kernel that writes its inputs late."""
        trial = prepared.trials[0]
        trial.memory.bytes.copy_(trial.image.bytes)
        return begins_early(self.session, trial.memory, invocation, prepared.case.workload)

    def _try_held(self, invocation: Invocation, prepared: PreparedCase, thorough: bool) -> str:
        """Runs the first case once more, where some blocks have to wait until others have ended. Only blocks with workspace
        are taken to leave results for each other, but in a thorough check all are."""
        if self._hazards is None or not (thorough or invocation.workspace.tensors):
            return ""
        case, trial = prepared.case, prepared.trials[0]
        found = rooms(invocation.launches, self.session.limits.multiprocessors, all_of_them=thorough)
        for room in found:
            _, _, reason = self._try(invocation.held(self._hazards, room), case, trial)
            if reason:
                return f"{reason} (launch {len(prepared.trials) + 1}, with room for {room} of its blocks at a time)"
        # Later launches may read what earlier ones have left, without a fence.
        alone = thorough and found and len(invocation.launches) == 1 and invocation.workspace.left
        if not alone or invocation.fenced:
            return ""
        for _ in range(_REPEATS):  # the device may have begun the next block before the workspace was spoiled
            *_, reason = self._try(invocation.held(self._hazards, 1, spoiled=True), case, trial)
            if reason and self._hazards.held:
                return "blocks read in workspace what others have written, without a fence (__threadfence) between the two"
        return ""

    def _cause(self, invocation: Invocation, case: Case, trial: _Trial) -> str:
        """The cause of a wrong result, found by launching again with one thing changed; "" if it is simply wrong."""
        wrong = {n: bits(o).clone() for n, o in trial.memory.outputs.items()}

        def differs(trial: _Trial, shared: int = NAN) -> bool:
            self._launch(invocation, case, trial, partial(self._begin, trial, shared))
            return not all(same(trial.memory.outputs[n], o) for n, o in wrong.items())

        if any(differs(trial) for _ in range(_REPEATS)):
            wrong_again = any(compare(trial.memory.outputs[e.name], e)[1] for e in trial.expected)
            return _CHANCE if wrong_again or trial.first is not None else "right when launched again"
        quiet = Memory(trial.memory.layout, self.session.device)
        quiet.fill(trial.inputs, ZERO)
        for e in trial.expected:
            bits(quiet.outputs[e.name]).copy_(bits(trial.image.outputs[e.name]))
        for what, changed, shared in (
            ("memory outside its inputs", replace(trial, image=quiet), NAN),
            ("shared memory that it has not written", trial, ZERO if self._hazards is not None else NAN),
            ("workspace that it has not written", replace(trial, scratch=ZERO), NAN),
        ):
            if differs(changed, shared):
                sure = all(differs(changed, shared) and not differs(trial) for _ in range(_REPEATS))
                return f"it depends on {what}" if sure else _CHANCE
        return ""


def _flags(trial: _Trial) -> torch.Tensor:
    """The findings on one launch, as one row of numbers on the device: for each range of memory outside the outputs whether
    it was changed; then for each output what `findings` has or, where a first launch is given, whether its bits differ from
    that launch's."""
    flags = trial.memory.changes(trial.image)
    for e in trial.judged:
        output = trial.memory.outputs[e.name]
        different = [(bits(output) != bits(trial.first[e.name])).any().double()] if trial.first is not None else None
        flags += different or findings(output, e)
    return torch.stack(flags)


@contextmanager
def threads_limited(number: int) -> Iterator[None]:
    """Limits calls on a CPU to so many threads; 0 for no limit."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number:
            torch.set_num_threads(before)


def _write_reference(trials: Iterator[_Trial], values: Sequence[object], launch: Launch) -> None:
    trial = next(trials)
    for e in trial.expected:
        trial.memory.outputs[e.name].copy_(e.reference)


def case_seed(seed: int, case: Case) -> int:
    """A seed of the case's own, so that adding a case leaves the data of the others as they were."""
    return (seed * 0x9E3779B1 + zlib.crc32(f"{case.name}|{case.workload.key}|{case.data}".encode())) % 2**63


_NUMBERS: Mapping[str, Callable[[Any], object]] = {"float32": float, "float64": np.float64, "int32": np.int32, "int64": int}
"""The types by which an entry point's caller tells scalars apart, by dtype."""


def argument_values(
    kernel: Kernel, workload: Workload, inputs: Tensors, outputs: Mapping[str, torch.Tensor]
) -> tuple[object, ...]:
    """A kernel's arguments in order: tensors, None for an absent optional one, numbers, structures."""
    sizes: dict[str, Any] = {**dict(workload.dims), **dict(workload.options)}
    tensors = {**inputs, **outputs}
    values: list[object] = []
    places = {a.name: place for place, a in enumerate(kernel.arguments)}
    for a in kernel.arguments:
        if a.kind == "structure":
            fields = tuple((places[n], 0) if n in places else (-1, sizes[n]) for n in a.fields)
            values.append(Structure(layout=a.layout, size=a.size_bytes, alignment=a.alignment, fields=fields))
        elif a.kind != "scalar":
            values.append(tensors.get(a.name) if a.optional else tensors[a.name])
        elif a.stride_of is not None:
            tensor = tensors[a.stride_of[0]]
            values.append(0 if tensor is None else tensor.stride(a.stride_of[1]))
        else:
            values.append(_NUMBERS[a.dtype_of(workload)](sizes[a.name]))
    return tuple(values)


def allocate_outputs(kernel: Kernel, workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """Makes uninitialised outputs."""
    outputs = {}
    for a in kernel.outputs(workload):
        dtype = getattr(torch, a.dtype_of(workload))
        order = kernel.memory_order(workload, a.name) if kernel.memory_order else range(len(a.shape))
        sizes = [workload.dim(a.shape[axis]) for axis in order]
        axes = sorted(range(len(sizes)), key=list(order).__getitem__)
        outputs[a.name] = torch.empty(sizes, dtype=dtype, device=device).permute(axes)
    return outputs


def poison(output: torch.Tensor, e: Expected, right: torch.Tensor) -> None:
    """Fills an output, or a part of it that should be `right`, with wrong values: NaN, or an odd number where NaN may be
    expected; integers, and elements of 8 bits where NaN may be expected, that differ from the right ones."""
    if e.exact or (output.itemsize == 1 and not e.all_finite):
        bits(output).copy_(~bits(right.to(output.dtype)))
    else:
        output.fill_(float("nan") if e.all_finite else _ODD_VALUE)
