"""What a kernel's statement leaves out, derived from its arguments' shapes: data, cases, neighbours, cost, baselines.

Functions whose first parameter is a kernel are methods of the kernels that leave them out; `dataclasses.replace` derives
them anew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from evo.problem.data import draw
from evo.problem.kernel import Argument, Case, Cost, Kernel, Tensors, Workload
from evo.problem.space import Value

if TYPE_CHECKING:
    import torch

_MANY = 9 << 20
"""Elements of the tensors of a case of many."""


def inputs(kernel: Kernel, workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    """Tensors of the most axes are of the distribution named, along their last axis; others are far from 1 and 0, so that
    ignoring them shows, and with outliers some are large."""
    import torch

    made: dict[str, torch.Tensor | None] = {}
    axes = max(len(a.shape) for a in kernel.arguments if a.kind == "input")
    for a in (a for a in kernel.arguments if a.kind == "input"):
        made[a.name] = None
        if not a.optional or workload.option(a.name):
            dtype, shape = getattr(torch, a.dtype_of(workload)), _shape(a, workload)
            if len(shape) == axes:
                values = draw(data, math.prod(shape[:-1]), shape[-1], dtype, generator).reshape(shape)
            else:
                wide = torch.promote_types(dtype, torch.float32)
                values = 1 + 0.5 * torch.randn(shape, dtype=wide, generator=generator, device=generator.device)
                values[..., ::8] *= 32 if data == "outlier" else 1
            made[a.name] = values.to(dtype).contiguous()
    return made


def _shape(argument: Argument, workload: Workload) -> list[int]:
    return [workload.dim(name) for name in argument.shape]


def cases(kernel: Kernel, target: str, workload: Workload) -> list[Case]:
    """Few elements each, but for one. All dimensions that are not compiled in have other sizes than the workload's."""
    compiled_in, first = kernel.compile_time_dims[target], kernel.data[0]
    free = [d for d in kernel.dimensions if d.name not in compiled_in]
    own, options, found = dict(workload.dims), dict(workload.options), dict[tuple[object, ...], Case]()
    few = {d.name: min(own[d.name], 509 if place else 67) for place, d in enumerate(free)}

    def add(data: str, changed: Mapping[str, Value], offset: int = 0) -> bool:
        """changed: dimensions and options that are others. Whether there is such a problem."""
        dims = {n: int(changed.get(n, few.get(n, size))) for n, size in own.items()}
        made = Workload.of(dims, workload.dtype, {n: changed.get(n, v) for n, v in options.items()})
        if not all(d.low <= dims[d.name] <= d.high for d in free) or kernel.validate(made):
            return False
        what = [f"{n}={value}" for n, value in changed.items()] + ([f"offset={offset}"] if offset else [])
        found.setdefault((data, made, offset), Case(" ".join([data, *what]), made, data, offset))
        return True

    for data in kernel.data:
        add(data, {})
    for d in free:
        for size in (0, 1, 3, 17, 64, 127, 769, 1025) if d is not free[0] else (0, 1):
            add(first, {d.name: size})
    others: list[tuple[str, dict[str, Value], int]] = [(first, {}, 1)]
    for name, value in options.items():
        if name not in compiled_in and isinstance(value, bool):
            others.append((first, {name: not value}, 0))
        elif name not in compiled_in and isinstance(value, float):
            others.append(("tiny" if "tiny" in kernel.data else first, {name: 4 * value or 0.5}, 0))
    # A gate's time goes by the number of cases: more sizes of the first dimension come along with what else is another.
    for size, other in zip_longest((3, 17, 64, 127) if free else (), others):
        data, changed, offset = other or (first, {}, 0)
        if size is None or not add(data, {free[0].name: size, **changed}, offset):
            add(data, changed, offset)
    if free:  # more than a persistent grid takes at once, and no whole number of its steps
        name, elements = free[0].name, max(math.prod(_shape(a, workload)) for a in kernel.arguments if a.kind != "scalar")
        many = max(1, own[name] * _MANY // max(1, elements))
        add(first, {name: (many if target == "cuda" else min(own[name], many)) | 1})
    return list(found.values())


def neighbours(kernel: Kernel, target: str, workload: Workload) -> list[Workload]:
    compiled_in = [d for d in kernel.dimensions if d.name in kernel.compile_time_dims[target]]
    own = dict(workload.dims)
    few = {d.name: min(own[d.name], max(d.low, 67)) for d in kernel.dimensions if d not in compiled_in}
    options = dict(workload.options)
    others = {n: not v for n, v in workload.options if isinstance(v, bool) and n in kernel.compile_time_dims[target]}
    near = [
        Workload.of({**own, **few, d.name: size}, workload.dtype, options)
        for d in compiled_in
        for size in dict.fromkeys((own[d.name] - 1, own[d.name] + 1, own[d.name] + 8, 2 * own[d.name], 769))
        if d.low <= size <= d.high and size != own[d.name]
    ]
    switched = [others, *({n: v} for n, v in others.items())] if others else []
    near += [Workload.of({**own, **few}, workload.dtype, {**options, **other}) for other in switched]
    return [w for w in dict.fromkeys(near) if not kernel.validate(w)]


def call_reference(kernel: Kernel, inputs: Tensors, workload: Workload) -> object:
    """The baseline of a statement that names no other."""
    return kernel.reference(inputs, workload)


def in_float32(kernel: Kernel, inputs: Tensors, workload: Workload) -> object:
    """In 16 bits throughout, as the reference would compute there, no kernel does."""
    halves = {n: t for n, t in inputs.items() if t is not None and t.is_floating_point() and t.itemsize == 2}
    return kernel.reference({**inputs, **{n: t.float() for n, t in halves.items()}}, workload)


def cost(kernel: Kernel, workload: Workload) -> Cost:
    import torch

    inputs = [a for a in kernel.arguments if a.kind == "input" and (not a.optional or workload.option(a.name))]
    tensors = (*inputs, *kernel.outputs(workload))
    each = ((getattr(torch, a.dtype_of(workload)), math.prod(_shape(a, workload))) for a in tensors)
    return Cost(bytes=sum(dtype.itemsize * elements for dtype, elements in each), flops=0)


_SMALL = 1 / 64
"""Of the largest input's bytes: one of fewer is left out of a copy."""


def copy(kernel: Kernel, inputs: Tensors, workload: Workload) -> torch.Tensor:
    """Reads and writes as many bytes as the cost says, as far as the large inputs go: a call for a small one costs more than
    its bytes, and torch.cat copies bytes one by one."""
    import torch

    left, parts = kernel.cost(workload).bytes // 2, list[torch.Tensor]()
    largest = max(t.nbytes for t in inputs.values() if t is not None)
    for tensor in (t for t in inputs.values() if t is not None and t.nbytes >= _SMALL * largest):
        parts.append(tensor.flatten().view(torch.uint8)[:left])
        left -= len(parts[-1])
    copy = parts[0].new_empty(sum(map(len, parts)))
    for into, part in zip(copy.split([len(part) for part in parts]), parts, strict=True):
        into.copy_(part)
    return copy
