"""One worker process: it is given tasks over a pipe, one at a time, and can be ended at any moment.

Written for processes that break: a worker's death shows at once, whatever its exit code; it is killed with all that it
started; what it printed last is kept; and an answer that cannot be read counts as a death.
"""

from __future__ import annotations

import itertools
import os
import pickle
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from evo.errors import DeviceError, EngineError, EvoError
from evo.evaluation import Status
from evo.executors._faults import exit_status, exit_text, ran_out_of_memory
from evo.executors._limits import Conduct, data_bytes, oom_kills, write_output_to
from evo.executors._stall import account, cause_of
from evo.executors._strays import STARTING, end_strays, end_tree, known_workers

__all__ = ["Worker", "WorkerDied", "WorkerStalled", "not_counted"]

_LOOK_S = 0.1
"""How often the memory of a worker is looked at."""

_NEAR = 0.75
"""A worker that held this share of what it may hold and died did so of the next allocation."""

_UNWATCHED = 0.25
"""Of a limit: most answers come before, and cost no look at what the process does."""

_STARTING_S = 60.0

_WAITING_S = 600.0
"""How long a worker may wait for others, all of which have limits of their own."""

_ENDING_S = 60.0
"""How long a killed process may take: a driver first ends what runs on the device."""

_LAST_WORDS = 2000

_CANNOT_ANSWER = 97
"""Exit code of a worker whose pipe is gone."""

_HEADER = struct.Struct("=8sQ")
_MAGIC = b"\x00evo\xffmsg"
_CHUNK_BYTES = 1 << 20

_numbers = itertools.count()


class WorkerDied(Exception):
    """The process ended, or answered rubbish. `str()` says how; `status` is what that stands for."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class WorkerStalled(Exception):
    """No answer within the limit. `certain`: it hangs, and was not waiting for a core or for another process."""

    def __init__(self, limit_s: float, certain: bool) -> None:
        super().__init__(f"no answer within {limit_s:.3g} s")
        self.limit_s, self.certain = limit_s, certain


@dataclass(frozen=True, kw_only=True)
class _Answer:
    value: Any = None
    error: BaseException | None = None
    complaint: str = ""


class _Wait(Enum):
    """Sent while a task runs."""

    BEGINS = 0
    ENDS = 1


class Worker:
    """`prepare` is called in the process first, with `arguments`; what it returns is the process's memory limit. `gone`
    is called when the process is."""

    def __init__(
        self,
        context: BaseContext,
        scratch: Path,
        prepare: Callable[..., int],
        arguments: tuple[Any, ...],
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._output = scratch / f"output-{os.getpid()}-{next(_numbers)}"
        self._connection, theirs = context.Pipe()
        self.complaint = ""
        """What the last task did to its process that it should not have; empty if nothing."""
        self.memory_limit = 0
        self.ends_at_s: float | None = None
        """When it will be given up, by time.monotonic(), if it does not answer; None while it may take what it likes."""
        self.waited_s = 0.0
        """How much of the time of the last task was `not_counted`."""
        self._gone = gone
        self._prepared = False
        self._received = bytearray()
        self._kills_before = oom_kills()
        with STARTING:
            self._process = context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs, self._output, prepare, arguments), name="evo-worker", daemon=True
            )
            self._process.start()
            self.pid: int = self._process.pid
            known_workers.add(self.pid)
        theirs.close()
        self._exitcode: int | None = None

    def post(self, task: Callable[..., Any], *arguments: Any) -> None:
        """Hands over a task, behind those posted before. Whether the worker takes it shows in `collect`."""
        self._kills_before = oom_kills()
        with suppress(OSError):
            self._connection.send((task, arguments))

    def collect(self, limit_s: float, patience: int = 0, *, sleeps: bool = False) -> Any:
        """The result of the first task whose result has not been collected. `patience`: how often the limit is granted
        again to a process that lacked what it needs; `sleeps`: see `evo.executors._stall.cause_of`. The limit begins
        anew after a time that is `not_counted`.

        Raises what the task raised, WorkerDied or WorkerStalled.
        """
        if not self._prepared:
            self.memory_limit = self._receive(_STARTING_S).value
            self._prepared = True
        self.waited_s = 0.0
        answer = self._receive(limit_s, patience, sleeps)
        self.complaint = answer.complaint
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _receive(self, limit_s: float, patience: int = 0, sleeps: bool = False) -> Any:
        """The next answer."""
        try:
            message = self._message(limit_s, patience, sleeps, shown=True)
            while isinstance(message, _Wait):
                if message is _Wait.BEGINS:
                    since = time.monotonic()
                    message = self._message(_WAITING_S, sleeps=True)
                    self.waited_s += time.monotonic() - since
                else:
                    message = self._message(limit_s, patience, sleeps, shown=True)
        finally:
            self.ends_at_s = None
        return message

    def _message(self, limit_s: float, patience: int = 0, sleeps: bool = False, *, shown: bool = False) -> Any:
        """The next message. Not by `Connection.recv`, which waits for as many bytes as rubbish announces. `shown`: the
        limit is that of the task."""
        watched_from = time.monotonic() + _UNWATCHED * limit_s
        deadline = watched_from + (1 - _UNWATCHED) * limit_s
        self.ends_at_s = deadline if shown else None
        first = before = None
        received, largest = self._received, 0
        while (end := _message_end(received)) is None or len(received) < end:
            now = time.monotonic()
            if before is None and now >= watched_from:
                first = before = account(self.pid)
            elif first is not None and before is not None and now >= deadline:
                after = account(self.pid)
                cause = cause_of(before, after, sleeps=sleeps)
                if not cause.starved or patience <= 0:
                    has_had_it = after.computed_s - first.computed_s >= limit_s
                    raise WorkerStalled(limit_s, cause.certain or has_had_it)
                patience, before = patience - 1, after
                deadline = now + limit_s
                self.ends_at_s = deadline if shown else None
            left = max(0.0, (watched_from if before is None else deadline) - now)
            look = min(left, _LOOK_S) if self.memory_limit else left
            ready = connection.wait([self._connection, self._process.sentinel], look)
            chunk = b""
            if self._connection in ready:
                with suppress(OSError):
                    chunk = os.read(self._connection.fileno(), _CHUNK_BYTES)
            if ready and not chunk:
                raise self._death(near_limit=largest > _NEAR * self.memory_limit > 0)
            received += chunk
            if _message_end(received) == 0:
                raise self._death(near_limit=False)
            largest = max(largest, data_bytes(self.pid)) if self.memory_limit else 0
        message = bytes(received[_HEADER.size : end])
        del received[:end]
        try:
            return pickle.loads(message)
        except Exception:  # rubbish behind a header that is right
            raise self._death(near_limit=False) from None

    def call(self, task: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        self.post(task, *arguments)
        return self.collect(limit_s)

    @property
    def alive(self) -> bool:
        return self._exitcode is None and not connection.wait([self._process.sentinel], 0)

    def last_words(self) -> str:
        """The end of what it wrote to its standard output and error."""
        with suppress(OSError), self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - _LAST_WORDS))
            return file.read().decode(errors="replace").strip()
        return ""

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
                self._exitcode = int(self._process.exitcode or 0)
                self._process.close()
                known_workers.discard(self.pid)
            end_strays()
            self._connection.close()
            self._output.unlink(missing_ok=True)
            self._gone()
        return self._exitcode

    def _death(self, *, near_limit: bool) -> WorkerDied:
        connection.wait([self._process.sentinel], _LOOK_S)  # its pipe is closed a moment before it is gone
        words = self.last_words()
        answered_rubbish = self.alive
        exitcode = self.end()
        if answered_rubbish:
            return WorkerDied(Status.CRASH, "wrote into the pipe of its answers")
        status = exit_status(exitcode)
        text = f"died ({exit_text(exitcode)})"
        if exitcode == _CANNOT_ANSWER:
            text = "died (its file descriptors were closed)"
        if near_limit or ran_out_of_memory(words) or oom_kills() > self._kills_before:
            status, text = Status.OUT_OF_MEMORY, f"ran out of memory and {text}"
        return WorkerDied(status, f"{text}: {words}" if words else text)


def _message_end(received: bytearray) -> int | None:
    """Where the message ends that begins so; None if that is not known yet, 0 if it is none."""
    if len(received) < _HEADER.size:
        return None if _MAGIC.startswith(received[: len(_MAGIC)]) else 0
    magic, length = _HEADER.unpack_from(received)
    return _HEADER.size + int(length) if magic == _MAGIC else 0


class _Life:
    """A worker, seen from inside."""

    def __init__(self, conn: Connection) -> None:
        self._connection, self._own, self._pipe = conn, os.getpid(), conn.fileno()
        self._conduct = Conduct(self._pipe)

    def run(self, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._conduct.begin()
        try:
            answer = _Answer(value=task(*arguments))
        except EvoError as error:
            answer = _Answer(error=error)
        except BaseException as error:  # of a class that the other side may not know
            text = "".join(traceback.format_exception(error))
            answer = _Answer(error=EngineError(f"{type(error).__name__}: {error}\n{text}"))
        if os.getpid() != self._own:
            os._exit(0)  # a candidate forked, and this is the other one
        self.send(replace(answer, complaint=self._conduct.complaint()))

    def send(self, message: object) -> None:
        if not self._conduct.intact(self._pipe):
            os._exit(_CANNOT_ANSWER)
        body = pickle.dumps(message)
        data = memoryview(_HEADER.pack(_MAGIC, len(body)) + body)
        while data:
            data = data[os.write(self._pipe, data) :]


_life: list[_Life] = []


@contextmanager
def not_counted() -> Iterator[None]:
    """In a task that waits for other processes: no limit of time counts it."""
    for life in _life:
        life.send(_Wait.BEGINS)
    yield
    for life in _life:
        life.send(_Wait.ENDS)


def _serve(conn: Connection, output: Path, prepare: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    """What a worker does from beginning to end."""
    _let_go_of_the_server()
    write_output_to(output)
    life = _Life(conn)
    _life[:] = [life]
    try:
        life.run(prepare, arguments)
        while True:
            life.run(*conn.recv())
    except (OSError, EOFError):
        os._exit(_CANNOT_ANSWER)


def _let_go_of_the_server() -> None:
    """Closes what the standard library has every worker inherit. Workers would keep the server that they come from
    alive, when the command is gone; and nothing that a candidate writes to should reach another process."""
    for holder, name in (
        (forkserver._forkserver, "_forkserver_alive_fd"),
        (resource_tracker._resource_tracker, "_fd"),
    ):
        with suppress(AttributeError, TypeError, OSError):
            os.close(getattr(holder, name))
            setattr(holder, name, None)
