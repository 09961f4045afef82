"""The time that no kernel can beat."""

import math
import os
import time
from collections.abc import Callable
from functools import cache, partial

import torch

from evo.problem.kernel import Cost
from evo.targets import Session, target_of

_DOUBTS = 4
"""Number of times that the rates are measured again before a time is refused."""
_MEMORY_MULTIPLE, _LEAST_MEMORY_BYTES = 4, 256 << 20
_CACHE_SHARE = 4
_TRIES = 2
_PRODUCT_SIZE = 4096
"""Rows and columns of the matrices whose product gives a GPU's rate of arithmetic."""
_PIECE, _PIECE_PRODUCT_SIZE = 1 << 20, 256
"""Elements of 4 bytes, rows and columns: work that one core of a CPU does in about a millisecond."""
_PRODUCTS_S = 0.05


class Roofline:
    """The time that no kernel can beat: its bytes over the memory's bandwidth, its operations over the arithmetic's rate.

    A kernel that seems faster did not do the work, or was not timed while it did (the roofline of Williams, Waterman and
    Patterson, 2009, as a test). Both rates are measured on the device itself, by operations of PyTorch that do nothing else;
    the best of several tries counts. They are measured again whenever they would refuse a time: a probe that something
    disturbed must not be held against a candidate.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._target = session, target_of(session.device)
        self._rates: tuple[float, ...] = _rates(session)
        """The best rates seen: bytes a second of the memory and of the cache, operations a second."""

    def refusal(self, us: float, cost: Cost, *, in_cache: bool) -> str:
        """Why a time is impossible; empty if it is not."""
        for doubts in range(_DOUBTS + 1):
            if doubts:
                self._rates = tuple(map(max, self._rates, _rates(self._session)))
            memory, cache, arithmetic = self._rates
            bound_us = 1e6 * max(cost.bytes / (cache if in_cache else memory), cost.flops / (cost.rate * arithmetic))
            least_us = self._target.believed_share * bound_us
            if us >= least_us:
                return ""
        return (
            f"{us:.3g} us is impossible: moving {cost.bytes:,} bytes and computing {cost.flops:,} operations takes"
            f" this device at least {least_us:.3g} us"
        )


roofline_of = cache(Roofline)


def _rates(session: Session) -> tuple[float, float, float]:
    """Bytes a second of the memory and of the cache, operations a second. Takes some hundred milliseconds at most."""
    if target_of(session.device).shares_cores:
        return _rates_of_cores(session)
    cache_bytes = session.limits.cache_bytes
    memory = _bandwidth(session, max(_MEMORY_MULTIPLE * cache_bytes, _LEAST_MEMORY_BYTES), repeats=1)
    cache = _bandwidth(session, max(cache_bytes // _CACHE_SHARE, 1 << 16), repeats=20)
    return memory, max(memory, cache), _arithmetic(session)


def _rates_of_cores(session: Session) -> tuple[float, float, float]:
    """The rates of a CPU if each core reached the best rate of one alone, by pieces of work that fit a scheduler's quantum:
    other programs do not slow the fastest of these down. No operation of PyTorch tells how fast the cores' caches are."""
    threads = torch.get_num_threads()
    cores = os.cpu_count() or threads
    torch.set_num_threads(1)  # two threads wait for each other, and for other programs, at the end of each operation
    try:
        source = torch.ones(_LEAST_MEMORY_BYTES // 8, dtype=torch.float32)
        target = torch.zeros_like(source)
        pairs = list(zip(source.split(_PIECE), target.split(_PIECE), strict=True))
        size = 4 * _PIECE
        # One try each: a second one would find its piece in the cache.
        copied = 2 * size / min(_best_s(session, partial(b.copy_, a), tries=1) for a, b in pairs)
        read = size / min(_best_s(session, a.sum, tries=1) for a, _ in pairs)
        filled = size / min(_best_s(session, partial(b.fill_, 1.0), tries=1) for _, b in pairs)
        n, products = _PIECE_PRODUCT_SIZE, list[float]()
        for dtype in (torch.float32, torch.bfloat16):
            a, ends_s = torch.randn(n, n).to(dtype), time.perf_counter() + _PRODUCTS_S
            while time.perf_counter() < ends_s:  # emulated arithmetic is slow: a few products tell its rate
                products.append(_best_s(session, partial(torch.mm, a, a)))
    finally:
        torch.set_num_threads(threads)
    return cores * max(copied, read, filled), math.inf, cores * 2.0 * n**3 / min(products)


def _bandwidth(session: Session, footprint_bytes: int, repeats: int) -> float:
    """Bytes a second: the best of reading, writing and copying."""
    half = torch.ones(footprint_bytes // 8, dtype=torch.float32, device=session.device)
    other = torch.empty_like(half)
    probes: tuple[Callable[[], object], ...] = (
        lambda: (half.sum(), other.sum()),
        lambda: (half.fill_(1.0), other.fill_(1.0)),
        lambda: other.copy_(half),
    )
    return 2 * half.numel() * half.element_size() / min(_best_s(session, probe, repeats) for probe in probes)


def _arithmetic(session: Session) -> float:
    """Operations a second of a product of matrices, in the fastest of the usual dtypes."""
    n, fastest_s = _PRODUCT_SIZE, math.inf
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(n, n, device=session.device).to(dtype)
        part = a[: n // 4, : n // 4].contiguous()
        # Emulated arithmetic is some hundred times slower: a 64th of the work tells, where all of it takes seconds a try.
        if 8 * _best_s(session, partial(torch.mm, part, part)) < fastest_s:
            fastest_s = min(fastest_s, _best_s(session, partial(torch.mm, a, a)))
    return 2.0 * n**3 / fastest_s


def _best_s(session: Session, call: Callable[[], object], repeats: int = 1, tries: int = _TRIES) -> float:
    """The least seconds that a call took, in any of several samples of so many calls."""
    replay = session.record([call] * repeats)
    try:
        return min(replay.run_us() for _ in range(tries)) / 1e6
    finally:
        replay.close()
