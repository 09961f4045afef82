"""Do independent clocks agree? evo's time, triton.testing.do_bench's and Nsight Compute's of the same machine code.

    python benchmarks/clock_agreement.py [--kernel layernorm] [--workload W]... [--json]

For every workload the kernel's default candidate is timed by
  evo        the search's own clock, cold: a graph of calls that walks over buffer sets, the cache cleared before it
  do_bench   triton.testing.do_bench of that same walk, per call (needs triton)
  ncu        Nsight Compute's gpu__time_duration of the kernels of that same walk: --cache-control none, as the walk
             finds the cache as evo leaves it, --clock-control none (needs ncu)
and, to see what differences are made of, by
  single     do_bench of one call: events around each, the cache cleared before it
  flushed    Nsight Compute with --cache-control all: a clean, empty cache before each kernel, so that what a kernel
             leaves in the cache to be written back is never paid for
  hot        evo's clock over one buffer set
  empty      evo's clock on a kernel that does nothing, launched with the same grid and block
evo's figure is the time from one call to the next: the start of a kernel behind another is in it. Nsight Compute's runs from
the begin of the first block to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from evo.evaluation import Binary
from evo.measure.clock import Protocol
from evo.measure.harness import Contender, TimingHarness
from evo.problem.genome import Genome
from evo.problem.kernel import LaunchSequence, Workload
from evo.problem.loading import load_kernel
from evo.problem.render import Source, render
from evo.targets import Session, compile_source, find_target

WORKLOADS = (
    "rows=32,cols=4096,dtype=float16",
    "rows=4096,cols=1024,dtype=float32",
    "rows=4096,cols=4096,dtype=float16",
    "rows=4096,cols=8192,dtype=float16",
    "rows=16384,cols=8192,dtype=bfloat16",
)
PROTOCOL = Protocol(name="cold", min_rounds=20, max_rounds=40, sample_us=1000.0, precision=0.003)
NCU_LAUNCHES = 30
COLUMNS = ("evo", "do_bench", "ncu", "single", "flushed", "hot", "empty")
EMPTY = 'extern "C" __global__ void empty(const void*, const void*, const void*, void*, long long, long long, float) {}'


class Case:
    """One workload's default candidate, loaded and bound to buffers."""

    def __init__(self, name: str, text: str) -> None:
        self.kernel, target = load_kernel(name), find_target("cuda")
        self.workload: Workload = self.kernel.workload("cuda", text)
        self.session: Session = target.open()
        self.bench = TimingHarness(self.kernel, "cuda", self.workload, self.session, seed=1)
        space = self.kernel.space("cuda", self.workload, self.session.limits)
        point = space.complete(space.default)
        arch = target.device().arch
        source = render(self.kernel, "cuda", Genome.of(point), self.workload, arch)
        with tempfile.TemporaryDirectory() as folder:
            self.binary: Binary = compile_source(source, arch, Path(folder))
            empty = Source(text=EMPTY, target="cuda", language="cuda_cpp", entry="empty")
            self.empty = compile_source(empty, arch, Path(folder))
        self.sequence: LaunchSequence = self.kernel.sequence("cuda", point, self.workload, self.session.limits)

    def contender(self) -> Contender:
        loaded = self.session.load(self.binary, self.kernel.entry)
        return self.bench.candidate(loaded, self.sequence)


def times(name: str, text: str) -> dict[str, Any]:
    case = Case(name, text)
    own = case.contender()
    plain = replace(case.sequence.launches[0], alignment=1, programmatic=False, smem_bytes=0, entry="")
    empty = replace(case.sequence, launches=(plain,))
    nothing = case.bench.candidate(case.session.load(case.empty, "empty"), empty)
    reference = case.kernel.reference_baseline
    found: dict[str, Any] = {"workload": case.workload.key}
    for protocol in (PROTOCOL, replace(PROTOCOL, name="hot", cold=False)):
        entries = {"own": own, "empty": nothing, reference.name: case.bench.baseline(reference)}
        timed, _ = case.bench.time(entries, protocol, reference.name)
        found["evo" if protocol.cold else "hot"] = timed[0].median_us
        found["empty"] = timed[1].median_us
    found["do_bench"], found["single"] = _do_bench(case, own.calls)
    found["ncu"] = _ncu(name, text, case.kernel.entry, "none")
    found["flushed"] = _ncu(name, text, case.kernel.entry, "all")
    return found


def _do_bench(case: Case, calls: Sequence[Callable[[], object]]) -> tuple[float | None, float | None]:
    """Microseconds a call: of a graph of all calls, and of one."""
    try:
        from triton.testing import do_bench
    except ImportError:
        return None, None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    walk, single = (
        1e3 * float(do_bench(f, warmup=50, rep=300, return_mode="median")) for f in (graph.replay, calls[0])
    )
    return walk / len(calls), single


def _ncu(name: str, text: str, entry: str, cache_control: str) -> float | None:
    """Median microseconds of the launches that Nsight Compute sees in a process of its own; None without it."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        return None
    command = [
        ncu, "--csv", "--print-units", "base", "--metrics", "gpu__time_duration.sum", "--cache-control", cache_control,
        "--clock-control", "none", "--kernel-name", entry, "--launch-skip", "5", "--launch-count", str(NCU_LAUNCHES),
        sys.executable, __file__, "--kernel", name, "--workload", text, "--only-launch",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    values = [
        float(line.rsplit('","', 1)[1].strip('"\n').replace(",", ""))
        for line in done.stdout.splitlines()
        if "gpu__time_duration.sum" in line
    ]
    if not values:
        print(done.stdout[-800:], done.stderr[-800:], file=sys.stderr)
        return None
    return median(values) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="layernorm")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--only-launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.only_launch:
        case = Case(options.kernel, options.workload[0])
        calls = case.contender().calls
        case.session.evict()
        for i in range(NCU_LAUNCHES + 10):
            calls[i % len(calls)]()
        case.session.synchronize()
        return
    rows = [times(options.kernel, text) for text in options.workload or WORKLOADS]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'workload, microseconds':<66}" + "".join(f"{n:>10}" for n in COLUMNS) + "   evo/do_bench  evo/ncu")
    for r in rows:
        figures = "".join(f"{r[n]:10.3f}" if r[n] else f"{'-':>10}" for n in COLUMNS)
        ratios = "".join(f"{r['evo'] / r[n]:13.3f}" if r[n] else f"{'-':>13}" for n in ("do_bench", "ncu"))
        print(f"{r['workload']:<66}{figures}{ratios}")


if __name__ == "__main__":
    main()
