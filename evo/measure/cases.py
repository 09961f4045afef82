"""Gate cases as text, drawn at random from a kernel's own statement, and made smaller.

A kernel's cases are where its author looked; random ones are where nobody has. What a search timed may be called with any
other size, option, distribution or alignment that the statement allows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evo.errors import UnknownNameError, UsageError
from evo.problem.kernel import Case, Dimension, Kernel, Tensors, Workload

if TYPE_CHECKING:
    import torch

_ATTEMPTS = 100
"""For each case; constraints between sizes leave few of all draws."""
_OFFSETS = (0, 0, 0, 1, 2, 3, 4, 5, 8)
_TENSORS = 4
"""As many have an offset of their own; others share theirs."""
_MIXED = 0.25
"""The share of cases with problems of two distributions side by side."""
_FACTOR = 4
"""Numbers among the options are up to so many times as large, or as small, as those of a kernel's cases."""
_OTHER_SIGN = 0.25
"""The share of numbers with the other sign, among the options that `option_min` does not keep from it."""
MOST_BYTES, _MOST_FLOPS = 1 << 22, 1 << 27
"""Of one case, so that a float64 reference on a CPU takes milliseconds."""
_AND = "+"


def random_cases(kernel: Kernel, target: str, workload: Workload, seed: int, number: int) -> list[Case]:
    """So many, or fewer where few draws are legal and small. Sizes that are not compiled in are log-uniform up to the
    workload's own or the largest of the kernel's cases; the rest as `_like_one` has it."""
    rng, known, found = random.Random(seed), kernel.cases(target, workload), list[Case]()
    free, fixed = _free(kernel, target), kernel.compile_time_dims[target]
    highest = {d.name: max(w.dim(d.name) for w in (workload, *(c.workload for c in known))) for d in free}
    for _ in range(_ATTEMPTS * number):
        case = _like_one(kernel, rng, known, fixed)
        dims = dict(case.workload.dims)
        for d in free:
            if (turn := rng.random()) < 0.6:
                dims[d.name] = max(d.low, int(math.exp(rng.uniform(0, math.log(highest[d.name] + 1)))))
            elif turn < 0.8:
                dims[d.name] = workload.dim(d.name)
        if not all(dims.values()):  # of nothing, no distribution but the plainest can be drawn
            case = replace(case, data=kernel.data[0])
        case = _named(replace(case, workload=_with(case.workload, dims)))
        cost = None if kernel.validate(case.workload) else kernel.cost(case.workload)
        if cost is not None and cost.bytes <= MOST_BYTES and cost.flops <= _MOST_FLOPS:
            found.append(case)
            if len(found) == number:
                break
    return found


def random_case_of(kernel: Kernel, target: str, workload: Workload, seed: int) -> Case:
    """One of the workload's own sizes."""
    rng, known, fixed = random.Random(seed), kernel.cases(target, workload), kernel.compile_time_dims[target]
    for _ in range(_ATTEMPTS):
        case = _like_one(kernel, rng, known, fixed)
        case = _named(replace(case, workload=_with(case.workload, dict(workload.dims))))
        if not kernel.validate(case.workload):
            return case
    return Case("", workload, kernel.data[0])


def _like_one(kernel: Kernel, rng: random.Random, known: Sequence[Case], fixed: Collection[str]) -> Case:
    """A case whose options and distributions are those of several of a kernel's cases, each drawn on its own, and numbers
    anything around those; whose tensors are aligned each on its own, if those of one of these cases are not aligned."""
    workload, kinds = rng.choice(known).workload, list(dict.fromkeys(case.data for case in known))
    separate = all(a.shape for a in kernel.arguments if a.kind == "input")  # see `draw_inputs`
    data = _AND.join(rng.choice(kinds) for _ in range(2 if separate and rng.random() < _MIXED else 1))
    options = dict(workload.options)
    for name in sorted(options.keys() - fixed) if rng.random() < 0.5 else ():
        values = sorted({case.workload.option(name) for case in known})
        options[name] = rng.choice(values)
        if isinstance(value := options[name], float):
            least = kernel.option_min.get(name, -math.inf)
            sign = -1 if least < 0 and rng.random() < _OTHER_SIGN else 1
            options[name] = max(least, float(f"{sign * value * _FACTOR ** rng.uniform(-1, 1):.3g}"))
        elif type(value) is int and len(values) == 1:  # nobody has said which others there are
            options[name] = rng.choice((value, value + 1, 2 * value, int(max(value - 1, kernel.option_min.get(name, 0)))))
    misaligned = any(case.offset for case in known) and rng.random() < 0.5
    offset = tuple(rng.choice(_OFFSETS) for _ in range(_TENSORS)) if misaligned else 0
    return Case("", replace(workload, options=tuple(options.items())), data, offset)


def draw_inputs(kernel: Kernel, case: Case, generator: torch.Generator) -> Tensors:
    """The inputs of a case. Of two distributions every item along the outermost axis has one, where every tensor of several
    axes has such an axis of its own: these are independent problems."""
    drawn = [kernel.inputs(case.workload, data, generator) for data in case.data.split(_AND)]
    found = dict(drawn[0])
    tensors = [(a, t) for a in kernel.arguments if a.kind == "input" and (t := found.get(a.name)) is not None]
    several = [(a, t) for a, t in tensors if t.ndim > 1]
    outermost = {a.shape[:1] for a, _ in several}
    shared = len(outermost) == 1 and () not in outermost  # what has no stated shape may hang together in any way
    if len(drawn) == 1 or not shared or any(0 in t.stride() or not t.is_floating_point() for _, t in several):
        return found
    (dimension,) = outermost
    for a, t in tensors:
        if a.shape[:1] == dimension and (other := drawn[1][a.name]) is not None:
            t[1::2] = other[1::2]
    return found


def simpler(kernel: Kernel, target: str, case: Case) -> Iterator[Case]:
    """Cases that ask less than this one: of fewer elements, of plain data, aligned, without options."""
    own, options = dict(case.workload.dims), dict(case.workload.options)
    for d in _free(kernel, target):
        size, least = own[d.name], max(d.low, 1)
        for fewer in dict.fromkeys((least, *(size - (size >> k) for k in range(1, size.bit_length())))):
            if least <= fewer < size:
                yield _named(replace(case, workload=_with(case.workload, {**own, d.name: fewer})))
    plain = (kernel.data[0], *case.data.split(_AND)) if _AND in case.data else kernel.data[:1]
    for data in dict.fromkeys(plain):
        if data != case.data:
            yield _named(replace(case, data=data))
    if case.offset:
        yield _named(replace(case, offset=0))
    if isinstance(case.offset, tuple):
        for i in (i for i, elements in enumerate(case.offset) if elements):
            yield _named(replace(case, offset=(*case.offset[:i], 0, *case.offset[i + 1 :])))
    for name, value in kernel.example(target).options:
        if name not in kernel.compile_time_dims[target] and options[name] != value:
            workload = Workload.of(own, case.workload.dtype, {**options, name: value})
            yield _named(replace(case, workload=workload))


def case_text(case: Case) -> str:
    """As `parse_case` reads it back."""
    offset = case.offset if isinstance(case.offset, int) else ".".join(map(str, case.offset))
    further = (f",offset={offset}" if offset else "") + (f",far={case.far}" if case.far else "")
    return f"{case.workload.key},data={case.data}{further}"


def is_case_text(name: str) -> bool:
    """Whether a case of that name is none of the kernel's own, but drawn, made smaller or named by a user."""
    return "data=" in name


def parse_case(kernel: Kernel, target: str, text: str) -> Case:
    """Raises UsageError or UnknownNameError."""
    parts = [part.strip() for part in text.split(",")]
    names = ("data=", "offset=", "far=")
    own = dict(part.split("=", 1) for part in parts if part.startswith(names))
    workload = kernel.workload(target, ",".join(p for p in parts if not p.startswith(names)))
    data, offsets = own.get("data", kernel.data[0]), own.get("offset", "0").split(".")
    for name in data.split(_AND):
        if name not in kernel.data:
            raise UnknownNameError(f"distribution of kernel {kernel.name}", name, kernel.data)
    if not all(o.isascii() and o.isdecimal() for o in offsets):
        raise UsageError(f"case {text!r}: offset {own['offset']!r} is neither a number of elements nor several as 0.3.1")
    offset, far = tuple(map(int, offsets)) if len(offsets) > 1 else int(offsets[0]), own.get("far", "")
    can_be_far = [a.name for a in kernel.arguments if a.stride_of is not None] or [d.name for d in kernel.dimensions]
    if far and far not in can_be_far:
        raise UnknownNameError(f"what kernel {kernel.name} can have far apart", far, can_be_far)
    return _named(Case("", workload, data, offset, far))


def _named(case: Case) -> Case:
    return replace(case, name=case_text(case))


def _free(kernel: Kernel, target: str) -> list[Dimension]:
    return [d for d in kernel.dimensions if d.name not in kernel.compile_time_dims[target]]


def _with(workload: Workload, dims: Mapping[str, int]) -> Workload:
    return replace(workload, dims=tuple(dims.items()))


WRAP = 1 << 31
"""Offsets from here on do not fit 32 bits with a sign, and from twice that on no 32 bits."""
BEYOND = 16
"""Items beyond a multiple of `WRAP` elements, in a dense far case."""


def far_cases(kernel: Kernel, target: str, workload: Workload) -> tuple[Case, ...]:
    """Cases for a candidate that has won (`evo.measure.far`). Of a kernel with stride arguments they are its own small ones,
    with one stride so large that the tensor spans 2 * WRAP elements. Of any other they are, on a GPU, the workload with so
    many items of the first free dimension that the largest tensor has some more than WRAP, and than 2 * WRAP, elements."""
    absent = {a.name for a in kernel.arguments if a.optional and not workload.option(a.name)}
    strides = [a.name for a in kernel.arguments if a.stride_of is not None and a.stride_of[0] not in absent]
    if strides:
        names = [d.name for d in _free(kernel, target)]
        own = [c for c in kernel.cases(target, workload) if not c.offset and all(c.workload.dim(n) > 1 for n in names)]
        own = sorted(own, key=lambda c: kernel.cost(c.workload).bytes)[: -(-len(own) // 2)]
        turns = ((name, own[turn % len(own) :] + own[: turn % len(own)]) for turn, name in enumerate(strides) if own)
        return tuple(_named(replace(case, far=name)) for name, cases in turns for case in cases)
    if target != "cuda" or not _free(kernel, target):
        return ()
    free, sizes, found = _free(kernel, target)[0], dict(workload.dims), list[Case]()
    shapes = [a.shape for a in kernel.arguments if free.name in a.shape and a.name not in absent]
    item = max((math.prod(sizes[n] for n in shape if n != free.name) for shape in shapes), default=0)
    for elements in (WRAP, 2 * WRAP) if item else ():
        large = _with(workload, {**sizes, free.name: -(-elements // item) + BEYOND})
        if large.dim(free.name) <= free.high and not kernel.validate(large):
            found.append(_named(Case("", large, kernel.data[0], far=free.name)))
    return tuple(found)
