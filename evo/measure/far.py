"""A candidate where offsets exceed 32 bits: what `evo.measure.cases.far_cases` asks for, made and judged on the device.

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
from functools import partial
from math import prod

import torch

from evo.errors import KernelError, LaunchError
from evo.evaluation import Check
from evo.measure.buffers import Operands, has_room, same
from evo.measure.cases import BEYOND, WRAP, draw_inputs
from evo.measure.gate import (
    Call,
    Invocation,
    allocate_outputs,
    case_seed,
    expected_outputs,
    stated_outputs,
    threads_limited,
)
from evo.problem.kernel import Case, Kernel, LaunchSequence, Tensors, Workload
from evo.problem.space import Point
from evo.runtime.package import launchable
from evo.runtime.tolerance import Expected, compare
from evo.targets import Session

_ALIGNMENT = 64
"""Elements that a far stride is a multiple of: whatever is aligned in a dense tensor is so in the view."""
_EACH = 2
_LIMIT_S = 8.0
"""Cases that a slow reference leaves no time for are left out."""
_SPARE_BYTES = 1 << 30
"""Left free on a GPU, for whoever else uses it."""
_MAP_NORESERVE = 0x4000
"""Of Linux: no memory has to stand behind the address space."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A call that is ready to be made: its tensors, and where to look for what each input holds (name, place, content) and
    for what each output is to be."""

    operands: Operands
    given: Sequence[tuple[str, torch.Tensor, torch.Tensor]]
    judged: Sequence[tuple[Expected, Callable[[], torch.Tensor]]]


def far_checks(
    kernel: Kernel, target: str, call: Call, point: Point, cases: Sequence[Case], session: Session, seed: int
) -> Iterator[Check]:
    """For each stride, or dimension, that is far the first _EACH of its cases that can be made; all up to the first that
    fails. Raises LaunchError."""
    made, ends = Counter[str](), time.monotonic() + _LIMIT_S
    for case in cases:
        if made[case.far] < _EACH and time.monotonic() < ends:
            check = None
            with suppress(KernelError):  # a function of the kernel fails at a case that its statement allows
                sequence = kernel.sequence(target, point, case.workload, session.limits)
                check = _check(kernel, call, sequence, case, session, seed)
            if check is not None:
                made[case.far] += 1
                yield check
                if not check.passed:
                    return


def _check(kernel: Kernel, call: Call, sequence: LaunchSequence, case: Case, session: Session, seed: int) -> Check | None:
    """None if there is no memory for the case, or nothing in it that is far. Raises LaunchError."""
    generator = torch.Generator(device=session.device).manual_seed(case_seed(seed, case))
    strides = {a.name: a.stride_of for a in kernel.arguments if a.stride_of is not None}
    with threads_limited(1):  # of so little, several that wait for each other and for a core take longer
        if case.far in strides:
            made = _view(kernel, case, *strides[case.far], generator)
        else:
            made = _dense(kernel, case, sequence, generator)
    if made is None or not all(launchable(launch.grid) for launch in sequence.launches):
        return None
    try:
        invocation = Invocation(kernel, call, sequence, session)
        invocation(invocation.values(case.workload, made.operands))
        session.synchronize()
    except LaunchError as refused:
        raise LaunchError(f"case {case.name}: {refused}") from refused
    error, judged, reason = None, made.judged[0][0], ""
    for judged, output in made.judged:
        error, wrong = compare(output(), judged)
        if wrong:
            reason = f"{judged.name}: {wrong}"
            break
    changed = next((name for name, place, content in made.given if not same(place, content)), "")
    reason = f"input {changed} was changed" if changed else reason
    return Check(
        case=case.name,
        passed=not reason,
        error=error,
        allowed=judged.largest_allowed,
        torch_error=judged.torch_error,
        reason=reason,
        seed=case_seed(seed, case),
    )


def _view(kernel: Kernel, case: Case, name: str, axis: int, generator: torch.Generator) -> _Made | None:
    """The tensor of that name spans twice WRAP elements along the axis. Before it lies as much memory as an offset goes back
    that is taken for a negative number of 32 bits: it is to give a wrong result, and no fault."""
    content = draw_inputs(kernel, case, generator)
    inputs, outputs = dict(content), allocate_outputs(kernel, case.workload, generator.device)
    tensor = inputs[name] if name in inputs else outputs.get(name)
    if tensor is None or tensor.shape[axis] < 2 or not tensor.stride(axis):
        return None
    strides = list(tensor.select(axis, 0).clone().stride())  # dense but for that axis, in the same order
    strides = [stride if own else 0 for stride, own in zip(strides, tensor.select(axis, 0).stride(), strict=True)]
    strides.insert(axis, (-(-2 * WRAP // (tensor.shape[axis] - 1)) // _ALIGNMENT + 1) * _ALIGNMENT)
    front, span = 2 * WRAP, 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    memory = _reserve((front + span) * tensor.element_size(), generator.device)
    if memory is None:
        return None
    expected = expected_outputs(kernel, content, case.workload, case.data)
    view = memory.view(tensor.dtype).as_strided(tensor.shape, strides, front)
    if name in inputs:
        once = tuple(slice(None if stride else 1) for stride in strides)  # of what a stride of 0 repeats
        view[once].copy_(tensor[once])
        inputs[name] = view
    else:
        outputs[name] = view
    for output in outputs.values():
        output.fill_(_poison(output.dtype))
    kept = [(n, t, own) for n, own in content.items() if own is not None and (t := inputs[n]) is not None]
    return _Made(
        operands=Operands(inputs, outputs),
        given=[(n, t, own.clone() if t is own else own) for n, t, own in kept],
        judged=[(e, partial(outputs.__getitem__, e.name)) for e in expected],
    )


def _reserve(size: int, device: torch.device) -> torch.Tensor | None:
    """uint8 [size], of any content; None where there is no room."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device) if has_room(device, size + _SPARE_BYTES) else None
    with suppress(OSError, ValueError):  # shared: a limit on a process's data is not for what it does not touch
        if sys.platform == "linux":
            region = mmap.mmap(-1, size + 8, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            return torch.frombuffer(region, dtype=torch.uint8)[: size // 8 * 8]
    return None


def _poison(dtype: torch.dtype) -> float | bool:
    """What outputs of a dtype hold before a call: NaN, the largest integer, or true."""
    return float("nan") if dtype.is_floating_point else dtype == torch.bool or torch.iinfo(dtype).max


def _dense(kernel: Kernel, case: Case, sequence: LaunchSequence, generator: torch.Generator) -> _Made | None:
    """Dense tensors of as many items as the workload has along the dimension that is far, `_runs` of which have content."""
    shapes = {a.name: a.shape for a in kernel.arguments if a.kind != "scalar"}
    axes = {name: shape.index(case.far) for name, shape in shapes.items() if case.far in shape}
    runs = _runs(case, [shapes[name] for name in axes])
    few = _sized(case.workload, case.far, sum(count for _, count in runs))
    if kernel.validate(few) or any(a.kind == "input" and not a.shape for a in kernel.arguments):
        return None
    content = draw_inputs(kernel, replace(case, workload=few), generator)
    expected = expected_outputs(kernel, content, few, case.data)
    alone = _independent(kernel, case, few, content, axes, expected)
    dtypes = {a.name: getattr(torch, a.dtype_of(case.workload)) for a in kernel.arguments if a.kind != "scalar"}
    size = sum(dtypes[name].itemsize * elements for name, elements in sequence.workspace)
    for name in (n for n in axes if n not in content or content[n] is not None):
        size += dtypes[name].itemsize * prod(case.workload.dim(n) for n in shapes[name])
    if not alone or not has_room(generator.device, size + _SPARE_BYTES):
        return None

    def parts(name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.narrow(axes[name], first, count) for first, count in runs] if name in axes else [whole]

    def looked_at(name: str) -> torch.Tensor:
        return torch.cat(parts(name, outputs[name]), axes.get(name, 0))

    inputs, outputs = dict(content), allocate_outputs(kernel, case.workload, generator.device)
    for name, t in content.items():
        if t is not None and name in axes:
            whole = t.new_zeros(tuple(case.workload.dim(n) for n in shapes[name]))
            for part, own in zip(parts(name, whole), t.split([count for _, count in runs], axes[name]), strict=True):
                part.copy_(own)
            inputs[name] = whole
    for name, output in outputs.items():
        for part in parts(name, output):
            part.fill_(_poison(output.dtype))
    return _Made(
        operands=Operands(inputs, outputs),
        given=[],
        judged=[(e, partial(looked_at, e.name)) for e in alone],
    )


def _runs(case: Case, shapes: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
    """Which items have content, as (first, count): those near either end, and near each multiple of WRAP elements of the
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


def _sized(workload: Workload, dimension: str, size: int) -> Workload:
    return replace(workload, dims=tuple((name, size if name == dimension else n) for name, n in workload.dims))


def _independent(
    kernel: Kernel, case: Case, few: Workload, content: Tensors, axes: Mapping[str, int], expected: Sequence[Expected]
) -> list[Expected]:
    """Those of the outputs that the reference does not change where zeros lie between the items."""
    twice = _sized(few, case.far, 2 * few.dim(case.far))
    if kernel.validate(twice):
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
