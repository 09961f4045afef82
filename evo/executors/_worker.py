"""One worker process: it runs the tasks that come over its pipe, one after another, and can be ended at any moment.

Written for processes that break: a worker's death shows at once, whatever its exit code; it is killed with all that it
started; what it printed last is kept; and an answer that cannot be read counts as a death.
"""

import gc
import itertools
import math
import os
import pickle
import re
import select
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from evo.errors import DeviceError, EngineError, EvoError
from evo.evaluation import Status
from evo.executors._processes import (
    STARTING,
    WORKER,
    WORKERS,
    confine,
    end_strays,
    end_tree,
    end_with_command,
    known_workers,
    leave_server,
    make_scratch,
    name_process,
    reap_child,
    restore_scratch,
    scratch_mark,
    start_worker,
    write_output_to,
)
from evo.problem.loading import load_kernel
from evo.targets import classify

_STARTING_S = 120.0

_ENDING_S = 60.0
"""Longest time that a killed process takes to end: a driver first ends what runs on the device."""

_DYING_S = 3.0
"""Longest time from the end of a process's pipe to the end of the process, on a busy machine."""

_LAST_WORDS = 2000
"""Bytes of a worker's output that a log repeats."""

_CLEANED = 3
"""Number of attempts at a task whose temporary files are cleaned away under it, which is no fault of a candidate."""

_CANNOT_ANSWER = 97
"""Exit code of a worker whose pipe is gone."""

_HEADER = struct.Struct("=8sQ")
_MAGIC = b"\x00evo\xffmsg"
_CHUNK_BYTES = 1 << 20

_NUMBERS = [1.0, 2.0**-60, sys.float_info.min]  # a list, so that nothing is computed ahead

_numbers = itertools.count()

_SIGNALS = {
    "SIGSEGV": Status.ILLEGAL_ADDRESS,
    "SIGBUS": Status.ILLEGAL_ADDRESS,
    "SIGABRT": Status.TRAP,
    "SIGILL": Status.TRAP,
    "SIGFPE": Status.TRAP,
    "SIGTRAP": Status.TRAP,
}


MOST_KILLED = 4
"""Number of attempts at a task whose workers are killed from outside; two, if they die by themselves."""
_UNKNOWN = 255
"""The exit code that multiprocessing reports where the server of processes, which would know it, was killed."""


class WorkerLost(Exception):
    """The process died, hung or did what no task may do, and has been ended. `str()` says how; `status`: what that counts
    as; `killed`: it was killed from outside (SIGKILL)."""

    def __init__(self, status: Status, text: str, *, killed: bool = False) -> None:
        super().__init__(text)
        self.status, self.killed = status, killed


class _SideEffectError(Exception):
    """A candidate did what no computation does. `str()` says what."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """A task's result, or the `error` that it raised; or, from a task that still runs, the `stage` that begins and, as
    `value`, what it has found so far."""

    value: Any = None
    error: BaseException | None = None
    stage: str = ""


class Worker:
    """A worker process, as its command sees it.

    prepare: called in the process first, with `arguments`. candidates: candidates run in the process itself, and after each
    task it is examined for what they have done to it. stage: of the task whose answer is awaited, since `since_s`; at
    `ends_at_s` the process is given up (both by time.monotonic()). spent_s: seconds of the last task, by stage. last_stage:
    the stage in which that task ended. found: what it had found when that stage began.
    """

    def __init__(
        self, scratch: Path, prepare: Callable[..., None], arguments: tuple[Any, ...], *, candidates: bool = False
    ) -> None:
        self._output = scratch / f"output-{os.getpid()}-{next(_numbers)}"
        self._connection, theirs = WORKERS.Pipe()
        self.stage = self.last_stage = ""
        self.since_s, self.ends_at_s = time.monotonic(), math.inf
        self.spent_s: dict[str, float] = {}
        self.found: Any = None
        self._started = False
        self._outgoing, self._received = bytearray(), bytearray()
        with STARTING:
            self._process = start_worker(
                lambda: WORKERS.Process(
                    target=_serve,
                    args=(theirs, self._output, prepare, arguments, candidates),
                    name=WORKER,
                    daemon=True,
                )
            )
            assert self._process.pid is not None
            self.pid = self._process.pid
            known_workers.add(self.pid)
        theirs.close()
        os.set_blocking(self._connection.fileno(), False)
        self._exitcode: int | None = None

    def post(self, task: Callable[..., Any], *arguments: Any, answered: bool = True) -> None:
        """Hands over a task, behind those posted before, without waiting. Errors of the pipe show in `collect`. answered: if
        not, the task has no answer, and what it raises is dropped."""
        self._outgoing += pickle.dumps((task, arguments, answered))
        self._send()

    def collect(self, limits_s: Mapping[str, float]) -> Any:
        """The answer to the first task that has not been answered.

        limits_s: limit of each stage. A task begins in the first one, and enters others by `enter_stage`. Raises what the
        task raised, WorkerLost; DeviceError if the process cannot be ended.
        """
        if not self._started:
            self._receive(time.monotonic() + _STARTING_S)
            self._started = True
        self.spent_s, self.found = {}, None
        self._enter(next(iter(limits_s)), limits_s)
        while (answer := self._receive(self.ends_at_s)).stage:
            self.found = answer.value
            self._enter(answer.stage, limits_s)
        self._leave()
        if isinstance(answer.error, _SideEffectError):
            self.end()
            raise WorkerLost(Status.CRASH, f"was ended: the candidate {answer.error}")
        if answer.error is not None:
            raise answer.error
        return answer.value

    @property
    def ended(self) -> bool:
        return self._exitcode is not None

    def kill(self) -> None:
        """Kills the process, from any thread; `collect` sees it die."""
        if self._exitcode is None:
            end_tree(self.pid)

    def end(self) -> int:
        """Kills the process with all that it started, and returns its exit code when it is gone, with all that it ran on the
        device. Raises DeviceError if the system cannot end it."""
        if self._exitcode is None:
            self.kill()
            if not connection.wait([self._process.sentinel], _ENDING_S):
                raise DeviceError(
                    f"process {self.pid} could not be ended within {_ENDING_S:g} s: a driver holds it; restart the"
                    " machine, or reset the device"
                )
            with STARTING:  # the start of another process would read the exit code
                self._process.join()
                self._exitcode = int(self._process.exitcode or 0)  # no close(): at its end the command joins all processes
                known_workers.discard(self.pid)
            end_strays()
            self._connection.close()
            with suppress(OSError):
                self._output.unlink()
        return self._exitcode

    def last_words(self) -> str:
        """The end of the process's standard output and error."""
        with suppress(OSError), self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - _LAST_WORDS))
            return file.read().decode(errors="replace").strip()
        return ""

    def _enter(self, stage: str, limits_s: Mapping[str, float]) -> None:
        self._leave()
        self.stage, self.since_s = stage, time.monotonic()
        self.ends_at_s = self.since_s + limits_s[stage]

    def _leave(self) -> None:
        if self.stage:
            self.last_stage = self.stage
            self.spent_s[self.stage] = self.spent_s.get(self.stage, 0.0) + time.monotonic() - self.since_s
        self.stage, self.ends_at_s = "", math.inf

    def _send(self) -> None:
        """Writes as much of `_outgoing` as the pipe takes now. Errors of the pipe show in `_receive`."""
        with suppress(OSError):
            while self._outgoing:
                del self._outgoing[: os.write(self._connection.fileno(), self._outgoing)]

    def _receive(self, ends_at_s: float) -> _Answer:
        """The next message. `Connection.recv` does not serve: it waits for as many bytes as rubbish announces."""
        received = self._received
        pipe, sentinel = self._connection.fileno(), self._process.sentinel
        poll = select.poll()
        poll.register(sentinel, select.POLLIN)
        while (end := _message_end(received)) is None or len(received) < end:
            left_s = ends_at_s - time.monotonic()
            if left_s <= 0:
                limit_s = ends_at_s - self.since_s
                self._leave()
                self.end()
                raise WorkerLost(Status.TIMEOUT, f"gave no result within {limit_s:.3g} s")
            poll.register(pipe, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            ready = dict(poll.poll(None if left_s == math.inf else math.ceil(1000 * left_s)))
            chunk = b""
            if ready.get(pipe, 0) & select.POLLOUT:
                self._send()
            if ready.get(pipe, 0) & ~select.POLLOUT:
                with suppress(OSError):
                    chunk = os.read(pipe, _CHUNK_BYTES)
                if not chunk:
                    raise self._death()
            elif sentinel in ready and pipe not in ready:
                raise self._death()
            received += chunk
            if _message_end(received) == 0:
                raise self._death()
        message = bytes(received[_HEADER.size : end])
        del received[:end]
        with suppress(Exception):
            answer = pickle.loads(message)
            if isinstance(answer, _Answer):
                return answer
        raise self._death()  # rubbish behind a header that is right

    def _death(self) -> WorkerLost:
        self._leave()
        answered_rubbish = not connection.wait([self._process.sentinel], _DYING_S)
        words = self.last_words()
        exitcode = self.end()
        if answered_rubbish:
            return WorkerLost(Status.CRASH, "wrote into the pipe of its answers")
        status, how = exit_status(exitcode)
        text = f"died ({'its file descriptors were closed' if exitcode == _CANNOT_ANSWER else how})"
        if ran_out_of_memory(words):
            status, text = Status.OUT_OF_MEMORY, f"ran out of memory and {text}"
        return WorkerLost(status, f"{text}: {words}" if words else text, killed=exitcode in (-signal.SIGKILL, _UNKNOWN))


_Result = TypeVar("_Result")


def run_with_kernel(function: Callable[..., _Result], kernel: str, digest: str, *arguments: Any) -> _Result:
    """What a function of a kernel and further arguments returns, in a worker of its own: there PyTorch is imported already,
    which takes seconds. kernel, digest: as in `load_kernel`. Raises what the function raises; DeviceError where the worker
    is lost, and lost again if it was killed from outside."""
    scratch, mark = make_scratch()
    lost = 0
    try:
        while True:
            worker = Worker(scratch, _prepare, (scratch,))
            worker.post(_with_kernel, function, kernel, digest, arguments)
            try:
                return cast(_Result, worker.collect({"task": math.inf}))
            except WorkerLost as loss:
                lost += 1
                if not loss.killed or lost == MOST_KILLED:
                    raise DeviceError(
                        f"functions of kernel {kernel} cannot be run (their process {loss}); mend what ends it, then try:"
                        f" evo check {kernel}"
                    ) from None
            finally:
                worker.end()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(mark)


def _prepare(scratch: Path) -> None:
    name_process("evo-cases")
    confine(scratch, limit_files=True)
    end_with_command()


def _with_kernel(function: Callable[..., _Result], kernel: str, digest: str, arguments: tuple[Any, ...]) -> _Result:
    return function(load_kernel(kernel, digest), *arguments)


def _message_end(received: bytearray) -> int | None:
    """End of the first message among these bytes; None if it is not known yet, 0 if they are no message."""
    if len(received) < _HEADER.size:
        return None if _MAGIC.startswith(received[: len(_MAGIC)]) else 0
    magic, length = _HEADER.unpack_from(received)
    return _HEADER.size + int(length) if magic == _MAGIC else 0


# -- how a process ended ------------------------------------------------------------------------------------------


def ran_out_of_memory(words: str) -> bool:
    """Whether the last words of a compiler or another process are about memory."""
    killed = r"Killed signal terminated program|virtual memory exhausted|MemoryError"
    return re.search(killed, words) is not None or classify(words, Status.OK) is Status.OUT_OF_MEMORY


def exit_status(exitcode: int) -> tuple[Status, str]:
    """The status that an exit code stands for, and its name: SIGSEGV, or exit code 3. exitcode: negative for a signal."""
    text = f"exit code {exitcode}"
    if exitcode < 0:
        with suppress(ValueError):
            text = signal.Signals(-exitcode).name
    return _SIGNALS.get(text, Status.CRASH), text


# -- inside the process -------------------------------------------------------------------------------------------


class _Inside:
    """The worker's own end of the pipe; and, where candidates run in its process, the state that they must not change."""

    def __init__(self, pipe: int, output: Path, *, candidates: bool) -> None:
        self._pipe, self._pid, self._candidates = pipe, os.getpid(), candidates
        self._tasks = open(pipe, "rb", closefd=False)  # noqa: SIM115
        self._scratch = output.parent
        self._files = {descriptor: _identity(descriptor) for descriptor in (0, 1, 2, pipe)}
        self._folder = Path().stat()  # "." is there even if the folder has been removed
        self._arithmetic = _arithmetic() if candidates else None

    def run_next(self) -> None:
        """Runs one task and answers it. Raises EOFError if there will be none."""
        task, arguments, answered = pickle.load(self._tasks)
        with suppress(OSError):
            os.ftruncate(2, 0)  # the output of earlier tasks
        for _ in range(_CLEANED):
            mark = None
            try:
                restore_scratch(self._scratch)
                mark = scratch_mark(self._scratch)
                answer = _Answer(value=task(*arguments))
                self.check()
            except (_SideEffectError, EvoError) as error:
                answer = _Answer(error=error)
            except BaseException as error:  # the other side may not know its class
                text = "".join(traceback.format_exception(error))
                answer = _Answer(error=EngineError(f"{type(error).__name__}: {error}\n{text}"))
            if scratch_mark(self._scratch) == mark:
                break
        if answered:
            self.send(answer)

    def check(self) -> None:
        """Raises _SideEffectError for what candidates have done to the process."""
        self._end_copy()
        if self._candidates and (done := self._side_effect()):
            raise _SideEffectError(done)

    def _side_effect(self) -> str:
        """The side effect of a candidate that no computation has, in a few words; empty if there is none."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if closed := [str(d) for d, file in self._files.items() if _identity(d) != file]:
            return f"closed file descriptor {', '.join(closed)} of its process"
        if not os.path.samestat(Path().stat(), self._folder):
            return "changed the working directory of its process"
        if _arithmetic() != self._arithmetic:
            return "changed with how many threads its process computes, or how it rounds floating-point numbers"
        return "started another process" if reap_child() else ""

    def send(self, message: _Answer) -> None:
        self._end_copy()
        if _identity(self._pipe) != self._files[self._pipe]:
            os._exit(_CANNOT_ANSWER)
        body = pickle.dumps(message)
        data = memoryview(_HEADER.pack(_MAGIC, len(body)) + body)
        while data:
            data = data[os.write(self._pipe, data) :]

    def _end_copy(self) -> None:
        """Ends a copy of this process that a candidate has made by fork."""
        if os.getpid() != self._pid:
            os._exit(0)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Device and inode of an open descriptor's file; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _arithmetic() -> tuple[float, ...]:
    """The number of PyTorch's threads, which omp_set_num_threads changes, and sums that a rounding mode changes that is not
    restored, or code linked with -ffast-math, where denormal numbers count as zero."""
    import torch

    one, tiny, smallest = _NUMBERS
    return torch.get_num_threads(), one + tiny, one - tiny, -one - tiny, smallest / 2


_inside: list[_Inside] = []


def enter_stage(name: str, found: Any = None) -> None:
    """Begins the next stage of the task that calls this; each stage has a time limit of its own. A candidate that has harmed
    the process so far gets no further. found: known to the command even if the process is lost in the new stage."""
    for inside in _inside:
        inside.check()
        inside.send(_Answer(stage=name, value=found))


def _serve(
    conn: Connection, output: Path, prepare: Callable[..., None], arguments: tuple[Any, ...], candidates: bool
) -> None:
    """The whole life of a worker process."""
    gc.freeze()  # what the server has imported is not searched for garbage, nor copied for that
    leave_server()
    restore_scratch(output.parent)
    write_output_to(output)
    prepare(*arguments)
    inside = _Inside(conn.fileno(), output, candidates=candidates)
    _inside[:] = [inside]
    try:
        inside.send(_Answer())
        while True:
            inside.run_next()
    except (OSError, EOFError):
        os._exit(_CANNOT_ANSWER)
