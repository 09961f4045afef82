"""Tries every known way to cheat, and random honest candidates, on the device at hand.

    python benchmarks/adversaries.py [--target cpu|cuda] [--dtype float16] [--json]
    python benchmarks/adversaries.py [--target cpu|cuda] --random 200 [--kernel attention] [--seed 1] [--json]

The first prints, for each cheat of tests/adversaries, the stage that refused it (build, load, launch, gate, timed,
neighbour) and the recorded reason; exit code 1 if a cheat was accepted, or an honest variant refused. The second builds
and gates random legal genomes of a kernel, spread over sizes and dtypes, and prints how many passed, and why the
others did not: what a search space promises, its template has to keep. Exit code 1 if a genome was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the cheats are the tests'

from evo.evaluation import Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest
from evo.executors.local import LocalExecutor
from evo.problem.genome import Genome
from evo.problem.kernel import Workload, load_kernel
from evo.targets import find_target
from tests.adversaries.cheats import names_for
from tests.adversaries.trial import try_all, workload_for

_COLUMNS = {"cpu": (256, 1000, 4096), "cuda": (256, 1000, 4096, 8192, 32768)}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where candidates are tried."""

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
        rows = [
            {"cheat": v.cheat.name, "stage": v.stage, "status": v.status, "reason": v.reason, "expected": v.cheat.stage}
            for v in verdicts
        ]
        print(json.dumps({"workload": workload.key, "verdicts": rows}, indent=1))
    else:
        table = Table("candidate", "refused by", "reason", title=f"{place.target}, {workload}")
        for v in verdicts:
            fine = bool(v.stage) == bool(v.cheat.stage)
            style = "" if fine else "bold red"
            table.add_row(v.cheat.name, v.stage or "nobody", v.reason.strip().partition("\n")[0], style=style)
        Console().print(table)
    return all(bool(v.stage) == bool(v.cheat.stage) for v in verdicts)


def workloads_of(name: str, target: str, dtype: str | None) -> list[Workload]:
    """What random genomes are for: of layernorm more sizes than the kernel itself names."""
    kernel = load_kernel(name)
    if name != "layernorm":
        return [w for w in kernel.workloads[target] if dtype in (None, w.dtype)]
    return [
        kernel.workload(target, f"rows=64,cols={cols},dtype={of}")
        for cols in _COLUMNS[target]
        for of in ((dtype,) if dtype else kernel.dtypes[target])
    ]


def try_random(place: Place, name: str, count: int, seed: int, dtype: str | None, *, as_json: bool) -> bool:
    """Whether every genome compiles and is right."""
    kernel, limits = load_kernel(name), find_target(place.target).limits(place.arch)
    rng = random.Random(seed)
    workloads = workloads_of(name, place.target, dtype)
    chosen = sorted(rng.randrange(len(workloads)) for _ in range(count))  # one after another: data are made once
    spaces = [kernel.space(place.target, w, limits) for w in workloads]
    genomes = [(workloads[i], Genome.of(spaces[i].sample(rng))) for i in chosen]

    def request(index: int) -> BuildRequest:
        workload, genome = genomes[index]
        return BuildRequest(
            kernel=name, target=place.target, arch=place.arch, genome=genome, workload=workload
        )

    builds = [place.executor.build(request(i)) for i in range(count)]
    outcomes, faults, gate_s = Counter[str](), list[dict[str, object]](), 0.0
    for (workload, genome), future in zip(genomes, builds, strict=True):
        build = future.result()
        status, reason = build.status, build.log
        if build.binary is not None:
            measured = place.executor.measure(
                MeasureRequest(
                    kernel=name,
                    target=place.target,
                    genome=genome,
                    workload=workload,
                    build=build,
                    seed=seed,
                    time=False,
                )
            ).result()
            status, reason = measured.status, measured.log
            gate_s += measured.gate_seconds
        outcomes[status] += 1
        if status is not Status.OK:
            fault = {"workload": workload.key, "status": status, "reason": reason.strip()[-400:]}
            faults.append({**fault, "genome": dict(genome.parameters)})
    if as_json:
        print(json.dumps({"outcomes": outcomes, "faults": faults, "gate_seconds": gate_s}, indent=1))
    else:
        print(f"{count} genomes: " + ", ".join(f"{n} {status}" for status, n in outcomes.most_common()))
        print(f"{1e3 * gate_s / max(1, count):.1f} ms of gate each")
        for fault in faults:
            print(f"{fault['status']}, {fault['workload']}: {fault['reason']}\n    {fault['genome']}")
    return set(outcomes) == {Status.OK}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", help="of the cheats, by default the target's first; of the genomes, by default all")
    parser.add_argument("--random", type=int, metavar="N", help="try N random genomes of a kernel instead")
    parser.add_argument("--kernel", default="layernorm", help="whose, by name or folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--builders", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    dtypes = load_kernel("layernorm").dtypes[given.target]
    arch = find_target(given.target).device().arch
    with tempfile.TemporaryDirectory(prefix="evo-adversaries-") as cache:
        executor = LocalExecutor(given.target, ExecutorConfig(builders=given.builders, cache_dir=Path(cache)))
        try:
            place = Place(executor=executor, target=given.target, arch=arch)
            if given.random is not None:
                passed = try_random(
                    place, given.kernel, given.random, given.seed, given.dtype, as_json=given.json
                )
            else:
                passed = try_cheats(place, given.dtype or dtypes[0], as_json=given.json)
        finally:
            executor.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
