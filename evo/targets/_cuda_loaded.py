"""Code on a GPU, without PyTorch: loading, launching, and for a process that does without it, memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from evo.errors import LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.runtime.driver import (
    DYNAMIC_SMEM,
    LARGE_CLUSTER,
    PORTABLE_CLUSTER,
    SMEM_WITHOUT_OPT_IN,
    STATIC_SMEM,
    Frame,
    Slot,
    error_text,
    load_driver,
)
from evo.targets import handed_over
from evo.targets._machine_code import has_fence
from evo.targets.cuda import (
    device_arch,
    device_limits,
    do,
    driver_version,
    first_device,
    get,
    ptx_advice,
)
from evo.targets.languages.cuda_cpp import nvrtc_version


def load(binary: Binary, entry: str, limits: Limits, stream: Callable[[], int]) -> CudaLoaded:
    """A cubin, or PTX that the driver compiles now, in the current context. stream: asked at each launch, where it is made.
    Raises LaunchError with the driver's log."""
    code = binary.loadable
    is_cubin = code.startswith(b"\x7fELF")
    try:
        module = get(ctypes.c_void_p, "cuModuleLoadData", f"{entry!r} does not load", code)
    except LaunchError as error:
        advice = "" if is_cubin else ptx_advice(nvrtc_version(), driver_version())
        raise LaunchError(f"{error}{advice and f'; {advice}'}") from None
    try:
        loaded = CudaLoaded(module, entry, limits, code, stream)
        loaded.launch = binary.launch
        return loaded
    except LaunchError:
        load_driver().cuModuleUnload(module)
        raise


class CudaLoaded:
    """A loaded entry point: packs arguments and launches on the stream that is current then. A launch that names another one
    of the same source is passed on to that."""

    launch: Mapping[str, int | str | bool] = MappingProxyType({})

    def __init__(self, module: int, entry: str, limits: Limits, code: bytes, stream: Callable[[], int]) -> None:
        self._driver = load_driver()
        self._module, self._entry, self._limits, self._code, self._stream = module, entry, limits, code, stream
        self._function: int = get(ctypes.c_void_p, "cuModuleGetFunction", f"looking up {entry!r}", module, entry.encode())
        self._unaligned = 0
        self._others: dict[str, CudaLoaded] = {}
        # Reading an attribute makes a lazily loading driver load the code now, and not during a graph's capture.
        smem = get(ctypes.c_int, "cuFuncGetAttribute", f"loading {entry!r}", STATIC_SMEM, self._function)
        self._smem_static_bytes = int(smem)
        self._sizes = self._parameter_sizes()
        self._smem_allowed = SMEM_WITHOUT_OPT_IN - self._smem_static_bytes
        self._cluster_allowed = PORTABLE_CLUSTER
        self._frame: tuple[object, Frame | None] = (None, None)
        self._checked: list[Slot] | None = None

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        if launch.entry not in ("", self._entry):
            if launch.entry not in self._others:
                self._others[launch.entry] = CudaLoaded(self._module, launch.entry, self._limits, self._code, self._stream)
            self._others[launch.entry](values, launch)
            return
        slots, words = handed_over(self._entry, values, on_gpu=True)
        if slots != self._checked:
            self._check(slots)
            self._checked = slots
        function, entry, beyond = self._function, self._entry, launch.alignment - 1
        if beyond and any(word & beyond for word, (code, _) in zip(words, slots, strict=True) if code == "Q"):
            launch = replace(launch, smem_bytes=0, cluster=1, programmatic=False)
            function, entry = self._unaligned_function(launch.alignment), f"{entry}_unaligned"
        elif launch.alone or launch.smem_bytes > self._smem_allowed or launch.cluster > self._cluster_allowed:
            if launch.alone:
                launch = replace(launch, smem_bytes=self._limits.smem_bytes_per_block - self._smem_static_bytes)
            self._opt_in(launch)
        known, frame = self._frame
        if frame is None or known != (launch, slots):
            frame = Frame(launch.grid, launch.block, launch.smem_bytes, launch.cluster, launch.programmatic, slots)
            self._frame = (launch, slots), frame
        frame.pack(*words)
        frame.config.stream = self._stream()
        if error := self._driver.cuLaunchKernelEx(frame.address, function, frame.arguments, None):
            why = error_text(self._driver, error)
            raise LaunchError(
                f"launch of {entry!r} with grid {launch.grid}, block {launch.block}, "
                f"{launch.smem_bytes} bytes of shared memory, cluster {launch.cluster}"
                f"{', programmatic' if launch.programmatic else ''}: {why}"
            )

    @property
    def fenced(self) -> bool:
        return has_fence(self._code)

    def _unaligned_function(self, alignment: int) -> int:
        if not self._unaligned:
            entry = f"{self._entry}_unaligned"
            try:
                self._unaligned = get(ctypes.c_void_p, "cuModuleGetFunction", entry, self._module, entry.encode())
            except LaunchError:
                raise LaunchError(
                    f"an address is not a multiple of {alignment} bytes, which {self._entry!r} requires, and there is no"
                    f" entry point {entry!r}"
                ) from None
        return self._unaligned

    def close(self) -> None:
        if self._module:
            self._driver.cuModuleUnload(self._module)
            self._module = 0

    def _parameter_sizes(self) -> tuple[int, ...] | None:
        """Bytes of each parameter of the entry point; None where the driver does not report them (before 12.4)."""
        if (tell := getattr(self._driver, "cuFuncGetParamInfo", None)) is None:
            return None
        sizes, offset, size = list[int](), ctypes.c_size_t(), ctypes.c_size_t()
        while not tell(self._function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return tuple(sizes)

    def _check(self, slots: list[Slot]) -> None:
        # With a wrong count or size the driver would read past the buffer and crash.
        if self._sizes is None:
            return
        if len(slots) != len(self._sizes):
            raise LaunchError(f"{self._entry!r} takes {len(self._sizes)} arguments, got {len(slots)}")
        for i, ((code, _), size) in enumerate(zip(slots, self._sizes, strict=True)):
            passed = struct.calcsize(f"={code}")
            if passed != size:
                known = {"Q": "an address", "q": "an integer", "d": "a double", "i": "an int32", "f": "a float"}
                kind = known.get(code, "a structure")
                raise LaunchError(f"parameter {i} of {self._entry!r} has {size} bytes; {kind} is passed as {passed}")

    def _opt_in(self, launch: Launch) -> None:
        """Requests what goes beyond the defaults: shared memory over 48 KB, clusters over 8 blocks."""
        total = launch.smem_bytes + self._smem_static_bytes
        if total > self._limits.smem_bytes_per_block:
            raise LaunchError(
                f"{self._entry!r} asks for {total:,} bytes of shared memory a block; this GPU has at most "
                f"{self._limits.smem_bytes_per_block:,}"
            )
        if launch.smem_bytes > self._smem_allowed:
            doing = f"raising the shared memory of {self._entry!r} to {launch.smem_bytes} bytes"
            do("cuFuncSetAttribute", doing, self._function, DYNAMIC_SMEM, launch.smem_bytes)
            self._smem_allowed = launch.smem_bytes
        if launch.cluster > self._cluster_allowed:
            do("cuFuncSetAttribute", f"allowing clusters of {launch.cluster}", self._function, LARGE_CLUSTER, 1)
            self._cluster_allowed = launch.cluster


class BareGpu:
    """GPU 0 in a process without PyTorch. Its methods raise LaunchError with the driver's message."""

    def __init__(self) -> None:
        """Raises DeviceError where there is none."""
        device, taking = first_device(), "taking the GPU's context"
        do("cuCtxSetCurrent", taking, get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", taking, device))

    def load(self, binary: Binary, entry: str) -> CudaLoaded:
        """Launches are made on the default stream."""
        return load(binary, entry, device_limits(device_arch()), lambda: 0)

    def allocate(self, size: int) -> int:
        """The address of so many bytes, or of one; they belong to no larger allocation."""
        return int(get(ctypes.c_void_p, "cuMemAlloc", f"allocating {size} bytes", max(size, 1)))

    def write(self, address: int, data: bytes) -> None:
        if data:
            do("cuMemcpyHtoD", "copying to the GPU", address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        """The contents of so many bytes when all launches have ended."""
        held = ctypes.create_string_buffer(max(size, 1))
        do("cuCtxSynchronize", "the GPU reports")
        do("cuMemcpyDtoH", "copying from the GPU", held, address, size)
        return held.raw[:size]
