"""CPU variants: what instructions this CPU has, one OpenMP runtime with PyTorch, the C++ compiler, libraries to call.

Nothing is run that this CPU may not understand: the instruction sets that a library was built for are compared with
those of this CPU before it is loaded. PyTorch is imported where it is needed: the engine uses single functions of this.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .driver import Slot
from .package import Unavailable, Variant

_RELEVANT = re.compile(
    r"(sse|ssse|avx|amx|fma|bmi|sve|sme)\w*"
    r"|pni|f16c|abm|lzcnt|tbm|xop|popcnt|movbe|v?aes|v?pclmulqdq|gfni|sha\w*|sm[34]|adx|lahf_lm|cx16|cldemote|serialize"
    r"|rdrand|rdseed|clwb|clflushopt|movdiri|movdir64b|prefetchi|apx\w*"
    r"|fp|fphp|asimd\w*|atomics|crc32|pmull|lrcpc|dcpop|jscvt|fcma|flagm\w*|frint|i8mm|bf16|dgh|rng|bti|mte\w*|mops|lse\w*"
)
"""Instruction sets that a compiler may use, as Linux spells them; not what tells of the kernel or of a hypervisor."""

_TYPES: dict[str, Any] = {
    "Q": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_TIMEOUT_S = 900
_OPENMP_SYMBOL = "GOMP_parallel"


def machine() -> str:
    """linux-x86_64."""
    return f"{platform.system()}-{platform.machine()}".lower()


@cache
def model() -> str:
    """What Linux calls this CPU."""
    found = re.search(r"^(?:model name|Model|Processor)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


@cache
def features() -> frozenset[str]:
    """Instruction sets of this CPU; empty where /proc/cpuinfo does not tell."""
    # A process may move between cores: what counts is what all of them have.
    cores = [set(flags.split()) for flags in re.findall(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.MULTILINE)]
    common = set.intersection(*cores) if cores else set()
    return frozenset(f for f in common if _RELEVANT.fullmatch(f))


def _cpuinfo() -> str:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(errors="replace")
    return ""


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
    """One pool of threads for PyTorch and the kernels, which torch.set_num_threads rules.

    Kernels are linked against no OpenMP library. Their GOMP_* and omp_* symbols bind, when they are loaded, to what the
    dynamic linker's global scope offers; here PyTorch's own runtime is put into it. GNU's runtime has the GOMP names, and
    so have LLVM's and Intel's. Returns the path of the runtime: PyTorch's, whatever its file is called, else the
    system's. Raises OSError if none is found.
    """
    import torch

    runtime, library = None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with suppress(OSError):
        runtime = _owner(ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    ctypes.CDLL(runtime or "libgomp.so.1", mode=os.RTLD_GLOBAL | os.RTLD_LAZY | (os.RTLD_NOLOAD if runtime else 0))
    return runtime or "libgomp.so.1"


def _owner(library: ctypes.CDLL) -> str | None:
    """Path of the shared object in which OpenMP's symbols resolve, seen from `library` and what it was linked with."""
    try:
        address = ctypes.cast(getattr(library, _OPENMP_SYMBOL), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _SymbolInfo()
    find = ctypes.CDLL(None).dladdr
    find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    return os.fsdecode(info.file) if find(address, ctypes.byref(info)) and info.file else None


@cache
def keep_freed_memory() -> None:
    """Has malloc keep large freed blocks, for the rest of this process, as an allocator for models does.

    glibc hands blocks above 32 MiB back and maps them afresh, so that PyTorch pays a page fault for every 4 KiB of every
    new output: up to ten times what the computation takes, in some processes and not in others. Where there is no
    mallopt, nothing happens.
    """
    with suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            set_option(option, value)


def argument_types(slots: Iterable[Slot]) -> list[Any]:
    """Parameters of an entry point for ctypes."""
    return [_TYPES.get(code) or _Aligned(int(code[:-1]), alignment) for code, alignment in slots]


@dataclass(frozen=True)
class _Aligned:
    """Type of a parameter for ctypes: a structure by reference, given as its bytes."""

    size: int
    alignment: int

    def from_param(self, content: bytes) -> Any:
        memory = ctypes.create_string_buffer(self.size + self.alignment)
        start = -ctypes.addressof(memory) % self.alignment
        ctypes.memmove(ctypes.addressof(memory) + start, content, len(content))
        return ctypes.byref(memory, start)


@dataclass(frozen=True, eq=False)
class Library:
    """A variant's entry points, loaded, one a launch; each is done when it returns. May be called by several threads at
    once."""

    variant: Variant
    functions: tuple[Any, ...]
    sizes: tuple[int, ...] = ()
    how: str = ""
    workspace: tuple[tuple[int, bool], ...] = ()

    def call(self, sizes: Mapping[str, int], retire: object, how: str = "") -> Library:
        """The same as Function.call; no call of it fails."""
        return replace(self, sizes=tuple(sizes.values()), how=how, workspace=self.variant.workspace(sizes))

    def described(self) -> tuple[Any, ...]:
        """The same as Function.described, without a context."""
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self.functions]
        one = (0, (1, 1, 1), 0, 1, False, 1, (), 1, 0, False)
        return 0, self.variant.described_workspace(), tuple((address, *one) for address in addresses)

    def __call__(self, *values: Any) -> bool:
        for function in self.functions:
            function(*values)
        return True


def lacking(needs: Mapping[str, Any]) -> str:
    """Why this CPU does not run what needs that; empty if it does."""
    if needs["machine"] != machine():
        return f"is for {needs['machine']}, this is {machine()}"
    if needs["features"] is None:
        return "was built for a CPU that is not known"
    missing = set(needs["features"]) - features()
    return f"needs {', '.join(sorted(missing))}, which this CPU lacks" if missing else ""


def load_shipped(variant: Variant) -> Library:
    """A variant's own library. Raises Unavailable, also where this CPU has not every instruction set it may use."""
    name = variant.record["binary"]
    if reason := lacking(variant.record["needs"]):
        raise Unavailable(f"{name} {reason}")
    variant.package.read(name)
    return _open_library(variant.package.path(name), variant)


def _open_library(path: Path, variant: Variant) -> Library:
    """Raises Unavailable."""
    if not machine().startswith("linux-"):
        raise Unavailable("CPU variants run on Linux only")
    try:
        share_openmp_runtime()
        # RTLD_LOCAL: variants share symbol names. RTLD_NOW: an undefined symbol shows here, not in a call.
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        functions = tuple(library[variant.entry(plan)] for plan in variant.plans)
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} does not load ({error})") from error
    for function in functions:
        function.restype = None
        function.argtypes = argument_types(variant.arguments)
    return Library(variant, functions)


def compiler() -> tuple[list[str], str]:
    """$CXX or the first compiler there is, as a command, and its version. Raises Unavailable."""
    wanted = os.environ.get("CXX", "")
    for command in [shlex.split(wanted)] if wanted else [[name] for name in _COMPILERS]:
        if command and shutil.which(command[0]):
            return command, run([*command, "--version"]).partition("\n")[0].strip()
    raise Unavailable(f"there is no C++ compiler ({wanted or ', '.join(_COMPILERS)})")


def compile_library(source: bytes, recipe: Mapping[str, Any], folders: Iterable[Path]) -> bytes:
    """For this very CPU. folders: of headers. Raises Unavailable."""
    command, version = compiler()
    libraries = () if "clang" in version else recipe["libraries"]  # clang's OpenMP calls need its own runtime
    with temporary_folder() as folder:
        text, library = folder / "variant.cpp", folder / "variant.so"
        text.write_bytes(source)
        include = [f"-I{place}" for place in folders]
        run([*command, *recipe["flags"], "-march=native", *include, str(text), "-o", str(library), *libraries])
        return library.read_bytes()


def load_library(variant: Variant, name: str, code: bytes) -> Library:
    """What was compiled of a variant. Raises Unavailable."""
    with temporary_folder() as folder:
        (folder / name).write_bytes(code)
        return _open_library(folder / name, variant)


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """To build in; where the system has such, or in another place. Raises Unavailable."""
    try:
        with tempfile.TemporaryDirectory(prefix="evo-build-", dir=place, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise Unavailable(f"no room to build in ({error.strerror})") from error


def run(command: Sequence[str], **options: Any) -> str:
    """What a compiler's command prints; options: of subprocess.run. Raises Unavailable, with its error."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_S, check=False, **options
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{command[0]} does not run ({error})") from error
    if done.returncode:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        telling = [line for line in lines if "error:" in line] or lines[-1:] or [f"exit code {done.returncode}"]
        raise Unavailable(f"the compiler refuses ({telling[0]})")
    return str(done.stdout)
