"""A real search for an hour, and what a night may bring: nothing may be lost, doubled or grow.

    python benchmarks/night.py [--minutes 60] [--target cpu] [--kernel layernorm] [--workload ...] [--seed 0] [--db FILE]

At random moments of the first sixth the search is killed, interrupted, told to end, hung up on or has no space left on its
disk, and is resumed; to the end, one of its processes is killed as by a machine that is out of memory, all of them sleep,
or another program holds the database. After every end: the database passes its own integrity check, every evaluation
that was there is there still, unchanged and once. From then on the memory of the search is looked at every ten seconds.
At last: a fresh sampler that is told the recorded measurements in order proposes exactly what was recorded, which is what
an unbroken search would have done, and `evo resume` goes on. A clock that jumps is not among it.

    python benchmarks/night.py --faults [--times 50] [--at-once 3] [--kinds "database deleted,..."] [--seed 0]

Each kind of fault, so many times, at random moments of searches of a small kernel on the CPU, several of which run at once.
A search that a fault ends is resumed. Exits with 1 if a row was lost or doubled, a candidate blamed for what came from
outside, a traceback printed, or anything else was not as it should be: a search that hangs, or ends with another code than
it should, processes or temporary files that outlive it, another program's database that was written to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from evo.lineage import RunSpec, StoredEvaluation
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.search.samplers import find_sampler
from evo.targets import find_target

sys.path.insert(0, str(Path(__file__).parent.parent))
from evo.testing.toy_kernel import TEMPLATE, write_kernel

RUN = "night"
_PAUSE_S = (5.0, 25.0)
_SLEEP_S = 4.0
_FIRST = 1 / 6
"""Share of the time in which the search itself is ended."""
_GROWTH = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--kernel", default="layernorm")
    parser.add_argument("--workload", default="rows=512,cols=1024,dtype=float32")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--faults", action="store_true", help="each kind of fault, --times times")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=3, help="searches that run at once")
    parser.add_argument("--kinds", default="", help="of faults, separated by commas; all if left out")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # a search leaves alone what nohup or a shell has it ignore
        signal.signal(number, signal.SIG_DFL)
    if options.faults:
        sys.exit(run_faults(options))
    with tempfile.TemporaryDirectory() as folder:
        night = Night(options, options.db or Path(folder) / "lineage.db")
        try:
            night.run()
        finally:
            night.end()


class Night:
    def __init__(self, options: argparse.Namespace, path: Path) -> None:
        self._options, self._path = options, path
        self._draw = random.Random(options.seed)
        self._began = time.monotonic()
        self._known: dict[int, str] = {}
        self._happened: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes]
        self._memory: list[tuple[float, int, float]] = []
        """Minutes, evaluations, MiB."""

    def end(self) -> None:
        self._process.kill()

    def run(self) -> None:
        seconds = 60 * self._options.minutes
        place = ["--target", self._options.target, "--workload", self._options.workload]
        self._start("search", self._options.kernel, *place, "--seed", "1", "--name", RUN, "--budget", "24h")
        ends: list[Callable[[], None]] = [
            *(partial(self._end, number) for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
            self._fill_disk,
        ]
        disturbs = [self._kill_one, self._suspend, self._hold_database]
        while (passed := time.monotonic() - self._began) < seconds:
            self._watch(self._draw.uniform(*_PAUSE_S))
            if passed < seconds * _FIRST:
                self._draw.choice([*ends, *disturbs])()
            else:
                self._draw.choice(disturbs)()
        self._end(signal.SIGKILL)
        self._verify()

    # -- the search ---------------------------------------------------------------------------------------------------

    def _start(self, *words: str) -> None:
        command = [sys.executable, "-m", "evo", *words, "--db", str(self._path)]
        known = _recorded(self._path)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while _recorded(self._path) <= known:
            if self._process.poll() is not None:
                sys.exit(f"evo {' '.join(words)} ended by itself with code {self._process.returncode}")
            time.sleep(0.1)

    def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                sys.exit(f"the search ended by itself with code {self._process.returncode}")
            minutes = (time.monotonic() - self._began) / 60
            if not self._memory or minutes - self._memory[-1][0] > 1 / 6:
                mib = psutil.Process(self._process.pid).memory_info().rss / 2**20
                self._memory.append((minutes, _recorded(self._path), mib))
                print(f"{minutes:6.1f} min {self._memory[-1][1]:7} evaluations {mib:7.1f} MiB", flush=True)
            time.sleep(0.5)

    def _resume(self) -> None:
        """After the search has ended: what it recorded is looked at, and it goes on."""
        with closing(sqlite3.connect(self._path)) as connection:
            integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
        with Store.open(self._path, write=False) as store:
            found = store.evaluations(store.run(RUN))
        now = {e.candidate.order: _identity(e) for e in found}
        assert integrity == "ok", integrity
        assert all(now.get(order) == identity for order, identity in self._known.items()), "an evaluation is lost"
        assert len(now) == len(found), "an order is doubled"
        self._known = now
        self._start("resume", RUN)

    # -- what happens -------------------------------------------------------------------------------------------------

    def _note(self, what: str) -> None:
        self._happened[what] += 1
        print(f"{(time.monotonic() - self._began) / 60:6.1f} min {what}", flush=True)

    def _end(self, number: signal.Signals) -> None:
        self._note(number.name)
        children = psutil.Process(self._process.pid).children(recursive=True)
        os.kill(self._process.pid, number)  # the search itself; its workers must notice by themselves
        code = self._process.wait(120)
        assert code == (-number if number == signal.SIGKILL else 130), code
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, f"workers outlive their search: {alive}"
        self._resume()

    def _fill_disk(self) -> None:
        """The search can write behind the first page of no file any more."""
        self._note("no space left")
        psutil.Process(self._process.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
        assert self._process.wait(120) == 2
        self._resume()

    def _kill_one(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        if children:
            self._note("a process killed")
            with suppress(psutil.Error):
                self._draw.choice(children).kill()

    def _suspend(self) -> None:
        self._note("suspended")
        process = psutil.Process(self._process.pid)
        tree = [process, *process.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for one in tree:
                with suppress(psutil.Error):
                    one.send_signal(number)
            time.sleep(_SLEEP_S if number == signal.SIGSTOP else 0.0)

    def _hold_database(self) -> None:
        self._note("database held")
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=60)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(_SLEEP_S)
            connection.execute("ROLLBACK")

    # -- at the end ---------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """The search has been resumed."""
        os.kill(self._process.pid, signal.SIGINT)
        assert self._process.wait(120) == 130
        with Store.open(self._path, write=False) as store:
            run = store.run(RUN)
            evaluations = store.evaluations(run)
        done = [e.candidate.order for e in evaluations]
        gaps = set(range(max(done) + 1)) - set(done)  # what was in flight when it was ended
        assert len(set(done)) == len(done)
        assert len(gaps) < run.spec.max_in_flight
        whole = evaluations[: min(gaps, default=len(done))]
        differing = _replay(run.spec, whole)
        later = [mib for minutes, _, mib in self._memory if minutes > self._options.minutes * _FIRST]
        print(json.dumps({
            "evaluations": len(done), "happened": dict(self._happened), "proposals_that_differ": differing,
            "memory_mib": {"first": later[0], "last": later[-1], "most": max(later)},
            "bytes_each": round(self._path.stat().st_size / len(done)),
        }, indent=2))  # fmt: skip
        assert differing == 0
        assert later[-1] < _GROWTH * later[0], "the search's memory grows"


def _recorded(path: Path) -> int:
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM candidate").fetchone()[0])
        except sqlite3.DatabaseError:  # no tables yet, or no database
            return 0


def _identity(e: StoredEvaluation) -> str:
    times = [t.samples_us for t in e.evaluation.timings]
    return f"{e.public_id} {e.candidate.proposal.genome.digest} {e.evaluation.status} {times}"


def _replay(spec: RunSpec, evaluations: list[StoredEvaluation]) -> int:
    """How many recorded proposals a fresh sampler would not have made from the recorded measurements."""
    kernel, workload = load_kernel(spec.kernel), spec.workloads[evaluations[0].candidate.task]
    limits = find_target(spec.target).limits(spec.arch)
    sampler = find_sampler(spec.sampler)(kernel.space(spec.target, workload, limits), spec.seed, {})
    timings = {e.candidate.order: e.evaluation.timing() for e in evaluations}
    first_of_code: dict[object, int] = {}
    best: float | None = None

    def tell(e: StoredEvaluation) -> None:
        """By the rules of the search's loop, written down a second time, so that it is not its own witness."""
        nonlocal best
        order, first = e.candidate.order, e.candidate.order
        if e.evaluation.build is not None and e.evaluation.build.binary is not None:
            sequence = kernel.sequence(spec.target, e.candidate.proposal.genome.parameters, workload, limits)
            first = first_of_code.setdefault((e.evaluation.build.binary.code_hash, sequence), order)
        timing = timings[order if e.evaluation.same_code_as is None else e.evaluation.same_code_as]
        score = timing.ratio if timing is not None else None
        if timing is not None and score is not None and (best is None or score < best):
            if not timing.disturbed:
                best = score
            elif best is not None:
                score = None  # nothing disturbed becomes the best of a run
        sampler.tell(order, score, first if first != order else None)

    differing = 0
    for order, e in enumerate(evaluations):
        if order >= spec.max_in_flight:
            tell(evaluations[order - spec.max_in_flight])
        proposal = sampler.ask(order)
        differing += (proposal.genome, proposal.parents) != (e.candidate.proposal.genome, e.candidate.proposal.parents)
    return differing


# -- each kind of fault, many times ------------------------------------------------------------------------------

_WAIT_S = 120.0
"""How long a search may take to record something, or to end."""
_MODES = 2000
_ENDS = {"killed": -9, "told": 130, "failed": 2, "unread": 130}
"""Exit codes of a search that was killed, told to end, cannot go on, or whose output nobody reads."""


@dataclass(kw_only=True)
class Tally:
    """What came of one kind of fault. reasons: why candidates were blamed. other: whatever else was not as it should be."""

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
        """By name: what is done, and how the search ends then: a key of _ENDS, or not at all if that is empty."""

        def signalled(number: signal.Signals, times: int = 1) -> Callable[[Faulty], None]:
            return lambda self: self._signal(number, times)

        def on(process: str, number: signal.Signals) -> Callable[[Faulty], None]:
            return lambda self: self._disturb(process, number)

        return {
            **{f"{name} killed": (on(name, signal.SIGKILL), "") for name in _PROCESSES},
            **{f"{name} stopped for 2 s": (on(name, signal.SIGSTOP), "") for name in _PROCESSES},
            "all stopped for 2 s": (cls._suspend, ""),
            "database locked for 2 s": (cls._lock_database, ""),
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
            "disk full": (cls._fill_disk, "failed"),
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

    def suffer(self, kind: str, tally: Tally) -> None:
        """One fault, and what becomes of the search."""
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
            self.close()
            if any(self._runs.glob("lineage.recovered-*.db")):
                self._db.unlink(missing_ok=True)  # what is wrong with it is told
            self._restore()

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
        """Until more rows are recorded."""
        assert self._process is not None
        until = time.monotonic() + _WAIT_S
        while _recorded(self._db) <= than:
            if self._process.poll() is not None:
                raise _Failure(f"the search ended with code {self._process.returncode}: {self._output.read_text()[-300:]}")
            if time.monotonic() > until:
                raise _Failure(f"nothing was recorded within {_WAIT_S:g} s: {self._output.read_text()[-300:]}")
            time.sleep(0.1)

    def _await_end(self, ends: str, tally: Tally, children: Sequence[psutil.Process] = ()) -> None:
        assert self._process is not None
        began = time.monotonic()
        try:
            code = self._process.wait(_WAIT_S)
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
        """Makes good what was done to the files, as a user would who reads what the search said."""
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

    def _signal(self, number: signal.Signals, times: int) -> None:
        assert self._process is not None
        for _ in range(times):
            self._process.send_signal(number)
            time.sleep(0.1 if times > 1 else 0.0)

    def _disturb(self, name: str, number: signal.Signals) -> None:
        """One of the processes of that name; the search itself, under that of command."""
        assert self._process is not None
        command = psutil.Process(self._process.pid)
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

    def _suspend(self) -> None:
        assert self._process is not None
        command = psutil.Process(self._process.pid)
        tree = [command, *command.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for one in tree:
                with suppress(psutil.Error):
                    one.send_signal(number)
            time.sleep(2.0 if number == signal.SIGSTOP else 0.0)

    def _lock_database(self) -> None:
        with closing(sqlite3.connect(self._db, isolation_level=None, timeout=60)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(2.0)
            connection.execute("ROLLBACK")

    def _delete_log(self) -> None:
        for end in ("-wal", "-shm"):
            self._db.with_name(self._db.name + end).unlink(missing_ok=True)
        time.sleep(1.0)  # before it is looked at: a reader would make another

    def _clean_tmp(self) -> None:
        for path in self._tmp.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _load(self) -> None:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        time.sleep(2.0)
        for process in busy:
            process.kill()
            process.wait()

    def _fill_disk(self) -> None:
        assert self._process is not None
        psutil.Process(self._process.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))

    def _copy_other(self) -> Path:
        return Path(shutil.copy(self._other, self._runs / "copy.db"))

    def _close_output(self) -> None:
        assert self._reader is not None
        os.close(self._reader)
        self._reader = None


_TOLD_S = 15.0
_PROCESSES = {
    "builder": ("evo-builder",),
    "device worker": ("evo-device",),
    "server of processes": ("evo-server",),
    "compiler": ("cc1plus", "g++", "ld", "as", "collect2"),
}


class _Failure(Exception):
    """A trial went another way than it may. `str()` says how."""


def _name(process: psutil.Process) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def _rows(path: Path) -> dict[int, str]:
    """What is recorded, by order. A database that is not there, or whose files are being exchanged, has nothing."""
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


def run_faults(options: argparse.Namespace) -> int:
    kinds = [kind for kind in Faulty.kinds() if not options.kinds or kind in options.kinds.split(",")]
    draw, began = random.Random(options.seed), time.monotonic()
    trials = [kind for kind in kinds for _ in range(options.times)]
    draw.shuffle(trials)
    tallies = {kind: Tally() for kind in kinds}

    def chain(number: int, folder: Path) -> None:
        search = Faulty(folder / str(number), options.seed + number)
        try:
            while trials:
                kind = trials.pop()
                search.suffer(kind, tallies[kind])
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
    main()
