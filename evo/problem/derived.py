"""The parts that a kernel's statement leaves out, derived from its arguments' shapes: data, cases, neighbours, cost.

Functions whose first parameter is a kernel are methods of the kernels that leave them out; `dataclasses.replace` derives
them anew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from evo.problem.data import KINDS_OF_NON_FINITE, draw
from evo.problem.kernel import ELEMENT_BYTES, Argument, Case, Cost, Kernel, Tensors, Workload
from evo.problem.repair import quotients, repaired, resized, tied_sizes
from evo.problem.space import Value
from evo.runtime.manifest import on_own_cores

if TYPE_CHECKING:
    import torch

_FOLD, _KINDS = 61, 5
"""Columns of a tensor of one axis that has none; fewer where it has not so many rows of them as `draw` has kinds of rows."""
_MANY, _ROWS = 9 << 20, 600
"""Elements of the tensors of a case of many, and its least rows however small the workload is."""


def inputs(kernel: Kernel, workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    """Tensors of the most axes are of the distribution named, along their last axis; others are far from 1 and 0, so that
    ignoring them shows, with outliers some are large, and beside sorted rows very large."""
    import torch

    made: dict[str, torch.Tensor | None] = {}
    axes = max((len(a.shape) for a in kernel.arguments if a.kind == "input"), default=0)
    for a in (a for a in kernel.arguments if a.kind == "input"):
        made[a.name] = None
        if not a.optional or workload.option(a.name):
            dtype, shape = getattr(torch, a.dtype_of(workload)), _shape(a, workload)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            if len(shape) == axes:
                rows, cols = _folded(kernel, a, workload)
                values = draw(data, rows, cols, dtype, generator).flatten()[: math.prod(shape)].reshape(shape)
            else:
                values = 1 + 0.5 * torch.randn(shape, dtype=wide, generator=generator, device=generator.device)
                values[..., ::8] *= 32 if data == "outlier" else 1
                values[..., 3::64] *= 8192 if data == "ramp" else 1  # results that a clamp at 1e4 changes
            made[a.name] = _rounded(values, dtype).contiguous()
    return made


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of any size as a dtype has them: what is too large for one of 8 bits, or an integer, is its largest number."""
    import torch

    if dtype == torch.bool:
        return values > 0
    if not dtype.is_floating_point:  # an eighth is the step, as most numbers are small
        limits, exact = torch.iinfo(dtype), 1 << 24  # up to which float32 has each integer
        low, high = max(limits.min, -exact), min(limits.max, exact)
        return (8 * values).nan_to_num(0.0).round().clamp(low, high).to(dtype)
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest).where(values.isfinite(), values)
    return values.to(dtype)


def _folded(kernel: Kernel, argument: Argument, workload: Workload) -> tuple[int, int]:
    """Rows and columns as which the data of a tensor are drawn. Of one axis they are those of a kernel whose rows lie one
    behind the other; some of each kind where it goes element by element; one row where it goes over all of them."""
    if len(argument.shape) != 1:
        return math.prod(_shape(argument, workload)[:-1]), _shape(argument, workload)[-1]
    (name,) = argument.shape
    size, unit = workload.dim(name), workload.dim(kernel.multiples.get(str(name), 0))
    if unit and size % unit == 0:
        return size // unit, unit
    if any(name in a.shape for a in kernel.arguments if a.kind == "output"):
        cols = max(1, min(_FOLD, size // _KINDS))
        return -(-size // cols), cols
    return 1, size


def _shape(argument: Argument, workload: Workload) -> list[int]:
    return [workload.dim(name) for name in argument.shape]


def cases(kernel: Kernel, target: str, workload: Workload) -> tuple[Case, ...]:
    """Few elements each, but for one. All dimensions that are not compiled in have other sizes than the workload's. Of one
    that has to be a multiple of another (`Kernel.multiples`) the quotient is chosen; sizes that `validate` refuses are
    repaired, what the case is about last of all."""
    compiled_in, first = kernel.compile_time_dims[target], kernel.data[0]
    free = [d.name for d in kernel.dimensions if d.name not in compiled_in]
    tied, own = tied_sizes(kernel, compiled_in), quotients(kernel, compiled_in, workload)
    found = dict[tuple[object, ...], Case]()
    few = {name: min(own[name], 509 if place else 67) for place, name in enumerate(free)}

    def elements(workload: Workload) -> int:
        return max(math.prod(_shape(a, workload)) for a in kernel.arguments if a.kind != "scalar")

    def add(data: str, changed: Mapping[str, Value], offset: int = 0) -> bool:
        """changed: dimensions and options that are others. Whether there is such a problem."""
        chosen = {n: int(changed.get(n, few.get(n, size))) for n, size in own.items()}
        others = tuple((n, changed.get(n, v)) for n, v in workload.options)
        asked = resized(kernel, compiled_in, replace(workload, options=others), chosen)
        ranges = {d.name: range(d.low, d.high + 1) for d in kernel.dimensions}
        beyond = any(size not in ranges[n] for n, size in asked.dims if n in changed)
        made = None if beyond else repaired(kernel, asked, pinned=compiled_in, about=changed)
        if made is None or elements(made) > 2 * max(_MANY, elements(asked)):
            return False
        now = {**quotients(kernel, compiled_in, made), **dict(made.options)}
        what = [f"{f'{n}/{tied[n]}' if n in tied else n}={now[n]}" for n in changed]
        what += [f"offset={offset}"] if offset else []
        found.setdefault((data, made, offset), Case(" ".join([data, *what]), made, data, offset))
        return True

    for data in kernel.data:
        add(data, {})
    if free and "non_finite" in kernel.data:
        usual = resized(kernel, compiled_in, workload, few)
        large = [a for a in kernel.arguments if a.kind == "input" and {*a.shape} >= {*free}]
        over_all = not any({*a.shape} & {*free} for a in kernel.outputs(workload))
        if over_all or (large and max(_folded(kernel, a, usual)[0] for a in large) < KINDS_OF_NON_FINITE):
            ones = dict.fromkeys(free[:-1], 1) if over_all else {}
            for size in range(few[free[-1]], few[free[-1]] + KINDS_OF_NON_FINITE):  # see `draw`
                for n in (size, size - KINDS_OF_NON_FINITE):
                    if add("non_finite", {**ones, free[-1]: n}):
                        break
    for name in free:
        for size in (0, 1, 3, 17, 64, 127, 769, 1025) if name != free[0] else (0, 1):
            add(first, {name: size})
    add(first, dict.fromkeys(free[:-1], 1))
    others: list[tuple[str, dict[str, Value], int]] = [(first, {}, 1)]
    for name, value in workload.options:
        if name not in compiled_in and isinstance(value, bool):
            others.append((first, {name: not value}, 0))
        elif name not in compiled_in and name in kernel.choices:
            others += [(first, {name: text}, 0) for text in kernel.choices[name] if text != value]
        elif name not in compiled_in and isinstance(value, float):
            others.append(("tiny" if "tiny" in kernel.data else first, {name: 4 * value or 0.5}, 0))
    # A gate's time goes by the number of cases: more sizes of the first dimension come along with what else is another.
    for size, other in zip_longest((3, 17, 64, 127) if free else (), others):
        data, changed, offset = other or (first, {}, 0)
        if size is None or not add(data, {free[0]: size, **changed}, offset):
            add(data, changed, offset)
    if free:  # more than a persistent grid takes at once, and no whole number of its steps
        many = max(1, own[free[0]] * _MANY // max(1, elements(workload)))
        many = min(max(own[free[0]], _ROWS), many) if on_own_cores(target) else many
        while many and not add(first, {free[0]: many | 1}):
            many //= 2
    return tuple(found.values())


def neighbours(kernel: Kernel, target: str, workload: Workload) -> tuple[Workload, ...]:
    compiled_in = kernel.compile_time_dims[target]
    own = quotients(kernel, compiled_in, workload)
    ranges = {d.name: range(d.low, d.high + 1) for d in kernel.dimensions}
    few = {n: min(size, max(ranges[n].start, 67)) for n, size in own.items() if n not in compiled_in}
    asked: list[tuple[Workload, tuple[str, ...]]] = []
    for name in (n for n in own if n in compiled_in):
        for size in dict.fromkeys((own[name] - 1, own[name] + 1, own[name] + 8, 2 * own[name], 769)):
            made = resized(kernel, compiled_in, workload, {**few, name: size})
            if made.dim(name) in ranges[name] and size != own[name]:
                asked.append((made, (name,)))
    others: dict[str, Value] = {n: not v for n, v in workload.options if isinstance(v, bool) and n in compiled_in}
    changes: list[dict[str, Value]] = [others, *({n: v} for n, v in others.items())] if others else []
    changes += [{n: v} for n, texts in kernel.choices.items() if n in compiled_in for v in texts if v != workload.option(n)]
    for other in changes:
        options = tuple((n, other.get(n, v)) for n, v in workload.options)
        asked.append((resized(kernel, compiled_in, replace(workload, options=options), few), tuple(other)))
    near = (repaired(kernel, w, pinned=[n for n in compiled_in if n not in about], about=about) for w, about in asked)
    same = kernel.binding(target, workload)
    return tuple(w for w in dict.fromkeys(near) if w is not None and kernel.binding(target, w) != same)


def call_reference(kernel: Kernel, inputs: Tensors, workload: Workload) -> object:
    """The baseline of a statement that names no other. PyTorch computes nothing in 8 bits."""
    import torch

    tensors, own = dict(inputs), (a for a in kernel.arguments if a.kind == "input" and a.dtype not in ("problem", "opmath"))
    for a in own:
        if (t := inputs[a.name]) is not None and t.is_floating_point() and t.itemsize == 1:
            tensors[a.name] = t.to(getattr(torch, workload.dtype))
    return kernel.reference(tensors, workload)


def in_float32(kernel: Kernel, inputs: Tensors, workload: Workload) -> object:
    """The reference in float32: no kernel computes in 16 bits throughout, as it would."""
    short = {n: t for n, t in inputs.items() if t is not None and t.is_floating_point() and t.itemsize <= 2}
    return kernel.reference({**inputs, **{n: t.float() for n, t in short.items()}}, workload)


def cost(kernel: Kernel, workload: Workload) -> Cost:
    inputs = [a for a in kernel.arguments if a.kind == "input" and (not a.optional or workload.option(a.name))]
    return cost_of(kernel, inputs, workload)


def cost_of(kernel: Kernel, inputs: Sequence[Argument], workload: Workload) -> Cost:
    """Moving these inputs, and the outputs, once."""
    tensors = (*inputs, *kernel.outputs(workload))
    each = ((ELEMENT_BYTES[a.dtype_of(workload)], math.prod(_shape(a, workload))) for a in tensors)
    return Cost(bytes=sum(size * elements for size, elements in each), flops=0)


_SMALL = 1 / 64
"""An input with a smaller share of the largest one's bytes is left out of a copy."""


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
