"""CUDA C++ to machine code on the user's machine: NVRTC, the compiler library that PyTorch itself uses, through ctypes.

Reference: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ._variant import Unavailable

__all__ = ["Compiler", "compiler"]


@dataclass(frozen=True)
class Compiler:
    """`version`: of the CUDA release it belongs to."""

    library: Any
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"nvrtc {self.version[0]}.{self.version[1]}"

    def arch_for(self, capability: tuple[int, int]) -> str:
        """Machine code of a GPU, or PTX if it is newer than this compiler. Raises Unavailable."""
        here, count = 10 * capability[0] + capability[1], ctypes.c_int()
        self._expect(self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "does not tell what it knows")
        known = (ctypes.c_int * count.value)()
        self._expect(self.library.nvrtcGetSupportedArchs(known), "does not tell what it knows")
        if here in known:
            return f"sm_{here}"
        older = [n for n in known if n < here]
        if not older:
            raise Unavailable(f"{self} does not compile for this GPU (compute capability {here / 10})")
        return f"compute_{max(older)}"

    def compile(self, source: bytes, headers: Mapping[str, bytes], flags: Iterable[str], arch: str) -> bytes:
        """A cubin for sm_XX, PTX for compute_XX. `headers`: what the source includes, by name. Raises Unavailable."""
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        program, options = ctypes.c_void_p(), [f"--gpu-architecture={arch}".encode(), *(f.encode() for f in flags)]
        error = self.library.nvrtcCreateProgram(
            ctypes.byref(program), source, b"untuned.cu", len(headers), texts, names
        )
        self._expect(error, "refuses the source")
        try:
            error = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            if error:
                lines = self._fetch("ProgramLog", program).decode(errors="replace").splitlines()
                telling = [line.strip() for line in lines if "error" in line] or [self._name(error)]
                raise Unavailable(f"{self} refuses it ({telling[0]})")
            return self._fetch("CUBIN" if arch.startswith("sm_") else "PTX", program)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._expect(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "gives no result")
        buffer = ctypes.create_string_buffer(size.value)
        self._expect(getattr(self.library, f"nvrtcGet{what}")(program, buffer), "gives no result")
        return buffer.raw if what == "CUBIN" else buffer.value  # the others are text, and end with a NUL

    def _expect(self, error: int, failing: str) -> None:
        if error:
            raise Unavailable(f"{self} {failing} ({self._name(error)})")

    def _name(self, error: int) -> str:
        return (self.library.nvrtcGetErrorString(error) or b"unknown error").decode()


@cache
def compiler() -> Compiler:
    """Raises Unavailable where there is none."""
    for place in _places():
        try:
            library = ctypes.CDLL(place)
            major, minor = ctypes.c_int(), ctypes.c_int()
            if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
                continue
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            pointer = ctypes.c_void_p
            library.nvrtcCreateProgram.argtypes = [
                pointer, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, pointer, pointer,
            ]  # fmt: skip
            library.nvrtcCompileProgram.argtypes = [pointer, ctypes.c_int, pointer]
            for what in ("ProgramLog", "CUBIN", "PTX"):
                getattr(library, f"nvrtcGet{what}Size").argtypes = [pointer, pointer]
                getattr(library, f"nvrtcGet{what}").argtypes = [pointer, pointer]
        except (OSError, AttributeError):
            continue
        return Compiler(library, (major.value, minor.value))
    raise Unavailable("CUDA's compiler library NVRTC is not found beside PyTorch")


def _places() -> Iterator[str]:
    """Where PyTorch has it from: linked into a library of its own, among NVIDIA's wheels, or on the system."""
    own = Path(torch.__file__).parent / "lib"
    yield str(own / "libcaffe2_nvrtc.so")
    major = (torch.version.cuda or "").partition(".")[0]
    found: list[Path] = []
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        roots = (spec.submodule_search_locations or ()) if spec else ()
        found = [p for root in roots for p in Path(root).glob("*/lib/libnvrtc.so.*")]
    yield from map(str, sorted(found, key=lambda p: (p.suffix != f".{major}", str(p))))
    yield from map(str, sorted(p for p in own.glob("libnvrtc*.so*") if "builtins" not in p.name))
    yield f"libnvrtc.so.{major}"
