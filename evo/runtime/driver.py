"""The CUDA driver by ctypes, and one launch as it wants it. Nothing here imports PyTorch.

Reference: CUDA Driver API, sections Module Management and Execution Control.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from .package import Unavailable

SMEM_WITHOUT_OPT_IN = 48 * 1024
PORTABLE_CLUSTER = 8
_CLUSTER_DIMENSION, _PROGRAMMATIC = 4, 6  # CUlaunchAttributeID


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "z": ctypes.c_size_t}
_NAMES = {
    "": "cuCtxSynchronize cuCtxResetPersistingL2Cache",
    "i": "cuInit",
    "p": (
        "cuDriverGetVersion cuDeviceGetCount cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuModuleUnload"
        " cuEventDestroy_v2 cuEventSynchronize cuThreadExchangeStreamCaptureMode"
    ),
    "ip": "cuGetErrorName cuGetErrorString",
    "pi": "cuDeviceGet cuDeviceGetUuid_v2 cuDeviceTotalMem_v2 cuDevicePrimaryCtxRetain cuEventCreate cuStreamCreate",
    "pii": "cuDeviceGetName cuDeviceGetAttribute cuDeviceGetPCIBusId cuFuncSetAttribute",
    "pip": "cuFuncGetAttribute",
    "pp": "cuModuleLoadData",
    "ppi": "cuEventRecordWithFlags",
    "ppp": "cuModuleGetFunction cuEventElapsedTime_v2",
    "pppp": "cuLaunchKernelEx",
    "ppz": "cuMemcpyHtoD_v2 cuMemcpyDtoH_v2",
    "pz": "cuMemAlloc_v2",
    "pzpp": "cuFuncGetParamInfo",
}
FUNCTIONS = {symbol: kinds for kinds, symbols in _NAMES.items() for symbol in symbols.split()}
"""Parameters by symbol, as far as a calling convention tells them apart: p an address, i an int, z a size."""
STATIC_SMEM, REGISTERS, DYNAMIC_SMEM, LARGE_CLUSTER = 1, 4, 8, 14  # CUfunction_attribute


@cache
def load_driver() -> Any:
    """The driver's functions by the names of cuda.h; an old driver lacks some. Raises Unavailable."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"there is no CUDA driver ({error})") from error
    found = SimpleNamespace()
    for symbol, kinds in FUNCTIONS.items():
        name = symbol.removesuffix("_v2")
        with suppress(AttributeError):
            function = getattr(library, symbol, None) or getattr(library, name)
            function.argtypes = [_KINDS[kind] for kind in kinds]
            setattr(found, name, function)
    if not hasattr(found, "cuLaunchKernelEx"):
        raise Unavailable("the CUDA driver is older than CUDA 11.8")
    if failure := found.cuInit(0):
        raise Unavailable(f"the CUDA driver does not start: {error_text(found, failure)}")
    return found


def error_text(driver: Any, error: int) -> str:
    """CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(error, ctypes.byref(name))
    driver.cuGetErrorString(error, ctypes.byref(text))
    return f"{(name.value or b'CUDA error').decode()} ({error}): {(text.value or b'unknown error').decode()}"


def ask(function: str, failing: str, *arguments: Any) -> None:
    """Calls a function of the driver. Raises Unavailable: what fails, and CUDA's words for the error."""
    driver = load_driver()
    if error := getattr(driver, function)(*arguments):
        raise Unavailable(f"{failing}: {error_text(driver, error)}")


def answer(kind: Any, function: str, failing: str, *arguments: Any) -> Any:
    """The value of a ctypes kind that a function of the driver writes to where its first parameter points. Raises
    Unavailable."""
    found = kind()
    ask(function, failing, ctypes.byref(found), *arguments)
    return found.value


def driver_version() -> int:
    """13010 of one for CUDA 13.1. Raises Unavailable."""
    return int(answer(ctypes.c_int, "cuDriverGetVersion", "the CUDA driver does not tell its version"))


Slot = tuple[str, int]
"""Format of an entry point's parameter for `struct`, and its alignment: ("Q", 8) of an address, ("128s", 64)."""
_MOST_ALIGNED = 256


@cache
def _layout(slots: tuple[Slot, ...]) -> tuple[struct.Struct, list[int]]:
    """What writes the arguments of an entry point one after another, and where each begins."""
    form, places = "=", list[int]()
    for code, alignment in slots:
        form += f"{-struct.calcsize(form) % alignment}x{code}"
        places.append(struct.calcsize(form) - struct.calcsize(f"={code}"))
    return struct.Struct(form), places


class Frame:
    """One launch as the driver wants it: geometry, and the arguments, which it has copied when the launch returns. `pack`
    writes them.

    cuLaunchKernelEx takes four parameters, where cuLaunchKernel takes eleven that ctypes would convert every time.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        cluster: int,
        programmatic: bool,
        slots: Sequence[Slot],
    ) -> None:
        form, places = _layout(tuple(slots))
        memory = ctypes.create_string_buffer(form.size + _MOST_ALIGNED)
        start = -ctypes.addressof(memory) % _MOST_ALIGNED
        base = ctypes.addressof(memory) + start
        self.pack = partial(form.pack_into, memory, start)
        self._pointers = (ctypes.c_void_p * len(slots))(*(base + place for place in places))
        attributes = []
        if cluster > 1:
            attributes.append(_LaunchAttribute(id=_CLUSTER_DIMENSION, value=(cluster, 1, 1)))
        if programmatic:
            attributes.append(_LaunchAttribute(id=_PROGRAMMATIC, value=(1,)))
        self._attributes = (_LaunchAttribute * len(attributes))(*attributes)
        self.config = _LaunchConfig(
            grid=blocks,
            block=block,
            smem_bytes=smem_bytes,
            attributes=ctypes.cast(self._attributes, ctypes.POINTER(_LaunchAttribute)),
            attribute_count=len(attributes),
        )
        self.address = ctypes.c_void_p(ctypes.addressof(self.config))
        self.arguments = ctypes.c_void_p(ctypes.addressof(self._pointers))
