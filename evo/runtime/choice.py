"""Which variant a problem takes, and of its builds (machine code for several architectures, PTX, a source), which one. The
variant is the one that was tuned at the nearest sizes.

On a GPU: machine code of its very architecture, else of an earlier one of its generation (sm_80 runs on 8.6), the latest
such; else PTX or a source, the latest that it runs. On a CPU: code that uses the most of its instructions.
Reference: CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility", "Family-Specific Features".
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import cpu
from .package import Variant, deciding, slower

_UNIT = 1e6
"""Distances are whole numbers of millionths of a doubling, so that equal ones are equal however they are computed."""

EXACT, CLOSE = ", measured at these sizes", ", the nearest that was measured"
FAR = ", the nearest, not reliably timed at such sizes"
"""Which variant serves a problem, in words, as in choice.h."""

_NEAR = 4
"""How many doublings farther than the nearest one's a variant's sizes may be in each dimension, so that it is a choice, too:
attention that is fast for one query is slow for thousands."""
_PTX = 100
"""Any machine code comes before any PTX, and before sources, which are compiled where they are to run."""


def rank_on_gpu(arch: str, capability: tuple[int, int]) -> int | None:
    """The place of code for `arch` (sm_89, compute_89, sm_90a) on a GPU of a compute capability; 0 is the best. None: it
    does not run there."""
    kind, _, digits = arch.partition("_")
    suffix = digits[-1] if digits[-1] in "af" else ""
    number = int(digits.rstrip("af"))
    older = 10 * capability[0] + capability[1] - number
    if older < 0 or (suffix == "a" and older):
        return None
    if number // 10 != capability[0] and (kind == "sm" or suffix == "f"):
        return None
    return older + (_PTX if kind == "compute" else 0)


def rank(variant: Variant, device: int) -> int | None:
    """The place of a build on a device (index of the GPU, -1: the CPU); the lowest is the best. None: it does not run there.
    A source for an architecture is right for that and all later ones, as PTX is. A library that a CPU cannot run as it is
    can be built again there, and comes last."""
    if (variant.target == "cpu") != (device < 0):
        return None
    if device >= 0:
        arch = variant.arch if variant.binary is not None else "compute_" + variant.arch.partition("_")[2]
        return rank_on_gpu(arch, torch.cuda.get_device_capability(device))
    if variant.binary is None or cpu.lacking(variant.record["needs"]):
        return 0
    return -len(variant.record["needs"]["features"]) - 1


def in_order(variants: Iterable[Variant], device: int) -> list[Variant]:
    """The variants that run on a device, the one to be taken first."""
    ranked = [(place, v) for v in variants if (place := rank(v, device)) is not None]
    return [v for _, v in sorted(ranked, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Member:
    """A problem that something was tuned at, found to be the best for, or raced at: the builds of that for a device, the one
    to be taken first; none where PyTorch was faster than what was tuned there, which was not kept, and no other is near.

    measured: in an undisturbed final on such a device, by its name, beside this release of PyTorch. slower: by what PyTorch
    was faster there; empty if it was not. how: what a race found, in words.
    """

    builds: Sequence[Variant]
    sizes: Mapping[str, int]
    measured: bool = False
    slower: str = ""
    how: str = ""


@dataclass(frozen=True)
class Family:
    """What is right for all problems of one device, dtype and sizes that are compiled in. untuned: says that nothing was
    tuned for these, and begins the reasons for which their problems are left to PyTorch; empty if something was."""

    members: Sequence[Member]
    untuned: str = ""

    def by_distance(self, sizes: Mapping[str, int]) -> list[Member]:
        """The member that was tuned nearest to a problem first: by the sum over the dimensions; of equally near ones that
        with the nearest last dimension, for what is dense in memory matters most, and so on. choice.h does the same."""
        return sorted(self.members, key=lambda m: _distance(m.sizes, sizes))

    def near(self, sizes: Mapping[str, int]) -> list[Member]:
        """The nearest member, and behind it those that are `_NEAR`."""
        nearest, *others = self.by_distance(sizes)
        return [nearest, *(m for m in others if _is_near(m.sizes, sizes, factors(nearest.sizes, sizes)))]


def is_measured(member: Member, sizes: Mapping[str, int]) -> bool:
    """Whether a member's own measurement decides for a problem."""
    return member.measured and bucket_of(member.sizes) == bucket_of(sizes)


def bucket_of(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Problems of one bucket are served as the first of them that was measured: sizes to half a doubling, and whether they
    are whole vectors: where rows begin between vectors, other code runs, of PyTorch, too. choice.h does the same."""
    return tuple(2 * int(2 * math.log2(max(n, 1)) + 0.5) + (n % 8 == 0) for n in sizes.values())


def member_of(builds: Sequence[Variant], device: int, point: Mapping[str, Any], sizes: Mapping[str, int]) -> Member:
    """point: of what the first of the builds won. sizes: of a problem that it fits, which may ask for fewer outputs."""
    record = {**builds[0].record, **point}
    here = cpu.model() if device < 0 else torch.cuda.get_device_name(device)
    measured = record.get("record", {}).get("device") == here and deciding(record) is not None
    measured = measured and _release(builds[0].beside) == _release(torch.__version__)
    asked = {n: sizes[n] for n in builds[0].package.unasked}
    return Member(builds, {**record["workload"]["dims"], **asked}, measured, slower(record) if measured else "")


def _release(version: str) -> list[str]:
    """2.11 of 2.11.0+cu130: another is another competitor."""
    return version.split(".")[:2]


def members_of(
    variants: Iterable[Variant], device: int, sizes: Mapping[str, int], prefer_more: bool, serve_slower: bool
) -> list[Member]:
    """The variants by what they were tuned for, and were the best for. sizes: of a problem that all of them fit. Where
    variants with and without outputs that it does not ask for were tuned for the same, those that were measured to be faster
    than PyTorch are taken; of both such, or neither, those with them if `prefer_more`. Where PyTorch was faster than what is
    not here, the nearest variants are; with `serve_slower` as such of a problem that nobody measured."""
    groups: dict[tuple[int, ...], list[tuple[Variant, Mapping[str, Any]]]] = {}
    for v in in_order(variants, device):
        for point in v.points:
            groups.setdefault(tuple(point["workload"]["dims"].values()), []).append((v, point))
    every = list[Member]()
    for group in groups.values():
        member = member_of([v for v, _ in group], device, group[0][1], sizes)
        timed = [v for v, point in group if v.was_timed_at(point)]
        if serve_slower and group[0][0] not in timed:
            member = replace(member, measured=False, slower="")
        every.append(replace(member, builds=timed))
    known, found = [m for m in every if m.builds], dict[tuple[int, ...], list[Member]]()

    def suits(m: Member) -> bool:
        return m.builds[0].gives_more(sizes) == prefer_more

    for m in every:
        if not m.builds:
            near = (k for k in known if _is_near(k.sizes, m.sizes))
            nearest = min(near, key=lambda k: (_distance(k.sizes, m.sizes), not suits(k)), default=m)
            m = replace(m, builds=nearest.builds)
        found.setdefault(tuple(m.sizes.values()), []).append(m)

    def merit(m: Member) -> tuple[bool, bool, bool]:
        return m.measured and not m.slower, bool(m.builds), bool(m.builds) and suits(m)

    return [max(alike, key=merit) for alike in found.values()]


def factors(own: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, float]:
    """How far sizes are from a variant's own, by dimension: in doublings."""
    return {d: abs(math.log2(max(n, 1)) - math.log2(max(sizes[d], 1))) for d, n in own.items()}


def _is_near(own: Mapping[str, int], sizes: Mapping[str, int], allowed: Mapping[str, float] | None = None) -> bool:
    """Whether sizes are `_NEAR` a variant's own, or as much farther than is allowed, by dimension."""
    return all(f <= _NEAR + (allowed[d] if allowed else 0) for d, f in factors(own, sizes).items())


def _distance(own: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    each = [int(_UNIT * f + 0.5) for f in factors(own, sizes).values()]
    return (sum(each), *reversed(each))
