"""An open GPU: candidates are loaded into PyTorch's context, launched on its streams, and timed as graphs."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from evo.errors import LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.problem.render import Source
from evo.runtime.cuda import current_stream
from evo.runtime.driver import load_driver
from evo.targets import EVICTION_MULTIPLE, DeviceInfo, Hazards, compile_source
from evo.targets._cuda_loaded import CudaLoaded, load
from evo.targets.cuda import do, get, pci_bus

_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL
_QUEUE_EVICTIONS = 3
"""These take about 150 us, in which the host can launch two calls of any kind."""


class CudaReplay:
    """A CUDA graph of calls in order. It keeps alive what they read, write and return. If all are the same call, it keeps
    only the last result: each call then writes to the same memory.

    Its first and last nodes record events: the time that the host takes to launch the graph is not part of a run.
    """

    def __init__(self, session: CudaSession, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = len(calls)
        self._session = session
        self._events: list[int] = [get(ctypes.c_void_p, "cuEventCreate", "creating an event", 0) for _ in range(2)]
        try:
            with session.blamed("preparing a replay"):
                self._graph, returned = session.capture(calls, self._events)
            self._kept: list[object] = [*calls, returned]
            self.run_us()  # the first run of a graph also uploads it, which is no part of a call
        except BaseException:
            self._destroy_events()
            raise

    def run_us(self) -> float:
        """Raises LaunchError."""
        with self._session.blamed("replaying"):
            self._graph.replay()
            do("cuEventSynchronize", "replaying", self._events[1])
            elapsed_ms = get(ctypes.c_float, "cuEventElapsedTime", "replaying", *self._events)
        return float(elapsed_ms) * 1e3 / self.calls

    def close(self) -> None:
        with suppress(RuntimeError):  # a broken context has nothing left to free
            self._graph.reset()
        self._destroy_events()
        self._kept.clear()

    def _destroy_events(self) -> None:
        for event in self._events:
            load_driver().cuEventDestroy(event)
        self._events = []


class CudaSession:
    """The methods are those of `evo.targets.Session`."""

    def __init__(self, info: DeviceInfo, limits: Limits) -> None:
        self.info, self.limits = info, limits
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(0)
        torch.empty(1, device=self.device)  # makes the primary context, and makes it current
        self._side = torch.cuda.Stream(self.device)
        self._other_data: torch.Tensor | None = None

    def load(self, binary: Binary, entry: str) -> CudaLoaded:
        """A cubin, or PTX that the driver compiles now. Raises LaunchError with the driver's log."""
        return load(binary, entry, self.limits, partial(current_stream, 0))

    def synchronize(self) -> None:
        do("cuCtxSynchronize", "the GPU reports")

    def evict(self) -> None:
        """Writes other data, so that a sample begins as it ends: with a cache full of modified lines. Lines that a kernel
        marked as persisting are reset first. Raises LaunchError."""
        do("cuCtxResetPersistingL2Cache", "clearing the cache")
        if self._other_data is None:
            size = EVICTION_MULTIPLE * self.limits.cache_bytes
            self._other_data = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._other_data.zero_()

    def estimate_us(self, call: Callable[[], object]) -> float:
        """The mean of two calls, queued behind other work. Takes a fifth of the time of a replay."""
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
        """Makes the first call once beforehand, because a first call may set things up. Raises LaunchError."""
        return CudaReplay(self, calls)

    @cached_property
    def _pool(self) -> Any:
        """Memory of graphs that run one after another. PyTorch takes it away for good when the last of them is freed, hence
        one that is kept."""
        pool = torch.cuda.graph_pool_handle()
        self._keeps_pool, _ = self.capture([partial(torch.zeros, 1, device=self.device)], pool=pool)
        return pool

    def repeatable(self, work: Callable[[], Any]) -> Callable[[], Any]:
        with self.blamed("preparing a repetition"):
            graph, (result,) = self.capture([work], pool=self._pool)

        def again() -> Any:
            graph.replay()
            return result

        return again

    def clocks(self) -> dict[str, float]:
        """sm_mhz, memory_mhz, temperature_c, power_w, other_processes that have a context on the GPU (not in a container
        with its own process identifiers), and throttle_reasons: NVML's bits, 0 for none. Without NVML nothing."""
        nvml, device = _nvml()
        if nvml is None:
            return {}
        readings: dict[str, Callable[[], float]] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device),
            "other_processes": lambda: strangers([p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)]),
        }
        found = {}
        for name, reading in readings.items():
            with suppress(nvml.NVMLError, LookupError):
                found[name] = float(reading())
        return found

    def disturbance(self) -> str:
        """Why the clocks are lower now, except for an idle GPU or a limit that a user has set."""
        nvml, device = _nvml()
        if nvml is not None:
            with suppress(nvml.NVMLError):
                bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
                return ", ".join(name for bit, name in _THROTTLES.items() if bits & bit)
        return ""

    @cached_property
    def hazards(self) -> Hazards | None:
        return CudaHazards(self)

    @contextmanager
    def blamed(self, doing: str) -> Iterator[None]:
        """Turns PyTorch's errors into LaunchErrors with CUDA's name of the error."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise LaunchError(f"{doing}: CUDA_ERROR_OUT_OF_MEMORY (2): {error}") from error
            self.synchronize()  # an error of the context is sticky: this raises it under its name
            raise LaunchError(f"{doing}: {error}") from error

    def capture(
        self, calls: Sequence[Callable[[], object]], events: Sequence[Any] = (), pool: Any = None
    ) -> tuple[torch.cuda.CUDAGraph, list[object]]:
        """A graph of `calls`, between records of two events if these are given, and what the calls returned. pool: of memory
        that graphs share which run one after another.

        torch.cuda.graph is not used: it collects garbage and empties the allocator's cache first, which takes longer
        than the capture.
        """
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream())
        collecting = gc.isenabled()
        gc.disable()  # freeing a graph or an event during a capture breaks it
        try:
            with torch.cuda.stream(self._side):
                calls[0]()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    for event in events[:1]:
                        self._record_node(event)
                    returned = self._repeated(calls) if len(set(calls)) == 1 else [call() for call in calls]
                    for event in events[1:]:
                        self._record_node(event)
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
        do("cuEventRecordWithFlags", "recording an event", event, self._side.cuda_stream, _EXTERNAL)


_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's reasons for lower clocks that spoil a measurement (nvmlClocksThrottleReasons). A power cap is not among them:
for some cards it is the normal state."""


def strangers(processes: Sequence[int]) -> int:
    """Number of processes that belong to other commands; those of this command have the same parent as this process. Raises
    LookupError if the identifiers are of another namespace."""
    if processes and os.getpid() not in processes:
        raise LookupError
    return sum(_parent_of(p) != os.getppid() for p in {*processes} - {os.getpid()})


def _parent_of(process: int) -> int | None:
    with suppress(psutil.Error):
        return int(psutil.Process(process).ppid())
    return None


@cache
def _nvml() -> tuple[Any, Any]:
    """NVML, and its handle of the device; None where it is missing or refuses, as in many containers."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        # NVML counts devices that CUDA_VISIBLE_DEVICES hides; the bus is the same to both.
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus().encode())
    return None, None


_NAPS = 64
"""Number of naps of about a microsecond from the candidate's launch on: its blocks start, and read any input that they do
not wait for."""

_MOST_NAPS = 1 << 24
"""A host that has stopped does not keep the GPU waiting for ever: half a minute. What it launches then is not checked."""

_MOST_HELD_S = 0.02

_SPOILINGS = 24
"""All wait for the device before the candidate begins: between two of them a block gets its turn."""

_WARP = 32

_THREADS = 256
"""Few, and without shared memory: blocks of the candidate must fit beside one of these on every multiprocessor."""

SOURCE = """
// Shared memory keeps the contents that an earlier block left. One block on each multiprocessor, with all the shared memory
// that a block can have, overwrites them.
extern "C" __global__ void __launch_bounds__(1024) scrub(long long word, long long count) {
    extern __shared__ volatile long long memory[];
    for (long long i = threadIdx.x; i < count; i += blockDim.x) memory[i] = word;
}

// Writes down whether a piece has another word than that of before; then writes what belongs there.
__device__ void look_and_write(longlong2* to, const longlong2* from, long long count, long long before, int* written) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const longlong2 found = to[i];
        if (found.x != before || found.y != before) *written = 1;
        if (from) to[i] = from[i];
    }
}

// Lets the next kernel, if it is a programmatic launch, start before this one has done anything.
// CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". The host signals the launch of that
// kernel; from then on naps are counted. Clock time is not: on a shared GPU it also passes while no kernel of this context
// can start.
extern "C" __global__ void end_late(
    longlong2* to, const longlong2* from, long long count, longlong2* to_2, const longlong2* from_2, long long count_2,
    long long before, int* written, const volatile int* launched, long long naps, long long most
) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (threadIdx.x == 0) {
        for (long long i = 0; i < most && !*launched; ++i) __nanosleep(1000);
        for (long long i = 0; i < naps; ++i) __nanosleep(1000);
    }
    __syncthreads();
    look_and_write(to, from, count, before, written);
    look_and_write(to_2, from_2, count_2, before, written);
}

// Takes a multiprocessor, as it has all shared memory: no block of another kernel fits beside it. It tells the host that it
// is there, and reads memory, past the first-level cache, until the host lets it go: some blocks before the others.
extern "C" __global__ void __launch_bounds__(32) hold(
    volatile int* there, const volatile int* signals, long long first, const int4* memory, long long count, long long most
) {
    const volatile int* const released = signals + (blockIdx.x < first ? 1 : 0);
    if (threadIdx.x == 0) there[blockIdx.x] = 1;
    long long at = (blockIdx.x * 32ll + threadIdx.x) % (count ? count : 1);
    for (long long i = 0; i < most && !*released; ++i)
        for (int turn = 0; turn < 16 && count; ++turn) {
            int4 found;
            asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(memory + at));
            at = at + 32 < count ? at + 32 : threadIdx.x % count;
        }
}

// Of a high priority, and takes a multiprocessor, too: it runs where a block of another kernel has ended, before the next.
extern "C" __global__ void __launch_bounds__(1024) spoil(int* memory, int word, long long count) {
    for (long long i = threadIdx.x; i < count; i += blockDim.x) memory[i] = word;
}
"""


class CudaHazards:
    """The methods are those of `evo.targets.Hazards`. Its kernels are compiled when it is created, in 0.1 s."""

    def __init__(self, session: CudaSession) -> None:
        self._multiprocessors = session.limits.multiprocessors
        self._smem_bytes = session.limits.smem_bytes_per_block // 8 * 8
        entries = ("scrub", "end_late", "hold", "spoil")
        self._scrub, self._end_late, self._hold, self._spoil = (self._load(session, entry) for entry in entries)
        self._signal = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._there = torch.zeros(self._multiprocessors, dtype=torch.int32, pin_memory=True)
        self._written = torch.zeros(1, dtype=torch.int32, device=session.device)
        self._beside, self._urgent = torch.cuda.Stream(session.device), torch.cuda.Stream(session.device, priority=-1)
        self._session, self.held = session, False

    @staticmethod
    def _load(session: CudaSession, entry: str) -> CudaLoaded:
        source = Source(text=SOURCE, target="cuda", language="cuda_cpp", entry=entry)
        return session.load(compile_source(source, session.info.arch, Path()), entry)

    def scrub(self, byte: int) -> None:
        self._scrub((_word(byte), self._smem_bytes // 8), self._whole(self._multiprocessors, 1024))

    @contextmanager
    def end_late(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor | None]], byte: int
    ) -> Iterator[Callable[[], bool]]:
        values: list[object] = []
        for to, source in (*pieces, (None, None))[:2]:
            values += [to, source, to.nbytes // 16 if to is not None else 0]
        blocks = min(self._multiprocessors, max(1, -(-max(to.nbytes for to, _ in pieces) // (16 * _THREADS))))
        self._session.synchronize()  # an earlier one has seen its signal
        self._signal.zero_()
        self._written.zero_()
        values += [_word(byte), self._written, self._signal.data_ptr(), _NAPS, _MOST_NAPS]
        self._end_late(values, Launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1)))
        try:
            yield lambda: bool(self._written.item())
        finally:
            self._signal.fill_(1)

    @contextmanager
    def hold(self, room: int, memory: torch.Tensor, spoiled: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        self._session.synchronize()
        self._signal.zero_()
        self._there.zero_()
        with self._session.blamed("holding blocks back"):
            try:
                with torch.cuda.stream(self._beside):
                    there, signals = self._there.data_ptr(), self._signal.data_ptr()
                    values = (there, signals, room, memory, memory.nbytes // 16, _MOST_NAPS)
                    self._hold(values, self._whole(self._multiprocessors, _WARP))
                _wait(lambda: bool(self._there.all()))
                begin, done = torch.cuda.Event(), torch.cuda.Event()
                if spoiled:  # nothing is written yet: what is behind it, in either stream, gets the multiprocessor in turn
                    self._spoil((None, np.int32(-1), 0), self._whole(1, _WARP))
                begin.record()
                yield
                done.record()
                self._urgent.wait_event(begin)
                with torch.cuda.stream(self._urgent):
                    for t in (*spoiled,) * _SPOILINGS:
                        self._spoil((t, np.int32(-1), t.nbytes // 4), self._whole(1, 1024))
                self._signal[1] = 1
                self.held = _wait(done.query)
            finally:
                self._signal.fill_(1)

    def _whole(self, blocks: int, threads: int) -> Launch:
        """Blocks that have a multiprocessor each."""
        return Launch(grid=(blocks, 1, 1), block=(threads, 1, 1), smem_bytes=self._smem_bytes)


def _word(byte: int) -> int:
    """64 bits of that byte."""
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


def _wait(done: Callable[[], bool]) -> bool:
    """Whether it was done in time: blocks that wait for those that are held back are not kept waiting for ever."""
    ends = time.perf_counter() + _MOST_HELD_S
    while not (found := done()) and time.perf_counter() < ends:
        pass
    return found
