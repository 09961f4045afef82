"""Languages: how a template is written, and what compiles it. One module each, found by its name; it defines `LANGUAGE`, an
object of protocol `Language`. A kernel's template has its language by its suffix: cuda.cu.j2 is CUDA C++ for target cuda.

Compilation works on a machine without the device.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from evo.discovery import find_plugin, plugin_names
from evo.errors import UsageError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.problem.loading import Notation
from evo.runtime.package import read_whole, write_whole

if TYPE_CHECKING:
    from evo.problem.render import Source  # brings the template engine along, which commands that only read do without


class Language(Notation, Protocol):
    """What a template is written in, for one target or several."""

    title: str
    """What people call it."""

    def compiler(self) -> str:
        """Compiler name and version, part of the build cache's key. Raises DeviceError if there is none."""
        ...

    def compile(self, source: Source, arch: str, workdir: Path) -> Binary:
        """Compiles in an empty folder of its own. What of a launch follows from the compilation alone, such as shared
        memory, is told in `Binary.launch`. Raises CompileError with the compiler's log."""
        ...

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        """Predicted resident threads over the multiprocessor's limit; None where there is no such limit. Raises CompileError
        where it shows that the code has no such entry point."""
        ...

    def recipe(self, flags: Sequence[str]) -> Mapping[str, Sequence[str]] | None:
        """What a package needs to know, beside the architecture, to compile a source where it runs (`flags`, `libraries`);
        None if it cannot, so that it runs binaries alone."""
        ...


def language_names() -> list[str]:
    return plugin_names("language")


def find_language(name: str) -> Language:
    """Raises UnknownNameError."""
    return cast(Language, find_plugin("language", name))


def compile_source(source: Source, arch: str, workdir: Path) -> Binary:
    """Compiles in the source's own language. Raises what `Language.compile` raises."""
    return find_language(source.language).compile(source, arch, workdir)


# Compiled code kept on disk, keyed by everything it depends on. Failures are not kept.

class CachedBinary(NamedTuple):
    """seconds: what the compilation took, also where it was an earlier one."""

    binary: Binary
    seconds: float
    cached: bool


def cached_build(folder: Path, language: Language, source: Source, arch: str) -> CachedBinary:
    """The binary of `source` for `arch`, compiled in a temporary folder if it is not in the cache.

    The cache is a folder of entries, one file each, that any number of processes may share. If two processes build the same,
    the later one replaces equal with equal. An entry that a crash or a bad disk has damaged is built again.

    Raises CompileError from the language; UsageError if the folder cannot be written to.
    """
    # The source's digest covers text, local headers, entry point and flags. Entries with other fields are never read.
    parts = (language.name, language.compiler(), arch, source.digest, *(f.name for f in fields(Binary)))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder / key[:2] / f"{key[2:]}.build"
    if (stored := read_whole(path)) is not None:
        head, _, code = stored.partition(b"\n")
        seconds, figures = json.loads(head)
        return CachedBinary(Binary(code=code, **figures), seconds, cached=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evo-build-", ignore_cleanup_errors=True) as workdir:
        binary = language.compile(source, arch, Path(workdir))
    seconds = time.perf_counter() - started
    if replace(source).digest != source.digest:  # a header has changed: which of the two was compiled, nobody knows
        return CachedBinary(binary, seconds, cached=False)
    figures = {name: value for name, value in vars(binary).items() if name != "code"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([seconds, figures]).encode() + b"\n" + binary.code)
    except OSError as error:
        raise UsageError(
            f"the build cache {folder} cannot be written ({error.strerror}): free some space there, or choose another"
            " folder"
        ) from error
    return CachedBinary(binary, seconds, cached=False)
