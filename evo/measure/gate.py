"""The gate: is a candidate's output right? Nothing is timed, stored or exported that has not passed.

For every case the candidate gets copies of the inputs and poisoned outputs, each with guard zones on both sides, and
its result is compared with a float64 reference. Inputs and guards must be as before.

- A read beside an input shows: the guards hold NaN, and in some launches another value.
- The first case of a kernel is launched several times: in other memory, on other data in the same memory, again, and over
  the right result of other data in place of poison. Results on equal data must be equal bit for bit. This refuses results
  that depend on the number of launches, on addresses, on what the outputs held, or on the order of threads; also sums in no
  fixed order, as with atomics, where every result is within the tolerance: what does not repeat cannot be debugged.
- Where the session can do more (`evo.targets.Hazards`): shared memory holds NaN before every launch, and a candidate
  that may start early runs behind a kernel that writes its inputs late.

A verdict follows from the kernel, the genome and the seed: the same launches on the same data repeat it.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np
import torch

from evo.errors import LaunchError
from evo.evaluation import Check
from evo.measure.buffers import HUGE, NAN, ZERO, Layout, Memory, bits, same, sum_of
from evo.problem.kernel import Case, Kernel, Launch, Tensors, Workload
from evo.runtime.tolerance import Expected, compare, expected, findings, verdict
from evo.targets import Session

_ODD_VALUE = 12288.0
"""Exact in every dtype, and written by no kernel."""

Call = Callable[[Sequence[object], Launch], None]
"""One launch of an entry point: `evo.targets.Loaded`, without its end."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """One launch: its memory, what it holds before (`image`), and what its outputs should be."""

    memory: Memory
    image: Memory
    inputs: Tensors
    expected: tuple[Expected, ...]
    repeats: bool = False
    """Whether the outputs must equal the first launch's, bit for bit."""
    where: str = ""
    """What is different from the first launch."""


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case with its data on the device; made once, used for every candidate. The first trial is the case itself."""

    case: Case
    seed: int
    trials: tuple[_Trial, ...]


class Gate:
    """Prepares cases once per process and judges candidates on them."""

    def __init__(self, kernel: Kernel, target: str, session: Session, seed: int) -> None:
        self._kernel, self._target, self._session, self._seed = kernel, target, session, seed
        self._hazards = session.hazards
        self._prepared: dict[tuple[Case, bool], PreparedCase] = {}
        self._held: list[torch.Tensor] = []
        self._sum = 0
        self.data_changed = False
        """What candidates are judged by is not as it was made. It lies in memory like the candidates' own, and a stray write
        can reach it past every guard."""

    def prepare(self, case: Case, *, repeated: bool = False) -> PreparedCase:
        """`repeated`: with the further launches of a kernel's first case."""
        if (case, repeated) in self._prepared:
            return self._prepared[case, repeated]
        seed = case_seed(self._seed, case)
        device = self._session.device
        generator = torch.Generator(device=device).manual_seed(seed)
        outputs = allocate_outputs(self._kernel, case.workload, device)

        def image(inputs: Tensors, expected: tuple[Expected, ...], guard: int) -> Memory:
            made = Memory(layout, device)
            made.fill(inputs, guard)
            for e in expected:  # NaN, but where NaN may be expected
                made.outputs[e.name].fill_(float("nan") if e.all_finite else _ODD_VALUE)
            return made

        data = self._kernel.inputs(case.workload, case.data, generator)
        layout = Layout(data, outputs, case.offset)
        expected = expected_outputs(self._kernel, data, case.workload)
        here, plain = Memory(layout, device), image(data, expected, NAN)
        trials = [_Trial(memory=here, image=plain, inputs=data, expected=expected)]
        if repeated:
            other = self._kernel.inputs(case.workload, case.data, generator)
            wanted = expected_outputs(self._kernel, other, case.workload)
            there, odd = Memory(layout, device), image(data, expected, HUGE)
            stale = image(data, expected, HUGE)
            for e in wanted:
                stale.outputs[e.name].copy_(e.reference)
            new, changed = image(other, wanted, HUGE), "on other data in the same memory"
            over = "over the result of other data"
            trials += [
                _Trial(memory=there, image=odd, inputs=data, expected=expected, repeats=True, where="in other memory"),
                _Trial(memory=here, image=new, inputs=other, expected=wanted, where=changed),
                _Trial(memory=there, image=plain, inputs=data, expected=expected, repeats=True, where="once more"),
                _Trial(memory=here, image=stale, inputs=data, expected=expected, repeats=True, where=over),
            ]
        prepared = PreparedCase(case=case, seed=seed, trials=tuple(trials))
        self._prepared[case, repeated] = prepared
        self._hold(prepared)
        return prepared

    def warm_up(self, workload: Workload) -> None:
        """Prepares every case, and runs it: with what is right, and the first also with what is wrong.

        PyTorch loads a GPU kernel when it is first called, tens of milliseconds each: a gate of three milliseconds takes
        half a second in a new process. Limits of time would have to allow for that.
        """
        launch = Launch(grid=(1, 1, 1), block=(1, 1, 1))
        for number, case in enumerate(self._kernel.cases(self._target, workload)):
            prepared = self.prepare(case, repeated=number == 0)
            self.check(partial(_write_reference, cycle(prepared.trials)), launch, prepared)
            if number == 0:
                self.check(lambda values, launch: None, launch, prepared)

    def _hold(self, prepared: PreparedCase) -> None:
        held = [t.image.bytes for t in prepared.trials]
        held += [given for t in prepared.trials for given in t.inputs.values() if given is not None]
        held += [x for t in prepared.trials for e in t.expected for x in (e.reference, e.finite, e.allowed)]
        new = [*{id(x): x for x in held}.values()]  # trials share what they are judged by
        self._held += new
        self._sum = (self._sum + sum_of(new)) % (1 << 64)

    def check(self, call: Call, launch: Launch, prepared: PreparedCase) -> Check:
        """Runs one case. A launch that fails raises LaunchError: it may have broken the device."""
        first: dict[str, torch.Tensor] = {}
        for number, trial in enumerate(prepared.trials, 1):
            found, of, reason = self._try(call, launch, prepared.case, trial, first)
            if number == 1 or reason:  # the three figures are of one launch
                error, judged = found, of
            if reason:
                wrong_result = reason.startswith(f"{judged.name}: ")
                reason += f" (launch {number}, {trial.where})" if trial.where else ""
                if wrong_result and (cause := self._cause(call, launch, prepared.case, trial)):
                    reason += f"; {cause}"
                break
            if number == 1 and len(prepared.trials) > 1:
                first = {n: o.clone() for n, o in trial.memory.outputs.items()}
        if not reason and launch.programmatic and len(prepared.trials) > 1:
            reason = self._try_late(call, launch, prepared)
        return Check(
            case=prepared.case.name,
            passed=not reason,
            error=error,
            allowed=judged.largest_allowed,
            torch_error=judged.torch_error,
            reason=reason,
            seed=prepared.seed,
        )

    def run(self, call: Call, cases: Sequence[tuple[Case, Launch]]) -> tuple[Check, ...]:
        """Checks in order, up to and including the first that fails. Raises LaunchError."""
        checks: list[Check] = []
        for case, launch in cases:
            prepared = self.prepare(case, repeated=not checks)
            try:
                checks.append(self.check(call, launch, prepared))
            except LaunchError as error:
                raise LaunchError(f"case {case.name}: {error}") from error
            if not checks[-1].passed:
                break
        self.data_changed = sum_of(self._held) != self._sum
        if self.data_changed and checks[-1].passed:
            reason = "memory far from its inputs and outputs was written, by which others are judged"
            checks[-1] = replace(checks[-1], passed=False, reason=reason)
        return tuple(checks)

    def _launch(
        self, call: Call, launch: Launch, case: Case, memory: Memory, image: Memory, shared: int = NAN
    ) -> None:
        """One launch on what `image` holds. Raises LaunchError."""
        memory.bytes.copy_(image.bytes)
        if self._hazards is not None:
            self._hazards.scrub(shared)
        if all(o.numel() for o in memory.outputs.values()):
            call(argument_values(self._kernel, case.workload, memory.inputs, memory.outputs), launch)
            self._session.synchronize()

    def _try(
        self, call: Call, launch: Launch, case: Case, trial: _Trial, first: dict[str, torch.Tensor]
    ) -> tuple[float | None, Expected, str]:
        """(largest error, the output it is of, reason for refusal or "")."""
        memory = trial.memory
        self._launch(call, launch, case, memory, trial.image)
        flags = memory.changes(trial.image)
        judged = [e for e in trial.expected if memory.outputs[e.name].numel()]
        for e in judged:
            output = memory.outputs[e.name]
            flags += [(bits(output) != bits(first[e.name])).any().double()] if trial.repeats else findings(output, e)
        values = torch.stack(flags).tolist()  # the one synchronisation
        outcome = values[len(values) - (1 if trial.repeats else 3) * len(judged) :]
        error: float | None = 0.0
        last, reason = trial.expected[-1], ""
        for i, e in enumerate(judged):
            last = e
            if not trial.repeats:
                error, reason = verdict(tuple(outcome[3 * i : 3 * i + 3]), memory.outputs[e.name], e)
            elif outcome[i]:
                error, reason = compare(memory.outputs[e.name], e)
                reason = reason or "result differs between repeats"
            if reason:
                reason = f"{e.name}: {reason}"
                break
        if any(values[: len(values) - len(outcome)]):
            reason = memory.changed(trial.image)
        return error, last, reason

    def _try_late(self, call: Call, launch: Launch, prepared: PreparedCase) -> str:
        """The first case once more, behind a kernel that writes its inputs late."""
        trial = prepared.trials[0]
        memory = trial.memory
        if not all(o.numel() for o in memory.outputs.values()):
            return ""
        memory.bytes.copy_(trial.image.bytes)
        values = argument_values(self._kernel, prepared.case.workload, memory.inputs, memory.outputs)
        return reads_early(self._session, memory, prepared.trials[2].inputs, partial(call, values, launch))

    def _cause(self, call: Call, launch: Launch, case: Case, trial: _Trial) -> str:
        """What a wrong result depends on, found by launching again with one thing changed; "" if it is simply wrong."""
        wrong = {n: o.clone() for n, o in trial.memory.outputs.items()}

        def differs(image: Memory, shared: int = NAN) -> bool:
            self._launch(call, launch, case, trial.memory, image, shared)
            return not all(same(trial.memory.outputs[n], o) for n, o in wrong.items())

        if differs(trial.image):
            wrong_again = any(compare(trial.memory.outputs[e.name], e)[1] for e in trial.expected)
            return "another result when launched again" if wrong_again or trial.repeats else "right when launched again"
        quiet = Memory(trial.memory.layout, self._session.device)
        quiet.fill(trial.inputs, ZERO)
        for e in trial.expected:
            quiet.outputs[e.name].copy_(trial.image.outputs[e.name])
        if differs(quiet):
            return "it depends on memory outside its inputs"
        if self._hazards is not None and differs(trial.image, ZERO):
            return "it depends on shared memory that it has not written"
        return ""


def reads_early(session: Session, memory: Memory, others: Tensors, call: Callable[[], object]) -> str:
    """Why a launch that may begin early is refused: it is made behind a kernel that writes its inputs late, where others
    are until then. Empty if it waits for them, or if the device has no such hazard. Raises LaunchError. memory: holds the
    inputs, and does so afterwards."""
    hazards = session.hazards
    if hazards is None:
        return ""
    call()
    session.synchronize()
    right = {n: o.clone() for n, o in memory.outputs.items()}
    image = memory.before_outputs.clone()
    memory.write(others)
    for output in memory.outputs.values():
        output.zero_()
    with hazards.write_late(memory.before_outputs, image):
        call()
    session.synchronize()
    if all(same(memory.outputs[n], o) for n, o in right.items()):
        return ""
    return "read an input before the kernel that writes it had ended"


def _write_reference(trials: Iterator[_Trial], values: Sequence[object], launch: Launch) -> None:
    trial = next(trials)
    for e in trial.expected:
        trial.memory.outputs[e.name].copy_(e.reference)


def case_seed(seed: int, case: Case) -> int:
    """A seed of the case's own, so that adding a case leaves the data of the others as they were."""
    return (seed * 0x9E3779B1 + zlib.crc32(f"{case.name}|{case.workload.key}|{case.data}".encode())) % 2**63


def argument_values(
    kernel: Kernel, workload: Workload, inputs: Tensors, outputs: Mapping[str, torch.Tensor]
) -> tuple[object, ...]:
    """The entry point's arguments in order: tensors, None for an absent optional one, numbers."""
    sizes = {**dict(workload.dims), **dict(workload.options)}
    tensors = {**inputs, **outputs}
    values: list[object] = []
    for a in kernel.arguments:
        if a.kind != "scalar":
            values.append(tensors.get(a.name) if a.optional else tensors[a.name])
        elif a.stride_of is not None:
            tensor = tensors[a.stride_of[0]]
            values.append(0 if tensor is None else tensor.stride(a.stride_of[1]))
        else:
            kind = float if a.dtype.startswith("float") else np.int32 if a.dtype == "int32" else int
            values.append(kind(sizes[a.name]))
    return tuple(values)


def allocate_outputs(kernel: Kernel, workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """Makes uninitialised outputs."""
    outputs = {}
    for a in kernel.outputs(workload):
        dtype = getattr(torch, workload.dtype if a.dtype == "problem" else a.dtype)
        order = kernel.memory_order(workload, a.name) if kernel.memory_order else range(len(a.shape))
        sizes = [workload.dim(a.shape[axis]) for axis in order]
        axes = sorted(range(len(sizes)), key=list(order).__getitem__)
        outputs[a.name] = torch.empty(sizes, dtype=dtype, device=device).permute(axes)
    return outputs


def as_outputs(kernel: Kernel, workload: Workload, result: object) -> dict[str, torch.Tensor]:
    """A tensor, a sequence of them or a mapping, by output name. Some outputs may be missing."""
    if isinstance(result, Mapping):
        return dict(result)
    tensors = result if isinstance(result, tuple | list) else (result,)
    return dict(zip((a.name for a in kernel.outputs(workload)), tensors, strict=False))


def expected_outputs(kernel: Kernel, inputs: Tensors, workload: Workload) -> tuple[Expected, ...]:
    """References and bounds for one set of inputs, on their device."""
    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    references = as_outputs(kernel, workload, kernel.reference(wide, workload))
    same_dtype = kernel.same_dtype or kernel.reference_baseline.call
    own = as_outputs(kernel, workload, same_dtype(inputs, workload))
    found = []
    for argument in kernel.outputs(workload):
        dtype = workload.dtype if argument.dtype == "problem" else argument.dtype
        tolerance = astuple(kernel.own_tolerance(workload) or kernel.tolerance[dtype])
        reference, torchs = references[argument.name], own.get(argument.name)
        found.append(expected(argument.name, reference, torchs, getattr(torch, dtype), tolerance))
    return tuple(found)
