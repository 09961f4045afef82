"""How long does a call take, and another beside it? Interleaved rounds, over buffers that together exceed the caches.

On a GPU `compare` measures twice: as a CUDA graph, which is the kernels' own time, and as calls from Python, one after
another.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .cpu import keep_freed_memory

_FOOTPRINT_BYTES = 256 << 20
_MOST_SETS = 512
_SAMPLE_S = 2e-3
"""At least so long is one sample, so that reading the clock costs nothing."""
_WAITED_SHARE = 0.02
"""A team of threads waits for the one that lost its core: one percent of waiting can slow a call by ten."""

Sample = Callable[[int], tuple[float, ...]]
"""So many calls, one after another: seconds by each of the clocks that are read."""


@dataclass(frozen=True)
class Timing:
    """Median in microseconds a call. `ratio`: over a reference's time in the same round, median; `low` and `high`: the
    ranks that enclose it with 95% confidence. `disturbed`: other programs slowed down more than half of the rounds, and
    all were used."""

    us: float
    ratio: float
    low: float
    high: float
    disturbed: bool

    @property
    def gain(self) -> str:
        if self.disturbed:
            return "too busy to measure"
        return f"{1 / self.ratio:.3f}x ({1 / self.high:.3f} to {1 / self.low:.3f})"


@dataclass(frozen=True)
class Race:
    """Seconds a call of each contender in each round, by each clock."""

    rounds: list[dict[str, tuple[float, ...]]]
    disturbed: bool

    def timing(self, name: str, reference: str, clock: int = 0) -> Timing:
        ratios = sorted(r[name][clock] / r[reference][clock] for r in self.rounds)
        reach = 0.98 * len(ratios) ** 0.5  # of the ranks around the middle: n/2 -+ 0.98 sqrt(n)
        low, high = max(0, int(len(ratios) / 2 - reach)), min(len(ratios) - 1, int(len(ratios) / 2 + reach))
        return Timing(
            us=1e6 * median(r[name][clock] for r in self.rounds),
            ratio=median(ratios),
            low=ratios[low],
            high=ratios[high],
            disturbed=self.disturbed,
        )


def race(
    contenders: Mapping[str, Sample],
    rounds: int,
    disturbed: Callable[[], bool],
    sample_s: float = _SAMPLE_S,
    most: int = 1 << 20,
) -> Race:
    """Rounds of one sample each, forth and back, each contender leading in turn; the first pair warms up, disturbed ones are
    taken again where half of them are not. A sample is of at least `sample_s`, but of at most `most` calls. disturbed:
    whether something slowed the timing down since it was last asked."""
    repeats = {}
    for name, sample in contenders.items():
        sample(1)
        repeats[name] = max(1, min(most, round(sample_s / max(sample(1)[-1], 1e-7))))

    def once(names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(s / repeats[name] for s in contenders[name](repeats[name])) for name in names}

    order = list(contenders)
    for names in (order, order[::-1]):
        once(names)
    kept: list[dict[str, tuple[float, ...]]] = []
    spoilt: list[dict[str, tuple[float, ...]]] = []
    while len(kept) < rounds and len(spoilt) < rounds:
        disturbed()  # whatever it was, it was before
        pair = [once(order), once(order[::-1])]
        (spoilt if disturbed() else kept).extend(pair)
        order = order[1:] + order[:1]  # the first of a pair runs on a device that has waited
    enough = bool(kept) and 2 * len(kept) >= rounds
    return Race(kept if enough else kept + spoilt, not enough)


def compare(frontend: Any, index: int, rounds: int) -> dict[str, tuple[float, Timing]]:
    """PyTorch's microseconds, and the variant's timing over PyTorch's, at the sizes it was tuned for: of "call" and, on a
    GPU, of "graph"."""
    dispatch = frontend.DISPATCH
    with dispatch.only(index):
        functions = {"own": frontend.SUBJECT, "other": frontend.ORIGINAL}
        return _interleaved(frontend, dispatch.package.variants[index], functions, rounds)


def cost_of_any_batch(frontend: Any, index: int, rounds: int) -> tuple[int, float]:
    """The variant that serves the sizes of this one where results must have the same bits in any batch, and its time over
    this one's: on a GPU of the kernels alone. Raises Unavailable where there is none; Busy."""
    dispatch, variant = frontend.DISPATCH, frontend.DISPATCH.package.variants[index]
    steady, usual = dispatch.for_any_batch(index)
    if steady.variant.index == index:
        return index, 1.0
    functions = {
        name: partial(frontend.served, frontend.by_variant(loaded)) for name, loaded in (("own", steady), ("other", usual))
    }
    found = _interleaved(frontend, variant, functions, rounds)
    return steady.variant.index, found.get("graph", found["call"])[1].ratio


def _interleaved(
    frontend: Any, variant: Any, functions: Mapping[str, Callable[..., Any]], rounds: int
) -> dict[str, tuple[float, Timing]]:
    """Microseconds of "other", of two functions, and the timing of "own" over it, at a variant's sizes: of "call" and, on a
    GPU, of "graph"."""
    place = torch.device(variant.target, 0)
    dtype, sizes = getattr(torch, variant.dtype), dict(variant.sizes)
    with torch.inference_mode():
        args = [frontend.timed(sizes, dtype, place, 0)]
        sets = sets_for(args[0])
        args += [frontend.timed(sizes, dtype, place, seed) for seed in range(1, sets)]
        walks = {name: walk([partial(function, *a) for a in args]) for name, function in functions.items()}
        races = {}
        if place.type == "cpu":
            keep_freed_memory()
            races["call"] = race({n: by_wall_clock(w) for n, w in walks.items()}, rounds, watch())
        else:
            with torch.cuda.device(place):
                races["graph"] = race({n: on_gpu(w) for n, w in walks.items()}, rounds, lambda: False)
                calls = {n: by_wall_clock(w, torch.cuda.synchronize) for n, w in walks.items()}
                races["call"] = race(calls, rounds, watch())
    found = {}
    for how, raced in races.items():
        own, other = (raced.timing(name, "other") for name in ("own", "other"))
        found[how] = (other.us / sets, replace(own, us=own.us / sets))
    return found


def watch() -> Callable[[], bool]:
    """Whether other programs kept this one from its cores since that was last asked."""
    since = time.perf_counter(), _run_queue_wait_s()

    def found() -> bool:
        nonlocal since
        (began, before), since = since, (time.perf_counter(), _run_queue_wait_s())
        return since[1] - before > _WAITED_SHARE * (since[0] - began)

    return found


def _run_queue_wait_s() -> float:
    """Seconds that the threads of this process were ready to run and have waited for a core, all together; 0 where Linux
    does not tell."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


def sets_for(args: tuple[Any, ...]) -> int:
    """Number of sets of such arguments in a walk, so that none is in a cache when its turn comes."""
    input_bytes = sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
    return min(_MOST_SETS, max(1, _FOOTPRINT_BYTES // (2 * input_bytes)))


def walk(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Each of the calls, one after another. A result lives until the next one takes its place, as in a model that runs
    again and again: freed all at once, their memory would go back to the system, and a call be the time of getting it.
    """
    kept: list[object] = [None] * len(calls)

    def run() -> object:
        for i, call in enumerate(calls):
            kept[i] = call()
        return kept

    return run


def by_wall_clock(run: Callable[[], object], synchronize: Callable[[], object] = lambda: None) -> Sample:
    """A sample by the wall clock."""

    def seconds(repeats: int) -> tuple[float]:
        synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        return (time.perf_counter() - begin,)

    return seconds


def on_gpu(walk: Callable[[], object]) -> Sample:
    """A sample by the GPU's clock, of a graph captured on the current stream or, if that is the default, on a new one."""
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        walk()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        walk()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds(repeats: int, _: object = walk) -> tuple[float]:  # it holds the results, which the graph writes to
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return (milliseconds / 1e3,)

    return seconds
