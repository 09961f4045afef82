"""Sanitizes a candidate: runs it under tools that find what the gate cannot see: accesses out of bounds, races, undefined
behaviour, memory that was never written.

The candidate is compiled anew. A process that the tool watches (`make_calls`) calls it on small cases of its gate; the
outputs are judged here by the gate. In that process every tensor has an allocation of its own, not a byte larger than the
tensor: the gate's guard zones would hide the first element beyond it. Data are drawn and references computed here, so that
the tool sees no kernel of PyTorch's.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo.errors import CompileError, DeviceError, EvoError, UnknownNameError
from evo.evaluation import Binary
from evo.measure import Request
from evo.problem.kernel import Kernel, Launch, LaunchSequence
from evo.problem.loading import load_kernel
from evo.problem.render import Source, render
from evo.runtime.cpu import argument_types
from evo.targets import Allocation, Session, Target, find_target, handed_over
from evo.targets.cpu import CpuTarget, compiler_path

if TYPE_CHECKING:
    import torch

    from evo.measure.gate import Gate, PreparedCase

_TOOLS = {
    "cuda": {
        # A call that the driver refuses is not a fault of the candidate, unless it ends the process, which reports it.
        # Padding keeps an access beyond one allocation from falling into the next.
        "memcheck": ("--report-api-errors", "no", "--padding", "512"),
        "racecheck": ("--racecheck-report", "analysis"),
        "initcheck": (),
        "synccheck": (),
    },
    "cpu": {
        "address": ("-fsanitize=address", "-fsanitize-recover=address", "-fno-omit-frame-pointer", "-g"),
        "undefined": ("-fsanitize=undefined", "-g"),
        # Unoptimised: the optimiser may give a variable that is unset on one path its value on the other path.
        "initcheck": ("-O0",),
    },
}
"""By target and tool the options: compute-sanitizer's, or the compiler's."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one tool found.

    errors: the tool's own count, if it has one. messages: one line for each finding. wrong: cases whose output the gate
    refuses. unfinished: why a process ended before it had made all calls, without a finding of the tool: the fault may be
    the tool's or the machine's. It counts as an error, too. command: what was run; its files are removed.
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
    """source_digest: of the rendered source. cases: names of the calls, the same under every tool."""

    source_digest: str
    cases: tuple[str, ...]
    reports: tuple[Report, ...]


def choose_tools(target: str, wanted: str) -> tuple[str, ...]:
    """The tool named; for "all" every one that the target has, the memory checker first. Raises UnknownNameError,
    DeviceError."""
    if target not in _TOOLS:
        raise DeviceError(f"there is no sanitizer for target {target}; targets that have one: {', '.join(_TOOLS)}")
    if wanted not in ("all", *_TOOLS[target]):
        raise UnknownNameError(f"sanitizer for target {target}", wanted, ["all", *_TOOLS[target]])
    return tuple(_TOOLS[target]) if wanted == "all" else (wanted,)


def find_compute_sanitizer() -> str:
    """Its path, from PATH or a toolkit's folder. Raises DeviceError."""
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


def sanitize(request: Request, tools: Sequence[str], limit_s: float) -> Sanitized:
    """Builds the candidate for each tool and runs it; findings are data. An executor calls this in a process of its own.

    tools: none of them stands for the memory checker alone. limit_s: for each process that a tool watches.
    Raises DeviceError where a tool, the compiler or the GPU is missing, TemplateError or EvoError for a candidate
    that cannot be built.
    """
    kernel, target = load_kernel(request.kernel, request.kernel_digest), find_target(request.target)
    tools = tools or choose_tools(request.target, "all")[:1]
    sanitizer = find_compute_sanitizer() if request.target == "cuda" else ""
    if reason := target.runs(request.arch):
        raise DeviceError(f"{reason}: sanitize it where it does")
    source = render(kernel, request.target, request.genome, request.workload, request.arch)
    with ThreadPoolExecutor(1) as beside:  # the compiler works while PyTorch is imported and data are drawn
        # -lineinfo leaves the machine code as it is.
        built = beside.submit(_compile, source, request.arch, target, "-lineinfo") if sanitizer else None
        calls = tuple(_draw_calls(kernel, request, target.open()))
        code = built.result() if built else b""
    job = _Job(kernel, request, source, calls, limit_s)
    reports = tuple(
        _under_compute_sanitizer(job, tool, sanitizer, code) if sanitizer else _under_gcc(job, tool) for tool in tools
    )
    return Sanitized(source_digest=source.digest, cases=tuple(c.name for c in job.calls), reports=reports)


_SMALL_BYTES = 8 << 20
"""Cases that move no more can run a hundred times slower."""
_SMALLEST_CASES = 4
_ALIGNMENT = 512
"""Bytes, as of the gate's memory."""


@dataclass(frozen=True)
class _Memory:
    """An allocation with a tensor at its end: what it holds before the call, and how many bytes of that are before the
    tensor, where it does not start at an aligned address."""

    data: bytes
    lead_bytes: int
    starts_unset: bool
    """True of an output, and of workspace that is not zeroed."""

    def content(self, filled: bool) -> bytes:
        """What is written to it; what starts unset and is not filled keeps what it is allocated with."""
        return self.data if filled or not self.starts_unset else self.data[: self.lead_bytes]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """values: the entry point's arguments in order: _Memory, None or numbers. judge: why the gate refuses what the tensors'
    allocations hold afterwards, by place among the arguments; empty if it does not."""

    name: str
    launches: tuple[Launch, ...]
    values: tuple[object, ...]
    judge: Callable[[dict[int, bytes]], str]


def _draw_calls(kernel: Kernel, request: Request, session: Session) -> Iterator[_Call]:
    """The small cases of the gate, every problem and alignment once, with the data that the gate draws for the first of
    them, launched as on this device. If the grid depends on the device, the case is launched again as on a single
    multiprocessor, where every block has to loop over more work."""
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
        invocation(values)  # zeroes workspace
        for place, (argument, value) in enumerate(zip(kernel.arguments, values, strict=True)):
            if isinstance(value, torch.Tensor):
                data = _bytes_of(value).cpu().numpy().tobytes()
                starts_unset = argument.kind != "input" and not argument.zeroed
                values[place] = _Memory(data, value.data_ptr() % _ALIGNMENT, starts_unset)
        names = {own: case.name}
        names.setdefault(few, f"{case.name}, few blocks")
        for sequence, name in names.items():
            judge = partial(_judge, gate, sequence, prepared)
            yield _Call(name=name, launches=sequence.launches, values=tuple(values), judge=judge)


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

    lead_bytes, start = tensor.data_ptr() % _ALIGNMENT, tensor.storage_offset() * tensor.itemsize
    size = lead_bytes + extent(tensor) * tensor.itemsize
    none = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return none.set_(tensor.untyped_storage(), start - lead_bytes, (size,), (1,))


@dataclass(frozen=True, kw_only=True)
class _Process:
    """A watched process that has ended. command: for a shell. exit_code: None if it was ended. results: for each call that
    has returned, in order, the contents of its tensors' allocations, by place among the arguments. failure: why it did not
    finish, and at which case; empty if it did."""

    command: str
    exit_code: int | None
    output: str
    seconds: float
    results: list[dict[int, bytes]]
    failure: str


def _compile(source: Source, arch: str, target: Target, *flags: str) -> bytes:
    source = replace(source, flags=tuple(dict.fromkeys((*source.flags, *flags))))
    try:
        with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
            return target.compile(source, arch, Path(name)).code
    except CompileError as error:
        raise EvoError(f"the candidate does not compile with {' '.join(flags)}: {str(error).strip()}") from error


@dataclass(frozen=True)
class _Job:
    kernel: Kernel
    request: Request
    source: Source
    calls: tuple[_Call, ...]
    limit_s: float

    def compile_with_gcc(self, *flags: str) -> bytes:
        return _compile(self.source, self.request.arch, CpuTarget(_COMPILER), *flags)

    def run(self, code: bytes, filled: bool, environment: dict[str, str], tool: Sequence[str] = ()) -> _Process:
        """Makes the calls in a process that `tool`, the beginning of its command, starts. filled: whether outputs hold
        something before."""
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="evo-sanitize-") as name:
            folder = Path(name)
            calls = [(c.launches, c.values) for c in self.calls]
            (folder / "candidate").write_bytes(code)
            (folder / "calls").write_bytes(pickle.dumps((self.request.target, self.kernel.entry, filled, calls)))
            child = "import evo.sanitize, sys; evo.sanitize.make_calls(sys.argv[1])"
            command = [*tool, sys.executable, "-P", "-c", child, name]
            path = os.pathsep.join(filter(None, sys.path))
            exit_code: int | None = None
            with (folder / "said").open("wb") as said:  # no pipe: what the candidate has started may hold its end open
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
                        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                    process.wait()
            output = (folder / "said").read_text(errors="replace")
            files = (folder / str(number) for number in range(len(calls)))
            results = [pickle.loads(f.read_bytes()) for f in files if f.exists()]
        return _Process(
            command=shlex.join([*(f"{n}={value}" for n, value in environment.items()), *command]),
            exit_code=exit_code,
            output=output,
            seconds=time.perf_counter() - started,
            results=results,
            failure=self._failure(exit_code, output, len(results)),
        )

    def _failure(self, exit_code: int | None, output: str, returned: int) -> str:
        """returned: how many calls have."""
        if exit_code == 0 and returned == len(self.calls):
            return ""
        where = f" at case {self.calls[returned].name}" if returned < len(self.calls) else ""
        if exit_code is None:
            return f"no end within {self.limit_s:.0f} s{where}"
        how = f"exit code {exit_code}" if exit_code >= 0 else signal.strsignal(-exit_code)
        said = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("=")]
        return f"the process died ({how}){where}{f': {said[-1]}' if said else ''}"

    def report(self, tool: str, processes: Sequence[_Process], found: Iterable[str], counted: int) -> Report:
        """found: what the tool describes, warnings too. counted: its errors, described or not. Where it counts none, a
        process that did not finish is an error of which nobody knows whose it is."""
        messages = [self._with_source_line(message) for message in dict.fromkeys(found)]
        failure = next((p.failure for p in processes if p.failure), "")
        if counted and not messages:
            messages = [f"{tool} counts errors, and describes none in a way that can be read: {counted}"]
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
        file, number = (re.findall(r"([\w.-]+\.(?:cpp|cu)):(\d+)", message) or [("", 0)])[0]
        _, marked, own = self.source.text.partition(f'#line 1 "{file}"\n')  # a template without Jinja keeps its name
        lines = ["", *(own if marked else self.source.text if file.startswith("candidate.") else "").splitlines()]
        return f"{message} | {lines[int(number)].strip()}" if 0 < int(number) < len(lines) else message


_MakeCall = Callable[[Sequence[Launch], Sequence[object], bool], dict[int, bytes]]
"""Of launches, arguments and whether outputs are filled: what the allocations hold afterwards."""


def make_calls(name: str) -> None:
    """What the watched process does: makes the calls that `_Job.run` has left in a folder; each result is a file there.

    It does without PyTorch, which takes seconds to start under a sanitizer. Raises EvoError if the device refuses something.
    """
    folder = Path(name)
    target, entry, filled, calls = pickle.loads((folder / "calls").read_bytes())
    make_call = _load_on_cpu(folder) if target == "cpu" else _load_on_gpu(folder, entry)
    for number, (launches, values) in enumerate(calls):
        (folder / str(number)).write_bytes(pickle.dumps(make_call(launches, values, filled)))


def _load_on_gpu(folder: Path, entry: str) -> _MakeCall:
    from evo.targets._cuda_loaded import BareGpu

    gpu = BareGpu()
    loaded = gpu.load(Binary(code=(folder / "candidate").read_bytes(), code_hash=""), entry)

    def make_call(launches: Sequence[Launch], values: Sequence[object], filled: bool) -> dict[int, bytes]:
        memories = {place: value for place, value in enumerate(values) if isinstance(value, _Memory)}
        held = {place: gpu.allocate(len(memory.data)) for place, memory in memories.items()}
        arguments = list(values)
        for place, memory in memories.items():
            gpu.write(held[place], memory.content(filled))
            arguments[place] = Allocation(held[place] + memory.lead_bytes)
        for launch in launches:
            loaded(arguments, replace(launch, programmatic=False))
        return {place: gpu.read(address, len(memories[place].data)) for place, address in held.items()}

    return make_call


def _load_on_cpu(folder: Path) -> _MakeCall:
    """The file stays where it is: the sanitizer finds names and lines in it."""
    ctypes.CDLL("libgomp.so.1", mode=os.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / "candidate"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    allocate = ctypes.CDLL(None).memalign
    allocate.argtypes, allocate.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p

    def make_call(launches: Sequence[Launch], values: Sequence[object], filled: bool) -> dict[int, bytes]:
        held: dict[int, tuple[int, int]] = {}
        arguments = list(values)
        for place, value in enumerate(values):
            if isinstance(value, _Memory):
                size, content = len(value.data), value.content(filled)
                held[place] = allocate(_ALIGNMENT, size), size
                ctypes.memmove(held[place][0], content, len(content))
                arguments[place] = Allocation(held[place][0] + value.lead_bytes, is_cuda=False)
        slots, words = handed_over("", arguments, on_gpu=False)
        for launch in launches:
            function = library[launch.entry]
            function.argtypes = argument_types(slots)
            function(*words)
        return {place: ctypes.string_at(address, size) for place, (address, size) in held.items()}

    return make_call


def _under_compute_sanitizer(job: _Job, tool: str, sanitizer: str, code: bytes) -> Report:
    """Raises DeviceError where the tool does not work."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_ERRORS), "--target-processes", "all"]
    command += ["--show-backtrace", "no", *_TOOLS["cuda"][tool]]
    filled = tool != "initcheck"  # outputs that were filled count as initialised
    process = job.run(code, filled, {}, command)
    count, found = read_report(process.output, process.exit_code)
    if (count is None and process.exit_code is not None) or "Device not supported" in process.output:
        lines = [line.lstrip("= ") for line in process.output.splitlines() if line.strip("= ")]
        raise DeviceError(
            f"{tool} of {sanitizer} did not work here ({'; '.join(lines[-3:]) or process.failure}): run it"
            " where the GPU and its driver support debugging tools"
        )
    return job.report(tool, [process], found, count or 0)


_ERRORS = 86
"""The exit code by which compute-sanitizer tells that it has found errors."""
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
_RACES = re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, \d+ warnings?\)", re.MULTILINE)
_REPORT = re.compile(r"^=+ (?! )(.+)\n((?:=+ {5}.*\n)*)", re.MULTILINE)
"""A title, and the indented lines below it."""
_LINES = 5
_NO_REPORT = re.compile("COMPUTE-SANITIZER|(ERROR|LEAK|RACECHECK) SUMMARY|Target application|Warning: Error buffer overflow")


def read_report(output: str, exit_code: int | None) -> tuple[int | None, list[str]]:
    """compute-sanitizer's own count of errors, None if it tells none; and one line for each kind of report: its title, the
    place, the first thread, and the access. An exit code that tells of errors counts where the output does not.

    Warnings are not errors: they report races that may be intended (between warps in step).
    """
    counts = _RACES.findall(output) or _SUMMARY.findall(output)  # one of every process that used the GPU
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
"""What g++'s -ftrivial-auto-var-init=pattern fills with."""
_ASAN = "detect_leaks=0:halt_on_error=0:handle_abort=1"


def _under_gcc(job: _Job, tool: str) -> Report:
    """Raises DeviceError where the tool cannot be had."""
    if tool == "initcheck":
        processes, found = _compare_fills(job)
        counted = len(found)
    else:
        runtime = _runtime("libasan.so" if tool == "address" else "libubsan.so")
        environment = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": _ASAN, "UBSAN_OPTIONS": "print_stacktrace=0"}
        processes = [job.run(job.compile_with_gcc(*_TOOLS["cpu"][tool]), True, environment)]
        output = processes[0].output
        found = [f"{what}, {place}" for place, what in re.findall(r"([^/\n]*): runtime error: (.+)", output)]
        found += re.findall(r"^SUMMARY: AddressSanitizer: (.+)$", output, re.MULTILINE)
        found = [re.sub(r" /\S*/(?=[^/\s]+:\d)", " ", message) for message in found]
        counted = max(len(found), len(re.findall("ERROR: AddressSanitizer:|: runtime error: ", output)))
    return job.report(tool, processes, found, counted)


def _compare_fills(job: _Job) -> tuple[list[_Process], list[str]]:
    """The processes, and which outputs depend on what unset memory holds."""
    builds = {
        fill: job.compile_with_gcc(*_TOOLS["cpu"]["initcheck"], f"-ftrivial-auto-var-init={name}")
        for fill, name in ((0, "zero"), (_PATTERN, "pattern"))
    }
    processes = []
    for fill in (0, _PATTERN, 0):  # the third shows results that depend on the order of threads
        environment = {
            "LD_PRELOAD": _runtime("libasan.so"),  # only for its malloc, which fills
            "ASAN_OPTIONS": f"{_ASAN}:max_malloc_fill_size={2**31 - 1}:malloc_fill_byte={fill}",
        }
        processes.append(job.run(builds[fill], False, environment))
        if processes[-1].failure:
            return processes, []
    found = [
        f"{call.name}: {job.kernel.arguments[place].name} depends on memory that was never written: it differs where that"
        " memory does"
        for call, zero, pattern, again in zip(job.calls, *(p.results for p in processes), strict=False)
        for place, value in enumerate(call.values)
        if isinstance(value, _Memory) and job.kernel.arguments[place].kind == "output"
        if zero[place] == again[place] != pattern[place]
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
