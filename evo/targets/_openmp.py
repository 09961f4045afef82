"""One OpenMP runtime for PyTorch and every candidate: one pool of threads, which torch.set_num_threads rules.

Candidates are linked against no OpenMP library. Their GOMP_* and omp_* symbols bind, when they are loaded, to
what the dynamic linker's global scope offers; here PyTorch's own runtime is put into it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from evo.errors import DeviceError

__all__ = ["keep_freed_memory", "share_openmp_runtime"]

_SYMBOL = "GOMP_parallel"


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@cache
def share_openmp_runtime() -> str:
    """Path of the runtime now in the global scope: PyTorch's, whatever its file is called, else the system's.

    GNU's runtime has the GOMP names, and so have LLVM's and Intel's. Raises DeviceError if none is found.
    """
    import torch

    runtime = None
    for name in ("libtorch_cpu.so", "libtorch.so"):
        path = Path(torch.__file__).parent / "lib" / name
        with suppress(OSError):
            runtime = runtime or _owner(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    mode = os.RTLD_GLOBAL | os.RTLD_LAZY | (os.RTLD_NOLOAD if runtime else 0)
    try:
        ctypes.CDLL(runtime or "libgomp.so.1", mode=mode)
    except OSError as error:
        raise DeviceError(f"no OpenMP runtime to run kernels with ({error}): apt install libgomp1") from error
    return runtime or "libgomp.so.1"


def _owner(library: ctypes.CDLL) -> str | None:
    """Path of the shared object that gives `library` the symbol."""
    try:
        address = ctypes.cast(getattr(library, _SYMBOL), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _SymbolInfo()
    find = ctypes.CDLL(None).dladdr
    find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    return os.fsdecode(info.file) if find(address, ctypes.byref(info)) and info.file else None


@cache
def keep_freed_memory() -> None:
    """Has malloc keep large freed blocks, for the rest of this process.

    glibc hands blocks above 32 MiB back and maps them afresh, so that PyTorch pays a page fault for every 4
    KiB of every new output. That would be timed as the baseline's, while a candidate writes to an output made
    beforehand. Where there is no mallopt, nothing happens.
    """
    with suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        for option, value in (
            (-4, 0),
            (-1, 2**31 - 1),
            (-2, 64 << 20),
        ):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            set_option(option, value)
