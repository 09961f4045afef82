"""Each kind of fault from outside, many times: no search may lose or double a row, or blame a candidate.

    python benchmarks/faults.py [--times 50] [--at-once 3] [--kinds "database deleted,..."] [--seed 0]

The faults happen at random moments of searches of a small kernel on the CPU, several of which run at once. A search that a
fault ends is resumed. Exits with 1 if a row was lost or doubled, a candidate was blamed for a fault from outside, a
traceback was printed, or anything else went wrong: a search that hangs, or ends with the wrong code, processes or temporary
files that outlive it, another program's database that was written to. SIGTERM ends it with the results so far.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from evo.lineage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.night import RUN, fill_disk, hold, recorded, suspend
from evo.testing.toy_kernel import TEMPLATE, write_kernel

_WAIT_S, _TOLD_S = 120.0, 15.0
"""Longest time for a search to record something, or to end; and to end when it is told to."""
_MODES = 2000
_ENDS = {"killed": -9, "told": 130, "failed": 2, "unread": 130}
"""Exit codes of a search that was killed, told to end, cannot go on, or whose output nobody reads."""


@dataclass(kw_only=True)
class Tally:
    """Results of one kind of fault. reasons: why candidates were blamed. other: anything else that went wrong."""

    trials: int = 0
    lost: int = 0
    doubled: int = 0
    blamed: int = 0
    tracebacks: int = 0
    reasons: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


class Faulty:
    """A search that goes from fault to fault, in a folder of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._home, self._draw = folder, random.Random(seed)
        self._tmp, self._here, self._runs = (folder / name for name in ("tmp", "here", "runs"))
        for made in (self._tmp, self._here, self._runs):
            made.mkdir(parents=True)
        modes = tuple(f"m{n}" for n in range(_MODES))
        tagged = TEMPLATE.replace("const float f", "volatile int tag = {{ p.mode[1:] }}; (void)tag;\n    const float f")
        self._kernel = write_kernel(folder / "toy", modes, template=tagged)
        self._db, self._other = self._runs / "lineage.db", folder / "other.db"
        with Store.open(self._other, write=True) as store:
            store.vacuum()
        self._others_bytes = self._other.read_bytes()
        self._output, self._starts = folder / "output", 0
        self._known: dict[int, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: int | None = None

    @classmethod
    def kinds(cls) -> dict[str, tuple[Callable[[Faulty], None], str]]:
        """Kinds of fault, by name: the deed, and a key of _ENDS for a search that ends then; empty for one that goes on."""

        def signalled(number: signal.Signals, times: int = 1) -> Callable[[Faulty], None]:
            return lambda self: self._signal(number, times)

        def on(process: str, number: signal.Signals) -> Callable[[Faulty], None]:
            return lambda self: self._disturb(process, number)

        return {
            **{f"{name} killed": (on(name, signal.SIGKILL), "") for name in _PROCESSES},
            **{f"{name} stopped for 2 s": (on(name, signal.SIGSTOP), "") for name in _PROCESSES},
            "all stopped for 2 s": (lambda self: suspend(self._running, 2.0), ""),
            "database locked for 2 s": (lambda self: hold(self._db, 2.0), ""),
            "write-ahead log deleted": (cls._delete_log, ""),
            "lock file deleted": (lambda self: self._db.with_name(self._db.name + ".lock").unlink(), ""),
            "TMPDIR cleaned": (cls._clean_tmp, ""),
            "TMPDIR deleted": (lambda self: shutil.rmtree(self._tmp, ignore_errors=True), ""),
            "build cache deleted": (lambda self: shutil.rmtree(self._runs / "cache", ignore_errors=True), ""),
            "current folder deleted": (lambda self: shutil.rmtree(self._here, ignore_errors=True), ""),
            "cores busy for 2 s": (cls._load, ""),
            "command killed": (signalled(signal.SIGKILL), "killed"),
            "SIGINT": (signalled(signal.SIGINT), "told"),
            "SIGINT twice": (signalled(signal.SIGINT, 2), "told"),
            "SIGTERM": (signalled(signal.SIGTERM), "told"),
            "SIGHUP": (signalled(signal.SIGHUP), "told"),
            "disk full": (lambda self: fill_disk(self._running), "failed"),
            "database deleted": (lambda self: self._db.unlink(), "failed"),
            "database moved": (lambda self: self._db.rename(self._home / "moved.db"), "failed"),
            "database replaced": (lambda self: self._copy_other().rename(self._db), "failed"),
            "database overwritten": (lambda self: self._db.write_bytes(self._others_bytes), "failed"),
            "database made read-only": (lambda self: self._db.chmod(0o444), "failed"),
            "folder of the database deleted": (lambda self: shutil.rmtree(self._runs, ignore_errors=True), "failed"),
            "kernel edited": (lambda self: (self._kernel / "cpu.cpp.j2").open("a").write("\n") and None, "failed"),
            "output closed": (cls._close_output, "unread"),
        }

    # -- a trial ----------------------------------------------------------------------------------------------------------

    def suffer(self, kind: str, tally: Tally) -> bool:
        """Does one fault, and checks the search afterwards. Returns whether it can go on."""
        tally.trials += 1
        act, ends = self.kinds()[kind]
        try:
            if self._process is None:
                self._start(piped=ends == "unread")
            elif ends == "unread":  # only a process whose output is a pipe can lose its reader
                self._signal(signal.SIGINT, 1)
                self._await_end("told", tally)
                self._start(piped=True)
            self._await_more(len(_rows(self._db)))
            time.sleep(self._draw.uniform(0.0, 0.5))
            before = _rows(self._db)
            children = psutil.Process(self._process.pid).children(recursive=True)
            act(self)
            if ends:
                self._await_end(ends, tally, children)
            else:
                self._await_more(len(before))
            self._verify(before, tally)
        except (_Failure, OSError, psutil.Error, sqlite3.Error) as error:
            tally.other.append(f"{type(error).__name__}: {error}; {self._output.read_text(errors='replace')[-600:]}")
            print(f"{kind}: {tally.other[-1]}", file=sys.stderr, flush=True)
            self.close()
            return False
        return True

    def close(self) -> None:
        if self._process is not None:
            tree = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
            self._process.kill()
            self._process.wait()
            psutil.wait_procs(tree, timeout=_WAIT_S)
        self._process = None

    def _start(self, *, piped: bool) -> None:
        self._starts += 1
        words = ("resume", RUN, "--db", str(self._db))
        if not self._known:
            options = ("--target", "cpu", "--name", RUN, "--budget", "24h", "--sampler", "random", "--seed", "1")
            words = ("search", str(self._kernel), *options, "--db", str(self._db))
        root = str(Path(__file__).parent.parent)
        environment = {**os.environ, "TMPDIR": str(self._tmp), "HOME": str(self._home), "PYTHONPATH": root}
        self._here.mkdir(exist_ok=True)
        self._tmp.mkdir(exist_ok=True)
        reader, writer = os.pipe() if piped else (None, None)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evo", *words],
                cwd=self._here,
                env=environment | {"OMP_WAIT_POLICY": "passive"},
                stdin=subprocess.DEVNULL,
                stdout=output if writer is None else writer,
                stderr=output,
            )
        if writer is not None:
            os.close(writer)
        self._reader = reader

    def _await_more(self, than: int) -> None:
        """Waits until more rows are recorded."""
        until = time.monotonic() + _WAIT_S
        while recorded(self._db) <= than:
            if self._running.poll() is not None:
                raise _Failure(f"the search ended with code {self._running.returncode}: {self._output.read_text()[-300:]}")
            if time.monotonic() > until:
                raise _Failure(f"nothing was recorded within {_WAIT_S:g} s: {self._output.read_text()[-300:]}")
            time.sleep(0.1)

    def _await_end(self, ends: str, tally: Tally, children: Sequence[psutil.Process] = ()) -> None:
        began = time.monotonic()
        try:
            code = self._running.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            raise _Failure("the search did not end") from None
        took_s = time.monotonic() - began
        if ends == "told" and took_s > _TOLD_S:
            tally.other.append(f"it took {took_s:.0f} s to end")
        if code != _ENDS[ends]:
            tally.other.append(f"exit code {code}: {self._output.read_text()[-300:]}")
        _, alive = psutil.wait_procs(children, timeout=_WAIT_S / 4)
        if alive:
            tally.other.append(f"processes outlive the search: {alive}")
            for process in alive:
                process.kill()
        if self._tmp.exists() and (left := [p.name for p in self._tmp.iterdir() if p.name.startswith(("pymp-", "evo-"))]):
            tally.other.append(f"left in TMPDIR: {left}")
        self._process = None
        if self._reader is not None:
            with suppress(OSError):
                os.close(self._reader)
        self._restore()

    def _restore(self) -> None:
        """Repairs the files, as a user would who reads the messages of the search."""
        if self._other.read_bytes() != self._others_bytes:
            raise _Failure("the other database was written to")
        recovered = [p for place in (self._runs, self._tmp, self._home) for p in place.glob("lineage.recovered-*.db")]
        if recovered:
            self._runs.mkdir(exist_ok=True)
            if self._db.exists() and self._db.read_bytes() != self._others_bytes:
                raise _Failure("what is in the place of the database was written to")
            max(recovered, key=lambda p: p.name).rename(self._db)
        for path in (*recovered, self._home / "moved.db"):
            path.unlink(missing_ok=True)
        if self._db.exists():
            self._db.chmod(0o644)
        template = self._kernel / "cpu.cpp.j2"
        template.write_text(template.read_text().rstrip("\n") + "\n")

    def _verify(self, before: Mapping[int, str], tally: Tally) -> None:
        found = _rows(self._db)
        known = {**self._known, **before}
        lost = sum(found.get(order) != row for order, row in known.items())
        tally.lost += lost
        if lost:
            tally.other.append(f"{lost} of {len(known)} rows are lost: {self._output.read_text(errors='replace')[-600:]}")
        with closing(sqlite3.connect(f"file:{self._db}?mode=ro", uri=True)) as connection:
            orders = [order for (order,) in connection.execute('SELECT "order" FROM candidate')]
            right = "status IN ('ok', 'same_code')"
            wrong = connection.execute(f"SELECT status, log FROM candidate WHERE NOT {right} ORDER BY id").fetchall()
        tally.doubled += len(orders) - len(set(orders))
        tally.blamed += len(wrong) - self._blamed
        tally.reasons += [f"{status}: {log[-300:]}" for status, log in wrong[self._blamed :]]
        self._blamed = len(wrong)
        said = self._output.read_text(errors="replace")
        tally.tracebacks += said.count("Traceback")
        if "Traceback" in said:
            tally.other.append(said[-1500:])
            self._output.write_text("")
        self._known = found

    _blamed = 0

    # -- faults -----------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _signal(self, number: signal.Signals, times: int) -> None:
        for _ in range(times):
            self._running.send_signal(number)
            time.sleep(0.1 if times > 1 else 0.0)

    def _disturb(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to one of the processes of a name; "command" is the search itself."""
        command = psutil.Process(self._running.pid)
        until = time.monotonic() + _WAIT_S
        while True:
            tree = command.children(recursive=True)
            found = [command] if name == "command" else [p for p in tree if _name(p) in _PROCESSES[name]]
            if found or time.monotonic() > until:
                break
            time.sleep(0.005)
        if not found:
            raise _Failure(f"there is no {name}")
        chosen = self._draw.choice(found)
        with suppress(psutil.NoSuchProcess):  # it ends just now
            chosen.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(2.0)
                chosen.send_signal(signal.SIGCONT)

    def _delete_log(self) -> None:
        for end in ("-wal", "-shm"):
            self._db.with_name(self._db.name + end).unlink(missing_ok=True)
        time.sleep(1.0)  # a reader that opened the database now would make another log

    def _clean_tmp(self) -> None:
        for path in self._tmp.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _load(self) -> None:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        time.sleep(2.0)
        for process in busy:
            process.kill()
            process.wait()

    def _copy_other(self) -> Path:
        return Path(shutil.copy(self._other, self._runs / "copy.db"))

    def _close_output(self) -> None:
        assert self._reader is not None
        os.close(self._reader)
        self._reader = None


_PROCESSES = {
    "builder": ("evo-builder",),
    "device worker": ("evo-device",),
    "server of processes": ("evo-server",),
    "compiler": ("cc1plus", "g++", "ld", "as", "collect2"),
}


class _Failure(Exception):
    """A trial went wrong. `str()` says how."""


def _name(process: psutil.Process) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def _rows(path: Path) -> dict[int, str]:
    """The recorded rows by order; none of a database that is not there, or whose files are being exchanged."""
    if not path.exists():
        return {}
    query = (
        'SELECT c."order", c.public_id, c.genome, c.status, count(t.id), total(t.median_us) FROM candidate c'
        " LEFT JOIN timing t ON t.candidate_id = c.id AND t.stage = 'search' GROUP BY c.id"
    )
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return {order: repr(row) for order, *row in connection.execute(query)}
    except sqlite3.OperationalError:
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=3, help="searches that run at once")
    parser.add_argument("--kinds", default="", help="names of faults, separated by commas; all if left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # a search keeps ignoring what nohup or a shell has it ignore
        signal.signal(number, signal.SIG_DFL)
    kinds = [kind for kind in Faulty.kinds() if not options.kinds or kind in options.kinds.split(",")]
    draw, began = random.Random(options.seed), time.monotonic()
    trials = [kind for kind in kinds for _ in range(options.times)]
    draw.shuffle(trials)
    tallies = {kind: Tally() for kind in kinds}

    signal.signal(signal.SIGTERM, lambda number, frame: trials.clear())

    def take() -> str | None:
        with suppress(IndexError):
            return trials.pop()
        return None

    def chain(number: int, folder: Path) -> None:
        search = Faulty(folder / str(number), options.seed + number)
        try:
            while (kind := take()) is not None:
                if not search.suffer(kind, tallies[kind]):
                    search = Faulty(folder / f"{number}-{len(trials)}", options.seed + number)
                minutes = (time.monotonic() - began) / 60
                print(f"{minutes:6.1f} min, {len(trials)} to do: {kind}", file=sys.stderr, flush=True)
        finally:
            search.close()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ThreadPoolExecutor(options.at_once) as pool:
        for done in [pool.submit(chain, number, Path(name)) for number in range(options.at_once)]:
            done.result()
    columns = ("trials", "lost", "doubled", "blamed", "tracebacks")
    print(f"{'fault':34}" + "".join(f"{column:>11}" for column in (*columns, "other")))
    for kind, tally in tallies.items():
        print(f"{kind:34}" + "".join(f"{getattr(tally, c):11}" for c in columns) + f"{len(tally.other):11}")
    for kind, tally in tallies.items():
        for said in (*tally.reasons, *tally.other):
            print(f"{kind}: {said}")
    print(f"{sum(t.trials for t in tallies.values())} trials in {(time.monotonic() - began) / 60:.1f} min")
    return int(any(t.lost or t.doubled or t.blamed or t.tracebacks or t.other for t in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
