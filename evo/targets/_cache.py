"""Compiled code kept on disk, keyed by everything it depends on. Failures are not kept."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from evo.errors import UsageError
from evo.evaluation import Binary
from evo.problem.render import Source
from evo.targets import Target

__all__ = ["CachedBinary", "cached_build"]

_FORMAT = 4
"""Part of every key: entries of another layout are never read."""


class CachedBinary(NamedTuple):
    """seconds: what the compilation took, also where it was an earlier one."""

    binary: Binary
    seconds: float
    cached: bool


def cached_build(folder: Path, target: Target, source: Source, arch: str) -> CachedBinary:
    """The binary of `source` for `arch`, compiled in a temporary folder if it is not in the cache.

    The cache is a folder of entries, one file each, that any number of processes may share. An entry is written to a
    temporary file and renamed, so that readers see all of it or nothing. If two processes build the same, the later one
    replaces equal with equal. An entry that a crash or a bad disk has damaged does not match its checksum and is
    built again.

    Raises CompileError from the target; UsageError if the folder cannot be written to.
    """
    # The source's digest covers text, local headers, entry point and flags.
    parts = (str(_FORMAT), target.name, target.compiler(), arch, source.digest)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder / key[:2] / f"{key[2:]}.build"
    if (found := _read(path)) is not None:
        return found
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evo-build-", ignore_cleanup_errors=True) as workdir:
        binary = target.compile(source, arch, Path(workdir))
    seconds = time.perf_counter() - started
    _write(path, binary, seconds)
    return CachedBinary(binary, seconds, cached=False)


def _read(path: Path) -> CachedBinary | None:
    """The entry at `path`; None if there is none or it is damaged."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            return None
        head, _, code = content.partition(b"\n")
        record = json.loads(head)
        return CachedBinary(Binary(code=code, **record["binary"]), record["seconds"], cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, binary: Binary, seconds: float) -> None:
    fields = {name: value for name, value in asdict(binary).items() if name != "code"}
    content = json.dumps({"binary": fields, "seconds": seconds}).encode() + b"\n" + binary.code
    scratch: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        Path(scratch).replace(path)
    except OSError as error:
        if scratch is not None:
            with suppress(OSError):
                Path(scratch).unlink(missing_ok=True)
        raise UsageError(
            f"the build cache {path.parent.parent} cannot be written ({error.strerror}): free some space "
            f"there, or choose another folder"
        ) from error
