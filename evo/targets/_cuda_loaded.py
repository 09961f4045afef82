"""A candidate loaded into the GPU: packs arguments, opts into what a launch needs, launches on PyTorch's stream."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evo.errors import LaunchError
from evo.problem.kernel import Launch, Limits
from evo.targets._cuda_driver import driver, error_text, expect

__all__ = ["CudaLoaded"]

_SMEM_WITHOUT_OPT_IN = 48 * 1024
_PORTABLE_CLUSTER = 8
_MOST_ARGUMENTS = 64


class CudaLoaded:
    """An entry point in a module of its own. One buffer holds the arguments of every call: the driver
    copies them when a call is enqueued or captured."""

    def __init__(self, module: Any, entry: str, limits: Limits, index: int) -> None:
        self._driver = driver()
        self._index = index
        # What torch.cuda.current_stream() asks, without the object that it makes: 3 us a launch.
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._module, self._entry, self._limits = module, entry, limits
        self._function = expect(self._driver.cuModuleGetFunction(module, entry.encode()), f"looking up {entry!r}")
        self._unaligned: Any = None
        attribute = self._driver.CUfunction_attribute
        # Reading attributes also has a lazily loading driver load the code now, not amid a graph's capture.
        self.registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.smem_static_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self._sizes = self._parameter_sizes()
        self._buffer = ctypes.create_string_buffer(8 * _MOST_ARGUMENTS)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * _MOST_ARGUMENTS)(*(base + 8 * i for i in range(_MOST_ARGUMENTS)))
        self._arguments = ctypes.addressof(self._pointers)
        self._smem_allowed = _SMEM_WITHOUT_OPT_IN - self.smem_static_bytes
        self._cluster_allowed = _PORTABLE_CLUSTER
        self._extended: tuple[object, Any] = (None, None)
        self._checked_form: str | None = None

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        addresses = self._pack(values)
        if addresses & (launch.alignment - 1):
            self._launch_unaligned(launch)
            return
        if launch.smem_bytes > self._smem_allowed or launch.cluster > self._cluster_allowed:
            self._opt_in(launch)
        stream = self._current_stream(self._index)
        if launch.cluster == 1 and not launch.programmatic:
            (error,) = self._driver.cuLaunchKernel(
                self._function, *launch.grid, *launch.block, launch.smem_bytes, stream, self._arguments, 0
            )
        else:
            config = self._extended_config(launch, stream)
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, self._arguments, 0)
        if error:
            raise LaunchError(
                f"launch of {self._entry!r} with grid {launch.grid}, block {launch.block}, "
                f"{launch.smem_bytes} bytes of shared memory, cluster {launch.cluster}"
                f"{', programmatic' if launch.programmatic else ''}: {error_text(self._driver, error)}"
            )

    def _launch_unaligned(self, launch: Launch) -> None:
        entry = f"{self._entry}_unaligned"
        if self._unaligned is None:
            error, found = self._driver.cuModuleGetFunction(self._module, entry.encode())
            if error:
                raise LaunchError(
                    f"an address is no multiple of {launch.alignment} bytes, which {self._entry!r} asks for, and there "
                    f"is no entry point {entry!r}"
                )
            self._unaligned = found
        stream = self._current_stream(self._index)
        (error,) = self._driver.cuLaunchKernel(
            self._unaligned, *launch.grid, *launch.block, 0, stream, self._arguments, 0
        )
        if error:
            raise LaunchError(
                f"launch of {entry!r} with grid {launch.grid}, block {launch.block}: {error_text(self._driver, error)}"
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

    def _pack(self, values: Sequence[object]) -> int:
        """Writes the arguments, 8 bytes apart: addresses and integers as 64 bits, floats as 32.

        Returns all addresses or-ed together: what they are multiples of.
        """
        codes, words, addresses = [], list[float](), 0
        for value in values:
            if isinstance(value, torch.Tensor):
                if not value.is_cuda:
                    raise LaunchError(f"argument {len(words)} of {self._entry!r} is on {value.device}, not on the GPU")
                codes.append("Q")
                words.append(address := value.data_ptr())
                addresses |= address
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
        return addresses

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

    def _extended_config(self, launch: Launch, stream: int) -> Any:
        key = (launch, stream)
        if self._extended[0] != key:
            api = self._driver
            attributes = []
            if launch.cluster > 1:
                attribute = api.CUlaunchAttribute()
                attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                shape = attribute.value.clusterDim
                shape.x, shape.y, shape.z = launch.cluster, 1, 1
                attributes.append(attribute)
            if launch.programmatic:
                attribute = api.CUlaunchAttribute()
                attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                attribute.value.programmaticStreamSerializationAllowed = 1
                attributes.append(attribute)
            config = api.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
            config.sharedMemBytes, config.hStream = launch.smem_bytes, stream
            config.attrs, config.numAttrs = attributes, len(attributes)
            self._extended = (key, config)
        return self._extended[1]
