"""One OpenMP runtime for PyTorch and the variants: one pool of threads, which torch.set_num_threads rules.

The variants are linked against no OpenMP library. Their GOMP_* and omp_* symbols bind, when they are loaded, to
what the dynamic linker's global scope offers; here PyTorch's own runtime is put into it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

__all__ = ["share_openmp_runtime"]

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

    GNU's runtime has the GOMP names, and so have LLVM's and Intel's. Raises OSError if none is found.
    """
    for name in ("libtorch_cpu.so", "libtorch.so"):
        with suppress(OSError):
            path = str(Path(torch.__file__).parent / "lib" / name)
            runtime = _owner(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
            if runtime is not None:
                ctypes.CDLL(runtime, mode=os.RTLD_GLOBAL | os.RTLD_LAZY | os.RTLD_NOLOAD)
                return runtime
    ctypes.CDLL("libgomp.so.1", mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
    return "libgomp.so.1"


def _owner(library: ctypes.CDLL) -> str | None:
    """Path of the shared object in which the symbol resolves, seen from `library` and what it was linked with."""
    try:
        address = ctypes.cast(getattr(library, _SYMBOL), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _SymbolInfo()
    find = ctypes.CDLL(None).dladdr
    find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    return os.fsdecode(info.file) if find(address, ctypes.byref(info)) and info.file else None
