"""Is a variant right? The frontend's cases, random inputs and edge cases, against PyTorch and float64: what was compiled on
this machine is tried before it serves a call, and `python -m PACKAGE check` asks of every variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import tolerance as tolerance_rule
from .cpu import Library
from .cuda import CudaCall, Function
from .package import Package, Unavailable

Call = Library | CudaCall
Loaded = Library | Function
Table = dict[tuple[Any, ...], Call | str]
"""Dispatch, or what stands in for it in a trial."""

_FREE_SIZE = 64
"""What sizes that are not compiled in are at most in a trial."""


class OneVariant(Table):
    """A table of one variant only."""

    def __init__(self, loaded: Loaded, retire: Callable[[int, int, str], None]) -> None:
        super().__init__()
        self._loaded, self._retire = loaded, retire

    def __missing__(self, key: tuple[Any, ...]) -> Call | str:
        variant = self._loaded.variant
        sizes = dict(zip((d["name"] for d in variant.package.dimensions), key[2:], strict=True))
        if any(sizes[n] != variant.sizes[n] for n in variant.fixed):
            return "other sizes are compiled in"
        try:
            return self._loaded.call(sizes, self._retire)
        except Unavailable as reason:
            return str(reason)


def try_out(frontend: Any, loaded: Loaded, place: torch.device) -> None:
    """To be called in a thread of its own. Raises Unavailable for a variant that is wrong or that no case tries; what
    PyTorch raises, as where no memory is left."""

    def failed(_variant: int, _device: int, reason: str) -> None:
        raise Unavailable(reason)

    variant, table = loaded.variant, OneVariant(loaded, failed)
    sizes = {n: size if n in variant.fixed else min(size, _FREE_SIZE) for n, size in variant.sizes.items()}
    tried = False
    with torch.no_grad():
        for name, args in frontend.cases(sizes, getattr(torch, variant.dtype), place, 0):
            own = frontend.served(table, *args)
            if own is not None:
                tried = True
                reason = compare(own, frontend.ORIGINAL(*args), frontend.exact(*args), variant.package)[2]
                if reason:
                    raise Unavailable(f"its results are not PyTorch's ({name}: {reason})")
    if not tried:
        raise Unavailable("no case could be tried")


@dataclass(frozen=True)
class Verdict:
    """What was found out about one case. `path`: what ran. `reason`: why it is refused; empty if it is right."""

    case: str
    path: str
    error: float
    """Infinite where the result is NaN and should not be."""
    torch_error: float
    reason: str

    @property
    def on_variant(self) -> bool:
        return self.path.startswith("variant")


def verdicts(frontend: Any, index: int, seed: int) -> Iterator[Verdict]:
    """Of the frontend's cases for one variant, with no other one allowed to step in."""
    dispatch, variant = frontend.DISPATCH, frontend.DISPATCH.package.variants[index]
    place = torch.device(variant.target, 0)
    with dispatch.only(index), torch.no_grad():
        for name, args in frontend.cases(dict(variant.sizes), getattr(torch, variant.dtype), place, seed):
            own, original, exact = frontend.SUBJECT(*args), frontend.ORIGINAL(*args), frontend.exact(*args)
            yield Verdict(name, frontend.explain(*args), *compare(own, original, exact, dispatch.package))


def compare(
    own: torch.Tensor, original: torch.Tensor, exact: torch.Tensor, package: Package
) -> tuple[float, float, str]:
    """(largest error, PyTorch's largest error, why `own` is refused)."""
    forms = [(t.shape, t.dtype, t.device, t.stride()) for t in (own, original)]
    if forms[0] != forms[1]:
        return 0.0, 0.0, f"{own.dtype} {tuple(own.shape)} is not the form of PyTorch's result"
    tolerance = package.kernel["tolerance"][str(own.dtype).removeprefix("torch.")]
    numbers = (tolerance["atol"], tolerance["rtol"], tolerance["torch_factor"])
    wanted = tolerance_rule.expected("result", exact, original, own.dtype, numbers)
    error, reason = tolerance_rule.compare(own, wanted)
    return math.inf if error is None else error, wanted.torch_error, reason
