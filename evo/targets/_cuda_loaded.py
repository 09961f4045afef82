"""Code on a GPU, without PyTorch: loading, launching, and for a process that does without it, memory."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evo.errors import LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.runtime.driver import PORTABLE_CLUSTER, SMEM_WITHOUT_OPT_IN, Frame, load_driver
from evo.targets._machine_code import has_fence
from evo.targets.cuda import (
    device_arch,
    device_limits,
    driver,
    driver_version,
    error_text,
    expect,
    nvrtc_version,
    ptx_advice,
)


def load(binary: Binary, entry: str, limits: Limits, stream: Callable[[], int]) -> CudaLoaded:
    """A cubin, or PTX that the driver compiles now, in the current context. stream: asked at each launch, where it is made.
    Raises LaunchError with the driver's log."""
    api, is_cubin = driver(), binary.code.startswith(b"\x7fELF")
    error, module = api.cuModuleLoadData(binary.code if is_cubin else binary.code + b"\0")
    if error:
        advice = "" if is_cubin else ptx_advice(nvrtc_version(), driver_version())
        raise LaunchError(f"{entry!r} does not load: {error_text(api, error)}{advice and f'; {advice}'}")
    try:
        return CudaLoaded(module, entry, limits, binary.code, stream)
    except LaunchError:
        api.cuModuleUnload(module)
        raise


class CudaLoaded:
    """A loaded entry point: packs arguments and launches on the stream that is current then. A launch that names another one
    of the same source is passed on to that."""

    def __init__(self, module: Any, entry: str, limits: Limits, code: bytes, stream: Callable[[], int]) -> None:
        self._driver = driver()
        self._module, self._entry, self._limits, self._code, self._stream = module, entry, limits, code, stream
        self._function = expect(self._driver.cuModuleGetFunction(module, entry.encode()), f"looking up {entry!r}")
        self._unaligned: Any = None
        self._others: dict[str, CudaLoaded] = {}
        # Reading an attribute makes a lazily loading driver load the code now, and not during a graph's capture.
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        smem = expect(self._driver.cuFuncGetAttribute(attribute, self._function), f"loading {entry!r}")
        self._smem_static_bytes = int(smem)
        self._sizes = self._parameter_sizes()
        self._smem_allowed = SMEM_WITHOUT_OPT_IN - self._smem_static_bytes
        self._cluster_allowed = PORTABLE_CLUSTER
        self._frame: tuple[object, Frame | None] = (None, None)
        self._checked_form: str | None = None

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        if launch.entry not in ("", self._entry):
            if launch.entry not in self._others:
                self._others[launch.entry] = CudaLoaded(self._module, launch.entry, self._limits, self._code, self._stream)
            self._others[launch.entry](values, launch)
            return
        form, words, addresses = self._read(values)
        function, entry = self._function, self._entry
        if addresses & (launch.alignment - 1):
            launch = replace(launch, smem_bytes=0, cluster=1, programmatic=False)
            function, entry = self._unaligned_function(launch.alignment), f"{entry}_unaligned"
        elif launch.alone or launch.smem_bytes > self._smem_allowed or launch.cluster > self._cluster_allowed:
            if launch.alone:
                launch = replace(launch, smem_bytes=self._limits.smem_bytes_per_block - self._smem_static_bytes)
            self._opt_in(launch)
        known, frame = self._frame
        if frame is None or known != (launch, len(words)):
            frame = Frame(launch.grid, launch.block[0], launch.smem_bytes, launch.cluster, launch.programmatic, len(words))
            self._frame = (launch, len(words)), frame
        struct.pack_into(form, frame.words, 0, *words)
        frame.config.stream = self._stream()
        if error := load_driver().cuLaunchKernelEx(frame.address, ctypes.c_void_p(int(function)), frame.arguments, None):
            why = error_text(self._driver, self._driver.CUresult(error))
            raise LaunchError(
                f"launch of {entry!r} with grid {launch.grid}, block {launch.block}, "
                f"{launch.smem_bytes} bytes of shared memory, cluster {launch.cluster}"
                f"{', programmatic' if launch.programmatic else ''}: {why}"
            )

    @property
    def fenced(self) -> bool:
        return has_fence(self._code)

    def _unaligned_function(self, alignment: int) -> Any:
        if self._unaligned is None:
            entry = f"{self._entry}_unaligned"
            error, found = self._driver.cuModuleGetFunction(self._module, entry.encode())
            if error:
                raise LaunchError(
                    f"an address is not a multiple of {alignment} bytes, which {self._entry!r} requires, and there is no"
                    f" entry point {entry!r}"
                )
            self._unaligned = found
        return self._unaligned

    def close(self) -> None:
        if self._module is not None:
            self._driver.cuModuleUnload(self._module)
            self._module = None

    def _parameter_sizes(self) -> tuple[int, ...] | None:
        """Bytes of each parameter of the entry point; None where the driver does not report them (before 12.4)."""
        sizes: list[int] = []
        try:
            while True:
                error, _, size = self._driver.cuFuncGetParamInfo(self._function, len(sizes))
                if error:
                    return tuple(sizes)
                sizes.append(int(size))
        except (AttributeError, RuntimeError):
            return None

    def _read(self, values: Sequence[Any]) -> tuple[str, list[float], int]:
        """The format by which struct packs the arguments, 8 bytes apart (addresses, integers, doubles as 64 bits, floats and
        int32 as 32); the arguments; and the bitwise or of all addresses, from which their common alignment follows."""
        codes, words, addresses = [], list[float](), 0
        for value in values:
            if hasattr(value, "data_ptr"):  # PyTorch's, or an allocation of this module's
                if not value.is_cuda:
                    raise LaunchError(f"argument {len(words)} of {self._entry!r} is on {value.device}, not on the GPU")
                codes.append("Q")
                words.append(address := value.data_ptr())
                addresses |= address
            elif value is None:
                codes.append("Q")
                words.append(0)
            elif isinstance(value, float):
                codes.append("d" if isinstance(value, np.float64) else "f4x")
                words.append(value)
            else:
                codes.append("i4x" if isinstance(value, np.int32) else "q")
                words.append(operator.index(value))
        form = "=" + "".join(codes)
        if form != self._checked_form:
            self._check(codes)
            self._checked_form = form
        return form, words, addresses

    def _check(self, codes: list[str]) -> None:
        # With a wrong count or size the driver would read past the buffer and crash.
        if self._sizes is None:
            return
        if len(codes) != len(self._sizes):
            raise LaunchError(f"{self._entry!r} takes {len(self._sizes)} arguments, got {len(codes)}")
        for i, (code, size) in enumerate(zip(codes, self._sizes, strict=True)):
            passed = 4 if code.endswith("4x") else 8
            if passed != size:
                kind = {"Q": "an address", "q": "an integer", "d": "a double", "i4x": "an int32", "f4x": "a float"}[code]
                raise LaunchError(f"parameter {i} of {self._entry!r} has {size} bytes; {kind} is passed as {passed}")

    def _opt_in(self, launch: Launch) -> None:
        """Requests what goes beyond the defaults: shared memory over 48 KB, clusters over 8 blocks."""
        attribute = self._driver.CUfunction_attribute
        total = launch.smem_bytes + self._smem_static_bytes
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
            result = self._driver.cuFuncSetAttribute(self._function, key, 1)
            expect(result, f"allowing clusters of {launch.cluster}")
            self._cluster_allowed = launch.cluster


@dataclass(frozen=True)
class Allocation:
    """Memory from `BareGpu`, for a launch's arguments in a tensor's place."""

    address: int
    is_cuda = True

    def data_ptr(self) -> int:
        return self.address


class BareGpu:
    """GPU 0 in a process without PyTorch. Its methods raise LaunchError with the driver's message."""

    def __init__(self) -> None:
        """Raises DeviceError where there is none."""
        self._driver = driver()
        device = expect(self._driver.cuDeviceGet(0), "looking up the GPU")
        context = expect(self._driver.cuDevicePrimaryCtxRetain(device), "taking the GPU's context")
        expect(self._driver.cuCtxSetCurrent(context), "taking the GPU's context")

    def load(self, binary: Binary, entry: str) -> CudaLoaded:
        """Launches are made on the default stream."""
        return load(binary, entry, device_limits(device_arch()), lambda: 0)

    def allocate(self, size: int) -> int:
        """The address of so many bytes, or of one; they belong to no larger allocation."""
        return int(expect(self._driver.cuMemAlloc(max(size, 1)), f"allocating {size} bytes"))

    def write(self, address: int, data: bytes) -> None:
        if data:
            held = ctypes.create_string_buffer(data, len(data))
            expect(self._driver.cuMemcpyHtoD(address, ctypes.addressof(held), len(data)), "copying to the GPU")

    def read(self, address: int, size: int) -> bytes:
        """The contents of so many bytes when all launches have ended."""
        held = ctypes.create_string_buffer(max(size, 1))
        expect(self._driver.cuCtxSynchronize(), "the GPU reports")
        expect(self._driver.cuMemcpyDtoH(ctypes.addressof(held), address, size), "copying from the GPU")
        return held.raw[:size]
