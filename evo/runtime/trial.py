"""Is a variant right? The frontend's cases, random inputs and edge cases, against PyTorch and float64: what was compiled on
this machine is tried before it serves a call, and `python -m PACKAGE check` asks of every variant."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from . import tolerance as tolerance_rule
from .cpu import CpuCall
from .cuda import CudaCall
from .package import Busy, Unavailable, Variant

__all__ = ["Call", "OneVariant", "Table", "Trial", "Verdict", "apart", "compare", "first_fault", "verdicts"]

Call = CpuCall | CudaCall
Table = dict[tuple[Any, ...], Call | str]
"""Dispatch, or what stands in for it in a trial."""

_T = TypeVar("_T")
_FREE_SIZE = 64
"""What sizes that are not compiled in are at most in a trial."""


@dataclass(frozen=True)
class Trial:
    """What frontend.py gives to try a variant with.

    cases(sizes, dtype, device, seed): calls, by name; those that the variant is not for are left out
    served(table, *args): the result of what `table` has for a call; None if that is to be left to PyTorch
    original, exact: of the same arguments, PyTorch's result and the one in float64
    """

    cases: Callable[[dict[str, int], torch.dtype, torch.device, int], Iterator[tuple[str, tuple[Any, ...]]]]
    served: Callable[..., torch.Tensor | None]
    original: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]


class OneVariant(Table):
    """A table of one variant only. make: its call for sizes."""

    def __init__(self, variant: Variant, names: Sequence[str], make: Callable[[dict[str, int]], Call]) -> None:
        super().__init__()
        self._variant, self._names, self._make = variant, names, make

    def __missing__(self, key: tuple[Any, ...]) -> Call | str:
        sizes = dict(zip(self._names, key[2:], strict=True))
        if any(sizes[n] != self._variant.sizes[n] for n in self._variant.fixed):
            return "other sizes are compiled in"
        try:
            return self._make(sizes)
        except Unavailable as reason:
            return str(reason)


def first_fault(
    trial: Trial, table: OneVariant, variant: Variant, place: torch.device, tolerance: Mapping[str, Any]
) -> str:
    """What is wrong with a variant; empty if it is right. To be asked in a thread of its own (`apart`). Raises
    Unavailable."""
    sizes = {n: size if n in variant.fixed else min(size, _FREE_SIZE) for n, size in variant.sizes.items()}
    tried = 0
    try:
        with torch.no_grad():
            for name, args in trial.cases(sizes, getattr(torch, variant.dtype), place, 0):
                own = trial.served(table, *args)
                if own is None:
                    continue
                tried += 1
                reason = compare(own, trial.original(*args), trial.exact(*args), tolerance)[2]
                if reason:
                    return f"{name}: {reason}"
    except Exception as error:  # PyTorch's: no memory left, for instance
        raise Unavailable(f"it cannot be tried ({type(error).__name__}: {str(error).partition(chr(10))[0]})") from error
    return "" if tried else "no case could be tried"


def apart(work: Callable[[], _T]) -> _T:
    """What `work` returns or raises, in a new thread: without the modes, streams and settings of the caller's. Raises
    Busy where there can be no thread."""
    found: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Busy(f"no thread can be started ({error})") from error
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


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
    """Of the frontend's cases for one variant, with no other one allowed to step in. Raises Unavailable."""
    dispatch, variant = frontend.DISPATCH, frontend.DISPATCH.package.variants[index]
    device = dispatch.device_of(index)
    place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    with dispatch.only(index), torch.no_grad():
        for name, args in frontend.cases(dict(variant.sizes), getattr(torch, variant.dtype), place, seed):
            own, original, exact = frontend.SUBJECT(*args), frontend.ORIGINAL(*args), frontend.exact(*args)
            verdict = compare(own, original, exact, dispatch.package.tolerance)
            yield Verdict(name, frontend.explain(*args), *verdict)


def compare(
    own: torch.Tensor, original: torch.Tensor, exact: torch.Tensor, tolerances: Mapping[str, Any]
) -> tuple[float, float, str]:
    """(largest error, PyTorch's largest error, why `own` is refused)."""
    forms = [(t.shape, t.dtype, t.device, t.stride()) for t in (own, original)]
    if forms[0] != forms[1]:
        return 0.0, 0.0, f"{own.dtype} {tuple(own.shape)} is not the form of PyTorch's result"
    tolerance = tolerances[str(own.dtype).removeprefix("torch.")]
    numbers = (tolerance["atol"], tolerance["rtol"], tolerance["torch_factor"])
    wanted = tolerance_rule.expected("result", exact, original, own.dtype, numbers)
    error, reason = tolerance_rule.compare(own, wanted)
    return math.inf if error is None else error, wanted.torch_error, reason
