"""How well does a reported time repeat? A/A noise within a race, and the spread over processes.

    python benchmarks/repeatability.py [--target cuda] [--kernel layernorm] [--workload W]... [--repeats 10] [--json]

For every workload the kernel's default candidate is built once and then raced, beside its twin (a second copy of it)
and the reference, in `repeats` fresh device processes, cold and hot, each on data of its own seed. Printed: the noise floor
(what the kernel seems to gain over its twin, largest over the repeats) and the spread of its reported medians,
(largest - smallest) / median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evo.evaluation import Build, Timing
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import RaceRequest, Request
from evo.measure.clock import noise_floor
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.targets import find_target

WORKLOADS = {
    "cuda": ("rows=32,cols=4096,dtype=float16", "rows=4096,cols=8192,dtype=float16"),
    "cpu": ("rows=4096,cols=1024,dtype=float32",),
}
SEED = 20_000


def default_build(
    executor: LocalExecutor, name: str, kernel: Kernel, target: str, workload: Workload
) -> tuple[Genome, Build]:
    """The kernel's default candidate for a workload. Ends the program if it does not build."""
    arch = find_target(target).device().arch
    space = kernel.space(target, workload, find_target(target).limits(arch))
    genome = Genome.of(space.complete(space.default))
    build = executor.build(
        Request(kernel=name, target=target, arch=arch, genome=genome, workload=workload)
    ).result()
    if build.binary is None:
        raise SystemExit(f"the default of {name} does not build for {workload}: {build.log}")
    return genome, build


def repeat(
    executor: LocalExecutor, name: str, kernel: Kernel, target: str, workload: Workload, repeats: int
) -> list[dict[str, Any]]:
    genome, build = default_build(executor, name, kernel, target, workload)
    found: dict[str, list[tuple[Timing, Timing, Timing]]] = {}
    for number in range(repeats):
        executor.renew_device()
        result = executor.race(
            RaceRequest(
                kernel=name,
                target=target,
                workload=workload,
                contenders=(("own", genome, build), ("twin", genome, build)),
                baselines=(),
                seed=SEED + number,
                hot=True,
            )
        ).result()
        if not result.timings:
            raise SystemExit(f"the race could not be held: {result.log or result.refused}")
        reference = next(t.contender for t in result.timings if t.contender not in ("own", "twin"))
        for protocol in dict.fromkeys(t.protocol for t in result.timings):
            by_name = {t.contender: t for t in result.timings if t.protocol == protocol}
            found.setdefault(protocol, []).append((by_name["own"], by_name["twin"], by_name[reference]))
    return [
        {
            "workload": workload.key,
            "protocol": {"final": "cold"}.get(protocol, protocol),
            "median_us": statistics.median(own.median_us for own, _, _ in races),
            "spread": _spread([own.median_us for own, _, _ in races]),
            "speedup_spread": _spread([1 / own.ratio for own, _, _ in races if own.ratio]),
            "noise_floor": max(noise_floor(own.samples_us, twin.samples_us) for own, twin, _ in races),
            "discarded_rounds": sum(own.clocks.get("discarded", 0.0) for own, _, _ in races),
            "disturbed": sum(bool(own.clocks.get("disturbed")) for own, _, _ in races),
            "medians_us": [round(own.median_us, 4) for own, _, _ in races],
        }
        for protocol, races in found.items()
    ]


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(WORKLOADS), default="cuda")
    parser.add_argument("--kernel", default="layernorm")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kernel = load_kernel(options.kernel)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as cache:
        executor = LocalExecutor(
            options.target, ExecutorConfig(builders=1, cache_dir=Path(cache), measure_timeout_s=120.0)
        )
        try:
            for text in options.workload or WORKLOADS[options.target]:
                workload = kernel.workload(options.target, text)
                rows += repeat(executor, options.kernel, kernel, options.target, workload, options.repeats)
        finally:
            executor.close()
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for r in rows:
        print(
            f"{r['workload']:<70} {r['protocol']:<5} {r['median_us']:9.3f} us  noise floor {r['noise_floor']:.2%}"
            f"  spread over {options.repeats} processes {r['spread']:.2%} (speed-up {r['speedup_spread']:.2%})"
            f"  {r['discarded_rounds']:.0f} rounds taken again, {r['disturbed']} races disturbed"
        )


if __name__ == "__main__":
    main()
