"""Confirmed winners, and figures printed instead, while other programs take the cores: searches and exports on a CPU.

    python benchmarks/busy.py [--busy 0 2 4 8] [--repeats 10] [--parts searches races] [--kernel layernorm] [--workload W]
                              [--evaluations 8] [--cores 2] [--json FILE]

So many busy processes run on the first `--cores` cores, to which everything measured is bound, too. searches: `evo search`
of a few candidates, with its finals. Each confirmed winner is timed again when nothing runs beside it, and a figure is off
where the two 95% intervals do not meet; how far off is told, too. races: a fresh process, with an empty cache, meets a
problem that nobody measured, of a package that was exported from a quiet search. What it remembers is compared with what
such processes remember on the quiet machine. `--json` appends a line for each run, so that the levels of load can be
measured one by one. A repetition takes from 10 s on a quiet machine to a minute beside eight programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WORKLOADS = {"layernorm": "rows=256,cols=512,dtype=float32"}
SEED = 700
WAIT_S = 2.5
"""How long a process of an export calls until it knows how its problem is served."""
CALLS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
package = __import__(sys.argv[2])
package.also_serve(measure=True)
x, ended = torch.randn(300, 384), time.monotonic() + float(sys.argv[3])
while True:
    package.layer_norm(x, (384,))
    said = str(package.explain(x, (384,)))
    if "too busy" not in said or time.monotonic() > ended:
        break
    time.sleep(0.05)
print(json.dumps(said))
"""


@contextmanager
def busy(number: int) -> Iterator[None]:
    """While so many processes do nothing but run, on the same cores as this one, and no longer than this one lives."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        time.sleep(0.5 if number else 0.0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def evo(*words: str, cwd: Path) -> Any:
    """The JSON that a command prints, whatever its exit code; None where it prints nothing."""
    done = subprocess.run([sys.executable, "-m", "evo", *words, "--json"], cwd=cwd, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        print(f"evo {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-300:]}", flush=True)
        return None
    return json.loads(done.stdout)


def searched(options: argparse.Namespace, folder: Path, level: int, number: int) -> dict[str, Any]:
    """One search beside `level` busy processes."""
    name, began = f"beside{level}_{number}", time.monotonic()
    words = ["search", options.kernel, "--target", "cpu", "--workload", options.workload, "--name", name, "--cold"]
    words += ["--evaluations", str(options.evaluations), "--finalists", "3", "--seed", str(SEED + number)]
    with busy(level):
        found = evo(*words, "--db", "busy.db", cwd=folder)
    record: dict[str, Any] = {"part": "searches", "busy": level, "seconds": round(time.monotonic() - began, 1)}
    if found is None or found["workloads"][0]["winner"] is None:
        return record | {"ended": "no winner"}
    held = found["workloads"][0]
    if held["winner"]["disturbed"]:
        shown = evo("best", "--run", name, "--db", "busy.db", cwd=folder)[0]
        return record | {"ended": shown["finals"], "speedup": shown["speedup"], "ratio": shown["ratio"]}
    sure = {key: held["winner"][key] for key in ("speedup", "speedup_low", "speedup_high")}
    return record | {"ended": "confirmed", **sure, "quiet": quiet(options, folder, held["winner"])}


def quiet(options: argparse.Namespace, folder: Path, winner: dict[str, Any]) -> dict[str, float] | None:
    """The winner's speed-up with its interval when nothing runs beside it; None where the machine is busy all the same."""
    genome = ",".join(f"{name}={value}" for name, value in winner["genome"].items())
    words = ["bench", options.kernel, "--target", "cpu", "--workload", options.workload, "--genome", genome]
    for _ in range(3):
        found = evo(*words, "--db", "none.db", cwd=folder)
        timings = found["workloads"][0]["timings"] if found else ()
        for t in timings:
            if t["contender"] == genome and not t["disturbed"]:
                return {"speedup": t["speedup"], "low": t["speedup_low"], "high": t["speedup_high"]}
    return None


def raced(folder: Path, level: int, number: int) -> dict[str, Any]:
    """The words and the memory of one process of the exported package, beside `level` busy processes."""
    cache = folder / f"cache{level}_{number}"
    place = {**os.environ, "EVO_KERNELS_CACHE": str(cache)}
    words = [sys.executable, "-c", CALLS, str(folder), "package", str(WAIT_S)]
    with busy(level):
        done = subprocess.run(words, cwd=folder, env=place, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"a process of the exported package failed: {done.stderr.strip()[-500:]}")
    kept = [json.loads(_payload(path)) for path in cache.glob("race-*")]
    return {"part": "races", "busy": level, "said": json.loads(done.stdout), "ratio": kept[0][1] if kept else None}


def _payload(path: Path) -> str:
    from evo.runtime.package import read_whole

    return (read_whole(path) or b'["", 0, ""]').decode()


def tell(records: list[dict[str, Any]]) -> None:
    """A line a level of load, then each figure that is off."""
    for level in sorted({r["busy"] for r in records if r["part"] == "searches"}):
        own = [r for r in records if r["part"] == "searches" and r["busy"] == level]
        ends = [r["ended"] for r in own]
        known = [r for r in own if r.get("quiet")]
        off = [r for r in known if r["speedup_low"] > r["quiet"]["high"] or r["speedup_high"] < r["quiet"]["low"]]
        worst = max((abs(r["speedup"] / r["quiet"]["speedup"] - 1) for r in known), default=0.0)
        counts = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
        seconds = statistics.median(r["seconds"] for r in own)
        print(
            f"searches beside {level}: {counts}; {len(known)} timed again when quiet, {len(off)} off, at most {worst:.1%}"
            f" from the quiet figure; {seconds:.0f} s each"
        )
        for r in off:
            q = r["quiet"]
            print(
                f"  OFF: {r['speedup']:.3f}x ({r['speedup_low']:.3f} to {r['speedup_high']:.3f}), quiet {q['speedup']:.3f}x"
                f" ({q['low']:.3f} to {q['high']:.3f})"
            )
        if wild := [1 / r["ratio"] for r in own if r["ended"] == "too busy to measure" and r["ratio"]]:
            hidden = ", ".join(f"{gain:.2f}x" for gain in sorted(wild))
            print(f"  not shown, since too busy to measure: {hidden}")
    for level in sorted({r["busy"] for r in records if r["part"] == "races"}):
        own = [r for r in records if r["part"] == "races" and r["busy"] == level]
        ratios = sorted(1 / r["ratio"] for r in own if r["ratio"])
        span = f", {ratios[0]:.2f} to {ratios[-1]:.2f} times PyTorch's speed" if ratios else ""
        print(f"races beside {level}: {len(ratios)} of {len(own)} remembered{span}")
        for said in dict.fromkeys(r["said"] for r in own if not r["ratio"]):
            print(f"  instead: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--parts", nargs="+", choices=("searches", "races"), default=["searches", "races"])
    parser.add_argument("--kernel", default="layernorm")
    parser.add_argument("--workload")
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.workload = options.workload or WORKLOADS[options.kernel]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])  # and all that it starts
    records: list[dict[str, Any]] = []
    with TemporaryDirectory() as made:
        folder = Path(made)
        if "races" in options.parts:
            words = ["search", options.kernel, "--target", "cpu", "--workload", options.workload, "--name", "exported"]
            evo(*words, "--evaluations", str(options.evaluations), "--cold", "--db", "busy.db", cwd=folder)
            evo("export", "exported", "--out", "package", "--db", "busy.db", cwd=folder)
        for level in options.busy:
            for number in range(options.repeats):
                for part in options.parts:
                    record = searched(options, folder, level, number) if part == "searches" else raced(folder, level, number)
                    records.append(record)
                    print(json.dumps(record), flush=True)
                    if options.json:
                        with options.json.open("a") as file:
                            file.write(json.dumps(record) + "\n")
    tell(records)


if __name__ == "__main__":
    main()
