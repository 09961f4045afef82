"""Tools that watch a candidate on a device of each target, for `evo.sanitize`.

- CUDA: NVIDIA's compute-sanitizer, https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/
- CPU: the sanitizers of g++. address, undefined: AddressSanitizer and UndefinedBehaviorSanitizer, compiled into the
  candidate; their runtimes are preloaded. initcheck: g++ has no MemorySanitizer. The candidate runs with all unset memory
  (variables, allocations, outputs) zero, and again with a pattern: results that differ depend on it. ThreadSanitizer is
  not offered: it does not see how GNU's OpenMP waits, and reports races in every parallel loop.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from evo.errors import DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Argument, Launch
from evo.problem.render import Source
from evo.runtime.cpu import argument_types
from evo.targets import Allocation, Language, find_language, handed_over
from evo.targets.languages.cpp import Cpp, compiler_path

ALIGNMENT = 512
"""Alignment of the gate's memory in bytes."""


@dataclass(frozen=True)
class Memory:
    """An allocation with a tensor at its end. data: its contents before the call. lead_bytes: number of bytes before the
    tensor, where that does not start at an aligned address. starts_unset: it is an output, or workspace that is not zeroed.
    """

    data: bytes
    lead_bytes: int
    starts_unset: bool

    def content(self, filled: bool) -> bytes:
        """The bytes that are written to the allocation before the call: all of `data`; or, unless `filled`, for one that
        starts unset only those before the tensor, so that the tensor stays unwritten."""
        return self.data if filled or not self.starts_unset else self.data[: self.lead_bytes]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A watched process that has ended. command: for a shell. exit_code: None if it was ended. results: contents of the
    allocations after each call that returned, in order, by place among the arguments. failure: why the process did not
    finish, and at which case; empty if it did."""

    command: str
    exit_code: int | None
    output: str
    seconds: float
    results: list[dict[int, bytes]]
    failure: str


class Watched(Protocol):
    """A candidate, and how it is compiled and called under a tool."""

    @property
    def arguments(self) -> Sequence[Argument]: ...

    @property
    def names(self) -> Sequence[str]:
        """The names of its calls, in order."""
        ...

    def compile(self, *flags: str) -> Binary: ...

    def run(self, binary: Binary, filled: bool, environment: dict[str, str], tool: Sequence[str] = ()) -> Process: ...


class Device(Protocol):
    """The device of a watched process, with the candidate loaded. Addresses are numbers."""

    def allocate(self, size: int, /) -> int: ...

    def write(self, address: int, content: bytes, /) -> None: ...

    def read(self, address: int, size: int, /) -> bytes: ...

    def pointer(self, address: int, /) -> object:
        """The address as an argument of a launch."""
        ...

    def launch(self, launch: Launch, arguments: Sequence[object], /) -> None: ...


Found = tuple[list[Process], list[str], int]
"""The processes, the descriptions of the tool, of warnings too, and the number of errors that it counts."""


class ComputeSanitizer:
    """The tools of NVIDIA's compute-sanitizer, as an `evo.targets.Sanitizer`."""

    _OPTIONS: ClassVar = {
        # A call that the driver refuses is not a fault of the candidate, unless it ends the process, which reports it.
        # Padding keeps an access beyond one allocation from falling into the next.
        "memcheck": ("--report-api-errors", "no", "--padding", "512"),
        "racecheck": ("--racecheck-report", "analysis"),
        "initcheck": (),
        "synccheck": (),
    }
    tools: tuple[str, ...] = tuple(_OPTIONS)

    def require(self) -> None:
        find_compute_sanitizer()

    def language(self, source: Source) -> Language:
        return find_language(source.language)

    def flags(self, tool: str) -> tuple[str, ...]:
        """It leaves the machine code as it is."""
        return ("-lineinfo",)

    def load(self, folder: Path, entry: str) -> Device:
        return _Gpu(folder, entry)

    def watch(self, job: Watched, tool: str) -> Found:
        """Raises DeviceError where the tool does not work."""
        sanitizer = find_compute_sanitizer()
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(_ERRORS), "--target-processes", "all"]
        command += ["--show-backtrace", "no", *self._OPTIONS[tool]]
        filled = tool != "initcheck"  # outputs that were filled count as initialised
        process = job.run(job.compile(*self.flags(tool)), filled, {}, command)
        count, found = read_report(process.output, process.exit_code)
        if (count is None and process.exit_code is not None) or "Device not supported" in process.output:
            lines = [line.lstrip("= ") for line in process.output.splitlines() if line.strip("= ")]
            raise DeviceError(
                f"{tool} of {sanitizer} did not work here ({'; '.join(lines[-3:]) or process.failure}): run it"
                " where the GPU and its driver support debugging tools"
            )
        return [process], found, count or 0


class _Gpu:
    """The GPU of a watched process, with the candidate loaded. Addresses are numbers."""

    def __init__(self, folder: Path, entry: str) -> None:
        from evo.targets._cuda_loaded import BareGpu

        gpu = BareGpu()
        self._loaded = gpu.load(Binary(code=(folder / "candidate").read_bytes(), code_hash=""), entry)
        self.allocate, self.write, self.read, self.pointer = gpu.allocate, gpu.write, gpu.read, Allocation

    def launch(self, launch: Launch, arguments: Sequence[object]) -> None:
        self._loaded(arguments, replace(launch, programmatic=False))


def find_compute_sanitizer() -> str:
    """The path of compute-sanitizer, in PATH or a toolkit's folder. Raises DeviceError."""
    name = "compute-sanitizer"
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).is_file()), None)
    if found is None:
        raise DeviceError(
            f"{name} was not found on the PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin: install the CUDA toolkit"
            " (https://developer.nvidia.com/cuda-downloads; apt install cuda-sanitizer), or set CUDA_HOME"
        )
    return found


_ERRORS = 86
"""Exit code of compute-sanitizer for errors that it has found."""
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
_RACES = re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, \d+ warnings?\)", re.MULTILINE)
_REPORT = re.compile(r"^=+ (?! )(.+)\n((?:=+ {5}.*\n)*)", re.MULTILINE)
"""A title, and the indented lines below it."""
_LINES = 5
_NO_REPORT = re.compile("COMPUTE-SANITIZER|(ERROR|LEAK|RACECHECK) SUMMARY|Target application|Warning: Error buffer overflow")


def read_report(output: str, exit_code: int | None) -> tuple[int | None, list[str]]:
    """compute-sanitizer's own count of errors, or None; and one line for each kind of report: its title, the place, the
    first thread, and the access. If the output counts no errors, an exit code that means errors is one.

    Warnings are not errors: they report races that may be intended (between warps in step).
    """
    counts = _RACES.findall(output) or _SUMMARY.findall(output)  # one for each process that used the GPU
    kinds: dict[tuple[str, ...], list[str]] = {}
    for title, below in _REPORT.findall(output):
        lines = [line.lstrip("=").strip() for line in below.splitlines()]
        where = [re.sub(r"\s*\[\d+ hazards?\]", "", line) for line in lines if re.match(r"(and .+ access )?at ", line)]
        if not _NO_REPORT.match(title):
            kinds.setdefault((title, *where), []).append("; ".join([title, *lines][:_LINES]))
    found = [first + (f" (and {len(more)} more like it)" if more else "") for first, *more in kinds.values()]
    total = sum(map(int, counts)) or int(exit_code == _ERRORS)
    return total if counts or total else None, found


_COMPILER = "g++"
_PATTERN = 0xFE
"""Byte that g++'s -ftrivial-auto-var-init=pattern fills with."""
_ASAN = "detect_leaks=0:halt_on_error=0:handle_abort=1"


class Gcc:
    """The sanitizers of g++, as an `evo.targets.Sanitizer`."""

    _FLAGS: ClassVar = {
        "address": ("-fsanitize=address", "-fsanitize-recover=address", "-fno-omit-frame-pointer", "-g"),
        "undefined": ("-fsanitize=undefined", "-g"),
        # Unoptimised: the optimiser may give a variable that is unset on one path its value on the other path.
        "initcheck": ("-O0", "-ftrivial-auto-var-init=zero"),
    }
    tools: tuple[str, ...] = tuple(_FLAGS)

    def require(self) -> None:
        """Each tool says itself what is missing."""

    def language(self, source: Source) -> Language:
        return Cpp(_COMPILER) if source.language == Cpp.name else find_language(source.language)

    def flags(self, tool: str) -> tuple[str, ...]:
        return self._FLAGS[tool]

    def load(self, folder: Path, entry: str) -> Device:
        return _Cpu(folder)

    def watch(self, job: Watched, tool: str) -> Found:
        """Raises DeviceError where the tool cannot be had."""
        if tool == "initcheck":
            return self._compare_fills(job)
        runtime = _runtime("libasan.so" if tool == "address" else "libubsan.so")
        environment = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": _ASAN, "UBSAN_OPTIONS": "print_stacktrace=0"}
        processes = [job.run(job.compile(*self.flags(tool)), True, environment)]
        output = processes[0].output
        found = [f"{what}, {place}" for place, what in re.findall(r"([^/\n]*): runtime error: (.+)", output)]
        found += re.findall(r"^SUMMARY: AddressSanitizer: (.+)$", output, re.MULTILINE)
        found = [re.sub(r" /\S*/(?=[^/\s]+:\d)", " ", message) for message in found]
        counted = max(len(found), len(re.findall("ERROR: AddressSanitizer:|: runtime error: ", output)))
        return processes, found, counted

    def _compare_fills(self, job: Watched) -> Found:
        """The processes, and messages about outputs that depend on the contents of unset memory."""
        plain, _ = zeroed = self.flags("initcheck")
        builds = {0: job.compile(*zeroed), _PATTERN: job.compile(plain, "-ftrivial-auto-var-init=pattern")}
        processes = []
        for fill in (0, _PATTERN, 0):  # the third shows results that depend on the order of threads
            environment = {
                "LD_PRELOAD": _runtime("libasan.so"),  # for its malloc, which fills memory
                "ASAN_OPTIONS": f"{_ASAN}:max_malloc_fill_size={2**31 - 1}:malloc_fill_byte={fill}",
            }
            processes.append(job.run(builds[fill], False, environment))
            if processes[-1].failure:
                return processes, [], 0
        found = [
            f"{name}: {argument.name} depends on memory that was never written: it differs where that memory does"
            for name, zero, pattern, again in zip(job.names, *(p.results for p in processes), strict=False)
            for place, argument in enumerate(job.arguments)
            if argument.kind == "output" and place in zero and zero[place] == again[place] != pattern[place]
        ]
        return processes, found, len(found)


class _Cpu:
    """The CPU of a watched process, with the candidate loaded. The candidate's file stays where it is: the sanitizer finds
    names and lines in it."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(folder / "candidate"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._memalign = ctypes.CDLL(None).memalign
        self._memalign.argtypes, self._memalign.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p
        self.read, self.pointer = ctypes.string_at, partial(Allocation, is_cuda=False)

    def allocate(self, size: int) -> int:
        return int(self._memalign(ALIGNMENT, size))

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def launch(self, launch: Launch, arguments: Sequence[object]) -> None:
        slots, words = handed_over("", arguments, on_gpu=False)
        function = self._library[launch.entry]
        function.argtypes = argument_types(slots)
        function(*words)


def _runtime(name: str) -> str:
    """Absolute path of the sanitizer's shared library. Raises DeviceError."""
    path = compiler_path(_COMPILER)
    done = subprocess.run([path, f"-print-file-name={name}"], capture_output=True, text=True, timeout=30, check=False)
    found = Path(done.stdout.strip())
    if not found.is_absolute() or not found.exists():
        raise DeviceError(
            f"{path} has no {name}, which sanitizing on a CPU needs: install it (apt install g++ brings it;"
            " dnf install libasan libubsan), or leave --tool out"
        )
    return str(found.resolve())  # the linker's name for it may be a text file
