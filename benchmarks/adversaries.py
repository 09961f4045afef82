"""Tries every known mistake of a template, and random legal candidates, on the device at hand.

    python benchmarks/adversaries.py [--target cpu|cuda] [--dtype float16] [--json]
    python benchmarks/adversaries.py [--target cpu|cuda] --random 200 [--kernel attention] [--gates 3] [--json]

The first prints, for each cheat of tests/adversaries, the stage that refused it (build, load, launch, gate, drawn, timed,
neighbour) and the recorded reason; exit code 1 if a cheat was accepted, or a right variant refused. The second builds
random legal genomes of a kernel, spread over sizes and dtypes, gates each several times, on data and random cases of a new
seed, and prints how many passed, and why the others did not: what a search space promises, its template has to keep. Exit
code 1 if a genome was refused.

A cheat stays if a template can do it by accident. What only a hostile author writes is not looked for: candidates are not
sandboxed, and templates are code of yours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the cheats are the tests'

from evo.evaluation import Build, Evaluation, Status
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import Request
from evo.measure.cases import random_cases
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.search.tasks import RANDOM_CASES
from evo.targets import find_target
from tests.adversaries.cheats import names_for
from tests.adversaries.trial import try_all, workload_for

_GATE_FLOOR_S = 10.0
"""A search ends what takes twenty times as long as most; here slow is not wrong."""

_COLUMNS = {"cpu": (256, 1000, 4096), "cuda": (256, 1000, 4096, 8192, 32768)}


@dataclass(frozen=True, kw_only=True)
class Place:
    """An executor and its target, where candidates are tried."""

    executor: LocalExecutor
    target: str
    arch: str


def try_cheats(place: Place, dtype: str, *, as_json: bool) -> bool:
    """Whether all was as it must be."""
    capability = find_target(place.target).limits(place.arch).capability
    cheats = names_for(place.target, capability)
    workload = workload_for(place.target, dtype)
    verdicts = list(try_all(place.executor, place.target, place.arch, workload, cheats))
    if as_json:
        rows = [asdict(v) | {"cheat": v.cheat.name, "expected": v.cheat.stage} for v in verdicts]
        print(json.dumps({"workload": workload.key, "verdicts": rows}, indent=1))
    else:
        table = Table("candidate", "refused by", "reason", title=f"{place.target}, {workload}")
        for v in verdicts:
            fine = bool(v.stage) == bool(v.cheat.stage)
            style = "" if fine else "bold red"
            table.add_row(v.cheat.name, v.stage or "nobody", v.reason.strip().partition("\n")[0], style=style)
        Console().print(table)
    return all(bool(v.stage) == bool(v.cheat.stage) for v in verdicts)


def workloads_of(kernel: Kernel, target: str, dtypes: Sequence[str]) -> list[Workload]:
    """Workloads for random genomes: the kernel's own sizes; for a kernel that works on rows, rows of several lengths."""
    keys = dict.fromkeys(w.key.replace(f",dtype={w.dtype}", "") for w in kernel.workloads[target])
    if {d.name for d in kernel.dimensions} == {"rows", "cols"}:
        (most,) = (d.high for d in kernel.dimensions if d.name == "cols")
        keys = dict.fromkeys(f"rows=64,cols={cols}" for cols in _COLUMNS[target] if cols <= most)
    return [kernel.workload(target, f"{key},dtype={dtype}") for key in keys for dtype in dtypes]


def try_random(place: Place, kernel: Kernel, dtypes: Sequence[str], given: argparse.Namespace) -> bool:
    """Whether every genome compiles and is right."""
    target, rng = place.target, random.Random(given.seed)
    limits = find_target(target).limits(place.arch)
    workloads = workloads_of(kernel, target, dtypes)
    spaces = [kernel.space(target, w, limits) for w in workloads]
    chosen = sorted(rng.randrange(len(workloads)) for _ in range(given.random))  # one after another: data are made once
    asked = [
        Request(
            kernel=given.kernel,
            target=target,
            arch=place.arch,
            genome=Genome.of(spaces[i].sample(rng)),
            workload=workloads[i],
            seed=given.seed,
        )
        for i in chosen
    ]
    outcomes, faults = Counter[str](), list[dict[str, object]]()

    def note(request: Request, found: Build | Evaluation) -> None:
        outcomes[found.status] += 1
        if found.status is not Status.OK:
            told = {"workload": request.workload.key, "seed": request.seed, "status": found.status}
            faults.append({**told, "reason": found.log[-400:], "genome": dict(request.genome.parameters)})

    seeds = range(given.seed, given.seed + given.gates)
    cases = {(w, seed): random_cases(kernel, target, w, seed, RANDOM_CASES) for w in workloads for seed in seeds}
    gates, build_s, gate_s = [], list[float](), list[float]()
    for request, building in [(r, place.executor.build(r)) for r in asked]:
        build = building.result()
        if build.binary is None:
            note(request, build)
            continue
        build_s.append(build.seconds)
        for seed in seeds:
            drawn = (rng.choice(cases[request.workload, seed]),)
            gated = replace(request, seed=seed, build=build, time=False, cases=drawn)
            gates.append((gated, place.executor.measure(gated)))
    for gated, measuring in gates:
        measured = measuring.result()
        gate_s.append(measured.gate_seconds)
        note(gated, measured)
    record = {
        "kernel": kernel.name,
        "dtypes": dtypes,
        "genomes": len({(r.genome, r.workload) for r in asked}),
        "outcomes": outcomes,
        "faults": faults,
        "gate_ms": 1e3 * sum(gate_s) / max(1, len(gate_s)),
        "build_s": sum(build_s) / max(1, len(build_s)),
    }
    if given.json:
        print(json.dumps(record, indent=1))
    else:
        gates_of = ", ".join(f"{n} {status}" for status, n in outcomes.most_common())
        print(f"{record['genomes']} genomes of {kernel.name}, {', '.join(dtypes)}, {given.gates} gates each: {gates_of}")
        print(f"{record['gate_ms']:.1f} ms a gate, {record['build_s']:.2f} s a build")
        for fault in faults:
            print(f"{fault['status']}, {fault['workload']}, seed {fault['seed']}: {fault['reason']}\n    {fault['genome']}")
    return set(outcomes) == {Status.OK}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", help="of the cheats, by default the target's first; of the genomes, by default all")
    parser.add_argument("--random", type=int, metavar="N", help="try N random genomes of a kernel instead")
    parser.add_argument("--kernel", default="layernorm", help="whose, by name or folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gates", type=int, default=1, metavar="N", help="of each genome, each with a seed of its own")
    parser.add_argument("--builders", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    kernel = load_kernel(given.kernel)
    dtypes = (given.dtype,) if given.dtype else kernel.dtypes[given.target]
    arch = find_target(given.target).device().arch
    with tempfile.TemporaryDirectory(prefix="evo-adversaries-") as cache:
        config = ExecutorConfig(builders=given.builders, cache_dir=Path(cache), gate_floor_s=_GATE_FLOOR_S)
        executor = LocalExecutor(given.target, config)
        try:
            place = Place(executor=executor, target=given.target, arch=arch)
            if given.random is not None:
                passed = try_random(place, kernel, dtypes, given)
            else:
                passed = try_cheats(place, dtypes[0], as_json=given.json)
        finally:
            executor.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
