"""Sanitizers for CPU candidates: the compiler's own, and memory filled in two ways.

address, undefined: AddressSanitizer and UndefinedBehaviorSanitizer, compiled into the candidate; their runtimes are
loaded before anything else of the process. initcheck: g++ has no MemorySanitizer; so the candidate runs with all
memory that nobody has set (its variables, what it allocates, its outputs) zero and again with a pattern: results
that differ were made from it. ThreadSanitizer is not offered: it does not see how GNU's OpenMP waits, and reports
races in every parallel loop.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from evo.errors import CompileError, DeviceError, EvoError
from evo.problem.render import Source
from evo.sanitizing._job import Job
from evo.sanitizing._process import WORKER, Ended, run_process
from evo.targets._cpu_compiler import compiler_path
from evo.targets.cpu import CpuTarget

__all__ = ["TOOLS", "run_tool"]

TOOLS = ("address", "undefined", "initcheck")

_COMPILER = "g++"
_OUTPUT_FILL = "255"
"""NaN in every dtype."""

_PATTERN = 0xFE
"""What g++'s -ftrivial-auto-var-init=pattern fills with."""

_FLAGS = {
    "address": ("-fsanitize=address", "-fsanitize-recover=address", "-fno-omit-frame-pointer", "-g"),
    "undefined": ("-fsanitize=undefined", "-g"),
}
_PRELOADED = {"address": "libasan.so", "undefined": "libubsan.so"}
_ASAN = "detect_leaks=0:halt_on_error=0:handle_abort=1"


def run_tool(tool: str, job: Job, source: Source, arch: str, limit_s: float) -> tuple[tuple[Ended, ...], list[str]]:
    """The processes that were run, and what the tool found. Raises DeviceError where the tool cannot be had."""
    if tool == "initcheck":
        return _initcheck(job, source, arch, limit_s)
    code = _build(source, _FLAGS[tool], arch, job.folder / f"{tool}.so")
    job.clear()
    environment = {"LD_PRELOAD": _runtime(_PRELOADED[tool]), "ASAN_OPTIONS": _ASAN, "UBSAN_OPTIONS": "print_stacktrace=0"}
    ended = _run(job, code, _OUTPUT_FILL, environment, limit_s)
    found = list(_address_errors(ended.output) if tool == "address" else _undefined_errors(ended.output))
    return (ended,), found or _failure(job, ended)


def _initcheck(job: Job, source: Source, arch: str, limit_s: float) -> tuple[tuple[Ended, ...], list[str]]:
    # Unoptimised: the optimiser takes a variable that is unset on one path for whatever it is on the other.
    builds = {
        0: _build(source, ("-O0", "-ftrivial-auto-var-init=zero"), arch, job.folder / "zero.so"),
        _PATTERN: _build(source, ("-O0", "-ftrivial-auto-var-init=pattern"), arch, job.folder / "pattern.so"),
    }
    runs: list[Ended] = []
    results: list[dict[str, bytes]] = []
    for fill in (0, _PATTERN, 0):  # the third tells results that depend on the order of threads
        environment = {
            "LD_PRELOAD": _runtime("libasan.so"),  # only for its malloc, which fills
            "ASAN_OPTIONS": f"{_ASAN}:max_malloc_fill_size={2**31 - 1}:malloc_fill_byte={fill}",
        }
        job.clear()
        runs.append(_run(job, builds[fill], str(fill), environment, limit_s))
        if failed := _failure(job, runs[-1]):
            return tuple(runs), failed
        results.append(job.outputs())
    zero, pattern, again = results
    found = [
        f"{name} depends on memory that was never written: it differs where that memory does"
        for name, data in zero.items()
        if data != pattern[name] and data == again[name]
    ]
    return tuple(runs), found


def _build(source: Source, flags: tuple[str, ...], arch: str, path: Path) -> Path:
    work = path.with_suffix("")
    work.mkdir(exist_ok=True)
    try:
        path.write_bytes(CpuTarget(_COMPILER).compile(replace(source, flags=(*source.flags, *flags)), arch, work).code)
    except CompileError as error:
        raise EvoError(f"the candidate does not compile with {' '.join(flags)}: {str(error).strip()}") from error
    return path


def _run(job: Job, code: Path, fill: str, environment: dict[str, str], limit_s: float) -> Ended:
    return run_process([*WORKER, "cpu", str(job.folder), str(code), fill], limit_s, environment)


@cache
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
    return str(found.resolve())  # not the linker's name of it, which may be a text file


_ADDRESS = re.compile(r"ERROR: AddressSanitizer:? (?P<kind>[\w-]+)")
_ACCESS = re.compile(r"^(?P<access>(?:READ|WRITE) of size \d+)", re.MULTILINE)
_FRAME = re.compile(r"#\d+ 0x[0-9a-f]+ in (?P<function>\S+) \S*?(?P<place>candidate\.cpp:\d+)")
_PLACE = re.compile(r"is located (?P<place>.+?region)")
_UNDEFINED = re.compile(r"(candidate\.cpp:\d+:\d+): runtime error: (.+)")


def _address_errors(output: str) -> Iterator[str]:
    """heap-buffer-overflow: WRITE of size 4 in twice, candidate.cpp:12, 0 bytes to the right of a 4004-byte region."""
    for report in output.split("=================================================================")[1:]:
        if not (kind := _ADDRESS.search(report)):
            continue
        access, frame = _ACCESS.search(report), _FRAME.search(report)
        what = [access["access"]] if access else []
        where = [f"in {frame['function']}, {frame['place']}"] if frame else []
        parts = [" ".join(what + where)] if what or where else []
        if place := _PLACE.search(report):
            parts.append(place["place"])
        yield f"{kind['kind']}: {', '.join(parts)}" if parts else kind["kind"]


def _undefined_errors(output: str) -> Iterator[str]:
    for place, what in _UNDEFINED.findall(output):
        yield f"{what}, {place}"


def _failure(job: Job, ended: Ended) -> list[str]:
    """Why the process did not come to its end, as the one thing found; empty if it did."""
    if ended.code == 0 and job.finished:
        return []
    where = f" at case {job.running}" if job.running else ""
    if ended.code is None:
        return [f"no end within {ended.seconds:.0f} s{where}"]
    reason = f"exit code {ended.code}"
    if ended.code < 0:
        with suppress(ValueError):
            reason = signal.Signals(-ended.code).name
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    return [f"the process died ({reason}){where}{': ' + lines[-1] if lines else ''}"]
