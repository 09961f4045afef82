"""Sanitizes a candidate: runs it under the tools that see what a gate cannot, out-of-bounds reads, races, undefined
behaviour, memory that nobody wrote.

The candidate is built anew, and called on small cases of its gate in a process of its own, which holds nothing
else; its outputs are judged as the gate judges them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evo.errors import DeviceError, UnknownNameError
from evo.executors import BuildRequest
from evo.problem.kernel import load_kernel
from evo.problem.render import Source, render
from evo.sanitizing import _cpu, _cuda
from evo.sanitizing._cuda import find_compute_sanitizer
from evo.sanitizing._job import Job
from evo.sanitizing._process import Ended, with_source_lines
from evo.targets import find_target

__all__ = ["Report", "Sanitized", "choose_tools", "find_compute_sanitizer", "sanitize"]

_TOOLS = {"cuda": _cuda.TOOLS, "cpu": _cpu.TOOLS}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one tool found.

    errors: its own count where it counts. messages: what it said, one line each. wrong: cases whose output the
    gate refuses. command: what was run; files it names are gone.
    """

    tool: str
    errors: int
    messages: tuple[str, ...]
    wrong: tuple[str, ...]
    command: str
    seconds: float

    @property
    def clean(self) -> bool:
        return not self.errors and not self.wrong


@dataclass(frozen=True, kw_only=True)
class Sanitized:
    """source_digest: of what was rendered. cases: what was called, under every tool."""

    source_digest: str
    cases: tuple[str, ...]
    reports: tuple[Report, ...]

    @property
    def clean(self) -> bool:
        return all(r.clean for r in self.reports)


def choose_tools(target: str, wanted: str) -> tuple[str, ...]:
    """The tool named, or for "all" every one that the target has. Raises UnknownNameError, DeviceError."""
    if target not in _TOOLS:
        raise DeviceError(f"there is no sanitizer for target {target}; there are some for: {', '.join(_TOOLS)}")
    if wanted == "all":
        return _TOOLS[target]
    if wanted not in _TOOLS[target]:
        raise UnknownNameError(f"sanitizer for target {target}", wanted, ["all", *_TOOLS[target]])
    return (wanted,)


def sanitize(
    request: BuildRequest, tools: Sequence[str], *, seed: int, limit_s: float, toolkits: Sequence[Path] = ()
) -> Sanitized:
    """Builds the candidate for each tool and runs it; findings are data.

    toolkits: folders beside the PATH that may hold compute-sanitizer. limit_s: for each process.
    Raises DeviceError where a tool, the compiler or the GPU is missing, TemplateError or EvoError for a candidate
    that cannot be built.
    """
    kernel, target = load_kernel(request.kernel), find_target(request.target)
    sanitizer = find_compute_sanitizer(toolkits) if request.target == "cuda" else ""
    if reason := target.runs(request.arch):
        raise DeviceError(f"{reason}: sanitize it where it does")
    binding = kernel.binding(request.target, request.workload)
    source = render(kernel, request.target, request.genome, binding, request.arch)
    session = target.open()
    try:
        with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
            job = Job(kernel, request, session, seed, Path(name))
            if request.target == "cuda":
                code = _cuda.build(source, request.arch, job.folder / "candidate.cubin")
                reports = [_on_cuda(tool, sanitizer, job, code, limit_s) for tool in tools]
            else:
                reports = [_on_cpu(tool, job, source, request.arch, limit_s) for tool in tools]
    finally:
        session.close()
    return Sanitized(
        source_digest=source.digest,
        cases=tuple(job.names),
        reports=tuple(
            replace(r, messages=tuple(with_source_lines(m, source.text) for m in r.messages)) for r in reports
        ),
    )


def _on_cuda(tool: str, sanitizer: str, job: Job, code: Path, limit_s: float) -> Report:
    ended, messages, errors = _cuda.run_tool(tool, sanitizer, job, code, limit_s)
    return _report(tool, job, (ended,), messages, errors)


def _on_cpu(tool: str, job: Job, source: Source, arch: str, limit_s: float) -> Report:
    runs, messages = _cpu.run_tool(tool, job, source, arch, limit_s)
    return _report(tool, job, runs, messages, len(messages))


def _report(tool: str, job: Job, runs: tuple[Ended, ...], messages: list[str], errors: int) -> Report:
    return Report(
        tool=tool,
        errors=errors,
        messages=tuple(dict.fromkeys(messages)),
        wrong=tuple(job.refusals()),
        command=runs[0].command,
        seconds=sum(run.seconds for run in runs),
    )
