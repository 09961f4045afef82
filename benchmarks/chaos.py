"""A search among broken candidates: nothing may be lost, no healthy candidate blamed, and little time spent.

    python benchmarks/chaos.py --target cpu [--candidates 500] [--share 0.2] [--json]

The candidates are those of tests/chaos, all of them different. They are built ahead and measured in order, as a search
does it; the same number of healthy ones is run before, for comparison. Exits with 1 if a candidate is lost, a healthy
one blamed, or a broken one accepted.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from evo.evaluation import Build, Status
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import Request
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.search.loop import default_max_in_flight
from evo.targets import find_target

KERNEL = Path(__file__).parent.parent / "tests" / "chaos"
HARMLESS = ("none", "print")
"""Their output is right, and they harm nothing: not counted as broken."""


@dataclass
class Tally:
    """The results of a run."""

    seconds: float = 0.0
    statuses: dict[int, Status] = field(default_factory=dict)
    seconds_by_fault: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    ratios: list[float] = field(default_factory=list)
    """Time over PyTorch's of each healthy candidate; all are the same kernel."""
    blamed: list[str] = field(default_factory=list)
    unjust: list[str] = field(default_factory=list)


def run(target: str, arch: str, faults: list[str], first_number: int, builders: int, cache: Path) -> Tally:
    """Evaluates a candidate for each of `faults`, as many at a time as a search has in flight."""
    workload = load_kernel(str(KERNEL)).workloads[target][0]
    executor = LocalExecutor(target, ExecutorConfig(builders=builders, cache_dir=cache))
    done: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
    tally = Tally()

    def genome(order: int) -> Genome:
        return Genome.of({"fault": faults[order], "number": first_number + order})

    def watch(future: Future[Any], order: int, what: str) -> None:
        future.add_done_callback(lambda f: done.put((order, what, f)))

    def request(genome: Genome) -> Request:
        return Request(kernel=str(KERNEL), target=target, arch=arch, genome=genome, workload=workload, seed=1)

    def build(order: int) -> None:
        watch(executor.build(request(genome(order))), order, "build")

    def measure(order: int, built: Build) -> None:
        watch(executor.measure(replace(request(genome(order)), build=built)), order, "measure")

    def settle(order: int, status: Status, log: str) -> None:
        tally.statuses[order] = status
        fault = faults[order]
        if fault in HARMLESS and status is not Status.OK:
            tally.blamed.append(f"{order} ({fault}): {status}: {log[-200:]}")
        if fault not in HARMLESS and status is Status.OK:
            tally.unjust.append(f"{order} ({fault})")

    # The processes get ready and the first candidate makes its data outside the time: a search does that once.
    warm = request(Genome.of({"fault": "none", "number": (1 << 14) - 1}))
    executor.measure(replace(warm, build=executor.build(warm).result())).result()

    started = before = time.perf_counter()
    asked, window = 0, default_max_in_flight(builders)
    while len(tally.statuses) < len(faults):
        while asked < len(faults) and asked - len(tally.statuses) < window:
            build(asked)
            asked += 1
        order, what, future = done.get(timeout=300)
        result = future.result()
        if what == "build" and result.binary is not None:
            measure(order, result)
            continue
        settle(order, result.status, result.log)
        if what == "measure" and result.timings and faults[order] == "none":
            tally.ratios.append(result.timings[0].ratio)
        now = time.perf_counter()
        tally.seconds_by_fault[faults[order]].append(now - before)
        before = now
    tally.seconds = time.perf_counter() - started
    executor.close()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.2, help="of candidates that are broken")
    parser.add_argument("--builders", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    target = find_target(arguments.target)
    arch = target.device().arch
    builders = arguments.builders or max(1, len(os.sched_getaffinity(0)))
    kernel = load_kernel(str(KERNEL))
    workload = kernel.workloads[target.name][0]
    kinds = kernel.space(target.name, workload, target.limits(arch)).parameters[0].values
    chance = random.Random(arguments.seed)
    count = arguments.candidates
    broken = round(count * arguments.share)
    kinds = [str(k) for k in kinds if k != "none"]
    mixed = [kinds[i % len(kinds)] for i in range(broken)] + ["none"] * (count - broken)
    chance.shuffle(mixed)
    with tempfile.TemporaryDirectory() as folder:
        clean = run(target.name, arch, ["none"] * count, 0, builders, Path(folder))
        chaos = run(target.name, arch, mixed, count, builders, Path(folder))
    report(arguments, mixed, clean, chaos)
    if chaos.blamed or chaos.unjust or clean.blamed or len(chaos.statuses) != count:
        sys.exit(1)


def report(arguments: argparse.Namespace, mixed: list[str], clean: Tally, chaos: Tally) -> None:
    count = len(mixed)
    causes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for order, status in chaos.statuses.items():
        causes[mixed[order]][str(status)] += 1
    rates = [count / clean.seconds, count / chaos.seconds]
    figures: dict[str, Any] = {
        "target": arguments.target,
        "candidates": count,
        "broken": sum(f not in HARMLESS for f in mixed),
        "lost": count - len(chaos.statuses),
        "healthy_blamed": chaos.blamed,
        "clean_blamed": clean.blamed,
        "broken_accepted": chaos.unjust,
        "causes": causes,
        "clean_per_s": round(rates[0], 2),
        "chaos_per_s": round(rates[1], 2),
        "ratio": round(rates[1] / rates[0], 3),
        "healthy_time_over_pytorch": {"clean": _spread(clean.ratios), "chaos": _spread(chaos.ratios)},
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for name in ("candidates", "broken", "lost", "healthy_blamed", "clean_blamed", "broken_accepted"):
        print(f"{name.replace('_', ' '):24}{figures[name]}")
    print(f"\n{'fault':26}{'recorded as':36}seconds until the next result, mean")
    for fault, found in sorted(causes.items()):
        waits = chaos.seconds_by_fault[fault]
        names = ", ".join(f"{status} {n}" for status, n in found.most_common())
        print(f"{fault:26}{names:36}{sum(waits) / len(waits):.2f}")
    for name, spread in figures["healthy_time_over_pytorch"].items():
        print(f"\nhealthy, time over PyTorch's, {name}: 5% {spread[0]}, median {spread[1]}, 95% {spread[2]}", end="")
    print(f"\ncandidates/s: clean {rates[0]:.2f}, with the broken {rates[1]:.2f}, ratio {rates[1] / rates[0]:.2f}")


def _spread(ratios: list[float]) -> list[float]:
    """5%, median, 95%."""
    return [round(float(v), 4) for v in np.quantile(ratios, [0.05, 0.5, 0.95])]


if __name__ == "__main__":
    main()
