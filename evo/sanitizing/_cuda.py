"""NVIDIA's compute-sanitizer for CUDA candidates.

Reference: Compute Sanitizer documentation, https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from evo.errors import CompileError, DeviceError, EvoError
from evo.problem.render import Source
from evo.sanitizing._job import Job
from evo.sanitizing._process import WORKER, Ended, run_process
from evo.targets import find_target

__all__ = ["TOOLS", "find_compute_sanitizer", "run_tool"]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

_NAME = "compute-sanitizer"
_ERRORS_FOUND = 86
_OPTIONS = {
    # The driver's refusals of calls are none of the candidate's faults, unless they end the worker, which says so.
    # Padding keeps an access beyond one allocation from falling into the next.
    "memcheck": ("--report-api-errors", "no", "--padding", "512"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
_FILL = {"initcheck": "none"}  # else 255, NaN in every dtype: outputs that were filled count as initialised


def find_compute_sanitizer(folders: Iterable[Path]) -> str:
    """Its path, from PATH or the first of `folders` that has it. Raises DeviceError."""
    found = shutil.which(_NAME) or next((str(f / _NAME) for f in folders if (f / _NAME).is_file()), None)
    if found is None:
        raise DeviceError(
            f"{_NAME} was not found on the PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin: install the CUDA toolkit"
            " (https://developer.nvidia.com/cuda-downloads; apt install cuda-sanitizer), or set CUDA_HOME"
        )
    return found


def build(source: Source, arch: str, path: Path) -> Path:
    """The candidate's code with line numbers, which leave the machine code as it is."""
    try:
        with_lines = replace(source, flags=tuple(dict.fromkeys((*source.flags, "-lineinfo"))))
        path.write_bytes(find_target("cuda").compile(with_lines, arch, path.parent).code)
    except CompileError as error:
        raise EvoError(f"the candidate does not compile: {str(error).strip()}") from error
    return path


def run_tool(tool: str, sanitizer: str, job: Job, code: Path, limit_s: float) -> tuple[Ended, list[str], int]:
    """The process, what was found, and how many of its errors. Raises DeviceError where the tool does not work."""
    job.clear()
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        str(_ERRORS_FOUND),
        "--target-processes",
        "all",
        "--show-backtrace",
        "no",
        *_OPTIONS[tool],
        *WORKER,
        "cuda",
        str(job.folder),
        str(code),
        _FILL.get(tool, "255"),
    ]
    ended = run_process(command, limit_s, {})
    count = _count(ended.output)
    refusal = next((line[5:] for line in ended.output.splitlines() if line.startswith("evo: ")), "")
    if ended.code is None:
        where = f" at case {job.running}" if job.running else ""
        return ended, [*_messages(ended.output), f"no end within {ended.seconds:.0f} s{where}"], max(count or 0, 1)
    if count is None or "Device not supported" in ended.output:
        lines = [line.lstrip("= ") for line in ended.output.splitlines() if line.strip("= ")]
        raise DeviceError(
            f"{tool} of {sanitizer} did not work here ({'; '.join(lines[-3:]) or f'exit code {ended.code}'}): run it"
            " where the GPU and its driver support debugging tools"
        )
    found = list(_messages(ended.output))
    if count == 0 and not (ended.code == 0 and job.finished):
        where = f" at case {job.running}" if job.running else ""
        return ended, [*found, f"{refusal or f'the process died (exit code {ended.code})'}{where}"], 1
    return ended, found, count


_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
_RACES = re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, \d+ warnings?\)", re.MULTILINE)
_LINES = 5
_NOT_FOUND = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "LEAK SUMMARY",
    "RACECHECK SUMMARY",
    "Target application",
    "Warning: Error buffer overflow",
)
"""How lines begin that are no reports."""


def _count(output: str) -> int | None:
    """Errors by the tool's own count; None if it never came to counting. Warnings, for races that a programmer may
    have meant (warps in step), are not errors."""
    found = _RACES.search(output) or _SUMMARY.search(output)
    return int(found.group(1)) if found else None


def _messages(output: str) -> Iterator[str]:
    """One line for each kind of report: its title, where, the thread it was first seen in, and what was accessed."""
    first: dict[tuple[str, ...], list[str]] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    for report in _reports(output):
        where = [re.sub(r"\s*\[\d+ hazards?\]", "", line) for line in report[1:] if re.match(r"(and .+ access )?at ", line)]
        kind = (report[0], *where)
        first.setdefault(kind, report)
        seen[kind] += 1
    for kind, report in first.items():
        more = f" (and {seen[kind] - 1} more like it)" if seen[kind] > 1 else ""
        yield "; ".join(report[:_LINES]) + more


def _reports(output: str) -> Iterator[list[str]]:
    """The lines of each report: a title, and what is set in under it."""
    report: list[str] = []
    for line in output.splitlines():
        if not line.startswith("========="):
            continue
        text = line.lstrip("=")
        if text.startswith("     ") and report:
            report.append(text.strip())
            continue
        if report:
            yield report
        title = text.strip()
        report = [title] if title and not title.startswith(_NOT_FOUND) else []
    if report:
        yield report
