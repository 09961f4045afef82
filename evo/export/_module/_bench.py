"""How long does a variant take, and PyTorch beside it? Interleaved, over buffers that together exceed the caches.

On a GPU twice: as a CUDA graph, which is the kernels' own time, and as calls from Python, one after another.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ._launcher import MANIFEST, Dispatch

__all__ = ["Comparison", "compare"]

_FOOTPRINT_BYTES = 256 << 20
_MOST_SETS = 64
_SAMPLE_S = 2e-3
"""At least so long is one sample, so that reading the clock costs nothing."""
_WAITED_SHARE = 0.02
_SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80
"""NVML's bits for clocks held down by the hardware, by heat or by a power brake; a power cap is none."""

_Timer = Callable[[int], float]
"""Seconds of so many walks."""
_Watch = Callable[[], bool]
"""Whether something slowed the timing down since it was last asked."""


@dataclass(frozen=True)
class Comparison:
    """Medians in microseconds a call. `ratio` is the variant's time over PyTorch's, `low` and `high` bound its median
    with 95% confidence. `disturbed`: too few rounds were free of disturbance, and all were used."""

    how: str
    own_us: float
    torch_us: float
    ratio: float
    low: float
    high: float
    disturbed: bool


def compare(frontend: Any, dispatch: Dispatch, index: int, rounds: int) -> list[Comparison]:
    """Times one variant at the sizes it was tuned for."""
    workload = MANIFEST["variants"][index]["workload"]
    device = dispatch.device_of(index)
    place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    dtype = getattr(torch, workload["dtype"])
    with dispatch.only(index), torch.inference_mode():
        args = [frontend.timed(workload["dims"], dtype, place, 0)]
        sets = min(_MOST_SETS, max(1, _FOOTPRINT_BYTES // (2 * _bytes(args[0]))))
        args += [frontend.timed(workload["dims"], dtype, place, seed) for seed in range(1, sets)]
        own, original = _walk(frontend.SUBJECT, args), _walk(frontend.ORIGINAL, args)
        if device < 0:
            _keep_freed_memory()
            return [_race("call", sets, rounds, (_wall(own), _wall(original)), _cores_taken())]
        with torch.cuda.device(device):
            graphs = (_device_time(_graph(own)), _device_time(_graph(original)))
            calls = (_wall(own, torch.cuda.synchronize), _wall(original, torch.cuda.synchronize))
            throttled, taken = _throttled(device), _cores_taken()
            return [
                _race("graph", sets, rounds, graphs, throttled),
                _race("call", sets, rounds, calls, lambda: throttled() | taken()),
            ]


def _cores_taken() -> _Watch:
    """Other programs, if threads of this process were ready to run and waited for a core for longer than `_WAITED_SHARE`
    of the time. Never where Linux does not tell."""
    since = time.perf_counter(), _waited_s()

    def found() -> bool:
        nonlocal since
        (began, before), since = since, (time.perf_counter(), _waited_s())
        now, waited = since
        return waited - before > _WAITED_SHARE * (now - began)

    return found


def _waited_s() -> float:
    """Seconds that the threads of this process have waited for a core, all together."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


def _throttled(device: int) -> _Watch:
    """Whether the GPU's clocks are held down. Never where nvidia-ml-py is not installed, or NVML does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    except Exception:  # a courtesy: whatever is missing, the timing needs none of it
        return lambda: False

    def found() -> bool:
        with suppress(pynvml.NVMLError):
            return bool(int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) & _SLOWDOWNS)
        return False

    return found


def _keep_freed_memory() -> None:
    """Has glibc's malloc keep large freed blocks in this process, as an allocator for models does: else every result pays
    a page fault for each 4 KiB of it, ten times what the computation takes, in some processes and not in others."""
    with suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            set_option(option, value)


def _bytes(args: tuple[Any, ...]) -> int:
    return sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))


def _walk(function: Callable[..., torch.Tensor], args: list[tuple[Any, ...]]) -> Callable[[], object]:
    """One call with each set of arguments. A result lives until the next one takes its place, as in a model that runs
    again and again: freed all at once, their memory would go back to the system, and a call be the time of getting it.
    """
    kept: list[object] = [None] * len(args)

    def run() -> object:
        for i, a in enumerate(args):
            kept[i] = function(*a)
        return kept

    return run


def _graph(walk: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        walk()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = walk()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _wall(run: Callable[[], object], synchronize: Callable[[], object] = lambda: None) -> Callable[[int], float]:
    """Seconds of so many runs, by the wall clock."""

    def seconds(repeats: int) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        return time.perf_counter() - begin

    return seconds


def _device_time(run: Callable[[], object]) -> Callable[[int], float]:
    """Seconds of so many runs, by the GPU's own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds(repeats: int) -> float:
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    return seconds


def _race(
    how: str, calls: int, rounds: int, timers: tuple[_Timer, _Timer], disturbed: _Watch
) -> Comparison:
    """Rounds of one sample each, in turns, two by two; the first two warm up. Disturbed ones are taken again, as many as
    `rounds` of them; where less than half of the rounds wanted are free of that, all are used."""
    own, original = timers
    once = min(original(1), original(1), own(1))
    repeats = max(1, round(_SAMPLE_S / once))

    def forth_and_back() -> list[tuple[float, float]]:
        own_s, torch_s = own(repeats), original(repeats)
        torch_again_s, own_again_s = original(repeats), own(repeats)
        return [(own_s, torch_s), (own_again_s, torch_again_s)]

    forth_and_back()
    kept: list[tuple[float, float]] = []
    spoilt: list[tuple[float, float]] = []
    while len(kept) < rounds and len(spoilt) < rounds:
        disturbed()  # whatever it was, it was before
        pair = forth_and_back()
        (spoilt if disturbed() else kept).extend(pair)
    enough = bool(kept) and 2 * len(kept) >= rounds
    pairs = kept if enough else kept + spoilt
    ratios = sorted(a / b for a, b in pairs)
    # The ranks that enclose a median of n samples with 95% confidence: n/2 -+ 0.98 sqrt(n).
    reach = 0.98 * len(ratios) ** 0.5
    low = max(0, int(len(ratios) / 2 - reach))
    high = min(len(ratios) - 1, int(len(ratios) / 2 + reach))
    scale = 1e6 / (repeats * calls)
    return Comparison(
        how=how,
        own_us=median(a for a, _ in pairs) * scale,
        torch_us=median(b for _, b in pairs) * scale,
        ratio=median(ratios),
        low=ratios[low],
        high=ratios[high],
        disturbed=not enough,
    )
