"""Targets: the kinds of machine that candidates run on. One module each, found by its name; it defines `TARGET`, an object
of protocol `Target`, whose `open` is called in a separate process, which may die with a candidate. In `languages/` there is
a module for each language that templates are written in, cheap to import: whoever reads a kernel asks for its suffix.
Compilation works on a machine without the device."""

from __future__ import annotations

import hashlib
import json
import operator
import re
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from evo.discovery import find_plugin, plugin_names
from evo.errors import DeviceError, LaunchError, UsageError
from evo.evaluation import Binary, Status
from evo.problem.kernel import Launch, Limits
from evo.problem.loading import Notation
from evo.runtime.driver import Slot
from evo.runtime.package import read_whole, write_whole

if TYPE_CHECKING:
    import torch

    from evo.problem.render import Source  # brings the template engine along, which commands that only read do without
    from evo.targets._sanitizers import Device, Process, Watched

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


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A structure among the values of a launch. layout, size, alignment: see `Argument`. fields: a value by its place among
    the launch's, or -1 and a number."""

    layout: str
    size: int
    alignment: int
    fields: tuple[tuple[int, float], ...]

    def content(self, values: Sequence[Any]) -> bytes:
        """values: of the launch, as addresses and numbers."""
        found = (values[place] if place >= 0 else number for place, number in self.fields)
        return struct.pack(self.layout, *found).ljust(self.size, b"\0")


_SLOTS: dict[str, Slot] = {"float": ("f", 4), "float64": ("d", 8), "int32": ("i", 4)}
"""How numbers are handed over, by the names of their types; others are integers of 64 bits."""


def handed_over(entry: str, values: Sequence[Any], *, on_gpu: bool) -> tuple[list[Slot], list[Any]]:
    """How each of a launch's values is handed over, and as what: an address, a number, the bytes of a structure. Raises
    LaunchError for a tensor that lies elsewhere."""
    slots, words, structures = list[Slot](), list[Any](), list[int]()
    for value in values:
        if value is None:
            slots.append(("Q", 8))
            words.append(0)
        elif hasattr(value, "data_ptr"):  # PyTorch's, or an `Allocation`
            if value.is_cuda is not on_gpu:
                where = "on the GPU" if on_gpu else "in memory"
                raise LaunchError(f"argument {len(words)} of {entry!r} is on {value.device}, not {where}")
            slots.append(("Q", 8))
            words.append(value.data_ptr())
        elif isinstance(value, Structure):
            slots.append((f"{value.size}s", value.alignment))
            structures.append(len(words))
            words.append(value)
        else:
            slots.append(_SLOTS.get(type(value).__name__, ("q", 8)))
            words.append(value if isinstance(value, float) else operator.index(value))
    for place in structures:
        words[place] = words[place].content(words)
    return slots, words


@dataclass(frozen=True)
class Allocation:
    """Memory for a launch's arguments in a tensor's place, in a process without PyTorch."""

    address: int
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.address


class Loaded(Protocol):
    """Loaded code, with an entry point for launches that name none. `values` are the arguments in the kernel's order:
    tensors, None, numbers, structures."""

    launch: Mapping[str, int | str | bool]
    """What the binary says of its launch (`Binary.launch`)."""

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


class Language(Notation, Protocol):
    """What a template is written in, for one target or several."""

    title: str
    """What people call it."""

    def compiler(self) -> str:
        """Compiler name and version, part of the build cache's key. Raises DeviceError if there is none."""
        ...

    def linker(self) -> str:
        """Name and version of what makes `Binary.stand_in`, part of its key in the build cache; empty without one."""
        ...

    def compile(self, source: Source, arch: str, workdir: Path, device_arch: str = "") -> Binary:
        """Compiles in an empty folder of its own. What of a launch follows from the compilation alone, such as shared
        memory, is told in `Binary.launch`. device_arch: of the device that is to run it, where that is another. Raises
        CompileError with the compiler's log."""
        ...

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        """Predicted resident threads over the multiprocessor's limit; None where there is no such limit. Raises CompileError
        where it shows that the code has no such entry point."""
        ...

    def recipe(self, flags: Sequence[str]) -> Mapping[str, Sequence[str]] | None:
        """What a package needs to know, beside the architecture, to compile a source where it runs (`flags`, `libraries`);
        None if it cannot, so that it runs binaries alone."""
        ...


class Sanitizer(Protocol):
    """Tools under which `evo.sanitize` runs candidates of a target."""

    tools: tuple[str, ...]
    """Names of the tools, the memory checker first."""

    def require(self) -> None:
        """Raises DeviceError where there are no such tools here."""
        ...

    def language(self, source: Source) -> Language:
        """The language that compiles a source for them."""
        ...

    def flags(self, tool: str) -> tuple[str, ...]:
        """The compiler's flags for a tool's first run."""
        ...

    def watch(self, job: Watched, tool: str) -> tuple[list[Process], list[str], int]:
        """The processes, the descriptions of the tool, of warnings too, and the number of errors that it counts. Raises
        DeviceError where it does not work."""
        ...

    def load(self, folder: Path, entry: str) -> Device:
        """The device of the watched process, without PyTorch, with the file `candidate` of a folder loaded."""
        ...


class Target(Protocol):
    """A kind of machine that candidates run on."""

    name: str
    language: str
    """Name of the usual language of its templates."""
    example_arch: str
    """Architecture to compile for where there is no device."""
    shares_cores: bool
    """True where candidates run on the machine's own cores, in its memory: building and timing must take turns."""
    summed_bytes: int
    """Outputs that are summed after a sample of a race: those of so many buffer sets."""
    compared_elements: int
    """Elements of an output that are compared with float64 in a race."""
    believed_share: float
    """The share of a measured bound that is still believed: the probes may miss the device's best by as much, the more so on
    cores that others use."""

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
        """Compiler of its usual language, for a run's record of the machine. Raises DeviceError if there is none."""
        ...

    def free_bytes(self) -> int:
        """Bytes that can still be allocated, by PyTorch too."""
        ...

    def has_room(self, size: int) -> bool:
        """Whether so many bytes can be allocated, also by the recording of a graph."""
        ...

    def memory_bytes(self) -> int:
        """All memory of the device; on shared cores what is free of it."""
        ...

    def machine_code(self, arch: str) -> str:
        """The architecture for which sources are rendered and points are legal that are compiled for `arch`: that of machine
        code, where `arch` is of an intermediate one."""
        ...

    def owns(self, arch: str) -> bool:
        """Whether `arch` is spelled as this target's architectures are."""
        ...

    def with_intermediate(self, archs: Sequence[str]) -> tuple[str, ...]:
        """Also an architecture whose code newer devices than these compile when they load it, where there is one."""
        ...

    def torch_as_on(self, arch: str) -> AbstractContextManager[None]:
        """Within it PyTorch computes with what it has on devices of `arch`, though the device present may be of another.
        Empty: the device's own."""
        ...

    def needs(self, arch: str, flags: Sequence[str]) -> dict[str, Any] | None:
        """What a machine must have for a binary for `arch`, as a manifest states it; None where `arch` says it."""
        ...

    def sanitizer(self) -> Sanitizer | None:
        """None if there are no such tools."""
        ...

    def open(self) -> Session:
        """Raises DeviceError."""
        ...


def find_language(name: str) -> Language:
    """Raises UnknownNameError."""
    return cast(Language, find_plugin("language", name))


def compile_source(source: Source, arch: str, workdir: Path) -> Binary:
    """Compiles in the source's own language. Raises what `Language.compile` raises."""
    return find_language(source.language).compile(source, arch, workdir)


def targets_by_rank() -> list[str]:
    """Names; those with devices of their own go before the machine's cores."""
    return sorted(plugin_names("target"), key=lambda name: (find_target(name).shares_cores, name))


def find_target(name: str) -> Target:
    """Raises UnknownNameError."""
    return cast(Target, find_plugin("target", name))


def target_of(device: torch.device) -> Target:
    """The target that is called as PyTorch calls that type of device."""
    return find_target(device.type)


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


def cached_build(
    folder: Path, language: Language, source: Source, arch: str, device_arch: str = ""
) -> CachedBinary:
    """The binary of `source` for `arch`, compiled in a temporary folder if it is not in the cache. device_arch: see
    `Language.compile`.

    The cache is a folder of entries, one file each, that any number of processes may share. If two processes build the same,
    the later one replaces equal with equal. An entry that a crash or a bad disk has damaged is built again.

    Raises CompileError from the language; UsageError if the folder cannot be written to.
    """
    # The source's digest covers text, local headers, entry point and flags. Entries with other fields are never read.
    device = [device_arch] if device_arch else []
    linked = [*device, language.linker()] if device else []
    parts = (language.name, language.compiler(), *linked, arch, source.digest, *(f.name for f in fields(Binary)))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder / key[:2] / f"{key[2:]}.build"
    if (stored := read_whole(path)) is not None:
        head, _, code = stored.partition(b"\n")
        seconds, size, figures = json.loads(head)
        return CachedBinary(Binary(code=code[:size], stand_in=code[size:], **figures), seconds, cached=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evo-build-", ignore_cleanup_errors=True) as workdir:
        binary = language.compile(source, arch, Path(workdir), *device)
    seconds = time.perf_counter() - started
    if replace(source).digest != source.digest:  # a header has changed: which of the two was compiled, nobody knows
        return CachedBinary(binary, seconds, cached=False)
    figures = {name: value for name, value in vars(binary).items() if name not in ("code", "stand_in")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps([seconds, len(binary.code), figures]).encode()
        write_whole(path, head + b"\n" + binary.code + binary.stand_in)
    except OSError as error:
        raise UsageError(
            f"the build cache {folder} cannot be written ({error.strerror}): free some space there, or choose another"
            " folder"
        ) from error
    return CachedBinary(binary, seconds, cached=False)
