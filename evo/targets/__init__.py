"""Targets: the kinds of machine that candidates are compiled for and run on. One module each, found by its name.

A module defines `TARGET`, an object of protocol `Target`. Compilation works on a machine without the
device; `open` is called in a separate process, which may die with a candidate.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from evo.discovery import find_plugin, plugin_names
from evo.errors import DeviceError, UsageError
from evo.evaluation import Binary, Status
from evo.problem.kernel import Launch, Limits
from evo.runtime.package import read_whole, write_whole

if TYPE_CHECKING:
    import torch

    from evo.problem.render import Source  # brings the template engine along, which commands that only read do without

EVICTION_MULTIPLE = 2
"""Session.evict() touches this many times the last-level cache: caches are no perfect queues."""

_CAUSES = {
    Status.OUT_OF_MEMORY: r"OUT OF MEMORY|BAD ALLOC|CAN'T ALLOCATE MEMORY|CANNOT ALLOCATE MEMORY",
    Status.MISALIGNED_ADDRESS: r"MISALIGNED ADDRESS",
    Status.ILLEGAL_ADDRESS: r"ILLEGAL ADDRESS|ILLEGAL MEMORY ACCESS|INVALID ADDRESS SPACE",
    Status.TRAP: r"ILLEGAL INSTRUCTION|CUDA ERROR ASSERT|DEVICE-SIDE ASSERT|HARDWARE STACK ERROR|INVALID PC|LAUNCH FAILED"
    r"|UNSPECIFIED LAUNCH FAILURE",
    Status.TIMEOUT: r"LAUNCH TIMEOUT|LAUNCH TIMED OUT",
}
"""Names of the CUDA driver's errors with spaces for underscores, and their texts as PyTorch repeats them. LAUNCH_FAILED is
what a trap instruction is reported as. What cannot be launched (LAUNCH_OUT_OF_RESOURCES, INVALID_VALUE) is left to the
default. Source: CUDA driver API, "Data types used by CUDA driver", CUresult."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device as every run records it."""

    name: str
    arch: str
    driver: str = ""
    details: dict[str, str] = field(default_factory=dict)


class Replay(Protocol):
    """A prepared sequence of calls that can be run and timed again and again."""

    calls: int

    def run_us(self) -> float:
        """Runs the sequence once; microseconds per call, measured on the device where it has a clock."""
        ...

    def close(self) -> None: ...


class Loaded(Protocol):
    """Loaded code, with an entry point for launches that name none. `values` are the arguments in the kernel's order:
    tensors, None, numbers."""

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        """Enqueues one launch on the session's current stream. Raises LaunchError if it cannot."""
        ...

    @property
    def fenced(self) -> bool:
        """Whether the code may order what one of its threads writes, as another sees it: it has a fence, or needs none."""
        ...

    def close(self) -> None: ...


class Hazards(Protocol):
    """Adverse conditions that the gate creates for a candidate, on devices that have them."""

    held: bool
    """Whether all was done in the last `hold` before it let the device go."""

    def scrub(self, byte: int) -> None:
        """Fills shared memory, which a launch finds uncleared, with `byte`."""
        ...

    def end_late(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor | None]], byte: int
    ) -> AbstractContextManager[Callable[[], bool]]:
        """Enqueues a kernel that lets the next programmatic launch, made within the block, start at once. The kernel waits,
        and then looks whether any of at most two pieces of memory, all of `byte` before, was written meanwhile, which the
        function tells after the block; and copies to each what is given beside it: uint8, of one size, at multiples of 16
        bytes. Raises LaunchError."""
        ...

    def hold(
        self, room: int, memory: torch.Tensor, spoiled: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Takes all multiprocessors but `room` while the launches are done that are made within the block, though not for
        ever: each of `Launch.alone` then has so many blocks at once. Meanwhile `memory`, uint8 or empty, is read all the
        time: then caches hold it. `spoiled`: memory that is overwritten with NaN between two blocks, where `room` is one.
        Raises LaunchError."""
        ...


class Session(Protocol):
    """An open device, in the process that may die with a candidate."""

    info: DeviceInfo
    limits: Limits
    device: torch.device

    def __hash__(self) -> int: ...

    @property
    def hazards(self) -> Hazards | None:
        """The hazards of the device; None if it has none. Raises what creating them raises: the gate does not run without
        them."""
        ...

    def load(self, binary: Binary, entry: str) -> Loaded:
        """Raises LaunchError."""
        ...

    def synchronize(self) -> None:
        """Waits for the device. Raises LaunchError with the device's own words if a call failed."""
        ...

    def evict(self) -> None:
        """Fills the last-level cache with other data, before a sample that must not find its own there."""
        ...

    def estimate_us(self, call: Callable[[], object]) -> float:
        """A rough time of one call, to size samples by. Raises LaunchError."""
        ...

    def record(self, calls: Sequence[Callable[[], object]]) -> Replay:
        """Prepares calls to be replayed in order. Their results stay alive with the replay, so that each call gets fresh
        memory. If all are the same call, a result is dropped each time, so that the next call gets the same memory."""
        ...

    def repeatable(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`work`, for many calls: on a GPU a graph of it, whose results lie in the same memory each time. It reads and
        writes the same tensors each time, and leaves nothing to the host."""
        ...

    def clocks(self) -> dict[str, float]:
        """Clocks (MHz), temperature (C), power (W), other processes on it now, as far as the device reports them."""
        ...

    def disturbance(self) -> str:
        """The disturbance of the device since this was last called, in a few words; empty if there was none."""
        ...


class Target(Protocol):
    """A kind of machine that candidates run on."""

    name: str
    language: str
    """Language that a template renders to, for file names and highlighting: cu, cpp."""
    shares_cores: bool
    """True where building and timing compete for the same cores and must take turns."""

    def device(self) -> DeviceInfo:
        """The first device that this process sees. Raises DeviceError, with the remedy, if there is none."""
        ...

    def devices(self) -> dict[str, str]:
        """All of them, in their order: the name of each, by an identity that no other has. Raises DeviceError."""
        ...

    def restrict(self, devices: Sequence[str]) -> None:
        """Has this process see these devices alone, by their identities, in this order. It must not have asked for any
        before."""
        ...

    def limits(self, arch: str) -> Limits:
        """Limits of `arch`, without the device. Raises DeviceError for an unknown arch."""
        ...

    def runs(self, arch: str) -> str:
        """Why code for `arch` does not run on the device present; empty if it does. Raises DeviceError if there is
        none, or for an unknown arch."""
        ...

    def compiler(self) -> str:
        """Compiler name and version, part of the build cache's key. Raises DeviceError if there is none."""
        ...

    def compile(self, source: Source, arch: str, workdir: Path) -> Binary:
        """Compiles in an empty folder of its own. Raises CompileError with the compiler's log."""
        ...

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        """Predicted resident threads over the multiprocessor's limit; None where there is no such limit. Raises CompileError
        where it shows that the code has no such entry point."""
        ...

    def open(self) -> Session:
        """Raises DeviceError."""
        ...


def target_names() -> list[str]:
    return plugin_names(sys.modules[__name__])


def find_target(name: str) -> Target:
    """Raises UnknownNameError."""
    return cast(Target, find_plugin(sys.modules[__name__], "target", name))


def answers(name: str) -> bool:
    """Whether a device of the target is present. Raises UnknownNameError."""
    try:
        find_target(name).device()
    except DeviceError:
        return False
    return True


def classify(message: str, default: Status) -> Status:
    """The status that a device's error message stands for."""
    text = message.upper().replace("_", " ")
    return next((status for status, pattern in _CAUSES.items() if re.search(pattern, text)), default)


# Compiled code kept on disk, keyed by everything it depends on. Failures are not kept.

class CachedBinary(NamedTuple):
    """seconds: what the compilation took, also where it was an earlier one."""

    binary: Binary
    seconds: float
    cached: bool


def cached_build(folder: Path, target: Target, source: Source, arch: str) -> CachedBinary:
    """The binary of `source` for `arch`, compiled in a temporary folder if it is not in the cache.

    The cache is a folder of entries, one file each, that any number of processes may share. If two processes build the same,
    the later one replaces equal with equal. An entry that a crash or a bad disk has damaged is built again.

    Raises CompileError from the target; UsageError if the folder cannot be written to.
    """
    # The source's digest covers text, local headers, entry point and flags. Entries with other fields are never read.
    parts = (target.name, target.compiler(), arch, source.digest, *(f.name for f in fields(Binary)))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder / key[:2] / f"{key[2:]}.build"
    if (stored := read_whole(path)) is not None:
        head, _, code = stored.partition(b"\n")
        seconds, figures = json.loads(head)
        return CachedBinary(Binary(code=code, **figures), seconds, cached=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evo-build-", ignore_cleanup_errors=True) as workdir:
        binary = target.compile(source, arch, Path(workdir))
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
