"""Sanitizes a candidate: runs it under tools that find what the gate cannot see: accesses out of bounds, races, undefined
behaviour, memory that was never written.

The candidate is compiled anew. A process that the tool watches (`make_calls`) calls it on small cases of its gate; the
outputs are judged here by the gate. In that process every tensor has an allocation of its own, not a byte larger than the
tensor: the gate's guard zones would hide the first element beyond it. Data are drawn and references computed here, so that
the tool sees no kernel of PyTorch's.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo.errors import CompileError, DeviceError, EvoError, UnknownNameError
from evo.evaluation import Binary
from evo.measure import Request
from evo.problem.kernel import Argument, Kernel, Launch, LaunchSequence, Limits, Workload
from evo.problem.loading import load_kernel
from evo.problem.render import Source, render
from evo.targets import Language, Sanitizer, Session, find_language, find_target
from evo.targets._sanitizers import ALIGNMENT, Memory, Process

if TYPE_CHECKING:
    import torch

    from evo.measure.gate import Gate, PreparedCase


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings of one tool.

    errors: the tool's own count, if it has one. messages: one line for each finding. wrong: cases whose output the gate
    refuses. unfinished: why a process ended before it had made all calls, without a finding of the tool; that counts as an
    error, though the fault may be the tool's or the machine's. command: the command line; its files have been removed.
    """

    tool: str
    errors: int
    messages: tuple[str, ...]
    wrong: tuple[str, ...]
    unfinished: str
    command: str
    seconds: float

    @property
    def clean(self) -> bool:
        return not self.errors and not self.wrong


@dataclass(frozen=True, kw_only=True)
class Sanitized:
    """A candidate's reports. source_digest: of the rendered source. cases: names of the calls, the same for every tool."""

    source_digest: str
    cases: tuple[str, ...]
    reports: tuple[Report, ...]


def choose_tools(target: str, wanted: str) -> tuple[str, ...]:
    """The named tool; for "all" every tool of the target, the memory checker first. Raises UnknownNameError, DeviceError."""
    tools = _sanitizer_of(target).tools
    if wanted not in ("all", *tools):
        raise UnknownNameError(f"sanitizer for target {target}", wanted, ["all", *tools])
    return tools if wanted == "all" else (wanted,)


def _sanitizer_of(target: str) -> Sanitizer:
    if (found := find_target(target).sanitizer()) is None:
        raise DeviceError(f"there is no sanitizer for target {target}")
    return found


def sanitize(request: Request, tools: Sequence[str], limit_s: float) -> Sanitized:
    """Builds the candidate for each tool and runs it; findings are data. An executor calls this in a process of its own.

    tools: by default the memory checker alone. limit_s: limit of each process that a tool watches. Raises DeviceError where
    a tool, the compiler or the GPU is missing, TemplateError or EvoError for a candidate that cannot be built.
    """
    kernel, target = load_kernel(request.kernel, request.kernel_digest), find_target(request.target)
    tools, sanitizer = tools or choose_tools(request.target, "all")[:1], _sanitizer_of(request.target)
    sanitizer.require()
    if reason := target.runs(request.arch):
        raise DeviceError(f"{reason}: sanitize it where it does")
    source = render(kernel, request.target, request.genome, request.workload, request.arch)
    compiled = cache(partial(_compile, source, request, sanitizer.language(source)))
    with ThreadPoolExecutor(1) as beside:  # the compiler works while PyTorch is imported and data are drawn
        built = beside.submit(compiled, *sanitizer.flags(tools[0]))
        with target.torch_as_on(request.arch):
            calls = tuple(_draw_calls(kernel, request, target.open()))
        built.result()
    job = _Job(kernel, request, source, calls, limit_s, compiled)
    reports = tuple(job.report(tool, *sanitizer.watch(job, tool)) for tool in tools)
    return Sanitized(source_digest=source.digest, cases=tuple(job.names), reports=reports)


_SMALL_BYTES, _SMALLEST_CASES = 8 << 20, 4
"""Bytes that a case may move, since it runs a hundred times slower here; but so many cases run whatever they move."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of the candidate. launches: made from `Binary.launch`. values: the entry point's arguments in order: Memory,
    None or numbers. judge: why the gate refuses the contents of the allocations after the call, by place among the
    arguments; empty if it does not."""

    name: str
    launches: Callable[[Mapping[str, Any]], tuple[Launch, ...]]
    values: tuple[object, ...]
    judge: Callable[[dict[int, bytes]], str]


def _draw_calls(kernel: Kernel, request: Request, session: Session) -> Iterator[_Call]:
    """The small cases of the gate, every problem and alignment once, with the gate's data, launched as on this device. If
    the grid depends on the device, the case is launched again as on a single multiprocessor, where every block has to loop
    over more work."""
    import torch

    from evo.measure.gate import Gate, Invocation

    gate = Gate(kernel, request.target, session, request.seed)
    cases = [c for c in kernel.cases(request.target, request.workload) if all(size for _, size in c.workload.dims)]
    distinct = {(c.workload, c.offset): c for c in reversed(cases)}
    ranked = sorted(distinct.values(), key=lambda c: kernel.cost(c.workload).bytes)
    for rank, case in enumerate(ranked):
        if rank >= _SMALLEST_CASES and kernel.cost(case.workload).bytes > _SMALL_BYTES:
            break
        prepared = gate.prepare(case)
        memory, image = prepared.trials[0].memory, prepared.trials[0].image
        memory.bytes.copy_(image.bytes)
        own, few = (
            kernel.sequence(request.target, request.genome.parameters, case.workload, limits)
            for limits in (session.limits, replace(session.limits, multiprocessors=1))
        )
        invocation = Invocation(kernel, lambda values, launch: None, own, session)
        values = list(invocation.values(case.workload, memory))
        invocation(values)  # zeroes workspace, and has outputs begin as they do
        for place, (argument, value) in enumerate(zip(kernel.arguments, values, strict=True)):
            if isinstance(value, torch.Tensor):
                data = _bytes_of(value).cpu().numpy().tobytes()
                starts_unset = argument.kind != "input" and not (argument.zeroed or argument.initial)
                values[place] = Memory(data, value.data_ptr() % ALIGNMENT, starts_unset)
        kinds = {own: (case.name, session.limits)}
        kinds.setdefault(few, (f"{case.name}, few blocks", replace(session.limits, multiprocessors=1)))
        for sequence, (name, limits) in kinds.items():
            judge = partial(_judge, gate, sequence, prepared)
            launches = partial(_launches, kernel, request, case.workload, limits)
            yield _Call(name=name, launches=launches, values=tuple(values[: len(kernel.parameters)]), judge=judge)


def _launches(
    kernel: Kernel, request: Request, workload: Workload, limits: Limits, built: Mapping[str, Any]
) -> tuple[Launch, ...]:
    return kernel.sequence(request.target, request.genome.parameters, workload, limits, built).launches


def _judge(gate: Gate, sequence: LaunchSequence, prepared: PreparedCase, held: dict[int, bytes]) -> str:
    import torch

    def replay(values: Sequence[object], launch: Launch) -> None:
        for place, data in held.items():
            _bytes_of(values[place]).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    return gate.check(replay, sequence, prepared).reason


def _bytes_of(tensor: Any) -> torch.Tensor:
    """The memory of a tensor, from the aligned address before it to its last element, gaps included."""
    import torch

    from evo.measure.buffers import extent

    lead_bytes, start = tensor.data_ptr() % ALIGNMENT, tensor.storage_offset() * tensor.itemsize
    size = lead_bytes + extent(tensor) * tensor.itemsize
    none = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return none.set_(tensor.untyped_storage(), start - lead_bytes, (size,), (1,))


def _compile(source: Source, request: Request, language: Language, *flags: str) -> Binary:
    source = replace(source, flags=tuple(dict.fromkeys((*source.flags, *flags))))
    try:
        with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
            return language.compile(source, request.arch, Path(name), *filter(None, [request.device_arch]))
    except CompileError as error:
        raise EvoError(f"the candidate does not compile with {' '.join(flags)}: {str(error).strip()}") from error


@dataclass(frozen=True)
class _Job:
    kernel: Kernel
    request: Request
    source: Source
    calls: tuple[_Call, ...]
    limit_s: float
    compile: Callable[..., Binary]

    @property
    def arguments(self) -> Sequence[Argument]:
        return self.kernel.parameters

    @property
    def names(self) -> Sequence[str]:
        return [call.name for call in self.calls]

    def run(self, binary: Binary, filled: bool, environment: dict[str, str], tool: Sequence[str] = ()) -> Process:
        """Makes the calls in a process. filled: whether outputs are written to before. tool: beginning of the command."""
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
            folder = Path(name)
            calls = [(c.launches(binary.launch), c.values) for c in self.calls]
            entry = binary.launch.get("entry", self.kernel.entry)
            (folder / "candidate").write_bytes(binary.loadable)
            (folder / "calls").write_bytes(pickle.dumps((self.request.target, entry, filled, calls)))
            child = "import evo.sanitize, sys; evo.sanitize.make_calls(sys.argv[1])"
            command = [*tool, sys.executable, "-P", "-c", child, name]
            path = os.pathsep.join(filter(None, sys.path))
            exit_code: int | None = None
            with (folder / "said").open("wb") as said:  # no pipe: a process of the candidate may hold its end open
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, "PYTHONPATH": path},
                    start_new_session=True,
                )
                try:
                    with suppress(subprocess.TimeoutExpired):
                        exit_code = process.wait(self.limit_s)
                finally:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
                    process.wait()
            output = (folder / "said").read_text(errors="replace")
            files = (folder / str(number) for number in range(len(calls)))
            results = [pickle.loads(f.read_bytes()) for f in files if f.exists()]
        return Process(
            command=shlex.join([*(f"{n}={value}" for n, value in environment.items()), *command]),
            exit_code=exit_code,
            output=output,
            seconds=time.perf_counter() - started,
            results=results,
            failure=self._failure(exit_code, output, len(results)),
        )

    def _failure(self, exit_code: int | None, output: str, returned: int) -> str:
        """Why a process did not finish; empty if it did. returned: number of calls that returned."""
        if exit_code == 0 and returned == len(self.calls):
            return ""
        where = f" at case {self.calls[returned].name}" if returned < len(self.calls) else ""
        if exit_code is None:
            return f"no end within {self.limit_s:.0f} s{where}"
        how = f"exit code {exit_code}" if exit_code >= 0 else signal.strsignal(-exit_code)
        said = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("=")]
        return f"the process died ({how}){where}{f': {said[-1]}' if said else ''}"

    def report(self, tool: str, processes: Sequence[Process], found: Iterable[str], counted: int) -> Report:
        """The report of a tool. found: its descriptions, of warnings too. counted: its errors, described or not; if there
        are none, a process that did not finish is an error whose cause is unknown."""
        messages = [self._with_source_line(message) for message in dict.fromkeys(found)]
        failure = next((p.failure for p in processes if p.failure), "")
        if counted and not messages:
            messages = [f"the tool counts {counted} errors, and describes none in a way that can be read"]
        if failure and (not counted or processes[-1].exit_code is None):
            messages.append(failure)
        ended = zip(self.calls, processes[-1].results, strict=False)
        refusals = [(call.name, call.judge(result)) for call, result in ended]
        return Report(
            tool=tool,
            errors=counted or int(bool(failure)),
            messages=tuple(messages),
            wrong=tuple(f"{name}: {reason}" for name, reason in refusals if reason),
            unfinished="" if counted else failure,
            command=processes[0].command,
            seconds=sum(p.seconds for p in processes),
        )

    def _with_source_line(self, message: str) -> str:
        """The message, followed by the first line of the candidate's source that it refers to."""
        suffix = find_language(self.source.language).suffix.lstrip(".")
        file, number = (re.findall(rf"([\w.-]+\.{suffix}):(\d+)", message) or [("", 0)])[0]
        _, marked, own = self.source.text.partition(f'#line 1 "{file}"\n')  # a template without Jinja keeps its name
        lines = ["", *(own if marked else self.source.text if file.startswith("candidate.") else "").splitlines()]
        return f"{message} | {lines[int(number)].strip()}" if 0 < int(number) < len(lines) else message


def make_calls(name: str) -> None:
    """Makes, in the watched process, the calls that `_Job.run` has left in a folder; each result is a file there.

    This needs no PyTorch, which takes seconds to start under a sanitizer. Raises EvoError if the device refuses something.
    """
    folder = Path(name)
    target, entry, filled, calls = pickle.loads((folder / "calls").read_bytes())
    device = _sanitizer_of(target).load(folder, entry)
    for number, (launches, values) in enumerate(calls):
        memories = {place: value for place, value in enumerate(values) if isinstance(value, Memory)}
        held = {place: device.allocate(len(memory.data)) for place, memory in memories.items()}
        arguments = list(values)
        for place, memory in memories.items():
            device.write(held[place], memory.content(filled))
            arguments[place] = device.pointer(held[place] + memory.lead_bytes)
        for launch in launches:
            device.launch(launch, arguments)
        results = {place: device.read(address, len(memories[place].data)) for place, address in held.items()}
        (folder / str(number)).write_bytes(pickle.dumps(results))
