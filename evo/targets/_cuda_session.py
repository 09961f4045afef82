"""An open GPU: candidates are loaded into PyTorch's context, launched on its streams, and timed as graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch

from evo.errors import EngineError, HangError, LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Limits
from evo.targets import EVICTION_MULTIPLE, DeviceInfo, Hazards
from evo.targets._cuda_driver import Clocks, driver, driver_version, error_text, expect, version_advice
from evo.targets._cuda_hazards import CudaHazards
from evo.targets._cuda_loaded import CudaLoaded
from evo.targets._nvrtc import nvrtc_version

__all__ = ["CudaReplay", "CudaSession"]


_QUEUE_EVICTIONS = 3
"""They last some 150 microseconds, in which the host can launch two calls of any kind."""


class CudaReplay:
    """A CUDA graph of calls in order, with what they read, wrote and returned kept alive; of one call that is repeated, what
    the last returned: each then writes where the one before did.

    Its first and last nodes record events, so that a run is timed from node to node: the time that the host
    takes to launch the graph is not in it.
    """

    def __init__(self, session: CudaSession, calls: Sequence[Callable[[], object]]) -> None:
        if not calls:
            raise EngineError("a replay needs at least one call")
        self.calls = len(calls)
        self._session, self._driver = session, driver()
        self._events = [expect(self._driver.cuEventCreate(0), "creating an event") for _ in range(2)]
        try:
            with session.blamed("preparing a replay"):
                self._graph, returned = session.capture(calls, *self._events)
            self._kept: list[object] = [*calls, returned]
            self.run_us()  # the first run of a graph also uploads it, which is no part of a call
        except BaseException:
            self._destroy_events()
            raise

    def run_us(self) -> float:
        """Raises LaunchError."""
        with self._session.blamed("replaying"):
            self._graph.replay()
            expect(self._driver.cuEventSynchronize(self._events[1]), "replaying")
            elapsed_ms = expect(self._driver.cuEventElapsedTime(*self._events), "replaying")
        return float(elapsed_ms) * 1e3 / self.calls

    def close(self) -> None:
        with suppress(RuntimeError):  # a broken context has nothing left to free
            self._graph.reset()
        self._destroy_events()
        self._kept.clear()

    def _destroy_events(self) -> None:
        for event in self._events:
            self._driver.cuEventDestroy(event)
        self._events = []


class CudaSession:
    """The methods are those of `evo.targets.Session`."""

    def __init__(self, index: int, info: DeviceInfo, limits: Limits) -> None:
        self.info, self.limits, self._index = info, limits, index
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        torch.empty(1, device=self.device)  # makes the primary context, and makes it current
        self._driver = driver()
        self._side = torch.cuda.Stream(self.device)
        self._clocks = Clocks(index)
        self._other_data: torch.Tensor | None = None

    def load(self, binary: Binary, entry: str) -> CudaLoaded:
        """A cubin, or PTX that the driver compiles now. Raises LaunchError with the driver's log."""
        is_cubin = binary.code.startswith(b"\x7fELF")
        image = binary.code if is_cubin else binary.code + b"\0"
        error, module = self._driver.cuModuleLoadData(image)
        if error:
            advice = None if is_cubin else version_advice(nvrtc_version(), driver_version())
            raise LaunchError(
                f"{entry!r} does not load: {error_text(self._driver, error)}" + (f"; {advice}" if advice else "")
            )
        try:
            return CudaLoaded(module, entry, self.limits, self._index)
        except LaunchError:
            self._driver.cuModuleUnload(module)
            raise

    def synchronize(self) -> None:
        expect(self._driver.cuCtxSynchronize(), "the GPU reports")

    def await_launch(self, limit_s: float) -> None:
        """Looks again and again, as the driver does when it synchronises. Raises LaunchError, HangError."""
        stream, deadline = torch.cuda.current_stream().cuda_stream, time.monotonic() + limit_s
        not_ready = self._driver.CUresult.CUDA_ERROR_NOT_READY
        late = False
        while (result := self._driver.cuStreamQuery(stream))[0] == not_ready:
            if late:
                raise HangError(
                    f"a launch did not end within {limit_s:.3g} s; it hangs, or has a fault that the device takes longer"
                    " to name, as it does a trap"
                )
            late = time.monotonic() >= deadline  # looked at once more: this process may have had no core for a while
        expect(result, "the GPU reports")

    def evict(self) -> None:
        """The other data are written, so that a sample begins as it ends: with a cache of data still to be written
        back. Lines that a kernel asked to keep for longer become ordinary ones first. Raises LaunchError."""
        expect(self._driver.cuCtxResetPersistingL2Cache(), "clearing the cache")
        if self._other_data is None:
            size = EVICTION_MULTIPLE * self.limits.cache_bytes
            self._other_data = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._other_data.zero_()

    def estimate_us(self, call: Callable[[], object]) -> float:
        """Of two calls that wait behind other work while the host queues them. Takes a fifth of the time of a replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.blamed("estimating a time"):
            for _ in range(_QUEUE_EVICTIONS):
                self.evict()
            begin.record()
            call()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / 2

    def record(self, calls: Sequence[Callable[[], object]]) -> CudaReplay:
        """The first call is also made once beforehand, for what a first call sets up. Raises LaunchError."""
        return CudaReplay(self, calls)

    def clocks(self) -> dict[str, float]:
        """sm_mhz, memory_mhz, temperature_c, power_w, throttle_reasons (NVML's bits), other_processes (on this GPU);
        {} without NVML."""
        return self._clocks.read()

    def disturbance(self) -> str:
        return self._clocks.throttled()

    @cached_property
    def hazards(self) -> Hazards | None:
        """For the gate. Raises EngineError if they cannot be made: an AttributeError would pass for having none."""
        try:
            return CudaHazards(self)
        except AttributeError as error:
            raise EngineError(f"the gate's own kernels cannot be made: {error}") from error

    def close(self) -> None:
        self._clocks.close()

    @contextmanager
    def blamed(self, doing: str) -> Iterator[None]:
        """Turns PyTorch's errors into LaunchErrors that carry CUDA's name for what happened."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise LaunchError(f"{doing}: CUDA_ERROR_OUT_OF_MEMORY (2): {error}") from error
            self.synchronize()  # an error of the context stays, and has its name
            raise LaunchError(f"{doing}: {error}") from error

    def capture(
        self, calls: Sequence[Callable[[], object]], begin: Any, end: Any
    ) -> tuple[torch.cuda.CUDAGraph, list[object]]:
        """A graph of `calls` between two event records, and what the calls returned.

        Not by torch.cuda.graph: it collects garbage and empties the allocator's cache first, which takes
        longer than the capture.
        """
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream())
        collecting = gc.isenabled()
        gc.disable()  # freeing a graph or an event amid a capture breaks it
        try:
            with torch.cuda.stream(self._side):
                calls[0]()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._record_node(begin)
                    returned = self._repeated(calls) if len(set(calls)) == 1 else [call() for call in calls]
                    self._record_node(end)
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._side)
        return graph, returned

    @staticmethod
    def _repeated(calls: Sequence[Callable[[], object]]) -> list[object]:
        for call in calls[1:]:
            call()
        return [calls[0]()]

    def _record_node(self, event: Any) -> None:
        external = self._driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        result = self._driver.cuEventRecordWithFlags(event, self._side.cuda_stream, external)
        expect(result, "recording an event")
