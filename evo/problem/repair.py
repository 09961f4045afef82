"""Sizes that a kernel's `validate` takes, near others that it refuses.

`validate` says of a workload that it is wrong, not what would be right. So sizes are moved: to a multiple of another, a
divisor, the same, a product, a power of two, the ratio that the kernel's own workloads have; one at a time, then two, then
three. A dimension that has to be a multiple of another is found once for a kernel (`Kernel.multiples`): its quotient can
then be chosen as if it were a dimension, and sizes stay as diverse as they are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, permutations
from typing import TYPE_CHECKING

from evo.errors import KernelError

if TYPE_CHECKING:
    from evo.problem.kernel import Case, Kernel, Workload

_MOST_TRIES = 400
"""Calls of `validate` for one workload."""
_WIDTH = {0: 1, 1: 48, 2: 12, 3: 5}
"""The nearest of one value that are tried, by how many values are moved together."""
_NEAR = 64
"""A divisor is looked for among so many sizes below and above."""
_STEPS = 9
"""Number of times that a step to the next multiple is doubled: multiples of a multiple may be asked for."""


def is_legal(kernel: Kernel, workload: Workload) -> bool:
    """Whether each size is in its range and `validate` has nothing against them together."""
    sizes = dict(workload.dims)
    return all(d.low <= sizes[d.name] <= d.high for d in kernel.dimensions) and not kernel.validate(workload)


def repaired(
    kernel: Kernel, workload: Workload, *, pinned: Collection[str] = (), about: Collection[str] = ()
) -> Workload | None:
    """The workload, if it is legal, else a legal one that differs in few sizes and options; None if none is found. Only an
    empty one may become empty.

    pinned: dimensions and options that keep their values. about: those that are changed only where nothing else helps.
    """
    ranges = {d.name: (d.low, d.high) for d in kernel.dimensions}
    dims = {n: min(max(size, ranges[n][0]), ranges[n][1]) if n not in pinned else size for n, size in workload.dims}
    workload = replace(workload, dims=tuple(dims.items()))
    if is_legal(kernel, workload):
        return workload
    tied = tied_sizes(kernel, pinned)
    start = {**quotients(kernel, pinned, workload), **{n: v for n, v in workload.options if isinstance(v, int)}}
    start.update({n: 1 for n in tied if dims[n] and not start[n]})
    movable = [n for n in start if n not in pinned]
    others = [n for n in movable if n not in about]
    ways: list[tuple[str, ...]] = [(), *combinations(others, 1), *permutations(others, 2)]
    ways += [names for number in (1, 2, 3) for names in permutations(movable, number) if number > 2 or {*names} & {*about}]
    examples = [quotients(kernel, pinned, w) for found in kernel.workloads.values() for w in found]
    tried = {workload}
    for names in ways:
        for chosen in _moved(kernel, start, names, _WIDTH[len(names)], examples):
            options = tuple((n, chosen.get(n, value)) for n, value in workload.options)
            made = resized(kernel, pinned, replace(workload, options=options), {n: int(chosen[n]) for n in dims})
            if made not in tried:
                tried.add(made)
                if is_legal(kernel, made):
                    return made
                if len(tried) > _MOST_TRIES:
                    return None
    return None


_Chosen = Mapping[str, int]
"""The quotient or size of each dimension, the whole number or switch of each option."""


def _moved(
    kernel: Kernel, chosen: _Chosen, names: tuple[str, ...], width: int, examples: Sequence[_Chosen]
) -> Iterator[_Chosen]:
    """The choice with other values of these names, the nearest first; each is chosen beside those before it."""
    if not names:
        yield chosen
        return
    for value in _near(kernel, chosen, names[0], examples)[:width]:
        yield from _moved(kernel, {**chosen, names[0]: value}, names[1:], width, examples)


def _near(kernel: Kernel, chosen: _Chosen, name: str, examples: Sequence[_Chosen]) -> list[int]:
    """Values that a rule between sizes may ask for, the nearest first."""
    size, found = chosen[name], set[int]()
    if isinstance(size, bool):
        return [not size]
    others = {n: v for n, v in chosen.items() if n != name and v > 0 and not isinstance(v, bool)}
    terms = {*others.values(), *(a * b for a, b in combinations_with_replacement(others.values(), 2))}
    for v in (*terms, *(2**k for k in range(1, 9))):
        found |= {size // v * v, (size // v + 1) * v}
    for v in terms:
        found |= {v, size + v, abs(size - v), math.gcd(size, v), math.isqrt(v)}
        found |= {next((s for s in range(size, size - _NEAR, -1) if s > 0 and v % s == 0), 1)}
        found |= {next((s for s in range(max(size, 1), size + _NEAR) if v % s == 0), v)}
    for a, b in permutations(others.values(), 2):
        found |= {a + b, abs(a - b), a // b}
    for example in examples:
        for n, v in others.items():
            if example.get(n) and example.get(name) and example[name] * v % example[n] == 0:
                found.add(example[name] * v // example[n])
        found.add(example.get(name, size))
    found |= {1 << size.bit_length(), 1 << max(size.bit_length() - 1, 0)}
    low, high = next(
        ((max(d.low, 1), d.high) for d in kernel.dimensions if d.name == name), (kernel.option_min.get(name, 0), 2**31 - 1)
    )
    low = 1 if name in kernel.multiples else low
    return sorted((v for v in found if low <= v <= high and v != size), key=lambda v: abs(math.log2((v + 1) / (size + 1))))


# -- dimensions that are multiples of others ------------------------------------------------------------------------


def find_multiples(kernel: Kernel) -> dict[str, str]:
    """Dimensions that `validate` asks to be multiples of others, with these, as far as the kernel's workloads show it."""
    found: dict[str, str] = {}
    for workload in (w for of_target in kernel.workloads.values() for w in of_target):
        for name, of in permutations([n for n, _ in workload.dims], 2):
            size, unit = workload.dim(name), workload.dim(of)
            base = workload
            if unit == 1:  # which everything is a multiple of
                size, unit = 3 * size, 3
                base = sized(workload, {name: size, of: unit})
            if name in found or found.get(of) == name or not size or size % unit or not is_legal(kernel, base):
                continue
            steps = (unit << k for k in range(_STEPS))
            whole = [sized(base, {name: size + sign * step}) for step in steps for sign in (1, -1) if sign * step + size > 0]
            between = [sized(base, {name: size + 1}), sized(base, {name: size - 1})]
            others = (u for u in (unit + 1, *(unit * k for k in (3, 5, 7))) if size % u)  # it is a multiple of none of these
            other = [sized(base, {of: u}) for u in others]
            if not any(is_legal(kernel, w) for w in (*between, *other)) and any(is_legal(kernel, w) for w in whole):
                found[name] = of
    return found


def sized(workload: Workload, dims: Mapping[str, int]) -> Workload:
    """The workload with these sizes, and its own of the dimensions that are not named."""
    return replace(workload, dims=tuple((n, dims.get(n, size)) for n, size in workload.dims))


def tied_sizes(kernel: Kernel, pinned: Collection[str]) -> dict[str, str]:
    """`Kernel.multiples`, without those that another size must not change."""
    return {n: of for n, of in kernel.multiples.items() if n not in pinned or of in pinned}


def quotients(kernel: Kernel, pinned: Collection[str], workload: Workload) -> dict[str, int]:
    """The size of each dimension, or how many times that of the one that it has to be a multiple of."""
    tied = tied_sizes(kernel, pinned)
    return {n: size // max(1, workload.dim(tied[n])) if n in tied else size for n, size in workload.dims}


def resized(kernel: Kernel, pinned: Collection[str], workload: Workload, chosen: Mapping[str, int]) -> Workload:
    """The workload with these `quotients`, and its own of the dimensions that are not named."""
    tied, chosen = tied_sizes(kernel, pinned), {**quotients(kernel, pinned, workload), **chosen}

    def size(name: str) -> int:
        return chosen[name] * (size(tied[name]) if name in tied else 1)

    return replace(workload, dims=tuple((name, size(name)) for name, _ in workload.dims))


# -- a kernel's own cases ---------------------------------------------------------------------------------------------


def legal_cases(kernel: Kernel, target: str, workload: Workload, cases: Sequence[Case]) -> list[Case]:
    """The cases, and in place of one of a workload that is refused the nearest that is not. Raises KernelError where there
    is none: what a gate does not run must not look as if it had passed."""
    found, pinned = [], kernel.compile_time_dims[target]
    for case in cases:
        made = repaired(kernel, case.workload, pinned=pinned)
        if made is None:
            reason = kernel.validate(case.workload) or "a size is out of its range"
            raise KernelError(f"`cases` gives {case.name!r}, and {case.workload.key} is no workload of the kernel: {reason}")
        found.append(case if made == case.workload else replace(case, name=f"{case.name}, as {made}", workload=made))
    return found
