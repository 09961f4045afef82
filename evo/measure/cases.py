"""Gate cases as text, drawn at random from a kernel's own statement, counted by kind, and made smaller.

A kernel's cases are where its author looked; random ones are where nobody has. What a search timed may be called with any
other size, option, distribution or alignment that the statement allows. Cases that a finalist always meets come before the
random ones: of a kind that the kernel's own cases lack, and at the end of each dimension.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evo.errors import KernelError, UnknownNameError, UsageError
from evo.problem import derived
from evo.problem.data import KINDS_OF_NON_FINITE
from evo.problem.kernel import Case, Dimension, Kernel, Tensors, Workload
from evo.problem.repair import is_legal, quotients, repaired, resized, sized, tied_sizes
from evo.targets import find_target

if TYPE_CHECKING:
    import torch

_ATTEMPTS = 12
"""Draws for each case; not every one can be repaired."""
_OFFSETS = (0, 0, 0, 1, 2, 3, 4, 5, 8)
_TENSORS = 4
"""The first of a case, so many, have an offset of their own; others share theirs."""
_MIXED = 0.25
"""The share of cases with problems of two distributions side by side."""
_FACTOR = 4
"""Numbers among the options are up to so many times as large, or as small, as those of a kernel's cases."""
_OTHER_SIGN = 0.25
"""The share of numbers with the other sign, among the options that `option_min` does not keep from it."""
MOST_BYTES, _MOST_FLOPS = 1 << 22, 1 << 27
"""The most that one case may cost, so that a float64 reference on a CPU takes milliseconds."""
_END_BYTES, _LARGE_BYTES = 1 << 26, 1 << 28
"""The most for a case at the end of a dimension, on a GPU: as a rule, and where fewer would not do for `COUNTER`."""
COUNTER = (1 << 16) + 65
"""A dimension that may be longer has one case that is: a counter of 16 bits wraps around. Where that is too large for a
finalist, the winner has one with content at both ends alone (`evo.measure.far`)."""
WRAP = 1 << 31
"""Offsets from here on do not fit 32 bits with a sign, and from twice that on no 32 bits."""
BEYOND = 16
"""Items beyond a multiple of `WRAP` elements, in a dense far case."""
_MOST_CALLS = 1 << 13
"""Calls of PyTorch's functions, at most, by a reference that loops over items: each takes microseconds, whatever it does."""
_PROBED = 4
"""Further items by which this is found."""
_BESIDE = (3, 1)
"""Sizes of the other dimensions there: of one column, much that is wrong does not show."""
_SPECIAL = 0.5
"""The share of cases with a dimension of a size that a template may have a path of its own for."""
_AND = "+"


def random_cases(kernel: Kernel, target: str, workload: Workload, seed: int, number: int) -> list[Case]:
    """Draws so many cases, or fewer where few draws are legal; the first are those of `required_cases`, however many.

    Sizes that are not compiled in, or quotients of those that have to be multiples of others (`Kernel.multiples`), are
    log-uniform up to the workload's own or the largest of the kernel's cases. In half of all cases one of them is special,
    and may be anything up to the end of its dimension, with less of the others. What `validate` refuses is repaired. The
    rest is as `_like_one` has it."""
    rng, known, fixed = random.Random(seed), kernel.cases(target, workload), kernel.compile_time_dims[target]
    free = free_dims(kernel, target)
    shapes = [quotients(kernel, fixed, w) for w in (workload, *(c.workload for c in known))]
    highest = {d.name: max(dims[d.name] for dims in shapes) for d in free}
    special = {d.name: _special_sizes(kernel, target, workload, d) for d in free}
    decks: dict[str, list[int]] = {d.name: [] for d in free}
    found = required_cases(kernel, target, workload)
    for _ in range(_ATTEMPTS * (number - len(found))):
        case = _like_one(kernel, rng, known, fixed)
        dims = quotients(kernel, fixed, case.workload)
        for d in free:
            if (turn := rng.random()) < 0.6:
                dims[d.name] = max(min(d.low, highest[d.name]), int(math.exp(rng.uniform(0, math.log(highest[d.name] + 1)))))
            elif turn < 0.8:
                dims[d.name] = shapes[0][d.name]
        chosen = rng.choice(free).name if free and rng.random() < _SPECIAL else ""
        if chosen:  # each in turn, in an order of the seed's
            decks[chosen] = decks[chosen] or [n for sizes in special[chosen] for n in rng.sample(sizes, len(sizes))]
            dims[chosen] = decks[chosen].pop()
        made = _small(kernel, target, resized(kernel, fixed, case.workload, dims), chosen, MOST_BYTES)
        if made is None:
            continue
        if not all(size for _, size in made.dims):  # of nothing, no distribution but the plainest can be drawn
            case = replace(case, data=kernel.data[0])
        found.append(named(replace(case, workload=made)))
        if len(found) == number:
            break
    return found


def _small(kernel: Kernel, target: str, workload: Workload, about: str, most_bytes: int) -> Workload | None:
    """The workload, made smaller until it costs at most `most_bytes` and as many operations as belong to them: the largest
    dimension that is not compiled in is halved each time, the one that the case is about only when all others are at their
    least. Sizes are repaired. None where no legal workload is that small."""
    fixed = kernel.compile_time_dims[target]
    lows = {d.name: max(1, d.low) for d in free_dims(kernel, target)}
    dims = quotients(kernel, fixed, workload)
    while True:
        made = repaired(kernel, resized(kernel, fixed, workload, dims), pinned=fixed, about=(about,) if about else ())
        if made is None or _affordable(kernel, made, most_bytes):
            return made
        shorter = [n for n, low in lows.items() if dims[n] > low and n != about] or [about]
        longest = max(shorter, key=lambda n: dims.get(n, 0))
        if dims.get(longest, 0) <= lows.get(longest, 0):
            return None
        dims[longest] = max(lows[longest], dims[longest] // 2)


def _affordable(kernel: Kernel, workload: Workload, most_bytes: int) -> bool:
    cost = kernel.cost(workload)
    return cost.bytes <= most_bytes and cost.flops <= _MOST_FLOPS * (most_bytes // MOST_BYTES)


def _special_sizes(kernel: Kernel, target: str, workload: Workload, dimension: Dimension) -> tuple[list[int], list[int]]:
    """Sizes that templates have paths of their own for, and those beside them, up to the longest that is affordable: the
    less likely and the likeliest."""
    longest = _longest(kernel, target, workload, dimension, 1, MOST_BYTES)
    likely = {2**k for k in range(5, 32)} | {*range(1024, 16385, 1024)} | {1000 * k for k in range(1, 11)}
    found = {2**k + step for k in range(32) for step in (-1, 0, 1)}
    found |= {*range(256, 8193, 256), *(1024 * k for k in range(17, 65))}
    found |= {digit * 10**k for k in range(7) for digit in (1, 2, 3, 5)}
    for w in (workload, *(w for of_target in kernel.workloads.values() for w in of_target)):
        own = quotients(kernel, kernel.compile_time_dims[target], w)[dimension.name]
        found |= {own, own - 1, own + 1, own + 8, 2 * own, 2 * own + 1, 3 * own}
    within = range(max(1, dimension.low), longest + 1)
    return sorted(n for n in found - likely if n in within) or [within.start], sorted(n for n in likely if n in within)


def _longest(kernel: Kernel, target: str, workload: Workload, dimension: Dimension, beside: int, most_bytes: int) -> int:
    """The largest size that the range of a free dimension and so many bytes allow beside little of the others."""
    calls = _calls_each(kernel, target, workload, dimension)

    def fits(size: int) -> bool:
        made = _little(kernel, target, workload, beside, {dimension.name: size})
        within = all(made.dim(d.name) <= d.high for d in kernel.dimensions)
        return within and size * calls <= _MOST_CALLS and _affordable(kernel, made, most_bytes)

    low, high = 0, dimension.high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _calls_each(kernel: Kernel, target: str, workload: Workload, dimension: Dimension) -> float:
    """How many more of PyTorch's functions the reference calls for each further item of a dimension: 0 where it does not
    loop over them."""
    import torch
    from torch.overrides import TorchFunctionMode  # a TorchDispatchMode would import PyTorch's compiler, for seconds

    class Counted(TorchFunctionMode):
        number = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += 1
            return func(*args, **(kwargs or {}))

    calls, least = list[int](), max(1, dimension.low)
    for size in (least, least + _PROBED):
        made = _little(kernel, target, workload, 1, {dimension.name: size})
        if not is_legal(kernel, made):
            return 0.0
        try:
            inputs = kernel.inputs(made, kernel.data[0], torch.Generator().manual_seed(0))
            with Counted() as counted:
                kernel.reference(inputs, made)
        except (KernelError, RuntimeError):  # a gate tells of it
            return 0.0
        calls.append(counted.number)
    return (calls[1] - calls[0]) / _PROBED


def _little(kernel: Kernel, target: str, workload: Workload, size: int, chosen: Mapping[str, int]) -> Workload:
    """The workload with so little of each free dimension but those chosen."""
    little = {d.name: min(max(d.low, size), d.high) for d in free_dims(kernel, target)}
    return resized(kernel, kernel.compile_time_dims[target], workload, {**little, **chosen})


def required_cases(kernel: Kernel, target: str, workload: Workload) -> list[Case]:
    """The cases that a finalist meets whatever is drawn: derived ones of the kinds that the kernel's own lack, and one at
    the end of each free dimension, if none of its own is that long."""
    known, fixed = kernel.cases(target, workload), kernel.compile_time_dims[target]
    wanted = {*_wanted_kinds(kernel, target, workload)}.difference(*_kinds_of_all(kernel, target, workload, known))
    found = []
    spare = derived.cases(kernel, target, workload) if wanted else ()
    for case, kinds in zip(spare, _kinds_of_all(kernel, target, workload, spare), strict=True):
        if wanted & kinds:
            found.append(named(case))
            wanted -= kinds
    for d in free_dims(kernel, target):
        met = max(quotients(kernel, fixed, c.workload)[d.name] for c in known)
        if (end := _end(kernel, target, workload, d)) and quotients(kernel, fixed, end)[d.name] > met:
            found.append(named(Case("", end, kernel.data[0])))
    return list(dict.fromkeys(found))


def _end(kernel: Kernel, target: str, workload: Workload, dimension: Dimension) -> Workload | None:
    """A workload with as much of a dimension as is affordable."""
    shared = find_target(target).shares_cores
    most_bytes = MOST_BYTES if shared else _END_BYTES
    for beside in _BESIDE:
        longest = _longest(kernel, target, workload, dimension, beside, most_bytes)
        if longest >= COUNTER:
            break
    if longest < COUNTER and not shared:
        longest = max(longest, min(COUNTER, _longest(kernel, target, workload, dimension, beside, _LARGE_BYTES)))
    made = _little(kernel, target, workload, beside, {dimension.name: longest})
    return _small(kernel, target, made, dimension.name, 4 * most_bytes) if longest else None  # with what a repair adds


def far_cases(kernel: Kernel, target: str, workload: Workload) -> tuple[Case, ...]:
    """The cases for a candidate that has won. Of a kernel with stride arguments they are its own small ones, with one stride
    so large that the tensor spans 2 * WRAP elements. Of any other they are, on a GPU, the workload with so many items of
    the first free dimension that the largest tensor has some more than WRAP, and than 2 * WRAP, elements; or that a
    counter of 16 bits wraps around, where no finalist meets that."""
    free = [d.name for d in free_dims(kernel, target)]
    absent = {a.name for a in kernel.arguments if a.optional and not workload.option(a.name)}
    strides = [a.name for a in kernel.arguments if a.stride_of is not None and a.stride_of[0] not in absent]
    if strides:
        own = [c for c in kernel.cases(target, workload) if not c.offset and all(c.workload.dim(n) > 1 for n in free)]
        own = sorted(own, key=lambda c: kernel.cost(c.workload).bytes)[: -(-len(own) // 2)]
        turns = ((name, own[turn % len(own) :] + own[: turn % len(own)]) for turn, name in enumerate(strides) if own)
        return tuple(named(replace(case, far=name)) for name, cases in turns for case in cases)
    shapes = [a.shape for a in kernel.arguments if {*free[:1]} & {*a.shape} and a.name not in absent]
    item = max((math.prod(workload.dim(n) for n in shape if n != free[0]) for shape in shapes), default=0)
    if find_target(target).shares_cores or not item:
        return ()
    sizes = [-(-elements // item) + BEYOND for elements in (WRAP, 2 * WRAP)]
    if item * COUNTER < WRAP and all(c.workload.dim(free[0]) < COUNTER for c in required_cases(kernel, target, workload)):
        sizes.append(COUNTER)  # made where there is no memory for the others
    large = (sized(workload, {free[0]: size}) for size in sizes)
    return tuple(named(Case("", w, kernel.data[0], far=free[0])) for w in large if is_legal(kernel, w))


def random_case_of(kernel: Kernel, target: str, workload: Workload, seed: int) -> Case:
    """One of the workload's own sizes."""
    rng, known, fixed = random.Random(seed), kernel.cases(target, workload), kernel.compile_time_dims[target]
    for _ in range(_ATTEMPTS):
        case = _like_one(kernel, rng, known, fixed)
        case = named(replace(case, workload=sized(case.workload, dict(workload.dims))))
        if is_legal(kernel, case.workload):
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
    fixed, options = kernel.compile_time_dims[target], dict(case.workload.options)
    own = quotients(kernel, fixed, case.workload)
    for d in free_dims(kernel, target):
        size, least = own[d.name], max(d.low, 1)
        for fewer in dict.fromkeys((least, *(size - (size >> k) for k in range(1, size.bit_length())))):
            if least <= fewer < size:
                asked = resized(kernel, fixed, case.workload, {d.name: fewer})
                made = repaired(kernel, asked, pinned=fixed, about=(d.name,))
                if made is not None and math.prod(dict(made.dims).values()) < math.prod(dict(case.workload.dims).values()):
                    yield named(replace(case, workload=made))
    plain = (kernel.data[0], *case.data.split(_AND)) if _AND in case.data else kernel.data[:1]
    for data in dict.fromkeys(plain):
        if data != case.data:
            yield named(replace(case, data=data))
    if case.offset:
        yield named(replace(case, offset=0))
    if isinstance(case.offset, tuple):
        for i in (i for i, elements in enumerate(case.offset) if elements):
            yield named(replace(case, offset=(*case.offset[:i], 0, *case.offset[i + 1 :])))
    for name, value in kernel.example(target).options:
        if name not in fixed and options[name] != value:
            workload = replace(case.workload, options=tuple({**options, name: value}.items()))
            if is_legal(kernel, workload):
                yield named(replace(case, workload=workload))


def case_text(case: Case) -> str:
    """The case in words, as `parse_case` reads it back."""
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
    return named(Case("", workload, data, offset, far))


def named(case: Case) -> Case:
    return replace(case, name=case_text(case))


def free_dims(kernel: Kernel, target: str) -> list[Dimension]:
    """The dimensions that are not compiled in; one that has to be a multiple of another may have a quotient of 1."""
    fixed = kernel.compile_time_dims[target]
    tied = tied_sizes(kernel, fixed)
    return [replace(d, low=min(d.low, 1)) if d.name in tied else d for d in kernel.dimensions if d.name not in fixed]


# -- kinds of cases ---------------------------------------------------------------------------------------------------

_KINDS_OF_DATA = ("nan", "inf", "outliers")
_MANY = 512
"""Rows of a case of many."""
_OUTLIER = 32
"""An outlier is so many times the median size of a tensor's numbers, or of those of the kernel's first distribution."""
_FEW = 6 * KINDS_OF_NON_FINITE
"""Size of free dimensions, at most, where a distribution is judged by what it draws; a few more, as `draw` goes by them."""


def count_kinds(kernel: Kernel, target: str, workload: Workload) -> dict[str, int]:
    """How many of a kernel's own cases, and of those that every finalist meets, are of each kind that its arguments ask for.

    The kinds are: data with NaN, Inf or outliers; one row and many, where rows are all free dimensions but the innermost; a
    free dimension that is no power of two; a misaligned address; each switch among the options on and off."""
    cases = (*kernel.cases(target, workload), *required_cases(kernel, target, workload))
    found = Counter(kind for kinds in _kinds_of_all(kernel, target, workload, cases) for kind in kinds)
    return {kind: found[kind] for kind in _wanted_kinds(kernel, target, workload)}


def missing_kinds(kernel: Kernel, target: str, workloads: Sequence[Workload]) -> dict[str, list[str]]:
    """Kinds of cases that the kernel's arguments ask for and no gate of a workload has, by the workload's key; without
    workloads that lack none."""
    missing = {w.key: [kind for kind, number in count_kinds(kernel, target, w).items() if not number] for w in workloads}
    return {key: kinds for key, kinds in missing.items() if kinds}


def _wanted_kinds(kernel: Kernel, target: str, workload: Workload) -> list[str]:
    import torch

    fixed, free, wanted = kernel.compile_time_dims[target], free_dims(kernel, target), list[str]()
    inputs = [a for a in kernel.arguments if a.kind == "input" and (not a.optional or workload.option(a.name))]
    if any(getattr(torch, a.dtype_of(workload)).is_floating_point for a in inputs):
        wanted += _KINDS_OF_DATA
    rows = free[:-1] or free
    if rows:
        wanted += ["one row"] if all(d.low <= 1 for d in rows) else []
        wanted += ["many rows"] if math.prod(d.high for d in rows) >= _MANY else []
        wanted += ["no power of two"]
    wanted += ["misaligned"] if inputs else []
    switches = [n for n, value in workload.options if isinstance(value, bool) and n not in fixed]
    return wanted + [f"{n}={on}" for n in switches for on in ("true", "false")]


def _kinds_of_all(kernel: Kernel, target: str, workload: Workload, cases: Sequence[Case]) -> Iterator[set[str]]:
    fixed, free = kernel.compile_time_dims[target], free_dims(kernel, target)
    of_data = _kinds_of_data(kernel, target, cases)
    rows = [d.name for d in free[:-1] or free]
    for case in cases:
        dims = quotients(kernel, fixed, case.workload)
        kinds, number = {*of_data.get(case, ())}, math.prod(dims[n] for n in rows)
        kinds |= {kind for kind, so in (("one row", number == 1), ("many rows", number >= _MANY)) if so and rows}
        kinds |= {"no power of two"} if any(dims[d.name] & (dims[d.name] - 1) for d in free) else set()
        kinds |= {"misaligned"} if case.offset else set()
        yield kinds | {f"{n}={str(on).lower()}" for n, on in case.workload.options if isinstance(on, bool)}


def _kinds_of_data(kernel: Kernel, target: str, cases: Sequence[Case]) -> dict[Case, set[str]]:
    """The kinds of the inputs that are drawn for each case, as far as one of few elements shows it."""
    import torch

    from evo.measure.gate import threads_limited  # which needs PyTorch

    found: dict[Case, set[str]] = {}
    judged: dict[Case, Case] = {}
    fixed = kernel.compile_time_dims[target]
    for case in (c for c in cases if all(size for _, size in c.workload.dims)):
        dims = quotients(kernel, fixed, case.workload)
        few = {n: size if n in fixed else min(size, _FEW + size % KINDS_OF_NON_FINITE) for n, size in dims.items()}
        made = repaired(kernel, resized(kernel, fixed, case.workload, few), pinned=fixed)
        judged[case] = Case("", made or case.workload, case.data)
    usual = math.inf
    for one in sorted(dict.fromkeys(judged.values()), key=lambda c: c.data != kernel.data[0]):  # plainest first
        kinds = found[one] = set[str]()
        drawn: Tensors = {}
        with threads_limited(1), suppress(KernelError, RuntimeError):  # a gate tells of it, and the case is of no kind
            drawn = draw_inputs(kernel, one, torch.Generator().manual_seed(0))
        for t in (t.double() for t in drawn.values() if t is not None and t.is_floating_point() and t.numel()):
            sizes = t[t.isfinite()].abs()
            kinds |= {"nan"} if bool(t.isnan().any()) else set()
            kinds |= {"inf"} if bool(t.isinf().any()) else set()
            median = float(sizes.median()) if sizes.numel() else 0.0
            usual = median or 1.0 if usual == math.inf else usual
            far = sizes.numel() > 1 and float(sizes.max()) > _OUTLIER * min(usual, median or usual)
            kinds |= {"outliers"} if far else set()
    return {case: found[one] for case, one in judged.items()}
