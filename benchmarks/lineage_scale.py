"""A search of a million candidates: what one more costs the command that searches, and how fast commands answer then.

    python benchmarks/lineage_scale.py --from RECORDED.db --db /tmp/scale.db [--candidates 1000000] [--runs 1] [--json]
    python benchmarks/lineage_scale.py --from RECORDED.db --db postgresql://user@host/name [...]
    python benchmarks/lineage_scale.py --db ... --only-ask        times the commands on a database that is there
    python benchmarks/lineage_scale.py --from ... --writers 10    ten processes at once, each with runs of its own

The search is a real one, sampler and store included, of the kernel and first workload of the run recorded last there;
but nothing is built or measured: a genome's build, checks and times are those of one of 500 candidates of that run, drawn
by the genome's digest, and its source is that of its fastest with a line of its own. Costs are seconds on the processor,
which a busy machine does not disturb, of the command's process, without those that making up answers takes; at 1,000,
3,000, 10,000 ... candidates, each over the last quarter. Commands are started as `evo COMMAND --json` and timed from
outside, the second of two turns, by the clock and on the processor (a server's own is not in it). What Python and evo's
imports take of that is what a query of nothing takes, and is printed first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import func, select

from evo.analysis.candidates import read_source
from evo.errors import StoreError
from evo.evaluation import Build, Evaluation
from evo.executors import AskedTarget, InFlight
from evo.lineage import LATEST, StoredRun
from evo.lineage import models as m
from evo.lineage.database import shown
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.measure import RaceRequest, RaceResult, Request
from evo.problem.genome import Genome
from evo.problem.kernel import Limits
from evo.problem.loading import load_kernel
from evo.search.loop import Budget, Progress
from evo.search.run import execute
from evo.search.tasks import OpenRun
from evo.targets import DeviceInfo, find_target

# A new command is one more line. {run}, {other}: runs; {candidate}, {cousin}: candidates far down in a run's lineage.
COMMANDS = (
    "query 'SELECT 1'",
    "runs",
    "best",
    "best layernorm",
    "show {candidate}",
    "show {run}",
    "lineage {candidate}",
    "failures {run}",
    "diff {candidate} {cousin}",
    "explain {candidate}",
    "operators {run}",
    "importance {run}",
    "compare {run} {other}",
    "pareto {run}",
    "query 'SELECT status, count(*) FROM candidate GROUP BY status'",
    "query 'SELECT * FROM v_best'",
    "query 'SELECT * FROM v_lineage WHERE child = ''{candidate}'''",
    "query 'SELECT count(*) FROM v_timings WHERE run = ''{run}'''",
    "prune {run} --dry-run",
    "report {run} --out /dev/null",
)
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run, and what its candidates got."""

    run: StoredRun
    source: str
    evaluations: tuple[Evaluation, ...]

    @classmethod
    def read(cls, db: str) -> Recorded:
        with Store.open(db, write=False) as store:
            run = store.run(LATEST)
            found = [e for e in store.evaluations(run) if e.evaluation.build and e.evaluation.same_code_as is None][:500]
            best = min((e for e in found if e.evaluation.timing()), key=lambda e: e.evaluation.score or 1.0)
            source = read_source(store, best.public_id)
            return cls(run=run, source=source, evaluations=tuple(_with_samples(e.evaluation) for e in found))


def _with_samples(evaluation: Evaluation) -> Evaluation:
    """Samples around the median, in place of pruned ones."""
    samples = [t.samples_us or tuple(t.median_us * (1 + i % 7 / 500) for i in range(24)) for t in evaluation.timings]
    return replace(
        evaluation,
        timings=tuple(replace(t, samples_us=s) for t, s in zip(evaluation.timings, samples, strict=True)),
    )


@dataclass(kw_only=True)
class Answers:
    """An executor, as `evo.executors.Executor` describes it; since it names the device, its own `AskedTarget`, too."""

    recorded: Recorded
    builders: int = 16
    devices: int = 1
    losses: int = 0
    own_s: float = 0.0
    """Seconds that answers took."""

    def __post_init__(self) -> None:
        self.name = self.recorded.run.spec.target
        self.target: AskedTarget = self

    def device(self) -> DeviceInfo:
        was = self.recorded.run.environment
        return DeviceInfo(name=was.device, arch=was.arch, driver=was.driver)

    def limits(self, arch: str) -> Limits:
        return find_target(self.name).limits(arch)

    def runs(self, arch: str) -> str:
        return ""

    def compiler(self) -> str:
        return self.recorded.run.environment.compiler

    def build(self, request: Request) -> Future[Build]:
        with self._answering() as future:
            future.set_result(self._build(request.genome))
        return future

    def measure(self, request: Request) -> Future[Evaluation]:
        with self._answering() as future:
            future.set_result(replace(self._drawn(request.genome), build=None))
        return future

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        timed = [t for e in self.recorded.evaluations if (t := e.timing())]
        names = [*(name for name, _, _ in request.contenders), *(request.baselines or ("torch",))]
        future: Future[RaceResult] = Future()
        future.set_result(RaceResult(timings=tuple(replace(t, contender=n) for n, t in zip(names, timed, strict=False))))
        return future

    def renew_device(self) -> None:
        pass

    def in_flight(self) -> tuple[InFlight, ...]:
        return ()

    def close(self) -> None:
        pass

    @contextmanager
    def _answering(self) -> Iterator[Future[Any]]:
        started = time.process_time()
        yield Future()
        self.own_s += time.process_time() - started

    def _drawn(self, genome: Genome) -> Evaluation:
        known = self.recorded.evaluations
        return known[int(genome.digest[:8], 16) % len(known)]

    def _build(self, genome: Genome) -> Build:
        build = self._drawn(genome).build
        assert build is not None
        own = hashlib.sha256(genome.digest.encode()).hexdigest()
        binary = build.binary and replace(build.binary, code=own.encode() * 300, code_hash=own)
        return replace(build, source=f"// {own}\n{self.recorded.source}", source_digest=own, binary=binary)


@dataclass(kw_only=True)
class Meter:
    """Notes what candidates cost, at `MARKS`; is a search's observer."""

    answers: Answers
    db: str
    marks: list[dict[str, float]] = field(default_factory=list)
    _since: tuple[int, float] | None = None

    def __call__(self, progress: Progress) -> None:
        mark = next((mark for mark in MARKS if mark > (self.marks[-1]["candidates"] if self.marks else 0)), None)
        if mark is None or progress.finished < mark - mark // 4:
            return
        spent_s = time.process_time() - self.answers.own_s
        self._since = self._since or (progress.finished, spent_s)
        if progress.finished < mark:
            return
        before, before_s = self._since
        found = {
            "candidates": progress.finished,
            "ms_each": round(1000 * (spent_s - before_s) / (progress.finished - before), 3),
            "memory_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
        }
        if "://" not in self.db:
            found["bytes_each"] = round(Path(self.db).stat().st_size / progress.finished)
        self.marks.append(found)
        self._since = None
        print(f"  {json.dumps(found)}", file=sys.stderr, flush=True)


def fill(recorded: Recorded, db: str, candidates: int, numbers: range) -> list[dict[str, float]]:
    """Fills the database with runs; costs of the candidates of the last run."""
    for number in numbers:
        meter, kernel = Meter(answers=Answers(recorded=recorded), db=db), load_kernel(recorded.run.spec.kernel)
        spec = replace(
            recorded.run.spec,
            seed=number,
            kernel_digest=kernel.digest,
            workloads=recorded.run.spec.workloads[:1],
            options={**recorded.run.spec.options, "cover": False, "starts": []},
            budget=vars(Budget(evaluations=candidates)),
            name=None,
        )
        with _writing(db) as store:
            run = store.create_run(spec, recorded.run.environment)
            execute(OpenRun(run=run, kernel=kernel, store=store, executor=meter.answers), meter)
    return meter.marks


@contextmanager
def _writing(db: str) -> Iterator[Store]:
    while True:
        try:
            store = Store.open(db, write=True)
        except StoreError as error:  # a file has one writer; this one waits for its turn
            if "another search" not in str(error):
                raise
            time.sleep(0.05)
            continue
        with store:
            yield store
        return


def count(db: str) -> dict[str, int]:
    """Contents of the database: candidates, different ones, runs, and bytes."""
    with Store.open(db, write=False) as store, store.reading() as connection:
        path = Path(db) if "://" not in db else None
        size = (
            path.stat().st_size if path else connection.scalar(select(func.pg_database_size(func.current_database())))
        )
        return {
            "candidates": connection.scalar(select(func.count()).select_from(m.Candidate)) or 0,
            "different": connection.scalar(select(func.count(m.Candidate.public_id.distinct()))) or 0,
            "runs": connection.scalar(select(func.count()).select_from(m.Run)) or 0,
            "bytes": int(size or 0),
        }


def names(db: str) -> dict[str, str]:
    """Something to ask about: the longest of the later runs, and the winner of another."""
    with Store.open(db, write=False) as store, store.reading() as connection:
        runs = connection.execute(select(m.Run.name, m.Run.uid, m.Run.id).order_by(m.Run.id.desc()).limit(6)).all()
        run, other = runs[0], runs[-1]
        found = connection.scalars(
            select(m.Candidate.order)
            .where(m.Candidate.run_id == run.id, m.Candidate.task == 0, m.Candidate.status == "ok")
            .order_by(m.Candidate.order.desc())
            .limit(2)
        ).all()
    return {
        "run": run.name,
        "other": other.name,
        "candidate": public_id(run.uid, found[0]),
        "cousin": public_id(run.uid, found[1]),
    }


def ask(db: str) -> dict[str, dict[str, float | str]]:
    """Seconds of every command, by the clock and on the processor, and its message if it failed."""
    known = names(db)
    evo = str(Path(sys.executable).with_name("evo"))
    timed: dict[str, dict[str, float | str]] = {}
    print("   clock processor", file=sys.stderr)
    for command in COMMANDS:
        words = [evo, *shlex.split(command.format(**known).replace("''", "'\"'\"'"))]
        words += ["--json", "--db", db]
        for _ in range(2):
            with tempfile.TemporaryFile("w+") as said:
                started = time.perf_counter()
                process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said)
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                clock = time.perf_counter() - started
                said.seek(0)
                error = said.read().strip()
        timed[command] = {"clock_s": round(clock, 3), "processor_s": round(used.ru_utime + used.ru_stime, 3)}
        if process.returncode:
            timed[command]["failed"] = error.splitlines()[-1][:100] if error else str(process.returncode)
        line = f"{clock:8.2f} {timed[command]['processor_s']:8.2f}  evo {command}  {timed[command].get('failed', '')}"
        print(line, file=sys.stderr, flush=True)
    return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="recorded", help="a database that a search has left")
    parser.add_argument("--db", required=True)
    parser.add_argument("--candidates", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--only-ask", action="store_true")
    parser.add_argument("--no-ask", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    record: dict[str, object] = {"db": shown(options.db), "writers": options.writers}
    if not options.only_ask:
        if options.recorded is None:
            parser.error("--from names the database whose records are the answers")
        recorded = Recorded.read(options.recorded)
        with Store.open(options.db, write=True):
            before = count(options.db)["candidates"]
        runs = max(1, options.runs // options.writers)
        each = max(1, options.candidates // (runs * options.writers))
        started = time.perf_counter()
        if options.writers == 1:
            record["costs"] = fill(recorded, options.db, each, range(runs))
        else:
            parts = [(recorded, options.db, each, range(i * runs, (i + 1) * runs)) for i in range(options.writers)]
            with multiprocessing.get_context("spawn").Pool(options.writers) as pool:
                pool.starmap(fill, parts)
        seconds = time.perf_counter() - started
        found = count(options.db)
        made = found["candidates"] - before
        record |= {"made": made, "seconds": round(seconds, 2), "candidates_per_s": round(made / seconds)}
        record.update(found)
        record["bytes_per_candidate"] = round(found["bytes"] / found["candidates"])
        record["lost_or_doubled"] = before + each * runs * options.writers - found["different"]
    if not options.no_ask:
        record["seconds_of"] = ask(options.db)
    print(json.dumps(record, indent=2))
    return 1 if record.get("lost_or_doubled") else 0


if __name__ == "__main__":
    raise SystemExit(main())
