"""Where a search builds and measures: on this machine, or on the workers of a cluster."""

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from evo.errors import DeviceError, UsageError
from evo.executors import Executor, ExecutorConfig, find_executor
from evo.lineage.database import make_folder
from evo.targets import answers, find_target

_LOCAL = "local"
_BUILDERS_A_CORE = 16
_LOOPBACK = re.compile(r"tcp://(localhost|127\.|\[::1\])")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where work runs, and on how much of it.

    on: "local"; the address of a Dask scheduler, tcp://HOST:PORT; a FILE.yaml that describes a Dask cluster to start; or the
    name of another executor.
    devices: "all", or indices, 0,1,3; the target's first where it is None. On a cluster: a part of the name of the kind of
    device that measures.
    builders: compiling processes; None: as many as the target leaves cores for. A cluster's workers have their own.

    Raises UsageError for what does not fit together, and for more builders than a machine has use for.
    """

    on: str = _LOCAL
    devices: str | None = None
    builders: int | None = None

    def __post_init__(self) -> None:
        find_executor(self.executor)
        if self.executor == self.on == "dask":
            raise UsageError(
                "--on 'dask' names no cluster: write the address of its scheduler, tcp://HOST:PORT, or the FILE.yaml that"
                " describes one to start"
            )
        if self.is_elsewhere:
            if self.devices is not None and re.fullmatch(r"all|[\d,]*", self.devices):
                raise UsageError(
                    f"--devices {self.devices!r}: of a cluster it names the kind of device that measures, e.g. 'NVIDIA L4'"
                )
            if self.builders is not None:
                raise UsageError("--builders is of this machine; workers of a cluster are started with their own")
        cores = os.cpu_count() or 1
        if self.builders is not None and self.builders < 1:
            raise UsageError(f"builders must be at least 1, got {self.builders}")
        if (self.builders or 0) > _BUILDERS_A_CORE * cores:
            raise UsageError(
                f"--builders {self.builders}: this machine has {cores} cores, and more than {_BUILDERS_A_CORE * cores}"
                " compilers would only wait for each other; give at most so many"
            )

    @property
    def _is_cluster(self) -> bool:
        return "://" in self.on or self.on.endswith((".yaml", ".yml"))

    @property
    def executor(self) -> str:
        """The name of the executor."""
        return "dask" if self._is_cluster else self.on

    @property
    def is_elsewhere(self) -> bool:
        """Whether its workers are to be asked what the devices are."""
        return self.executor != _LOCAL

    @property
    def remarks(self) -> list[str]:
        """What a user is to know before workers are opened there."""
        found = []
        if self.on.startswith("tcp://") and not _LOOPBACK.match(self.on):
            found.append(
                f"the scheduler at {self.on} is used without TLS: whoever reaches it or its workers can run code there, and"
                " read what is sent (docs/scaling.md)"
            )
        if self._is_cluster:
            found.append(f"the search begins when workers with a device have come to {self.on}")
        return found


HERE = Place()
"""This machine, with its first device."""


def open_workers(target: str, cache: Path, place: Place = HERE) -> closing[Executor]:
    """Worker processes that start at once: they take seconds to get ready, so open this before anything slow. cache: the
    folder of what is compiled, beside the database."""
    with suppress(OSError):  # who writes to it says why it cannot be
        make_folder(cache.parent)
    config = ExecutorConfig(cache_dir=cache, builders=place.builders or 1, devices=(place.devices or "",))
    if place.is_elsewhere:
        config = replace(config, scheduler=place.on)
    else:
        chosen = choose_devices(target, place.devices)
        config = replace(config, builders=place.builders or default_builders(target, len(chosen)), devices=chosen)
    return closing(find_executor(place.executor)(target, config))


@contextmanager
def search_here(target: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a search on this machine's CPU, which ends with its process; tells of another one that holds it. A
    device of its own needs none."""
    with ExitStack() as held:
        with suppress(OSError):
            if find_target(target).shares_cores:
                folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                descriptor = os.open(folder / f"evo-cpu-{os.getuid()}.lock", flags, 0o600)
                held.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.pwrite(descriptor, f"{os.getpid():<10}".encode(), 0)
                except BlockingIOError:
                    holder = os.pread(descriptor, 10, 0).decode().strip() or "unknown"
                    tell(f"another search on this CPU is running (pid {holder}): each disturbs the other's times")
        yield


def choose_devices(target: str, devices: str | None) -> tuple[str, ...]:
    """The devices of this machine that candidates are measured on, by their identities; the target's first where none are
    named.

    devices: "all", or indices: 0,1,3. Raises UsageError for another text, DeviceError where one is missing, or where they
    are not of one kind: their times do not compare.
    """
    if devices is None:
        return ("",)
    indices = devices.split(",")
    if devices != "all" and (not all(i.isascii() and i.isdecimal() for i in indices) or len(set(indices)) < len(indices)):
        raise UsageError(f"--devices {devices!r} is neither all nor different numbers, counted from 0: e.g. 0,1,3")
    found = find_target(target).devices()
    chosen = range(len(found)) if devices == "all" else [int(i) for i in indices]
    if beyond := [i for i in chosen if i >= len(found)]:
        there = f"{len(found)} answer" if len(found) > 1 else "one answers"
        missing = f"there is no device {beyond[0]} of target {target}"
        raise DeviceError(f"--devices {devices!r}: {missing}: {there}, counted from 0")
    identities, names = list(found), list(found.values())
    if len(kinds := {names[0], *(names[i] for i in chosen)}) > 1:  # the first is what the record describes
        raise DeviceError(
            f"--devices {devices!r}: times of {' and '.join(sorted(kinds))} do not compare; have this process see devices of"
            " one kind alone (docs/scaling.md)"
        )
    return tuple(identities[i] for i in chosen) if len(found) > 1 else ("",)


def default_builders(target: str, devices: int = 1) -> int:
    """Builders beside the devices' processes: all cores but one for each; all where they take turns anyway, or nothing can
    be timed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if find_target(target).shares_cores or not answers(target):
        return cores
    return max(1, min(cores - devices, 32 * devices))
