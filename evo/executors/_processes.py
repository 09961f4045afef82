"""Where workers come from, what they may take, and how they end with all that they started.

Workers are forked from a server that has imported what they need, once: that takes seconds, a fork milliseconds. The server
opens no device and starts no thread pool, so that its children may. It says nothing on the terminal, and nor do they.

A process tree is hard to end: children leave their parent's process group (ninja's compilers do), or lose their parent. So
the server takes in orphans (Linux), and what it has for children beside the workers is a stray. When the server ends,
because the command has ended however it did, everything below it ends too: even a stopped process, which could not see to
that itself. Each worker watches the command as well (`end_with_command`).

Limits hold accidents, not attackers: a candidate is code that runs as the user.
"""

import atexit
import ctypes
import errno
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any

import psutil

from evo.errors import DeviceError

SCRATCH = "evo-work-"
"""Beginning of the names of folders for temporary files; the number of the command's process follows."""

_MARK = "in-use"
"""A file in such a folder, which its command has open and locked."""

_IMPORTED = [
    "evo.executors._processes",  # first: from then on nothing is said on the terminal
    "evo.cli",
    "evo.executors.local",
    "evo.measure.harness",
]

WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload(_IMPORTED)

WORKER = "evo-worker"
"""Name of worker processes."""

STARTING = threading.Lock()
"""Guards `known_workers` while a worker starts or ends."""

known_workers: set[int] = set()
"""Process numbers of the workers that have not ended."""

_ROUNDS = 50
_PAUSE_S = 0.01

_SERVER_PAUSES_S = (0.05, 0.2, 1.0, 2.0)
"""Pauses after servers that ended before they had started a worker."""

_FILE_BYTES = 1 << 30
"""The largest file that a compiler may write, or a candidate on the CPU."""

_OOM_SCORE = 500
"""Workers' score for the system that runs out of memory: it ends them before the command and the user's own programs."""

_SET_CHILD_SUBREAPER = 36
_ANY_CHILD = 0x40000000
"""__WALL: also children that were not made by fork."""


# -- the server ---------------------------------------------------------------------------------------------------


def start_server() -> None:
    """Starts the server unless it runs: before its first worker, so that it gets ready while the command reads its
    arguments. Raises DeviceError where no folder for temporary files can be written.

    SIGINT is blocked in the server and in all its children: ^C on a terminal goes to every process there, and the command
    alone decides what becomes of its workers.
    """
    try:
        Path.cwd()
    except FileNotFoundError:  # it has been removed, and the standard library asks for its name
        os.chdir("/")
    resource_tracker.ensure_running()  # first, for it leaves SIGINT unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _unnamed_socket():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _unnamed_socket() -> Iterator[None]:
    """A server that is started inside has a socket without a name in the file system, reached by a descriptor (Linux). The
    socket outlives the folder for temporary files, whose name may be too long for a socket, and a command that is killed
    leaves no `pymp-` folder there."""
    server: Any = forkserver._forkserver
    config: Any = getattr(multiprocessing.process.current_process(), "_config")  # noqa: B009
    kept, folder = config.get("tempdir"), make_folder("evo-socket-")
    opened, descriptors = os.open(folder, os.O_RDONLY | os.O_CLOEXEC), Path("/proc/self/fd")
    place = descriptors / str(opened) if descriptors.is_dir() else folder
    try:
        config["tempdir"] = str(place)
        yield
        address = Path(server._forkserver_address)
        if place != folder and address.parent == place:
            server._forkserver_address = str(descriptors / str(os.open(address, os.O_PATH | os.O_CLOEXEC)))
    finally:
        config["tempdir"] = kept
        os.close(opened)
        shutil.rmtree(folder, ignore_errors=True)


def _become_server() -> None:
    """Sets the server up, once, when it imports this module."""
    server, command = os.getpid(), os.getppid()
    name_process("evo-server")
    write_output_to(Path(os.devnull))
    # The user's folder may be removed meanwhile, and some libraries cannot be loaded in a folder that is gone.
    with suppress(FileNotFoundError):
        sys.path[:] = [str(Path(entry).absolute()) for entry in sys.path]
    os.chdir("/")
    # A baseline that PyTorch compiles is compiled in its own process: others would be taken for a candidate's.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _leave_main_out()
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")  # an orphan has ended
    adopt_orphans()

    def end() -> None:
        if os.getpid() == server:  # workers inherit this function
            _end_all(lambda: _descendants(server, recursive=False))
            for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{command}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)


def start_worker(process: Callable[[], Any]) -> Any:
    """Starts the process that `process` makes; the caller holds `STARTING`. A server that ends meanwhile, killed by somebody
    or by a system that is out of memory, is replaced. Raises DeviceError where several end."""
    for pause_s in _SERVER_PAUSES_S:
        start_server()
        started = process()
        try:
            started.start()
            return started
        except (EOFError, ConnectionError):
            time.sleep(pause_s)  # until its end shows, so that `start_server` sees it
    raise DeviceError(
        f"the process that workers are started from ended {len(_SERVER_PAUSES_S)} times in a row: see whether memory runs"
        " out, or something ends processes called evo-server"
    )


def _leave_main_out() -> None:
    """Keeps workers from running the program that searches once more: it may be a script without a guard. They work in its
    current folder, or in the server's where that has been removed."""
    prepare: Any = spawn.prepare

    def prepare_without(data: dict[str, Any]) -> None:
        if data["name"] == WORKER:
            gone = () if Path(data["dir"]).is_dir() else ("dir",)
            data = {k: v for k, v in data.items() if not k.startswith((*gone, "init_main_from_"))}
        prepare(data)

    setattr(spawn, "prepare", prepare_without)  # noqa: B010


def leave_server() -> None:
    """Closes, in a worker, what the standard library has every worker inherit: it would keep the server alive when the
    command is gone, and nothing that a candidate writes to should reach another process."""
    for holder, name in (
        (forkserver._forkserver, "_forkserver_alive_fd"),
        (resource_tracker._resource_tracker, "_fd"),
    ):
        with suppress(AttributeError, TypeError, OSError):
            os.close(getattr(holder, name))
            setattr(holder, name, None)


# -- folders for temporary files ----------------------------------------------------------------------------------


def make_folder(prefix: str) -> Path:
    """A new folder for temporary files. Raises DeviceError where none can be made."""
    try:
        try:
            return Path(tempfile.mkdtemp(prefix=prefix))
        except FileNotFoundError:  # the folder that tempfile found at first has been removed since
            tempfile.tempdir = None
            return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise DeviceError(
            f"no folder for temporary files can be made ({error.strerror or error}): free some space in"
            f" {os.environ.get('TMPDIR', '/tmp')}, or set TMPDIR to a folder that exists"
        ) from error


def make_scratch() -> tuple[Path, int]:
    """A folder for the workers of a command, and a descriptor of its mark: the folder is in use as long as that is open.
    Folders of commands that were killed are removed. Raises DeviceError."""
    folder = make_folder(f"{SCRATCH}{os.getpid()}-")
    for mark in folder.parent.glob(f"{SCRATCH}*/{_MARK}"):
        with suppress(OSError), mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
    descriptor = os.open(folder / _MARK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks, or another command that looks at the mark just now
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder, descriptor


def scratch_mark(folder: Path) -> tuple[int, int] | None:
    """Identity of a scratch folder's mark: another one, or None, after something has cleaned the folder."""
    with suppress(OSError):
        mark = (folder / _MARK).stat()
        return mark.st_ino, mark.st_ctime_ns
    return None


def restore_scratch(folder: Path) -> None:
    """Makes a scratch folder and its mark again where something has cleaned them away. Raises DeviceError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "it belongs to somebody else")
        os.close(os.open(folder / _MARK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise DeviceError(
            f"the folder for temporary files {folder} was removed, and cannot be made again ({error.strerror}): set TMPDIR"
            " to another one"
        ) from error


# -- the parent watchdog ------------------------------------------------------------------------------------------


def end_with_command() -> None:
    """Has this process end when the command does. It gets a process group of its own, so that ^C on a terminal reaches
    neither worker nor compiler, whose ends would look like failures of their candidates."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="evo-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        end_with_children()


def end_with_children() -> None:
    _kill(_descendants(os.getpid()))
    os._exit(1)


# -- what a worker may take -------------------------------------------------------------------------------------------


def write_output_to(path: Path) -> None:
    """Points the standard output and error at a file, for this process and its children."""
    target = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)


def name_process(name: str) -> None:
    """Sets the name that `top` and `ps` show for this process (Linux), 15 characters at most."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def adopt_orphans() -> None:
    """Makes this process, not the system, the parent of processes below it whose parents are gone (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def confine(scratch: Path, *, limit_files: bool) -> None:
    """Has a worker, and what it starts, keep temporary files in `scratch`. limit_files: no file may exceed `_FILE_BYTES`;
    not for a process that uses a GPU, whose driver writes files of its own."""
    _limit(resource.RLIMIT_CORE, 0)
    if limit_files:
        _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    # Python has this signal ignored, and compilers are not to inherit that it is not.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)  # what a killed worker leaves goes with the folder


def limit_data(further_bytes: int, *, times_held: int = 1) -> None:
    """Lets this process, and each of its children, hold `further_bytes` of data beyond `times_held` times what it holds now.

    Address space is not limited: mapped libraries are gigabytes that cost nothing. Systems other than Linux do not tell what
    a process holds, so that there is no limit.
    """
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split(None, 1)[0]) << 10  # allocated, touched or not
        _limit(resource.RLIMIT_DATA, times_held * held + further_bytes)


def _limit(what: int, value: int) -> None:
    """Sets a soft limit, which the engine raises again where it needs more."""
    hard = resource.getrlimit(what)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


# -- the process tree ---------------------------------------------------------------------------------------------


def end_tree(pid: int) -> None:
    """Kills a worker, its process group and its descendants. They may still be ending when this returns."""
    below = _descendants(pid)
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _kill(below)


def end_strays() -> None:
    """Kills all processes that dead workers have left."""
    server: Any = getattr(forkserver._forkserver, "_forkserver_pid", None)

    def find() -> list[psutil.Process]:
        with STARTING:
            return [p for p in _descendants(server, recursive=False) if p.pid not in known_workers]

    if server is not None:
        _end_all(find)


def reap_child() -> bool:
    """Whether this process has a child, running or just ended; the exit code of a child that has ended is read."""
    for options in (os.WNOHANG | _ANY_CHILD, os.WNOHANG):
        try:
            os.waitpid(-1, options)
            return True
        except ChildProcessError:
            return False
        except OSError:  # not Linux: without the first option
            continue
    return False


def _end_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kills the processes that `find` finds and all below them, until none is left."""
    for _ in range(_ROUNDS):
        found = find()
        if not found:
            return
        for process in found:
            _kill([process, *_descendants(process.pid)])
        time.sleep(_PAUSE_S)


def _descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    """Processes below a process that have not ended."""
    found = []
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=recursive):
            with suppress(psutil.Error):  # it has ended just now
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _become_server()
