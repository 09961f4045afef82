"""PTX to machine code in this process, by nvJitLink through ctypes: the driver would do it in the process that times.

Reference: nvJitLink documentation, https://docs.nvidia.com/cuda/nvjitlink/
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from evo.errors import CompileError
from evo.runtime.nvrtc import places
from evo.runtime.package import Unavailable

_INPUT_PTX = 2


class Linker:
    """The library at a path. `version`: of the CUDA release it belongs to. Raises OSError, AttributeError if it is none."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        if self._library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor)):
            raise OSError(f"{path} does not report its version")
        self.version = major.value, minor.value

    def __str__(self) -> str:
        return f"nvjitlink {self.version[0]}.{self.version[1]}"

    def link(self, ptx: bytes, arch: str, flags: Iterable[str]) -> bytes:
        """A cubin for `arch`, such as sm_90. Raises CompileError with the linker's log."""
        handle, options = ctypes.c_void_p(), [f"-arch={arch}".encode(), *(f.encode() for f in flags)]
        given = (ctypes.c_char_p * len(options))(*options)
        self._expect(self._library.nvJitLinkCreate(ctypes.byref(handle), len(options), given), handle)
        try:
            data = ptx + b"\0"
            added = self._library.nvJitLinkAddData(handle, _INPUT_PTX, data, ctypes.c_size_t(len(data)), b"candidate.ptx")
            self._expect(added, handle)
            self._expect(self._library.nvJitLinkComplete(handle), handle)
            return self._fetch("LinkedCubin", handle)
        finally:
            self._library.nvJitLinkDestroy(ctypes.byref(handle))

    def _fetch(self, what: str, handle: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        if getattr(self._library, f"nvJitLinkGet{what}Size")(handle, ctypes.byref(size)):
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvJitLinkGet{what}")(handle, buffer)
        return buffer.raw

    def _expect(self, error: int, handle: ctypes.c_void_p) -> None:
        if error:
            log = self._fetch("ErrorLog", handle).rstrip(b"\0").decode(errors="replace").strip() if handle else ""
            raise CompileError(f"{self} does not link its PTX: {log or f'error {error}'}")


@cache
def linker(least: tuple[int, int]) -> Linker:
    """The one beside PyTorch that reads the PTX of an NVRTC of this version. Raises Unavailable where there is none."""
    for place in places("nvJitLink"):
        with suppress(OSError, AttributeError):
            if (found := Linker(place)).version >= least:
                return found
    raise Unavailable("CUDA's library nvJitLink is not found beside PyTorch")
