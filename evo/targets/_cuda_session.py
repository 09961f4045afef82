"""An open GPU: candidates are loaded into PyTorch's context, launched on its streams, and timed as graphs."""

from __future__ import annotations

import ctypes
import gc
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from evo.errors import EngineError, LaunchError
from evo.evaluation import Binary
from evo.kernel import Launch, Limits
from evo.targets import DeviceInfo
from evo.targets._cuda_driver import Clocks, driver, driver_version, error_text, expect, version_advice
from evo.targets._nvrtc import nvrtc_version

__all__ = ["CudaLoaded", "CudaReplay", "CudaSession"]

_SMEM_WITHOUT_OPT_IN = 48 * 1024
_PORTABLE_CLUSTER = 8
_MOST_ARGUMENTS = 64


class CudaLoaded:
    """An entry point in a module of its own. One buffer holds the arguments of every call: the driver
    copies them when a call is enqueued or captured."""

    def __init__(self, module: Any, entry: str, limits: Limits) -> None:
        self._driver = driver()
        self._module, self._entry, self._limits = module, entry, limits
        self._function = expect(self._driver.cuModuleGetFunction(module, entry.encode()), f"looking up {entry!r}")
        attribute = self._driver.CUfunction_attribute
        # Reading attributes also has a lazily loading driver load the code now, not amid a graph's capture.
        self.registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.smem_static_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.local_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self._sizes = self._parameter_sizes()
        self._buffer = ctypes.create_string_buffer(8 * _MOST_ARGUMENTS)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * _MOST_ARGUMENTS)(*(base + 8 * i for i in range(_MOST_ARGUMENTS)))
        self._arguments = ctypes.addressof(self._pointers)
        self._smem_allowed = _SMEM_WITHOUT_OPT_IN - self.smem_static_bytes
        self._cluster_allowed = _PORTABLE_CLUSTER
        self._cluster_launch: tuple[object, Any] = (None, None)
        self._checked_form: str | None = None

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        self._pack(values)
        if launch.smem_bytes > self._smem_allowed or launch.cluster > self._cluster_allowed:
            self._opt_in(launch)
        stream = torch.cuda.current_stream().cuda_stream
        if launch.cluster == 1:
            (error,) = self._driver.cuLaunchKernel(
                self._function, *launch.grid, *launch.block, launch.smem_bytes, stream, self._arguments, 0
            )
        else:
            config = self._cluster_config(launch, stream)
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, self._arguments, 0)
        if error:
            raise LaunchError(
                f"launch of {self._entry!r} with grid {launch.grid}, block {launch.block}, "
                f"{launch.smem_bytes} bytes of shared memory, cluster {launch.cluster}: "
                f"{error_text(self._driver, error)}"
            )

    def occupancy(self, launch: Launch) -> float:
        """The driver's own count of resident threads over the multiprocessor's limit, 0 to 1."""
        if launch.smem_bytes > self._smem_allowed:
            self._opt_in(launch)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        blocks = expect(
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, launch.smem_bytes),
            f"asking for the occupancy of {self._entry!r}",
        )
        return int(blocks) * threads / self._limits.threads_per_multiprocessor

    def close(self) -> None:
        if self._module is not None:
            self._driver.cuModuleUnload(self._module)
            self._module = None

    def _attribute(self, attribute: Any) -> int:
        return int(expect(self._driver.cuFuncGetAttribute(attribute, self._function), f"loading {self._entry!r}"))

    def _parameter_sizes(self) -> tuple[int, ...] | None:
        """Bytes of each parameter of the entry point; None where the driver cannot tell (before 12.4)."""
        sizes: list[int] = []
        try:
            while True:
                error, _, size = self._driver.cuFuncGetParamInfo(self._function, len(sizes))
                if error:
                    return tuple(sizes)
                sizes.append(int(size))
        except (AttributeError, RuntimeError):
            return None

    def _pack(self, values: Sequence[object]) -> None:
        """Writes the arguments, 8 bytes apart: addresses and integers as 64 bits, floats as 32."""
        codes, words = [], list[float]()
        for value in values:
            if isinstance(value, torch.Tensor):
                if not value.is_cuda:
                    raise LaunchError(f"argument {len(words)} of {self._entry!r} is on {value.device}, not on the GPU")
                codes.append("Q")
                words.append(value.data_ptr())
            elif value is None:
                codes.append("Q")
                words.append(0)
            elif isinstance(value, float):
                codes.append("f4x")
                words.append(value)
            else:
                codes.append("q")
                words.append(operator.index(value))  # type: ignore[arg-type]
        form = "".join(codes)
        if form != self._checked_form:
            self._check(codes)
            self._checked_form = form
        struct.pack_into("=" + form, self._buffer, 0, *words)

    def _check(self, codes: list[str]) -> None:
        # A wrong count or size would have the driver read past the buffer: a crash that blames nobody.
        if len(codes) > _MOST_ARGUMENTS:
            raise LaunchError(f"{self._entry!r} is given {len(codes)} arguments; at most {_MOST_ARGUMENTS} are passed")
        if self._sizes is None:
            return
        if len(codes) != len(self._sizes):
            raise LaunchError(f"{self._entry!r} takes {len(self._sizes)} arguments, got {len(codes)}")
        for i, (code, size) in enumerate(zip(codes, self._sizes, strict=True)):
            passed = 4 if code == "f4x" else 8
            if passed != size:
                kind = {"Q": "an address", "q": "an integer", "f4x": "a float"}[code]
                raise LaunchError(f"parameter {i} of {self._entry!r} has {size} bytes; {kind} is passed as {passed}")

    def _opt_in(self, launch: Launch) -> None:
        """Asks for what goes beyond the defaults: shared memory over 48 KB, clusters over 8 blocks."""
        attribute = self._driver.CUfunction_attribute
        total = launch.smem_bytes + self.smem_static_bytes
        if total > self._limits.smem_bytes_per_block:
            raise LaunchError(
                f"{self._entry!r} asks for {total:,} bytes of shared memory a block; this GPU has at most "
                f"{self._limits.smem_bytes_per_block:,}"
            )
        if launch.smem_bytes > self._smem_allowed:
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = self._driver.cuFuncSetAttribute(self._function, key, launch.smem_bytes)
            expect(result, f"raising the shared memory of {self._entry!r} to {launch.smem_bytes} bytes")
            self._smem_allowed = launch.smem_bytes
        if launch.cluster > self._cluster_allowed:
            key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            expect(
                self._driver.cuFuncSetAttribute(self._function, key, 1),
                f"allowing clusters of {launch.cluster}",
            )
            self._cluster_allowed = launch.cluster

    def _cluster_config(self, launch: Launch, stream: int) -> Any:
        key = (launch, stream)
        if self._cluster_launch[0] != key:
            api = self._driver
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape = attribute.value.clusterDim
            shape.x, shape.y, shape.z = launch.cluster, 1, 1
            config = api.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
            config.sharedMemBytes, config.hStream = launch.smem_bytes, stream
            config.attrs, config.numAttrs = [attribute], 1
            self._cluster_launch = (key, config)
        return self._cluster_launch[1]


class CudaReplay:
    """A CUDA graph of calls in order, with what they read, wrote and returned kept alive.

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

    alignment = 256  # cudaMalloc's promise; PyTorch's allocator keeps to 512

    def __init__(self, index: int, info: DeviceInfo, limits: Limits) -> None:
        self.info, self.limits = info, limits
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        torch.empty(1, device=self.device)  # makes the primary context, and makes it current
        self._driver = driver()
        self._side = torch.cuda.Stream(self.device)
        self._clocks = Clocks(index)

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
            return CudaLoaded(module, entry, self.limits)
        except LaunchError:
            self._driver.cuModuleUnload(module)
            raise

    def synchronize(self) -> None:
        expect(self._driver.cuCtxSynchronize(), "the GPU reports")

    def record(self, calls: Sequence[Callable[[], object]]) -> CudaReplay:
        """The first call is also made once beforehand, for what a first call sets up. Raises LaunchError."""
        return CudaReplay(self, calls)

    def clocks(self) -> dict[str, float]:
        """sm_mhz, memory_mhz, temperature_c, power_w, throttle_reasons (NVML's bits); {} without NVML."""
        return self._clocks.read()

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
                    returned = [call() for call in calls]
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

    def _record_node(self, event: Any) -> None:
        external = self._driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        result = self._driver.cuEventRecordWithFlags(event, self._side.cuda_stream, external)
        expect(result, "recording an event")
