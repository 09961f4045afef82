"""The CPU as an open device: candidates are shared libraries in this process, called through ctypes."""

import _ctypes
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import psutil
import torch

from evo.errors import DeviceError, LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.runtime.cpu import argument_types, keep_freed_memory, share_openmp_runtime
from evo.runtime.driver import Slot
from evo.runtime.timing import watch
from evo.targets import EVICTION_MULTIPLE, DeviceInfo, Hazards, handed_over


class CpuLoaded:
    """A library, and an entry point of it: extern "C", void, of pointers, int64, int32, double and float arguments, and of
    references to structures."""

    def __init__(self, path: str, entry: str, launch: Mapping[str, int | str | bool] = MappingProxyType({})) -> None:
        """Raises LaunchError."""
        self._entry, self.launch = entry, launch
        try:
            # RTLD_LOCAL: candidates share names. RTLD_NOW: an undefined symbol shows here, not in a call.
            self._library: ctypes.CDLL | None = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as error:
            raise LaunchError(f"{entry!r} does not load: {error}") from error
        self._functions: dict[str, Any] = {}
        self._slots: dict[str, list[Slot]] = {}
        try:
            self._functions[""] = self._find(entry)
        except LaunchError:
            self.close()
            raise

    def _find(self, entry: str) -> Any:
        try:
            function = self._library[entry]  # type: ignore[index]
        except AttributeError as error:
            raise LaunchError(f'no symbol {entry!r}: declare extern "C" void {entry}(...)') from error
        function.restype = None
        self._functions[entry] = function
        return function

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        """Calls the entry point of `launch`, whose other fields do not count here, and returns when the call is done."""
        slots, words = handed_over(self._entry, values, on_gpu=False)
        function = self._functions.get(launch.entry) or self._find(launch.entry)
        if self._slots.get(launch.entry) != slots:
            function.argtypes, self._slots[launch.entry] = argument_types(slots), slots
        function(*words)

    @property
    def fenced(self) -> bool:
        """True: threads join before a call returns."""
        return True

    def close(self) -> None:
        """Unloads the library; its entry points must not be called again."""
        if self._library is not None:
            _ctypes.dlclose(self._library._handle)
            self._library = None


class CpuReplay:
    """Calls made one after another. Their results are kept until the next run, so that a call that allocates its output
    finds cold memory, as a call that is given its output does. If all are the same call, results are dropped, so that each
    finds the same memory."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = len(calls)
        self._calls = tuple(calls)
        self._kept: list[object] = [None] * len(calls)
        self._repeated = len(calls) > 1 and len(set(calls)) == 1

    def run_us(self) -> float:
        if self._repeated:
            call = self._calls[0]
            begin = time.perf_counter_ns()
            for _ in range(self.calls):
                call()
            return (time.perf_counter_ns() - begin) / 1e3 / self.calls
        kept = self._kept
        begin = time.perf_counter_ns()
        for i, call in enumerate(self._calls):
            kept[i] = call()
        return (time.perf_counter_ns() - begin) / 1e3 / self.calls

    def close(self) -> None:
        self._calls = ()
        self._kept.clear()


class CpuSession:
    """The methods are those of `evo.targets.Session`."""

    def __init__(self, info: DeviceInfo, limits: Limits) -> None:
        self.info, self.limits = info, limits
        self.hazards: Hazards | None = None
        self.device = torch.device("cpu")
        self._disturbed = watch()
        self._other_data: torch.Tensor | None = None
        keep_freed_memory()
        try:
            share_openmp_runtime()
        except OSError as error:
            raise DeviceError(f"no OpenMP runtime to run kernels with ({error}): apt install libgomp1") from error

    def load(self, binary: Binary, entry: str) -> CpuLoaded:
        """Raises LaunchError with the dynamic linker's words, DeviceError if there is no room for the file."""
        try:
            # The linker takes a path that it knows for the library that it knows: each has a name of its own.
            with tempfile.NamedTemporaryFile(prefix="evo-", suffix=".so") as file:
                file.write(binary.code)
                file.flush()
                return CpuLoaded(file.name, entry, binary.launch)
        except OSError as error:
            raise DeviceError(
                f"cannot write a temporary file in {tempfile.gettempdir()} ({error.strerror}): free space or set TMPDIR"
            ) from error

    def synchronize(self) -> None:
        """Calls are done when they return."""

    def evict(self) -> None:
        if self._other_data is None:
            self._other_data = torch.ones(EVICTION_MULTIPLE * self.limits.cache_bytes // 4)
        # Only read: stores may bypass this cache, and a sample of such would pay for writing back what others left.
        self._other_data.sum()

    def estimate_us(self, call: Callable[[], object]) -> float:
        call()
        begin = time.perf_counter_ns()
        call()
        call()
        return (time.perf_counter_ns() - begin) / 1e3 / 2

    def record(self, calls: Sequence[Callable[[], object]]) -> CpuReplay:
        return CpuReplay(calls)

    def repeatable(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return work

    def clocks(self) -> dict[str, float]:
        """cpu_mhz, the mean over the cores; load, the runnable processes of the last minute."""
        found: dict[str, float] = {}
        with suppress(Exception):  # a courtesy: sandboxes hide it
            found["cpu_mhz"] = float(psutil.cpu_freq().current)
        with suppress(OSError):
            found["load"] = os.getloadavg()[0]
        return found

    def disturbance(self) -> str:
        """Other programs, if threads of this process were ready to run and waited for a core."""
        return "other programs took the cores" if self._disturbed() else ""
