"""CUDA C++ to machine code in this process, by NVRTC through ctypes: needs neither a CUDA toolkit nor a GPU.

Reference: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .package import Unavailable

_SOURCE_NAME = b"candidate.cu"
"""What the compiler's messages call the source: candidate.cu(12): error: ..."""


_NEEDS = re.compile(r"^// needs (sm_\d+a)\b", re.MULTILINE)


def own_arch(source: str, arch: str) -> str:
    """The architecture that a source is compiled for where code for `arch` is wanted: that in its line `// needs sm_90a`, if
    it has one, as it uses instructions of that GPU alone. Raises Unavailable for code of another GPU, and for PTX, which is
    for others, too."""
    found = _NEEDS.search(source)
    if found is None or arch == found[1]:
        return arch
    if f"{arch}a" != found[1]:
        raise Unavailable(f"its source needs {found[1]}, and code for {arch} is wanted")
    return found[1]


class Refused(Unavailable):
    """The source does not compile. `log`: all that the compiler says of it."""

    def __init__(self, compiler: Compiler, log: str) -> None:
        telling = [line.strip() for line in log.splitlines() if "error" in line] or [log]
        super().__init__(f"{compiler} refuses it ({telling[0]})")
        self.log = log


class Compiled(NamedTuple):
    """code: a cubin for sm_XX, PTX for compute_XX. log: of ptxas, too. ptx: of a cubin, too; text in UTF-8."""

    code: bytes
    log: str
    ptx: bytes


class Compiler:
    """The library at a path. `version`: of the CUDA release it belongs to. Raises OSError, AttributeError if it is none."""

    def __init__(self, path: str) -> None:
        beside = Path(path).parent.glob("libnvrtc-builtins.so.*") if Path(path).is_absolute() else ()
        for builtins in beside:  # which NVRTC opens by name, and older wheels do not find beside it
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        if self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            raise OSError(f"{path} does not report its version")
        self.version = major.value, minor.value

    def __str__(self) -> str:
        return f"nvrtc {self.version[0]}.{self.version[1]}"

    def architectures(self) -> list[int]:
        """The compute capabilities it compiles for, 89 for 8.9. Raises Unavailable."""
        count = ctypes.c_int()
        self._expect(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "does not tell what it knows")
        known = (ctypes.c_int * count.value)()
        self._expect(self._library.nvrtcGetSupportedArchs(known), "does not tell what it knows")
        return list(known)

    def arch_for(self, capability: tuple[int, int], recorded: str = "") -> str:
        """Machine code of a GPU, or PTX if it is newer than this compiler. recorded: what the source was made for, such as
        sm_90a: it may use what only the architecture (a) or its family (f) has, and is compiled for that. CUDA C++
        Programming Guide, "Family-Specific Features". Raises Unavailable."""
        here, known = 10 * capability[0] + capability[1], self.architectures()
        feature = recorded[-1] if recorded.endswith(("a", "f")) else ""
        if here in known:
            return f"sm_{here}{feature}"
        if feature:
            raise Unavailable(f"{self} does not compile for sm_{here}{feature}")
        older = [n for n in known if n < here]
        if not older:
            raise Unavailable(f"{self} does not compile for this GPU (compute capability {here / 10})")
        return f"compute_{max(older)}"

    def compile(
        self,
        source: bytes,
        headers: Mapping[str, bytes],
        flags: Iterable[str],
        arch: str,
    ) -> Compiled:
        """`headers`: what the source includes, by name. Raises Refused, and Unavailable where the compiler itself fails."""
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        program, options = ctypes.c_void_p(), [f"--gpu-architecture={arch}".encode(), *(f.encode() for f in flags)]
        error = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source, _SOURCE_NAME, len(headers), texts, names
        )
        self._expect(error, "refuses the source")
        try:
            error = self._library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            # ptxas ends its part of the log with a NUL, and errors may follow it.
            log = self._fetch("ProgramLog", program).replace(b"\0", b"").decode(errors="replace").strip()
            if error:
                raise Refused(self, log or self._name(error))
            ptx = self._fetch("PTX", program).rstrip(b"\0")
            return Compiled(self._fetch("CUBIN", program) if arch.startswith("sm_") else ptx, log, ptx)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._expect(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "gives no result")
        buffer = ctypes.create_string_buffer(size.value)
        self._expect(getattr(self._library, f"nvrtcGet{what}")(program, buffer), "gives no result")
        return buffer.raw

    def _expect(self, error: int, failing: str) -> None:
        if error:
            raise Unavailable(f"{self} {failing} ({self._name(error)})")

    def _name(self, error: int) -> str:
        name: bytes | None = self._library.nvrtcGetErrorString(error)
        return (name or b"unknown error").decode()


@cache
def compiler() -> Compiler:
    """The one beside PyTorch. Raises Unavailable where there is none."""
    for place in places("nvrtc"):
        with suppress(OSError, AttributeError):
            return Compiler(place)
    raise Unavailable("CUDA's compiler library NVRTC is not found beside PyTorch")


def places(name: str) -> Iterator[str]:
    """Where PyTorch has a library of CUDA (nvrtc, nvJitLink) from: linked into one of its own, among NVIDIA's wheels, or on
    the system. PyTorch itself, which takes seconds to import, is not needed for it."""
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent if torch and torch.origin else Path()
    own, made_for = folder / "lib", ""
    yield str(own / f"libcaffe2_{name}.so")
    with suppress(OSError):
        made_for = (folder / "version.py").read_text()
    major = match[1] if (match := re.search(r"^cuda\b.*'(\d+)\.", made_for, re.MULTILINE)) else ""
    found: list[Path] = []
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        roots = (spec.submodule_search_locations or ()) if spec else ()
        found = [p for root in roots for p in sorted(Path(root).glob(f"*/lib/lib{name}.so.*"))]
    yield from map(str, sorted(found, key=lambda p: p.suffix != f".{major}"))  # else in the order of Python's path
    yield from map(str, sorted(p for p in own.glob(f"lib{name}*.so*") if "builtins" not in p.name))
    with suppress(ImportError, RuntimeError, OSError):  # a toolkit's, where this is installed
        from cuda.pathfinder import load_nvidia_dynamic_lib

        yield str(load_nvidia_dynamic_lib(name).abs_path)
    yield f"lib{name}.so.{major}"
