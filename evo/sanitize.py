"""Sanitizes a candidate: runs it under tools that find what the gate cannot see: accesses out of bounds, races, undefined
behaviour, memory that was never written.

The candidate is compiled anew. A process that the tool watches (`make_calls`) calls it on small cases of its gate; the
outputs are judged here as the gate judges them. In that process every tensor has an allocation of its own, not a byte
larger than the tensor: the gate's guard zones would hide the first element beyond it. Data are drawn and references
computed here, so that the tool sees no kernel of PyTorch's.

- CUDA: NVIDIA's compute-sanitizer, https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/
- CPU: the sanitizers of g++. address, undefined: AddressSanitizer and UndefinedBehaviorSanitizer, compiled into the
  candidate; their runtimes are preloaded. initcheck: g++ has no MemorySanitizer. The candidate runs with all unset memory
  (variables, allocations, outputs) zero, and again with a pattern: results that differ depend on it. ThreadSanitizer is
  not offered: it does not see how GNU's OpenMP waits, and reports races in every parallel loop.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evo.errors import CompileError, DeviceError, EvoError, UnknownNameError
from evo.evaluation import Binary
from evo.executors import Request
from evo.measure.buffers import extent
from evo.measure.gate import allocate_outputs, argument_values, case_seed, expected_outputs
from evo.problem.kernel import Case, Kernel, Launch, load_kernel
from evo.problem.render import Source, render
from evo.runtime.tolerance import Expected, compare
from evo.targets import Loaded, Session, Target, find_target
from evo.targets.cpu import CpuTarget, compiler_path

if TYPE_CHECKING:
    import torch

__all__ = ["Report", "Sanitized", "choose_tools", "find_compute_sanitizer", "make_calls", "read_report", "sanitize"]

_TOOLS = {
    "cuda": ("memcheck", "racecheck", "initcheck", "synccheck"),
    "cpu": ("address", "undefined", "initcheck"),
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one tool found.

    errors: the tool's own count, if it has one. messages: one line for each finding. wrong: cases whose output the gate
    refuses. command: what was run; its files are removed.
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
    """source_digest: of the rendered source. cases: names of the calls, the same under every tool."""

    source_digest: str
    cases: tuple[str, ...]
    reports: tuple[Report, ...]

    @property
    def clean(self) -> bool:
        return all(r.clean for r in self.reports)


def choose_tools(target: str, wanted: str) -> tuple[str, ...]:
    """The tool named, or for "all" every one that the target has. Raises UnknownNameError, DeviceError."""
    if target not in _TOOLS:
        raise DeviceError(f"there is no sanitizer for target {target}; targets that have one: {', '.join(_TOOLS)}")
    if wanted == "all":
        return _TOOLS[target]
    if wanted not in _TOOLS[target]:
        raise UnknownNameError(f"sanitizer for target {target}", wanted, ["all", *_TOOLS[target]])
    return (wanted,)


def find_compute_sanitizer(folders: Iterable[Path]) -> str:
    """Its path, from PATH or the first of `folders` that has it. Raises DeviceError."""
    name = "compute-sanitizer"
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).is_file()), None)
    if found is None:
        raise DeviceError(
            f"{name} was not found on the PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin: install the CUDA toolkit"
            " (https://developer.nvidia.com/cuda-downloads; apt install cuda-sanitizer), or set CUDA_HOME"
        )
    return found


def sanitize(
    request: Request, tools: Sequence[str], *, seed: int, limit_s: float, toolkits: Sequence[Path] = ()
) -> Sanitized:
    """Builds the candidate for each tool and runs it; findings are data.

    toolkits: folders, in addition to PATH, in which to look for compute-sanitizer. limit_s: for each process.
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
        job = _Job(
            kernel=kernel,
            request=request,
            source=source,
            calls=tuple(_draw_calls(kernel, request, session, seed)),
            limit_s=limit_s,
        )
        reports = [
            _under_compute_sanitizer(job, tool, sanitizer) if request.target == "cuda" else _under_gcc(job, tool)
            for tool in tools
        ]
    finally:
        session.close()
    return Sanitized(source_digest=source.digest, cases=tuple(c.name for c in job.calls), reports=tuple(reports))


_SMALL_BYTES = 8 << 20
_SMALLEST_CASES = 4
_LEAD_BYTE = b"\xa5"
"""Fills the memory before a tensor that does not start at an aligned address."""


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """An allocation with a tensor argument at its end, `lead_bytes` from its start. data: what an input holds; None for an
    output."""

    lead_bytes: int
    size_bytes: int
    data: bytes | None


@dataclass(frozen=True, kw_only=True)
class _Call:
    """values: the entry point's arguments in order: _Memory, None or numbers. outputs: by place among them, what is expected
    and a tensor of that shape."""

    name: str
    launch: Launch
    values: tuple[object, ...]
    outputs: dict[int, tuple[Expected, torch.Tensor]]


def _small_cases(kernel: Kernel, request: Request) -> list[Case]:
    """Gate cases that are small enough to run a hundred times slower: every problem and alignment once, whatever its data.

    They move at most 8 MiB; the smallest four are always included.
    """
    distinct: dict[tuple[object, int], Case] = {}
    for case in kernel.cases(request.target, request.workload):
        if all(size for _, size in case.workload.dims):
            distinct.setdefault((case.workload, case.offset), case)
    ranked = sorted(distinct.values(), key=lambda c: kernel.cost(c.workload).bytes)
    few = ranked[:_SMALLEST_CASES]
    few += [c for c in ranked[_SMALLEST_CASES:] if kernel.cost(c.workload).bytes <= _SMALL_BYTES]
    return [c for c in distinct.values() if c in few]


def _draw_calls(kernel: Kernel, request: Request, session: Session, seed: int) -> Iterator[_Call]:
    """Each case with the data that the gate draws for it, launched as on this device. If the grid depends on the device, the
    case is launched again as on a single multiprocessor, where every block has to loop over more work."""
    import torch

    for case in _small_cases(kernel, request):
        generator = torch.Generator(device=session.device).manual_seed(case_seed(seed, case))
        inputs = kernel.inputs(case.workload, case.data, generator)
        made = allocate_outputs(kernel, case.workload, session.device)
        expected = {e.name: e for e in expected_outputs(kernel, inputs, case.workload)}
        values = list(argument_values(kernel, case.workload, inputs, made))
        outputs = {}
        for place, (argument, value) in enumerate(zip(kernel.arguments, values, strict=True)):
            if isinstance(value, torch.Tensor):
                # From its first element to its last, with the gaps between them.
                flat, is_input = value.as_strided((extent(value),), (1,)), argument.kind == "input"
                data = flat.cpu().view(torch.uint8).numpy().tobytes() if is_input else None
                values[place] = _Memory(lead_bytes=case.offset * value.itemsize, size_bytes=flat.nbytes, data=data)
                if not is_input:
                    outputs[place] = expected[argument.name], value
        limits, parameters = session.limits, request.genome.parameters
        own = kernel.launch(request.target, parameters, case.workload, limits)
        yield _Call(name=case.name, launch=own, values=tuple(values), outputs=outputs)
        few = kernel.launch(request.target, parameters, case.workload, replace(limits, multiprocessors=1))
        if few != own:
            yield _Call(name=f"{case.name}, few blocks", launch=few, values=tuple(values), outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class _Process:
    """A watched process that has ended.

    command: for a shell. code: the exit code, negative for a signal; None if it took too long. results: for each call that
    has returned, in order, the contents of its tensors' allocations, by place among the arguments.
    """

    command: str
    code: int | None
    output: str
    seconds: float
    results: tuple[dict[int, bytes], ...]

    @property
    def where(self) -> str:
        """The case that it was running."""
        cases = re.findall(r"^evo: case (.*)$", self.output, re.MULTILINE)
        return f" at case {cases[-1]}" if cases else ""


@dataclass(frozen=True, kw_only=True)
class _Job:
    kernel: Kernel
    request: Request
    source: Source
    calls: tuple[_Call, ...]
    limit_s: float

    def compile(self, target: Target, *flags: str) -> bytes:
        source = replace(self.source, flags=tuple(dict.fromkeys((*self.source.flags, *flags))))
        try:
            with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
                return target.compile(source, self.request.arch, Path(name)).code
        except CompileError as error:
            raise EvoError(f"the candidate does not compile with {' '.join(flags)}: {str(error).strip()}") from error

    def run(self, code: bytes, fill: int | None, environment: Mapping[str, str], tool: Sequence[str] = ()) -> _Process:
        """Makes the calls in a process that `tool`, the beginning of its command, starts. fill: the byte that outputs hold
        before; None leaves them as they were allocated."""
        with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
            folder = Path(name)
            calls = [(c.name, c.launch, c.values) for c in self.calls]
            (folder / "candidate").write_bytes(code)
            (folder / "calls").write_bytes(pickle.dumps((self.request.target, self.kernel.entry, fill, calls)))
            child = "import evo.sanitize, sys; sys.exit(evo.sanitize.make_calls(sys.argv[1]))"
            command = [*tool, sys.executable, "-P", "-c", child, name]
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            started = time.perf_counter()
            exit_code, output = _run_process(command, self.limit_s, {**environment, **path})
            files = (folder / str(number) for number in range(len(calls)))
            results = tuple(pickle.loads(f.read_bytes()) for f in files if f.exists())
        return _Process(
            command=shlex.join([*(f"{n}={value}" for n, value in environment.items()), *command]),
            code=exit_code,
            output=output,
            seconds=time.perf_counter() - started,
            results=results,
        )

    def report(self, tool: str, processes: Sequence[_Process], messages: Iterable[str], errors: int) -> Report:
        ended = zip(self.calls, processes[-1].results, strict=False)
        refusals = [(call.name, self._refusal(call, result)) for call, result in ended]
        return Report(
            tool=tool,
            errors=errors,
            messages=tuple(self._with_source_line(m) for m in dict.fromkeys(messages)),
            wrong=tuple(f"{name}: {reason}" for name, reason in refusals if reason),
            command=processes[0].command,
            seconds=sum(p.seconds for p in processes),
        )

    def _refusal(self, call: _Call, result: Mapping[int, bytes]) -> str:
        """Why the gate refuses the result of a call; empty if it does not."""
        import torch

        for place, found in result.items():
            memory, name = call.values[place], self.kernel.arguments[place].name
            assert isinstance(memory, _Memory)
            lead, data = found[: memory.lead_bytes], found[memory.lead_bytes :]
            if memory.data not in (None, data):
                return f"input {name} was changed"
            if place not in call.outputs:
                continue
            if lead != _LEAD_BYTE * memory.lead_bytes:
                return f"memory outside output {name} was written"
            expected, like = call.outputs[place]
            output = torch.frombuffer(bytearray(data), dtype=like.dtype).as_strided(like.shape, like.stride())
            if reason := compare(output.to(like.device), expected)[1]:
                return f"{name}: {reason}"
        return ""

    def _with_source_line(self, message: str) -> str:
        """The message, followed by the first line of the candidate's source that it refers to."""
        found = re.search(r"candidate\.(?:cpp|cu):(\d+)", message)
        lines = self.source.text.splitlines()
        number = int(found.group(1)) if found else 0
        return f"{message} | {lines[number - 1].strip()}" if 0 < number <= len(lines) else message


def _run_process(command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """The exit code, None after `limit_s`, and what it wrote to stdout and stderr. `environment` is added to this
    process's own."""
    with tempfile.TemporaryFile() as said:  # no pipe: a process that the candidate has started may hold its end open
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
        said.seek(0)
        return code, said.read().decode(errors="replace")


def make_calls(name: str) -> int:
    """What the watched process does: makes the calls that `_Job.run` has left in a folder; its exit code. Says on stdout
    which case it begins, and why it ends if the device refuses something."""
    import torch

    folder = Path(name)
    target, entry, fill, calls = pickle.loads((folder / "calls").read_bytes())
    try:
        session = find_target(target).open()
        if target == "cpu":
            from evo.targets._cpu_session import CpuLoaded

            # Unlike the session, this leaves the file in place, in which the sanitizer finds names and lines.
            loaded: Loaded = CpuLoaded(ctypes.CDLL(str(folder / "candidate"), mode=os.RTLD_LOCAL | os.RTLD_NOW), entry)
        else:
            loaded = session.load(Binary(code=(folder / "candidate").read_bytes(), code_hash=""), entry)
        for number, (case, launch, values) in enumerate(calls):
            print(f"evo: case {case}", flush=True)
            held: dict[int, torch.Tensor] = {}
            for place, memory in enumerate(values):
                if isinstance(memory, _Memory):
                    size = memory.lead_bytes + memory.size_bytes
                    data = memory.data if memory.data is not None or fill is None else bytes([fill]) * memory.size_bytes
                    content = bytearray(_LEAD_BYTE * memory.lead_bytes + (data or b""))
                    held[place] = torch.empty(size, dtype=torch.uint8, device=session.device)
                    if content:  # copied from the host: fill_ would run a kernel of PyTorch's
                        held[place][: len(content)].copy_(torch.frombuffer(content, dtype=torch.uint8))
            tensors = {place: held[place][values[place].lead_bytes :] for place in held}
            loaded([tensors.get(place, value) for place, value in enumerate(values)], replace(launch, programmatic=False))
            session.synchronize()
            results = {place: tensor.cpu().numpy().tobytes() for place, tensor in held.items()}
            (folder / str(number)).write_bytes(pickle.dumps(results))
    except EvoError as error:
        print(f"evo: {error}", flush=True)
        return 3
    return 0


_NAN_BYTE = 255
"""NaN in every dtype."""
_ERRORS_FOUND = 86
_OPTIONS = {
    # A call that the driver refuses is not a fault of the candidate, unless it ends the process, which reports it.
    # Padding keeps an access beyond one allocation from falling into the next.
    "memcheck": ("--report-api-errors", "no", "--padding", "512"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}


def _under_compute_sanitizer(job: _Job, tool: str, sanitizer: str) -> Report:
    """Raises DeviceError where the tool does not work."""
    code = job.compile(find_target("cuda"), "-lineinfo")  # which leaves the machine code as it is
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_ERRORS_FOUND), "--target-processes", "all"]
    command += ["--show-backtrace", "no", *_OPTIONS[tool]]
    fill = None if tool == "initcheck" else _NAN_BYTE  # outputs that were filled count as initialised
    # With this, every tensor of PyTorch's is an allocation of the driver's.
    process = job.run(code, fill, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, command)
    count, found = read_report(process.output)
    if process.code is None:
        count, found = max(count or 0, 1), [*found, f"no end within {process.seconds:.0f} s{process.where}"]
    elif count is None or "Device not supported" in process.output:
        lines = [line.lstrip("= ") for line in process.output.splitlines() if line.strip("= ")]
        raise DeviceError(
            f"{tool} of {sanitizer} did not work here ({'; '.join(lines[-3:]) or f'exit code {process.code}'}): run it"
            " where the GPU and its driver support debugging tools"
        )
    elif count == 0 and not (process.code == 0 and len(process.results) == len(job.calls)):
        said = re.search(r"^evo: (?!case )(.*)$", process.output, re.MULTILINE)
        reason = said.group(1) if said else f"the process died (exit code {process.code})"
        count, found = 1, [*found, f"{reason}{process.where}"]
    return job.report(tool, [process], found, count)


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
"""Beginnings of lines that are not reports."""


def read_report(output: str) -> tuple[int | None, list[str]]:
    """compute-sanitizer's own count of errors, None if its output has none; and one line for each kind of report: its title,
    the place, the first thread, and the access.

    Warnings are not errors: they report races that may be intended (between warps in step).
    """
    counts = _RACES.findall(output) or _SUMMARY.findall(output)  # one of every process that used the GPU
    first: dict[tuple[str, ...], list[str]] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    for report in _reports(output):
        where = [re.sub(r"\s*\[\d+ hazards?\]", "", line) for line in report[1:] if re.match(r"(and .+ access )?at ", line)]
        kind = (report[0], *where)
        first.setdefault(kind, report)
        seen[kind] += 1
    more = {kind: f" (and {count - 1} more like it)" if count > 1 else "" for kind, count in seen.items()}
    return sum(map(int, counts)) if counts else None, ["; ".join(first[k][:_LINES]) + more[k] for k in first]


def _reports(output: str) -> Iterator[list[str]]:
    """The lines of each report: a title, and the indented lines below it."""
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


_COMPILER = "g++"
_PATTERN_BYTE = 0xFE
"""What g++'s -ftrivial-auto-var-init=pattern fills with."""
_ASAN = "detect_leaks=0:halt_on_error=0:handle_abort=1"


def _under_gcc(job: _Job, tool: str) -> Report:
    """Raises DeviceError where the tool cannot be had."""
    if tool == "initcheck":
        processes, found = _compare_fills(job)
    else:
        flags = [f"-fsanitize={tool}", "-g"]
        flags += ["-fsanitize-recover=address", "-fno-omit-frame-pointer"] if tool == "address" else []
        runtime = _runtime("libasan.so" if tool == "address" else "libubsan.so")
        environment = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": _ASAN, "UBSAN_OPTIONS": "print_stacktrace=0"}
        processes = [job.run(job.compile(CpuTarget(_COMPILER), *flags), _NAN_BYTE, environment)]
        output = processes[0].output
        found = list(_address_errors(output) if tool == "address" else _undefined_errors(output))
    if not found:
        found = [reason for p in processes if (reason := _failure(job, p))]
    return job.report(tool, processes, found, len(found))


def _compare_fills(job: _Job) -> tuple[list[_Process], list[str]]:
    """The processes, and which outputs depend on what unset memory holds."""
    # Unoptimised: the optimiser may give a variable that is unset on one path its value on the other path.
    builds = {
        fill: job.compile(CpuTarget(_COMPILER), "-O0", f"-ftrivial-auto-var-init={name}")
        for fill, name in ((0, "zero"), (_PATTERN_BYTE, "pattern"))
    }
    processes: list[_Process] = []
    for fill in (0, _PATTERN_BYTE, 0):  # the third shows results that depend on the order of threads
        environment = {
            "LD_PRELOAD": _runtime("libasan.so"),  # only for its malloc, which fills
            "ASAN_OPTIONS": f"{_ASAN}:max_malloc_fill_size={2**31 - 1}:malloc_fill_byte={fill}",
        }
        processes.append(job.run(builds[fill], fill, environment))
        if _failure(job, processes[-1]):
            return processes, []
    zero, pattern, again = (p.results for p in processes)
    found = [
        f"{call.name}: {job.kernel.arguments[place].name} depends on memory that was never written: it differs where that"
        " memory does"
        for number, call in enumerate(job.calls)
        for place in call.outputs
        if zero[number][place] != pattern[number][place] and zero[number][place] == again[number][place]
    ]
    return processes, found


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


def _failure(job: _Job, process: _Process) -> str:
    """Why the process did not finish; empty if it did."""
    if process.code == 0 and len(process.results) == len(job.calls):
        return ""
    if process.code is None:
        return f"no end within {process.seconds:.0f} s{process.where}"
    reason = f"exit code {process.code}"
    if process.code < 0:
        with suppress(ValueError):
            reason = signal.Signals(-process.code).name
    lines = [line.strip() for line in process.output.splitlines() if line.strip()]
    return f"the process died ({reason}){process.where}{': ' + lines[-1] if lines else ''}"
