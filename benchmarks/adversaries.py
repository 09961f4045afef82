"""Tries every known mistake of a template, and random legal candidates, on the device at hand.

    python benchmarks/adversaries.py [--target cpu|cuda] [--dtype float16] [--json]
    python benchmarks/adversaries.py [--target cpu|cuda] --random 200 [--kernel attention] [--seed 1] [--json]

The first prints, for each cheat of tests/adversaries, the stage that refused it (build, load, launch, gate, drawn, timed,
neighbour) and the recorded reason; exit code 1 if a cheat was accepted, or a right variant refused. The second builds
and gates random legal genomes of a kernel, spread over sizes and dtypes, and prints how many passed, and why the
others did not: what a search space promises, its template has to keep. Exit code 1 if a genome was refused.

A cheat stays if a template can do it by accident. What only a hostile author writes is not looked for: candidates are not
sandboxed, and templates are code of yours.

Accidents, and what refuses them:
  random cases            wrong_* loses_* (wrong for one option, distribution, alignment, number of threads, for many rows
                          alone, between two sizes) unwritten_last_row_when_timed changes_x_when_timed writes_far_when_timed
  wide guards             writes_beyond_the_guard reads_beyond_the_guard reads_far_before
  float64 reference       zeros copies_input fixed_statistics sample_variance statistics_of_row_0 ignores_weight ignores_bias
                          uncounted_last_element, and all of attention's that do not stand below
  hostile data            ignores_eps raw_moments half_accumulation nan_is_zero loses_inf flushes_denormals, adds_the_mask
                          never_rescales never_rescales_the_sum no_maximum weights_of_16_bits
  poisoned outputs        writes_nothing unwritten_last_element unwritten_last_row reads_its_output keeps_the_larger
                          drops_last_query drops_last_channels_of_v no_keys_no_number
  misaligned case         aligned_only
  neighbouring sizes      tuned_columns
  other strides           dense_queries dense_keys dense_values dense_output
  guards and inputs       changes_x changes_weight writes_element_before writes_element_after writes_beside_input
                          reads_element_before reads_vector_after reads_weight_after, reads_a_key_more
                          weighs_a_value_more_with_0 writes_a_row_more
  NaN in shared memory    uninitialised_shared
  inputs written late     reads_early reads_early_when_timed (a missing wait of a programmatic launch)
  repeated launches       race last_bit_wanders right_at_first (state that is not reset) right_after_the_first
                          right_for_one_pointer caches_by_pointer
  checks in a race        caches_by_pointer_when_timed wrong_now_and_then_when_timed right_for_the_first_set
  look at machine code    overlaps_itself (lets the next call start early, so that timed calls overlap)
  state of the process    takes_the_threads (omp_set_num_threads) rounds_upward (a rounding mode that is left set)
  compiler and driver     does_not_compile has_no_entry_point too_much_shared_memory

Hostile, and gone with what looked for them:
  skips_what_it_has_done                keeps a list of outputs that it has written, to return at once
  skips_what_looks_done                 recognises poison, and works only where it sees some
  skips_what_looks_done_when_timed      the same, only in races
  skips_what_looks_the_same_when_timed  samples inputs and outputs, to return where they are as it left them
  right_in_the_gate                     counts launches, to stop working when the gate must be over
  skips_under_the_clock                 the same, and remembers where it has been since
  works_on_when_timed                   returns at once, and works in a thread of its own
  leaves_a_thread                       starts a thread that stays
  pins_itself, team_pins_itself         binds threads of its process to other cores
  team_rounds_upward                    sets another rounding mode in all threads but the first
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the cheats are the tests'

from evo.evaluation import Status
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import Request
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

    def request(index: int) -> Request:
        workload, genome = genomes[index]
        return Request(
            kernel=name, target=place.target, arch=place.arch, genome=genome, workload=workload, seed=seed
        )

    requests = [request(i) for i in range(count)]
    builds = [place.executor.build(r) for r in requests]
    outcomes, faults, gate_s = Counter[str](), list[dict[str, object]](), 0.0
    for asked, future in zip(requests, builds, strict=True):
        build = future.result()
        status, reason = build.status, build.log
        if build.binary is not None:
            measured = place.executor.measure(replace(asked, build=build, time=False)).result()
            status, reason = measured.status, measured.log
            gate_s += measured.gate_seconds
        outcomes[status] += 1
        if status is not Status.OK:
            fault = {"workload": asked.workload.key, "status": status, "reason": reason.strip()[-400:]}
            faults.append({**fault, "genome": dict(asked.genome.parameters)})
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
