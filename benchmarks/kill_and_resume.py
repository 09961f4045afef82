"""Kills a real search with SIGKILL at random moments, resumes it, and examines what is left.

    python benchmarks/kill_and_resume.py [--kills 10] [--target cpu] [--seed 0]

After every kill: the database opens and passes its own integrity check; every evaluation that was there before
is there still, unchanged and once. At the end: a fresh sampler that is told the recorded measurements in order
proposes exactly what was recorded, which is what an unbroken search would have done.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil

from evo.lineage import RunSpec, StoredEvaluation
from evo.lineage.store import Store
from evo.problem.kernel import load_kernel
from evo.search.samplers import find_sampler
from evo.targets import find_target

RUN = "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--workload", default="rows=512,cols=1024,dtype=float32")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of death")
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lineage.db"
        known: dict[int, str] = {}
        for kill in range(1, arguments.kills + 1):
            after_s = moments.uniform(0, 8)
            _run_and_kill(path, arguments, known=len(known), first=kill == 1, after_s=after_s)
            integrity = sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone()[0]
            with Store.open(path, write=False) as store:
                found = store.evaluations(store.run(RUN))
            now = {e.candidate.order: _identity(e) for e in found}
            lost = [o for o, identity in known.items() if now.get(o) != identity]
            print(f"kill {kill:2}: after {after_s:4.1f} s, {len(now):4} recorded, integrity {integrity}, lost {len(lost)}")
            assert integrity == "ok"
            assert not lost
            assert len(now) == len(found), "an order is doubled"
            known = now
        subprocess.run(_command("resume", RUN, path, "--evaluations", str(len(known) + 30)), check=True)
        with Store.open(path, write=False) as store:
            run = store.run(RUN)
            evaluations = store.evaluations(run)
        orders = [e.candidate.order for e in evaluations]
        assert orders == list(range(len(orders))), "an order is missing or doubled"
        differing = _replay(run.spec, evaluations)
        print(f"{len(evaluations)} evaluations, none missing or doubled; replayed proposals that differ: {differing}")
        assert differing == 0


def _command(verb: str, subject: str, path: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "evo", verb, subject, "--db", str(path), *more]


def _run_and_kill(path: Path, arguments: argparse.Namespace, *, known: int, first: bool, after_s: float) -> None:
    """Kills the search `after_s` seconds after it has recorded more than the `known` evaluations."""
    if first:
        more = ["--target", arguments.target, "--workload", arguments.workload, "--seed", "1", "--name", RUN]
        command = _command("search", "layernorm", path, *more, "--budget", "1h")
    else:
        command = _command("resume", RUN, path)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while _recorded(path) <= known and process.poll() is None:
        time.sleep(0.1)
    time.sleep(after_s)
    if process.poll() is not None:
        sys.exit(f"the search ended by itself with code {process.returncode}")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)  # the search itself; its workers must notice by themselves
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"workers outlive their search: {alive}"


def _recorded(path: Path) -> int:
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM candidate").fetchone()[0])
        except sqlite3.OperationalError:  # no tables yet
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


if __name__ == "__main__":
    main()
