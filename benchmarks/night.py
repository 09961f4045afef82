"""A real search for an hour, with the accidents of a night: nothing may be lost, doubled or grow.

    python benchmarks/night.py [--minutes 60] [--target cpu] [--kernel layernorm] [--workload ...] [--seed 0] [--db FILE]

At random moments of the first sixth the search is killed, interrupted, told to end, hung up on or has no space left on its
disk, and is resumed; to the end, one of its processes is killed as by a machine that is out of memory, all of them sleep,
or another program holds the database. After every end: the database passes its own integrity check, every evaluation
that was there is there still, unchanged and once. From then on the memory of the search is noted every ten seconds. At
last a fresh sampler that is told the recorded measurements in order proposes exactly the recorded candidates, as an unbroken
search would have done, and `evo resume` goes on. A clock that jumps is not among the accidents.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil

from evo.lineage import RunSpec, StoredEvaluation
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.search.samplers import find_sampler
from evo.targets import find_target

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
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # a search leaves alone what nohup or a shell has it ignore
        signal.signal(number, signal.SIG_DFL)
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
        known = recorded(self._path)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while recorded(self._path) <= known:
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
                self._memory.append((minutes, recorded(self._path), mib))
                print(f"{minutes:6.1f} min {self._memory[-1][1]:7} evaluations {mib:7.1f} MiB", flush=True)
            time.sleep(0.5)

    def _resume(self) -> None:
        """Checks the records of a search that has ended, and resumes it."""
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
        self._note("no space left")
        fill_disk(self._process)
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
        suspend(self._process, _SLEEP_S)

    def _hold_database(self) -> None:
        self._note("database held")
        hold(self._path, _SLEEP_S)

    # -- at the end ---------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Ends the search, which has been resumed, and checks all its records."""
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


def suspend(search: subprocess.Popen[bytes], seconds: float) -> None:
    """Stops the search with all its processes for a while."""
    command = psutil.Process(search.pid)
    tree = [command, *command.children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in tree:
            with suppress(psutil.Error):
                one.send_signal(number)
        time.sleep(seconds if number == signal.SIGSTOP else 0.0)


def hold(database: Path, seconds: float) -> None:
    """Locks the database for a while, as another program that writes to it."""
    with closing(sqlite3.connect(database, isolation_level=None, timeout=60)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.execute("ROLLBACK")


def fill_disk(search: subprocess.Popen[bytes]) -> None:
    """Lets the search write only the first page of any file."""
    psutil.Process(search.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))


def recorded(path: Path) -> int:
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
    """Number of recorded proposals that a fresh sampler would not have made from the recorded measurements."""
    kernel, workload = load_kernel(spec.kernel), spec.workloads[evaluations[0].candidate.task]
    limits = find_target(spec.target).limits(spec.arch)
    sampler = find_sampler(spec.sampler)(kernel.space(spec.target, workload, limits), spec.seed, {})
    timings = {e.candidate.order: e.evaluation.timing() for e in evaluations}
    first_of_code: dict[object, int] = {}
    best: float | None = None

    def tell(e: StoredEvaluation) -> None:
        """Tells the sampler a result by the rules of the search's loop, stated a second time as an independent witness."""
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


if __name__ == "__main__":
    main()
