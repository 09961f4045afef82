"""Loads the libraries of CPU variants, and builds them again from the shipped source where they do not fit.

Nothing is run that this CPU may not understand: the instruction sets that a library was built for are compared with
those of this CPU before it is loaded. Libraries built here are kept (_cache.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._cache import cache_folder
from ._openmp import share_openmp_runtime
from ._processor import features, machine
from ._variant import FOLDER, Unavailable, Variant, read_unchanged

__all__ = ["Build", "CpuCall", "Library", "build_of", "compiler", "load", "open_library"]

_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_TIMEOUT_S = 300


@dataclass(frozen=True, eq=False)
class Library:
    """A loaded entry point. `rebuilt`: why the shipped library was not it; empty if it was."""

    function: Any
    rebuilt: str


class CpuCall:
    """An entry point that is done when it returns. May be called by several threads at once."""

    def __init__(self, variant: Variant, library: Library, sizes: Mapping[str, int]) -> None:
        self.variant, self.sizes = variant, tuple(sizes.values())
        self._function = library.function

    def described(self) -> tuple[int, int, int, tuple[int, int, int], int, int, int, bool, int]:
        """As CudaCall.described; without a context."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0, 0, 0, (1, 1, 1), 1, 0, 1, False, 1

    def __call__(self, *values: float) -> bool:
        self._function(*values)
        return True


def load(variant: Variant) -> Library:
    """The shipped library if it fits this machine, else one built here. Raises Unavailable."""
    if not machine().startswith("linux-"):
        raise Unavailable("CPU variants run on Linux only")
    record = variant.record
    try:
        _check_machine(record)
        read_unchanged(record["binary"], record["binary_sha256"])
        return Library(open_library(FOLDER / record["binary"], variant), rebuilt="")
    except Unavailable as shipped:
        try:
            with _built(variant) as path:
                return Library(open_library(path, variant), rebuilt=str(shipped))
        except Unavailable as built:
            raise Unavailable(f"{shipped}, and building it here fails: {built}") from built


def _check_machine(record: Mapping[str, Any]) -> None:
    """Raises Unavailable unless this CPU has every instruction set that the shipped library may use."""
    needs = record["needs"]
    if needs["machine"] != machine():
        raise Unavailable(f"{record['binary']} is for {needs['machine']}, this is {machine()}")
    if needs["features"] is None:
        raise Unavailable(f"what {record['binary']} needs of a CPU is not known")
    missing = set(needs["features"]) - features()
    if missing:
        raise Unavailable(f"{record['binary']} needs {', '.join(sorted(missing))}, which this CPU lacks")


def open_library(path: Path, variant: Variant) -> Any:
    try:
        share_openmp_runtime()
        # RTLD_LOCAL: variants share symbol names. RTLD_NOW: an undefined symbol shows here, not in a call.
        function = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)[variant.entry]
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} does not load ({error})") from error
    function.restype = None
    function.argtypes = [_TYPES[code] for code in variant.arguments]
    return function


@dataclass(frozen=True)
class Build:
    """How a source is built for this very CPU. `name`: of the library, another one for whatever else would be built."""

    name: str
    command: tuple[str, ...]
    libraries: tuple[str, ...]

    def run(self, source: bytes, path: Path) -> None:
        """Raises Unavailable."""
        text = path.with_suffix(".cpp")
        text.write_bytes(source)
        _run([*self.command, f"-I{FOLDER}", str(text), "-o", str(path), *self.libraries])


def build_of(record: Mapping[str, Any], recipe: Mapping[str, Any], source: bytes) -> Build:
    """Of a variant's source, or of one made of it. Raises Unavailable, also if what it includes has changed."""
    for name, sha256 in record["includes"].items():
        read_unchanged(name, sha256)
    command, version = compiler()
    command = [*command, *recipe["flags"], "-march=native"]
    libraries = [] if "clang" in version else recipe["libraries"]  # clang's OpenMP calls need its own runtime
    sources = [hashlib.sha256(source).hexdigest(), *sorted(record["includes"].values())]
    parts = [*sources, version, *command, *libraries, machine(), *sorted(features())]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest() + ".so"
    return Build(name, tuple(command), tuple(libraries))


@contextmanager
def _built(variant: Variant) -> Iterator[Path]:
    """The library built from the shipped source; on disk at least until the block ends."""
    record = variant.record
    source = read_unchanged(record["source"], record["source_sha256"])
    build = build_of(record, record["recipe"], source)
    cache = cache_folder()
    if cache is not None and (cache / build.name).is_file():
        yield cache / build.name
        return
    try:
        with tempfile.TemporaryDirectory(prefix="evo-module-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / build.name
            build.run(source, path)
            if cache is not None:
                with suppress(OSError):
                    part = Path(tempfile.mkdtemp(dir=cache)) / build.name
                    shutil.copyfile(path, part)
                    part.replace(cache / build.name)
                    part.parent.rmdir()
            yield path
    except OSError as error:
        raise Unavailable(f"no room to build in ({error.strerror})") from error


def compiler() -> tuple[list[str], str]:
    """$CXX or the first compiler there is, as a command, and its version. Raises Unavailable."""
    wanted = os.environ.get("CXX", "")
    for command in [shlex.split(wanted)] if wanted else [[name] for name in _COMPILERS]:
        if command and shutil.which(command[0]):
            return command, _run([*command, "--version"]).partition("\n")[0].strip()
    raise Unavailable(f"there is no C++ compiler ({wanted or ', '.join(_COMPILERS)})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or "no message").splitlines()[0]
        raise Unavailable(f"{command[0]} refuses ({reason})") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{command[0]} does not run ({error})") from error
    return done.stdout
