"""Which variant a problem takes, and of its builds (machine code for several architectures, PTX, a source), which one.

On a GPU: machine code of its very architecture, else of an earlier one of its generation (sm_80 runs on 8.6), the latest
such; else PTX or a source, the latest that it runs. On a CPU: code that uses the most of its instructions.
Reference: CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility", "Family-Specific Features".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from . import cpu
from .package import Variant, slower

_NEAR = 4.0
"""Doublings, summed over the dimensions."""

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
    """Those that run on a device, the one to be taken first."""
    ranked = [(place, v) for v in variants if (place := rank(v, device)) is not None]
    return [v for _, v in sorted(ranked, key=lambda pair: pair[0])]


def builds_of_nearest(variants: Sequence[Variant], sizes: Mapping[str, int], device: int) -> list[Variant]:
    """Of those that are right for a problem, the ones tuned nearest to its sizes, in order."""
    nearest = min(variants, key=lambda v: _distance(v, sizes))  # of equally near ones, that with the nearest last dimension
    return in_order((v for v in variants if v.tuned_as(nearest)), device)


def slower_there(record: Mapping[str, Any], sizes: Mapping[str, int], device: int) -> str:
    """What `slower` says of a record of the manifest, where that tells something of a problem on a device: of sizes that
    are near, and measured on its very architecture; a CPU must be the same model. Empty otherwise."""
    if sum(factors(record["workload"]["dims"], sizes).values()) > _NEAR:
        return ""
    if device < 0:
        there = record.get("record", {}).get("device") == cpu.model()
    else:
        there = rank_on_gpu(record["arch"], torch.cuda.get_device_capability(device)) == 0
    return slower(record) if there else ""


def factors(own: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, float]:
    """How far sizes are from a variant's own, by dimension: in doublings."""
    return {d: abs(math.log2(max(n, 1) / max(sizes[d], 1))) for d, n in own.items()}


def _distance(variant: Variant, sizes: Mapping[str, int]) -> tuple[float, ...]:
    """Summed over the dimensions; then of each, the last first: what is dense in memory matters most."""
    each = factors(variant.sizes, sizes)
    return (round(sum(each.values()), 6), *reversed(each.values()))
