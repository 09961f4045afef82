"""Is a variant right? The frontend's cases, random inputs and edge cases, against PyTorch and float64: what was compiled on
this machine is tried before it serves a call, and `python -m PACKAGE check` asks of every variant. Is it faster than
PyTorch? A race tells, at a problem that nobody measured.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NoReturn, TypeVar

import torch

from . import tolerance as tolerance_rule
from .cpu import Library
from .cuda import CudaCall, Function, beside_captures
from .package import Package, Unavailable, Variant
from .timing import watch

Call = Library | CudaCall
Loaded = Library | Function
Table = dict[tuple[Any, ...], Call | str]
"""Dispatch, or what stands in for it in a trial."""

_FREE_SIZE = 64
"""What sizes that are not compiled in are at most in a trial."""

_ROUNDS, _ROUNDS_ON_CPU = 5, 7
"""On a GPU the shortest counts: what disturbs a call only adds to its time. On a CPU the median of at least so many does."""
_FAR = 1.25
"""A CPU is busy where a contender's median is so many times its shortest, as in the engine's races."""
_WARM_S, _LONGEST_RACE_S = 0.05, 0.2
"""On a CPU, whose threads wake slowly at first: rounds go on for so long at least, and none begins after so long."""
_LEAD = 1.5
"""The GPU waits for so many times what the CPU takes to enqueue all rounds."""
_LONGEST_LEAD_S, _CYCLES_A_SECOND = 0.02, 2.5e9
"""What it waits at most; cycles of the fastest GPUs."""

_OTHER_SIZE = 0.7
"""The share of a random case's sizes that are not those tuned for."""
_SHIFTS = (0, 0, 1, 2, 4)
_NON_FINITE = ("NaN", "Inf", "-Inf")
_OF_ANY_DTYPE = ("normal", "constant")
_ROWS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": lambda x: x,
    "large": lambda x: x.mul_(12),
    "tiny": lambda x: x.mul_(1e-4),
    "constant": lambda x: x.copy_(x[..., :1].clone().expand_as(x)),
    "outlier": lambda x: x[..., 0].fill_(300),
    "NaN": lambda x: x[..., -1].fill_(math.nan),
    "Inf": lambda x: x[..., -1].fill_(math.inf),
    "-Inf": lambda x: x[..., -1].fill_(-math.inf),
}
"""What is made of rows, by how they are called; those `_OF_ANY_DTYPE` also of integers and of floats of 8 bits."""

_Found = TypeVar("_Found")


class OneVariant(Table):
    """A table of one variant only."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self._loaded = loaded

    def __missing__(self, key: tuple[Any, ...]) -> Call | str:
        variant = self._loaded.variant
        sizes = dict(zip((d["name"] for d in variant.package.dimensions), key[2:], strict=True))
        if not variant.fits(sizes):
            return "other sizes are compiled in"
        try:
            self[key] = self._loaded.call(sizes, _fail)
        except Unavailable as reason:
            self[key] = str(reason)
        return self[key]


def _fail(_variant: int, _device: int, reason: str) -> NoReturn:
    raise Unavailable(reason)


def apart(
    device: int, stream: torch.cuda.Stream | None, threads: int, work: Callable[[torch.device], _Found]
) -> _Found:
    """In a thread that is for it alone, without the modes and settings of the caller's: on a GPU on a stream there, also
    while graphs are captured, on a CPU by so many threads."""
    with torch.no_grad():
        if stream is None:
            torch.set_num_threads(threads)
            return work(torch.device("cpu"))
        with beside_captures(), torch.cuda.device(device), torch.cuda.stream(stream):
            return work(torch.device("cuda", device))


def try_out(frontend: Any, loaded: Loaded, place: torch.device) -> None:
    """To be called `apart`. Raises Unavailable for a variant that is wrong or that no case tries; what PyTorch raises, as
    where no memory is left."""
    variant, table = loaded.variant, OneVariant(loaded)
    sizes = {n: size if n in variant.fixed else min(size, _FREE_SIZE) for n, size in variant.sizes.items()}
    tried = False
    for name, args in frontend.cases(sizes, getattr(torch, variant.dtype), place, 0):
        own = frontend.served(table, *args)
        if own is None:
            continue
        # PyTorch takes up to two seconds to plan for a new shape: it is asked for the form, and where its error matters.
        if tried and not _judged(frontend, own, args, variant.package, exactly=True)[2]:
            continue
        tried = True
        if reason := _judged(frontend, own, args, variant.package)[2]:
            raise Unavailable(f"its results are not PyTorch's ({name}: {reason})")
    if not tried:
        raise Unavailable("no case could be tried")


def race(
    frontend: Any,
    variants: Sequence[Loaded],
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: int,
    stream: torch.cuda.Stream | None,
) -> tuple[Loaded, float, bool]:
    """The fastest variant for one problem, its time over PyTorch's, and, on a CPU, whether other programs made the times
    useless. Raises Unavailable where no variant takes the problem, or a GPU has waited for the CPU; what PyTorch raises,
    as where no memory is left.

    On a GPU the kernels' own time counts, with none of their data in its second-level cache: a wait on the stream lets the
    CPU run ahead of it. On a CPU it is the time of a call that is launched from Python.
    """

    def times(place: torch.device) -> tuple[Loaded, float, bool]:
        args = frontend.timed(dict(sizes), dtype, place, 0)
        calls = [partial(frontend.served, OneVariant(v), *args) for v in variants]
        taking = [i for i, call in enumerate(calls) if call() is not None]  # and what is done once is done: code, plans
        if not taking:
            raise Unavailable("no variant takes it")
        contenders = [partial(frontend.ORIGINAL, *args), *(calls[i] for i in taking)]
        contenders[0]()
        busy = False
        if device < 0:
            waited = watch()
            rounds = _rounds_on_cpu(contenders)
            busy = waited() or any(median(of_call) > _FAR * min(of_call) for of_call in rounds)
            original, *own = map(median, rounds)
        else:
            original, *own = map(min, rounds_on_gpu(contenders, place))
        return variants[taking[own.index(min(own))]], min(own) / original, busy

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(apart, device, stream, torch.get_num_threads(), times).result()


def rounds_on_gpu(calls: Sequence[Callable[[], object]], place: torch.device) -> list[list[float]]:
    """Milliseconds of each call in each of a few rounds, the GPU's own, with none of its data in the second-level cache.
    Raises Unavailable if the CPU was late, so that the GPU may have waited for it within a call of several kernels."""
    other_data = torch.empty(torch.cuda.get_device_properties(place).L2_cache_size, dtype=torch.uint8, device=place)
    spans = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_ROUNDS)] for _ in calls]

    def enqueue(turn: int) -> None:
        for call, of_call in zip(calls, spans, strict=True):
            begin, end = of_call[turn]
            other_data.zero_()
            begin.record()
            call()
            end.record()

    began = time.perf_counter()
    enqueue(0)
    needed_s = _ROUNDS * (time.perf_counter() - began)
    late = True
    for lead_s in (_LEAD * needed_s, 4 * _LEAD * needed_s):
        if late:
            torch.cuda.current_stream().synchronize()
            torch.cuda._sleep(int(min(lead_s, _LONGEST_LEAD_S) * _CYCLES_A_SECOND))
            for turn in range(_ROUNDS):
                enqueue(turn)
            late = spans[0][0][0].query()
    torch.cuda.current_stream().synchronize()
    if late:
        raise Unavailable("this machine's CPU was too busy to keep the GPU at work")
    return [[begin.elapsed_time(end) for begin, end in of_call] for of_call in spans]


def _rounds_on_cpu(calls: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Seconds of each call in each round."""
    found: list[list[float]] = [[] for _ in calls]
    first, spent = time.perf_counter(), 0.0
    while spent < _WARM_S or (len(found[0]) < _ROUNDS_ON_CPU and spent < _LONGEST_RACE_S):
        for call, seconds in zip(calls, found, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        spent = time.perf_counter() - first
    return found


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


def verdicts(frontend: Any, index: int, seed: int, random_cases: int = 0) -> Iterator[Verdict]:
    """Verdicts on the frontend's cases for one variant, and on so many random ones; no other variant may step in."""
    dispatch, variant = frontend.DISPATCH, frontend.DISPATCH.package.variants[index]
    place = torch.device(variant.target, 0)
    with dispatch.only(index), torch.no_grad():
        own_cases = frontend.cases(dict(variant.sizes), getattr(torch, variant.dtype), place, seed)
        for name, args in chain(own_cases, _random_cases(frontend, variant, place, seed, random_cases)):
            own = frontend.SUBJECT(*args)
            yield Verdict(name, frontend.explain(*args), *_judged(frontend, own, args, dispatch.package))


def _random_cases(
    frontend: Any, variant: Variant, place: torch.device, seed: int, number: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of random sizes, up to those that the variant was tuned for. Every other row of the first tensor, or the only
    one, is of another kind, and it starts anywhere."""
    rng = random.Random(seed)
    for turn in range(seed, seed + number):
        sizes = dict(variant.sizes)
        for name in (d["name"] for d in variant.package.dimensions if d["name"] not in variant.fixed):
            if sizes[name] > 1 and rng.random() < _OTHER_SIZE:
                sizes[name] = int(math.exp(rng.uniform(0.0, math.log(sizes[name] + 1))))
        sizes = getattr(frontend, "served_sizes", dict)(sizes)
        first, *rest = frontend.timed(sizes, getattr(torch, variant.dtype), place, turn)
        kinds = _ROWS if first.is_floating_point() and first.itemsize > 1 else _OF_ANY_DTYPE
        kind = rng.choice([k for k in kinds if first.ndim <= 2 or k not in _NON_FINITE])
        shift = rng.choice(_SHIFTS)
        moved = first.new_empty(first.numel() + shift)[shift:].view(first.shape).copy_(first)
        rows = torch.atleast_2d(moved)
        _ROWS[kind](rows[..., rng.randrange(min(2, rows.shape[-2])) :: 2, :])
        where = " ".join(f"{name}={size}" for name, size in sizes.items())
        yield f"{kind} rows, {shift} elements off, {where}", (moved, *rest)


def _judged(
    frontend: Any, own: Any, args: tuple[Any, ...], package: Package, *, exactly: bool = False
) -> tuple[float, float, str]:
    """(largest error, PyTorch's largest error, why results are refused), of a tensor or of all of a tuple.
    exactly: PyTorch's are taken to be the rounded exact ones, from which less may differ."""
    exact = frontend.exact(*args)
    original = _rounded(exact, own) if exactly else getattr(frontend, "comparable", frontend.ORIGINAL)(*args)
    moved = frontend.exact(*map(_moved, args)) if args[0].element_size() > 2 else exact
    results = zip(*(t if isinstance(t, tuple) else (t,) for t in (own, original, exact, moved)), strict=True)
    ties = frontend.ties(*args) if hasattr(frontend, "ties") else {}
    found = [
        compare(o, t, e, package, _distance(e, m), ties.get(i))
        for i, (o, t, e, m) in enumerate(results)
        if e is not None
    ]
    errors, of_torch, reasons = zip(*found, strict=True)
    return max(errors), max(of_torch), next(filter(None, reasons), "")


def _rounded(exact: Any, like: Any) -> Any:
    if isinstance(exact, tuple):
        return tuple(o if e is None else e.to(o.dtype) for e, o in zip(exact, like, strict=True))
    return exact.to(like.dtype)


def _moved(arg: Any) -> Any:
    """A tensor whose elements are some roundings larger or smaller: what such roundings on the way may do to a result."""
    if not isinstance(arg, torch.Tensor) or arg.dtype not in (torch.float32, torch.float64):
        return arg
    generator = torch.Generator(arg.device).manual_seed(0)  # a user's own stays as it is
    up = torch.randint(2, arg.shape, generator=generator, device=arg.device)
    return arg * (1 + tolerance_rule.input_roundings(arg) * torch.finfo(arg.dtype).eps / 2 * (2 * up - 1))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point():
        return 0.0
    difference = (one - other).abs()
    return float(torch.where(difference.isfinite(), difference, 0.0).max()) if difference.numel() else 0.0


def compare(
    own: torch.Tensor,
    original: torch.Tensor,
    exact: torch.Tensor,
    package: Package,
    rounding: float = 0.0,
    ties: tuple[torch.Tensor, int] | None = None,
) -> tuple[float, float, str]:
    """(largest error, PyTorch's largest error, why `own` is refused); errors of integers are 0 or infinite. rounding, ties:
    see `tolerance.expected` and `tolerance.Expected`."""
    # Not by the order of axes in memory: PyTorch's own back ends for attention differ in it.
    forms = [(t.shape, t.dtype, t.device) for t in (own, original)]
    if forms[0] != forms[1]:
        return 0.0, 0.0, f"{own.dtype} {tuple(own.shape)} is not the form of PyTorch's result"
    if not exact.is_floating_point():
        reason = tolerance_rule.compare(own, tolerance_rule.expected_exactly("result", exact.to(own.dtype), None, ties))[1]
        return math.inf if reason else 0.0, 0.0, reason
    tolerance = package.kernel["tolerance"][str(own.dtype).removeprefix("torch.")]
    numbers = (tolerance["atol"], tolerance["rtol"], tolerance["torch_factor"])
    # Of any data, where errors of whole rows may lean one way together.
    keeps = [kept for kept in tolerance.get("keeps", ("overflow",)) if kept != "rounding"]
    wanted = tolerance_rule.expected("result", exact, original, own.dtype, numbers, rounding, keeps)
    error, reason = tolerance_rule.compare(own, wanted)
    return math.inf if error is None else error, wanted.torch_error, reason
