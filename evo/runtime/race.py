"""Short races between variants and PyTorch at a problem that nobody measured, held when it is first met; what they found is
kept on this machine for later processes.

On a GPU the kernels' own time counts, with none of their data in its second-level cache: a wait on the stream lets the CPU
run ahead of it. On a CPU it is the time of a call that is launched from Python.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import torch

from . import cpu, cuda
from .package import MANIFEST, Package, Unavailable, digest, keep, kept
from .trial import Loaded, OneVariant

_ROUNDS, _ROUNDS_ON_CPU = 3, 7
"""Of which the shortest counts: what disturbs a call only adds to its time."""
_LEAD_CYCLES = 1 << 20
"""Of the GPU's clock, half a millisecond: so long the CPU takes to enqueue all rounds."""


@dataclass(frozen=True)
class Result:
    """Of the fastest variant in a race: its name, its time over PyTorch's, and the sizes of the problem."""

    variant: str
    ratio: float
    sizes: str


class Races:
    """Of one package. frontend: the kernel's module."""

    def __init__(self, package: Package, frontend: Any) -> None:
        self._package, self._frontend = package, frontend

    def result(self, device: int, common: str) -> Result | None:
        """Of a race that was held on this machine. common: what problems share that one race decides for."""
        found = kept(self._file(device, common))
        return None if found is None else Result(*json.loads(found))

    def hold(
        self, device: int, common: str, variants: Sequence[Loaded], sizes: Mapping[str, int], dtype: torch.dtype
    ) -> Result:
        """Of the variants and PyTorch, kept for `result`. Raises Unavailable where there is too little memory, say."""
        stream = torch.cuda.current_stream(device) if device >= 0 else None
        threads = torch.get_num_threads()

        def times() -> list[float]:
            with torch.no_grad():
                if stream is not None:
                    with cuda.beside_captures(), torch.cuda.device(device), torch.cuda.stream(stream):
                        return _on_gpu(self._calls(variants, sizes, dtype, torch.device("cuda", device)), stream)
                torch.set_num_threads(threads)
                return _on_cpu(self._calls(variants, sizes, dtype, torch.device("cpu")))

        try:
            with ThreadPoolExecutor(max_workers=1) as thread:  # without the modes and settings of the caller's
                original, *own = thread.submit(times).result()
        except Exception as error:  # whatever it is, the caller has a model to run
            raise Unavailable(f"no race could be held: {str(error).partition(chr(10))[0]}") from error
        fastest = min(range(len(own)), key=own.__getitem__)
        shown = "x".join(map(str, sizes.values()))
        result = Result(str(variants[fastest].variant), own[fastest] / original, shown)
        keep(self._file(device, common), json.dumps(astuple(result)).encode())
        return result

    def _calls(
        self, variants: Sequence[Loaded], sizes: Mapping[str, int], dtype: torch.dtype, place: torch.device
    ) -> Iterator[Callable[[], object]]:
        """PyTorch's call, and one for each variant, of the same arguments."""
        args = self._frontend.timed(dict(sizes), dtype, place, 0)
        yield lambda: self._frontend.ORIGINAL(*args)
        for loaded in variants:
            table = OneVariant(loaded, _failed)
            if self._frontend.served(table, *args) is None:
                raise Unavailable(f"{loaded.variant} does not take it")
            yield lambda table=table: self._frontend.served(table, *args)  # type: ignore[misc]

    def _file(self, device: int, common: str) -> str:
        if device < 0:
            machine = cpu.model(), torch.get_num_threads()
        else:
            machine = torch.cuda.get_device_name(device), cuda.driver_version()
        return f"race-{digest(self._package.read(MANIFEST), torch.__version__, *map(str, machine), common)}"


def _failed(_variant: int, _device: int, reason: str) -> None:
    raise Unavailable(reason)


def _on_gpu(calls: Iterator[Callable[[], object]], stream: torch.cuda.Stream) -> list[float]:
    """Milliseconds of each."""
    contenders = list(calls)
    cache = torch.cuda.get_device_properties(stream.device).L2_cache_size
    other_data = torch.empty(cache, dtype=torch.uint8, device=stream.device)
    for call in contenders:
        call()  # what is done once is done: plans, workspaces, code
    stream.synchronize()
    torch.cuda._sleep(_LEAD_CYCLES)
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in contenders]
    for _ in range(_ROUNDS):
        for call, found in zip(contenders, spans, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            other_data.zero_()
            begin.record(stream)
            call()
            end.record(stream)
            found.append((begin, end))
    stream.synchronize()
    return [min(begin.elapsed_time(end) for begin, end in found) for found in spans]


def _on_cpu(calls: Iterator[Callable[[], object]]) -> list[float]:
    """Seconds of each."""
    contenders = list(calls)
    shortest = [math.inf] * len(contenders)
    for call in contenders:
        call()
    for _ in range(_ROUNDS_ON_CPU):
        for i, call in enumerate(contenders):
            began = time.perf_counter()
            call()
            shortest[i] = min(shortest[i], time.perf_counter() - began)
    return shortest
