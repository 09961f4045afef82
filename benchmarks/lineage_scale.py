"""A lineage database of a million candidates: how fast it fills, how large it is, how long each command takes.

    python benchmarks/lineage_scale.py --db /tmp/scale.db [--candidates 1000000] [--runs 1000] [--sources] [--json]
    python benchmarks/lineage_scale.py --db postgresql://user@host/name [...]
    python benchmarks/lineage_scale.py --db ... --only-ask        times the commands on a database that is there
    python benchmarks/lineage_scale.py --db ... --writers 10      ten processes at once, each with runs of its own

Records are full: each candidate has its parents, a build, 17 checks and two timings with 24 samples each, and each
run its finals and winners, of the sizes that searches of layernorm leave behind. With --sources each candidate has a
source of its own too, of 20 kB; compressing those is most of the work then. Only the time in the store counts, not
that of making records up. Commands are started as `evo COMMAND --json` and timed from outside, the second of two
turns, by the clock and, as a busy machine cannot disturb, on the processor (a server's own is not in it). What
Python and evo's imports take of that is what a query of nothing takes, and is printed first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lineage_records import Plan, Search, spec_of
from sqlalchemy import func, select

from evo.errors import StoreError
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.database import shown
from evo.lineage.models import public_id
from evo.lineage.store import Store

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
_TRANSACTION = 500  # candidates; of more, other writers to a server wait for the end


def fill(plan: Plan, first: int, seconds: float = 0.0) -> tuple[int, float]:
    """Candidates recorded and the seconds that the store took for it."""
    made = 0
    with Store.open(plan.db, write=True) as store:
        for number in range(first, first + plan.runs):
            run = store.create_run(*spec_of(number))
            search = Search(run, plan)
            records = search.candidates()
            while chunk := [record for _, record in zip(range(_TRANSACTION), records, strict=False)]:
                started = time.perf_counter()
                with store.transaction():
                    for ref, evaluation in chunk:
                        store.add(run, ref, evaluation, elapsed_s=float(ref.order))
                seconds += time.perf_counter() - started
                made += len(chunk)
            with store.transaction():
                won: set[int] = set()
                for task, order, measurement in search.finals():
                    store.add_final(run, order, measurement, elapsed_s=600.0)
                    if task not in won:
                        won.add(task)
                        store.set_winner(run, task, order)
                store.set_status(run, RunStatus.FINISHED, reason="time", elapsed_s=600.0)
            if (number + 1 - first) % 100 == 0:
                print(f"  {made:,} candidates, {made / seconds:,.0f}/s so far", file=sys.stderr, flush=True)
    return made, seconds


def _write(plan: Plan, first: int, results: multiprocessing.Queue[tuple[int, float]]) -> None:
    while True:
        try:
            results.put(fill(plan, first))
            return
        except StoreError as error:  # a file has one writer; this one waits for its turn
            if "another search" not in str(error):
                raise
            time.sleep(0.05)


def fill_beside(plan: Plan, writers: int) -> tuple[int, float]:
    """As `fill`, by so many processes at once; the seconds are those of the clock on the wall."""
    results: multiprocessing.Queue[tuple[int, float]] = multiprocessing.Queue()
    started = time.perf_counter()
    workers = [multiprocessing.Process(target=_write, args=(plan, i * plan.runs, results)) for i in range(writers)]
    for worker in workers:
        worker.start()
    made = sum(results.get()[0] for _ in workers)
    for worker in workers:
        worker.join()
    return made, time.perf_counter() - started


def count(db: str) -> dict[str, int]:
    """What is in the database: candidates, different ones, runs, and bytes."""
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
    """Of every command: its seconds by the clock and on the processor, and what it said if it failed."""
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
    parser.add_argument("--db", required=True)
    parser.add_argument("--candidates", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--sources", action="store_true")
    parser.add_argument("--only-ask", action="store_true")
    parser.add_argument("--no-ask", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    record: dict[str, object] = {"db": shown(options.db), "writers": options.writers}
    if not options.only_ask:
        before = 0
        if "://" in options.db or Path(options.db).exists():
            with Store.open(options.db, write=True):
                before = count(options.db)["candidates"]
        runs = max(1, options.runs // options.writers)
        each = max(1, options.candidates // (runs * options.writers))
        plan = Plan(db=options.db, runs=runs, candidates=each, sources=options.sources)
        if options.writers > 1:
            made, seconds = fill_beside(plan, options.writers)
        else:
            made, seconds = fill(plan, 0)
        found = count(options.db)
        record |= {"made": made, "seconds": round(seconds, 2), "candidates_per_s": round(made / seconds)} | found
        record["bytes_per_candidate"] = round(found["bytes"] / found["candidates"])
        record["lost_or_doubled"] = before + made - found["different"]
    if not options.no_ask:
        record["seconds_of"] = ask(options.db)
    print(json.dumps(record, indent=2))
    return 1 if record.get("lost_or_doubled") else 0


if __name__ == "__main__":
    raise SystemExit(main())
