"""What far cases ask for, made and judged on the device: offsets that exceed 32 bits, for a candidate that has won.

A view spans 2^32 elements, of which only those of a small tensor are ever touched: on a CPU the rest is address space
without memory. A dense tensor holds zeros but for a few items at both ends and around each multiple of 2^31 elements. Their
results are compared if the reference shows that neither the zeros nor the distance matter to them. What there is no memory
for is left out.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import torch

from evo.errors import KernelError, LaunchError
from evo.evaluation import Check
from evo.measure import FAILING, NO_MEMORY, NO_TIME, NOT_FAR, UNLAUNCHABLE
from evo.measure.buffers import Operands, copy_once, same
from evo.measure.cases import BEYOND, WRAP, draw_inputs
from evo.measure.gate import Call, Gate, Invocation, allocate_outputs, case_seed, poison, threads_limited
from evo.measure.reference import expected_outputs, figures, stated_outputs
from evo.problem.kernel import Case, Kernel, LaunchSequence, Tensors, Workload
from evo.problem.repair import is_legal, sized
from evo.problem.space import Point
from evo.runtime.manifest import launchable
from evo.runtime.tolerance import Expected, compare
from evo.targets import target_of

_ALIGNMENT = 64
"""Elements that a far stride is a multiple of: whatever is aligned in a dense tensor is so in the view."""
_EACH = 2
_LIMIT_S = 8.0
"""After so long no further case is made."""
_SPARE_BYTES = 1 << 30
"""Left free on a GPU, for whoever else uses it."""
_MAP_NORESERVE = 0x4000
"""A flag of Linux: no memory has to stand behind the address space."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A call that is ready to be made: its tensors, where to look for what each input holds (name, place, content), what
    outputs should be, and what there is of one, by name."""

    operands: Operands
    given: Sequence[tuple[str, torch.Tensor, torch.Tensor]]
    expected: Sequence[Expected]
    output: Callable[[str], torch.Tensor]


def far_checks(gate: Gate, call: Call, point: Point, cases: Sequence[Case]) -> Iterator[Check]:
    """Checks, for each stride or dimension that is far, on the first _EACH of its cases that can be made, up to the first
    that fails. The gate has those that cannot be made in `left_out`. Raises LaunchError."""
    made, ends = Counter[str](), time.monotonic() + _LIMIT_S
    for case in cases:
        late = time.monotonic() > ends
        if made[case.far] >= (1 if late else _EACH):
            continue
        try:
            check = NO_TIME if late else _check(gate, call, gate.sequence(call, point, case.workload), case)
        except KernelError:  # at what its statement allows
            check = FAILING
        if isinstance(check, str):
            gate.left_out[case.name] = check
            continue
        made[case.far] += 1
        yield check
        if not check.passed:
            return


def _check(gate: Gate, call: Call, sequence: LaunchSequence, case: Case) -> Check | str:
    """The verdict, or why there is none. Raises LaunchError."""
    kernel, session, seed = gate.kernel, gate.session, case_seed(gate.seed, case)
    if not all(launchable(launch.grid) for launch in sequence.launches):
        return UNLAUNCHABLE
    generator = torch.Generator(device=session.device).manual_seed(seed)
    strides = {a.name: a.stride_of for a in kernel.arguments if a.stride_of is not None}
    with threads_limited(1):  # of so little, several that wait for each other and for a core take longer
        if case.far in strides:
            made = _view(kernel, case, *strides[case.far], generator)
        else:
            made = _dense(kernel, case, sequence, generator)
    if isinstance(made, str):
        return made
    try:
        invocation = Invocation(kernel, call, sequence, session)
        invocation(invocation.values(case.workload, made.operands))
        session.synchronize()
    except LaunchError as refused:
        raise LaunchError(f"case {case.name}: {refused}") from refused
    error, judged, reason = None, made.expected[0], ""
    for judged in made.expected:
        error, wrong = compare(made.output(judged.name), judged)
        if wrong:
            reason = f"{judged.name}: {wrong}"
            break
    changed = next((name for name, place, content in made.given if not same(place, content)), "")
    reason = f"input {changed} was changed" if changed else reason
    return Check(case=case.name, passed=not reason, **figures(error, judged), reason=reason, seed=seed)


def _view(kernel: Kernel, case: Case, name: str, axis: int, generator: torch.Generator) -> _Made | str:
    """The tensor of that name spans 2 * WRAP elements along the axis. Before it lies as much memory as an offset goes back
    that is taken for a negative number of 32 bits: it is to give a wrong result, and no fault."""
    content = draw_inputs(kernel, case, generator)
    inputs, outputs = dict(content), allocate_outputs(kernel, case.workload, generator.device)
    tensor = inputs[name] if name in inputs else outputs.get(name)
    if tensor is None or tensor.shape[axis] < 2 or not tensor.stride(axis):
        return NOT_FAR
    strides = list(tensor.select(axis, 0).clone().stride())  # dense but for that axis, in the same order
    strides = [stride if own else 0 for stride, own in zip(strides, tensor.select(axis, 0).stride(), strict=True)]
    strides.insert(axis, (-(-2 * WRAP // (tensor.shape[axis] - 1)) // _ALIGNMENT + 1) * _ALIGNMENT)
    front, span = 2 * WRAP, 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    memory = _reserve((front + span) * tensor.element_size(), generator.device)
    if memory is None:
        return NO_MEMORY
    expected = expected_outputs(kernel, content, case.workload, case.data)
    view = memory.view(tensor.dtype).as_strided(tensor.shape, strides, front)
    if name in inputs:
        copy_once(view, tensor)
        inputs[name] = view
    else:
        outputs[name] = view
    for e in expected:
        poison(outputs[e.name], e, e.reference)
    kept = [(n, t, own) for n, own in content.items() if own is not None and (t := inputs[n]) is not None]
    return _Made(
        operands=Operands(inputs, outputs),
        given=[(n, t, own.clone() if t is own else own) for n, t, own in kept],
        expected=expected,
        output=outputs.__getitem__,
    )


def _reserve(size: int, device: torch.device) -> torch.Tensor | None:
    """uint8 [size], of any content; None where there is no room."""
    if not (target := target_of(device)).shares_cores:
        return torch.empty(size, dtype=torch.uint8, device=device) if target.has_room(size + _SPARE_BYTES) else None
    with suppress(OSError, ValueError):  # shared: a limit on a process's data is not for what it does not touch
        if sys.platform == "linux":
            region = mmap.mmap(-1, size + 8, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            return torch.frombuffer(region, dtype=torch.uint8)[: size // 8 * 8]
    return None


def _dense(kernel: Kernel, case: Case, sequence: LaunchSequence, generator: torch.Generator) -> _Made | str:
    """Dense tensors of as many items as the workload has along the dimension that is far, `_runs` of which have content."""
    shapes = {a.name: a.shape for a in kernel.arguments if a.kind != "scalar"}
    axes = {name: shape.index(case.far) for name, shape in shapes.items() if case.far in shape}
    runs = _runs(case, [shapes[name] for name in axes])
    few = sized(case.workload, {case.far: sum(count for _, count in runs)})
    if not is_legal(kernel, few) or any(a.kind == "input" and not a.shape for a in kernel.arguments):
        return NOT_FAR
    content = draw_inputs(kernel, replace(case, workload=few), generator)
    expected = expected_outputs(kernel, content, few, case.data)
    alone = _independent(kernel, case, few, content, axes, expected)
    dtypes = {a.name: getattr(torch, a.dtype_of(case.workload)) for a in kernel.arguments if a.kind != "scalar"}
    size = sum(dtypes[name].itemsize * elements for name, elements in sequence.workspace)
    for name in (n for n in axes if n not in content or content[n] is not None):
        size += dtypes[name].itemsize * prod(case.workload.dim(n) for n in shapes[name])
    if not alone or not target_of(generator.device).has_room(size + _SPARE_BYTES):
        return NO_MEMORY if alone else NOT_FAR

    def parts(name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.narrow(axes[name], first, count) for first, count in runs] if name in axes else [whole]

    def few_of(name: str, few: torch.Tensor) -> Sequence[torch.Tensor]:
        return few.split([count for _, count in runs], axes[name]) if name in axes else [few]

    def looked_at(name: str) -> torch.Tensor:
        return torch.cat(parts(name, outputs[name]), axes.get(name, 0))

    inputs, outputs = dict(content), allocate_outputs(kernel, case.workload, generator.device)
    for name, t in content.items():
        if t is not None and name in axes:
            whole = t.new_zeros(tuple(case.workload.dim(n) for n in shapes[name]))
            for part, own in zip(parts(name, whole), few_of(name, t), strict=True):
                part.copy_(own)
            inputs[name] = whole
    for e in alone:
        for part, right in zip(parts(e.name, outputs[e.name]), few_of(e.name, e.reference), strict=True):
            poison(part, e, right)
    return _Made(operands=Operands(inputs, outputs), given=[], expected=alone, output=looked_at)


def _runs(case: Case, shapes: Sequence[tuple[str | int, ...]]) -> list[tuple[int, int]]:
    """The items that have content, as (first, count): those near either end, and near each multiple of WRAP elements of the
    largest of the tensors."""
    total = case.workload.dim(case.far)
    item = max(prod(case.workload.dim(n) for n in shape if n != case.far) for shape in shapes)
    runs: list[tuple[int, int]] = []
    for mark in (0, *range(WRAP, total * item, WRAP), total * item):
        first, last = max(mark // item - BEYOND, 0), min(mark // item + BEYOND, total)
        if runs and first <= sum(runs[-1]):
            runs[-1] = (runs[-1][0], last - runs[-1][0])
        else:
            runs.append((first, last - first))
    return runs


def _independent(
    kernel: Kernel, case: Case, few: Workload, content: Tensors, axes: Mapping[str, int], expected: Sequence[Expected]
) -> list[Expected]:
    """The outputs that the reference does not change where zeros lie between the items."""
    twice = sized(few, {case.far: 2 * few.dim(case.far)})
    if not is_legal(kernel, twice):
        return []
    wide: dict[str, torch.Tensor | None] = {}
    for name, given in content.items():
        t = given.double() if given is not None and given.is_floating_point() else given
        if t is not None and name in axes:
            t = torch.stack([t, torch.zeros_like(t)], axes[name] + 1).flatten(axes[name], axes[name] + 1)
        wide[name] = t
    found = stated_outputs(kernel, "`reference`", kernel.reference, wide, twice)

    def own(name: str) -> torch.Tensor:
        return found[name].movedim(axes[name], 0)[::2].movedim(0, axes[name]) if name in axes else found[name]

    return [e for e in expected if torch.allclose(own(e.name), e.reference, rtol=1e-9, atol=1e-12, equal_nan=True)]
