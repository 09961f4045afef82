"""One worker process: it runs the tasks that come over its pipe, one after another, and can be ended at any moment.

Written for processes that break: a worker's death shows at once, whatever its exit code; it is killed with all that it
started; what it printed last is kept; and an answer that cannot be read counts as a death.
"""

import itertools
import math
import os
import pickle
import re
import select
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
from typing import Any

from evo.errors import DeviceError, EngineError, EvoError
from evo.evaluation import Status
from evo.executors._processes import (
    STARTING,
    WORKER,
    WORKERS,
    end_strays,
    end_tree,
    is_marked,
    known_workers,
    leave_server,
    mark_scratch,
    reap_child,
    start_worker,
    write_output_to,
)
from evo.targets import classify

_STARTING_S = 120.0

_ENDING_S = 60.0
"""How long a killed process may take: a driver first ends what runs on the device."""

_DYING_S = 3.0
"""A process's pipe is closed a moment before the process is gone, on a busy machine longer."""

_LAST_WORDS = 2000
"""Bytes of what a worker printed that a log repeats."""

_CLEANED = 3
"""How often a task is run whose temporary files are cleaned away under it, each time."""

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
"""As often is a task tried whose workers something outside kills; one whose workers die of themselves twice."""


class WorkerLost(Exception):
    """The process died, hung or did what no task may do, and has been ended. `str()` says how; `status` is what that
    stands for; `killed`: by something outside (SIGKILL)."""

    def __init__(self, status: Status, text: str, *, killed: bool = False) -> None:
        super().__init__(text)
        self.status, self.killed = status, killed


class _SideEffectError(Exception):
    """In a worker: a candidate did what no computation does. `str()` says what."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    value: Any = None
    error: BaseException | None = None
    """What the task raised."""
    stage: str = ""
    """Of a task that still runs: its next stage begins. `value` is what it has found so far."""


class Worker:
    """`prepare` is called in the process first, with `arguments`. `candidates`: they run in the process itself, so each task
    is followed by a look at what it has done to the process."""

    def __init__(
        self, scratch: Path, prepare: Callable[..., None], arguments: tuple[Any, ...], *, candidates: bool = False
    ) -> None:
        self._output = scratch / f"output-{os.getpid()}-{next(_numbers)}"
        self._connection, theirs = WORKERS.Pipe()
        self.stage = ""
        """That of the task whose answer is waited for."""
        self.since_s = time.monotonic()
        """When it began, by time.monotonic()."""
        self.ends_at_s = math.inf
        """When the process will be given up, if there is no answer."""
        self.spent_s: dict[str, float] = {}
        """By stage, what the last task took until its answer or its process's end."""
        self.last_stage = ""
        """In which it ended."""
        self.found: Any = None
        """What that task had found when its last stage began."""
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
        """Hands over a task, behind those posted before; never waits. Whether the worker takes it shows in `collect`.

        answered: otherwise it has no answer, and what it raises is dropped.
        """
        self._outgoing += pickle.dumps((task, arguments, answered))
        self._send()

    def collect(self, limits_s: Mapping[str, float]) -> Any:
        """The answer to the first task that has not been answered.

        limits_s: by stage, how long it may take. A task begins in the first, and goes on to others by `enter_stage`.
        Raises what the task raised, WorkerLost; DeviceError if the process cannot be ended.
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
        """From any thread: whoever waits for it sees it die."""
        if self._exitcode is None:
            end_tree(self.pid)

    def end(self) -> int:
        """Kills it with all that it started, and waits until it is gone: what it ran on the device is gone then too.

        Returns its exit code. Raises DeviceError if the system cannot end it.
        """
        if self._exitcode is None:
            self.kill()
            if not connection.wait([self._process.sentinel], _ENDING_S):
                raise DeviceError(
                    f"process {self.pid} could not be ended within {_ENDING_S:g} s: a driver holds it; restart the"
                    " machine, or reset the device"
                )
            with STARTING:  # nobody else may read the exit code, as the start of another process does
                self._process.join()
                self._exitcode = int(self._process.exitcode or 0)  # not closed: the end of the command may be joining it
                known_workers.discard(self.pid)
            end_strays()
            self._connection.close()
            with suppress(OSError):
                self._output.unlink()
        return self._exitcode

    def last_words(self) -> str:
        """The end of what it wrote to its standard output and error."""
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
        """As much of what waits to be sent as the pipe takes now. What is wrong with it shows in `_receive`."""
        with suppress(OSError):
            while self._outgoing:
                del self._outgoing[: os.write(self._connection.fileno(), self._outgoing)]

    def _receive(self, ends_at_s: float) -> _Answer:
        """The next message. Not by `Connection.recv`, which waits for as many bytes as rubbish announces."""
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
        return WorkerLost(status, f"{text}: {words}" if words else text, killed=exitcode == -signal.SIGKILL)


def _message_end(received: bytearray) -> int | None:
    """Where the message ends that begins so; None if that is not known yet, 0 if it is none."""
    if len(received) < _HEADER.size:
        return None if _MAGIC.startswith(received[: len(_MAGIC)]) else 0
    magic, length = _HEADER.unpack_from(received)
    return _HEADER.size + int(length) if magic == _MAGIC else 0


# -- how a process ended ------------------------------------------------------------------------------------------


def ran_out_of_memory(words: str) -> bool:
    """Whether a compiler's or a process's last words are about memory."""
    killed = r"Killed signal terminated program|virtual memory exhausted|MemoryError"
    return re.search(killed, words) is not None or classify(words, Status.OK) is Status.OUT_OF_MEMORY


def exit_status(exitcode: int) -> tuple[Status, str]:
    """The status that the end of a process stands for, and what it is called: SIGSEGV, or exit code 3. exitcode: negative
    for a signal."""
    text = f"exit code {exitcode}"
    if exitcode < 0:
        with suppress(ValueError):
            text = signal.Signals(-exitcode).name
    return _SIGNALS.get(text, Status.CRASH), text


# -- inside the process -------------------------------------------------------------------------------------------


class _Inside:
    """The worker's own end of the pipe; and, where candidates run in its process, what they must leave as they found it."""

    def __init__(self, pipe: int, output: Path, *, candidates: bool) -> None:
        self._pipe, self._pid, self._candidates = pipe, os.getpid(), candidates
        self._tasks = open(pipe, "rb", closefd=False)  # noqa: SIM115
        self._output, self._mark = output, mark_scratch(output.parent)
        self._files = {descriptor: _identity(descriptor) for descriptor in (0, 1, 2, pipe)}
        self._folder = Path().stat()  # by the name ".", which it has even if it is removed
        self._arithmetic = _arithmetic() if candidates else None

    def run_next(self) -> None:
        """Raises EOFError if there will be none."""
        task, arguments, answered = pickle.load(self._tasks)
        with suppress(OSError):
            os.ftruncate(2, 0)  # what earlier tasks printed
        for _ in range(_CLEANED):
            answer = self._run(task, arguments)
            if is_marked(self._output.parent, self._mark):
                break  # else its temporary files were cleaned away under it, which is nobody's fault here
        if answered:
            self.send(answer)

    def _run(self, task: Callable[..., Any], arguments: tuple[Any, ...]) -> _Answer:
        try:
            self._restore_scratch()
            answer = _Answer(value=task(*arguments))
            self.check()
        except (_SideEffectError, EvoError) as error:
            answer = _Answer(error=error)
        except BaseException as error:  # of a class that the other side may not know
            text = "".join(traceback.format_exception(error))
            answer = _Answer(error=EngineError(f"{type(error).__name__}: {error}\n{text}"))
        return answer

    def _restore_scratch(self) -> None:
        """Raises DeviceError."""
        if is_marked(self._output.parent, self._mark):
            return
        try:
            mark = mark_scratch(self._output.parent)
            write_output_to(self._output)
        except OSError as error:
            raise DeviceError(
                f"the folder for temporary files {self._output.parent} was removed, and cannot be made again"
                f" ({error.strerror}): set TMPDIR to another one"
            ) from error
        os.dup2(mark, self._mark, inheritable=False)
        os.close(mark)
        self._files |= {descriptor: _identity(descriptor) for descriptor in (1, 2)}

    def check(self) -> None:
        """Raises _SideEffectError."""
        self._end_copy()
        if self._candidates and (done := self._side_effect()):
            raise _SideEffectError(done)

    def _side_effect(self) -> str:
        """What was done that no computation does, in a few words; empty if nothing was. Ends no process."""
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
        """A candidate that forks goes on in two processes."""
        if os.getpid() != self._pid:
            os._exit(0)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Which file an open descriptor stands for; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _arithmetic() -> tuple[float, ...]:
    """The number of threads that PyTorch computes with, and sums that depend on the rounding mode.

    A call of omp_set_num_threads changes the first. A rounding mode that is not restored changes the others, and so does
    code linked with -ffast-math, where denormal numbers count as zero.
    """
    import torch

    one, tiny, smallest = _NUMBERS
    return torch.get_num_threads(), one + tiny, one - tiny, -one - tiny, smallest / 2


_inside: list[_Inside] = []


def enter_stage(name: str, found: Any = None) -> None:
    """In a task: its next stage begins, with a time limit of its own. A candidate that has harmed the process so far gets
    no further. found: is known even if the process is lost in that stage."""
    for inside in _inside:
        inside.check()
        inside.send(_Answer(stage=name, value=found))


def _serve(
    conn: Connection, output: Path, prepare: Callable[..., None], arguments: tuple[Any, ...], candidates: bool
) -> None:
    """What a worker does from beginning to end."""
    leave_server()
    os.close(mark_scratch(output.parent))  # it is made again where it was cleaned away
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
