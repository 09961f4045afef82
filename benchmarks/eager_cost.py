"""Cost of an eager call of an exported or shipped package, beside PyTorch's, at the first and at later calls.

    python benchmarks/eager_cost.py --package exported/layernorm [--package kernels/attention] [--workload TEXT]...
                                    [--rounds 30] [--processes 7] [--new-sizes DIMENSION] [--json]

Calls, one after another on the same tensors, in inference mode and as a user writes them (arguments that have their
default are left out), for each variant's own sizes, or those whose workload contains a TEXT (spaces or commas between
several words that it must all contain). By two clocks: `host` ends when the last call returned, `call` when the GPU has
finished, too. Contenders take turns: PyTorch's function, the package with its native launcher (if it is built: python -m
PACKAGE build) and with the Python launcher, and of attention each of PyTorch's back ends, forced.

Processes: in fresh ones, importing the package after PyTorch, its first and second call on a GPU that has made the
arguments, and then PyTorch's first call. Median and range of `--processes`; 0 leaves them out. What is shipped is compiled
at its first call: that is timed with what was compiled before in the cache, and with an empty one.

New sizes: calls that each have another size of the dimension named, up to 2,048 (several that are equal: q_len,kv_len), and
the same once more, by `host`: medians; and by how much memory grows over 100,000 calls with sizes drawn from all of those.

Exit code: 0 measured; 1 a variant's own sizes were not served by a variant, so that what was timed is PyTorch.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from exported import Package, Sample, add_packages, load, load_all, machine, race, watch
from torch.nn.attention import SDPBackend, sdpa_kernel

SAMPLE_S = 2e-3
MOST_CALLS = 500
"""Number of calls in a sample: the driver holds about a thousand launches, and further ones would wait for the GPU."""
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")

FRESH = """
import json, sys, time
begin = time.perf_counter()
import torch
after = time.perf_counter()
folder, name, index, benchmarks = sys.argv[1:]
sys.path.insert(0, str(__import__("pathlib").Path(folder).parent))
__import__(name)
imported = time.perf_counter()
sys.path[0] = benchmarks
from eager_cost import first_calls
calls = first_calls(folder, int(index))
print(json.dumps({"PyTorch's own import": after - begin, "import": imported - after, **calls}))
"""

CLOCKS = ("host", "call")
_NEW_SIZES, _MANY = 400, 100_000

Call = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_packages(parser)
    parser.add_argument("--workload", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--new-sizes", default="", metavar="DIMENSION")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    packages = load_all(options.package)
    for package in packages:
        package.serve_all()
    problems = [(p, i) for p in packages for i in tuned(p) if wanted(p, i, options.workload)]
    if not problems:
        raise SystemExit(f"no variant's workload contains {' or '.join(map(repr, options.workload))}")
    found: dict[str, list[Any]] = {"calls": [], "new_sizes": [], "processes": []}
    served = True
    for package, index in problems:
        record = {"package": package.folder.name, "workload": workload(package, index)}
        place = place_of(package, index)
        if place.type == "cuda" and not torch.cuda.is_available():
            record["refused"] = "no CUDA GPU answers to PyTorch"
        else:
            record |= {"machine": machine(place), **calls(package, index, place, options.rounds)}
        served &= "refused" not in record
        found["calls"].append(record)
        if not options.json:
            tell_calls(record)
    for package, index in problems:
        vary = options.new_sizes.split(",")
        if set(vary) <= package.manifest["variants"][index]["workload"]["dims"].keys():
            found["new_sizes"].append(record := new_sizes(package, index, place_of(package, index), vary))
            if not options.json:
                tell_new_sizes(record)
    for package in packages if options.processes else ():
        chosen = [i for p, i in problems if p is package]
        if chosen:
            found["processes"].append(record := processes(package, chosen[0], options.processes))
            if not options.json:
                tell_processes(record)
    if options.json:
        print(json.dumps(found, indent=1, default=lambda timing: asdict(timing)))
    return 0 if served else 1


def tuned(package: Package) -> list[int]:
    """One variant for each workload: a package may have it for several architectures."""
    first: dict[str, int] = {}
    for index in range(len(package.manifest["variants"])):
        first.setdefault(workload(package, index), index)
    return list(first.values())


def workload(package: Package, index: int) -> str:
    key: str = package.manifest["variants"][index]["workload"]["key"]
    return key


def wanted(package: Package, index: int, texts: list[str]) -> bool:
    words = workload(package, index).replace(",", " ").split()
    return not texts or any(all(w in words for w in text.replace(",", " ").split()) for text in texts)


def place_of(package: Package, index: int) -> torch.device:
    return torch.device(package.manifest["variants"][index]["target"])


def arguments(package: Package, index: int, place: torch.device) -> tuple[Any, ...]:
    """All, by position."""
    of = package.manifest["variants"][index]["workload"]
    made: tuple[Any, ...] = package.frontend.timed(of["dims"], getattr(torch, of["dtype"]), place, 0)
    return made


def as_written(package: Package, args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Without what is the default of the function anyway."""
    parameters = list(inspect.signature(getattr(package.module, package.function)).parameters.values())
    positional = [a for a, p in zip(args, parameters, strict=True) if p.kind is not p.KEYWORD_ONLY]
    named = {
        p.name: a for a, p in zip(args, parameters, strict=True) if p.kind is p.KEYWORD_ONLY and a is not p.default
    }
    while not isinstance(positional[-1], torch.Tensor) and positional[-1] == parameters[len(positional) - 1].default:
        positional.pop()
    return positional, named


def calls(package: Package, index: int, place: torch.device, rounds: int) -> dict[str, Any]:
    full = arguments(package, index, place)
    args, named = as_written(package, full)
    own, theirs = getattr(package.module, package.function), getattr(torch.nn.functional, package.function)
    contenders: dict[str, Sample] = {"PyTorch": sample(lambda: theirs(*args, **named), place)}
    left_out, ways = {}, {}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of back ends, why they cannot run
        if package.frontend._call is not None:
            ways["native launcher"] = package.explain(*full)
            contenders["native launcher"] = sample(lambda: own(*args, **named), place)
        else:
            left_out["native launcher"] = package.frontend.NATIVE.reason
        with package.launched_from_python():
            ways["Python launcher"] = package.explain(*full)
        contenders["Python launcher"] = sample(lambda: own(*args, **named), place, package.launched_from_python)
        for name in BACKENDS if package.function == "scaled_dot_product_attention" else ():
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    theirs(*args, **named)
            except RuntimeError as error:
                left_out[name] = str(error).splitlines()[0].partition(". ")[0]
            else:
                within = lambda name=name: sdpa_kernel(getattr(SDPBackend, name))  # noqa: E731
                contenders[name] = sample(lambda: theirs(*args, **named), place, within)
        refused = [way for way in ways.values() if not way.startswith("variant")]
        raced = race(contenders, rounds, watch(), SAMPLE_S, MOST_CALLS)
    found: dict[str, Any] = {"ways": ways, "left_out": left_out, "contenders": {}}
    for name in contenders:
        by_clock = {clock: raced.timing(name, "PyTorch", i) for i, clock in enumerate(CLOCKS)}
        found["contenders"][name] = by_clock
    peers = [name for name in contenders if name not in ways]
    found["best_peer"] = best = min(peers, key=lambda name: found["contenders"][name]["call"].us)
    found["over_best_peer"] = {
        way: {clock: raced.timing(way, best, i) for i, clock in enumerate(CLOCKS)} for way in ways
    }
    return {**found, "refused": refused[0]} if refused else found


def sample(call: Call, place: torch.device, within: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Sample:
    """Times by the clocks `host` and `call`. The context around the calls is entered once a sample."""
    wait = (lambda: torch.cuda.synchronize(place)) if place.type == "cuda" else (lambda: None)

    def seconds(repeats: int) -> tuple[float, float]:
        with within():
            wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            returned = time.perf_counter()
            wait()
            return returned - begin, time.perf_counter() - begin

    return seconds


def tell_calls(record: dict[str, Any]) -> None:
    print(f"{record['package']} {record['workload']}" + (f", {record['machine']}" if "machine" in record else ""))
    for name, timings in record.get("contenders", {}).items():
        both = "   ".join(f"{clock} {timing.us:10.2f} us  {timing.gain}" for clock, timing in timings.items())
        print(f"  {name:20} {both}")
    for name, timings in record.get("over_best_peer", {}).items() if record.get("best_peer") != "PyTorch" else ():
        gains = ", ".join(f"{clock} {timing.gain}" for clock, timing in timings.items())
        print(f"  {name:20} over {record['best_peer']}, the fastest peer by call: {gains}")
    for name, reason in record.get("left_out", {}).items():
        print(f"  {name:20} not timed: {reason}")
    if "refused" in record:
        print(f"  NOT SERVED: {record['refused']}")
    elif "contenders" in record and any(t.disturbed for pair in record["contenders"].values() for t in pair.values()):
        print("  ! something slowed this down while it was timed: do not trust the figure")


def new_sizes(package: Package, index: int, place: torch.device, vary: list[str]) -> dict[str, Any]:
    """Microseconds and MiB."""
    of, draw = package.manifest["variants"][index]["workload"], random.Random(0)
    own, theirs = getattr(package.module, package.function), getattr(torch.nn.functional, package.function)
    sizes = draw.sample(range(1, 2049), _NEW_SIZES)
    dims = [{**of["dims"], **dict.fromkeys(vary, n)} for n in sizes]
    us: dict[str, float] = {}
    with torch.inference_mode():
        made = [package.frontend.timed(d, getattr(torch, of["dtype"]), place, 0) for d in dims]
        written = [as_written(package, args) for args in made]
        ways = {"native launcher": nullcontext} if package.frontend._call is not None else {}
        ways |= {"Python launcher": package.launched_from_python}
        for way, within in ways.items():
            with within():
                own(*written[0][0], **written[0][1])  # its code is there from here on
                for turn in ("first", "second"):
                    host = [sample(lambda a=a, n=n: own(*a, **n), place)(1)[0] for a, n in written[1:]]
                    us[f"{way}, {turn} calls"] = 1e6 * median(host)
        for turn in ("first", "second"):
            host = [sample(lambda a=a, n=n: theirs(*a, **n), place)(1)[0] for a, n in written[1:]]
            us[f"PyTorch, {turn} calls"] = 1e6 * median(host)
        before = psutil.Process().memory_info().rss
        for _ in range(_MANY):
            args, named = draw.choice(written)
            own(*args, **named)
        sample(lambda: None, place)(1)
        grown = (psutil.Process().memory_info().rss - before) / 2**20
    varied = "=".join(vary)
    return {"package": package.folder.name, "workload": of["key"], "varied": varied, "us": us, "grown_mib": grown}


def tell_new_sizes(record: dict[str, Any]) -> None:
    print(f"{record['package']} {record['workload']}, {_NEW_SIZES - 1} other sizes of {record['varied']}")
    for name, us in record["us"].items():
        print(f"  {name:32} {us:8.2f} us")
    print(f"  memory grows by {record['grown_mib']:.1f} MiB over {_MANY:,} calls")


def processes(package: Package, index: int, count: int) -> dict[str, Any]:
    """Milliseconds: median and range."""
    ms: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="no-launcher-") as nothing:
        ways: dict[str, str | None] = {"native launcher": None} if package.frontend._call is not None else {}
        ways["Python launcher"] = nothing
        if package.is_shipped:
            fresh(package, index, nothing)  # fills it
            ways["Python launcher, empty cache"] = ""
        for n in range(count):
            for way, cache in ways.items():  # in turns
                place = cache if cache != "" else str(Path(nothing) / f"empty-{n}")
                for name, seconds in fresh(package, index, place).items():
                    key = name if "PyTorch" in name else f"{name}, {way}"
                    ms.setdefault(key, []).append(1e3 * seconds)
    found = {name: {"median": median(v), "low": min(v), "high": max(v)} for name, v in ms.items()}
    return {"package": package.folder.name, "workload": workload(package, index), "ms": found}


def fresh(package: Package, index: int, cache: str | None) -> dict[str, float]:
    """Seconds, of a process of its own. `cache`: where it is to look for the native launcher, and for compiled code."""
    words = [str(package.folder), package.name, str(index), str(Path(__file__).parent)]
    own = {"EVO_KERNELS_CACHE": cache, "CUDA_CACHE_PATH": f"{cache}/driver"} if cache else {}  # NVRTC looks into the latter
    environment = {**os.environ, **own}
    command = [sys.executable, "-W", "ignore", "-c", FRESH, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"a fresh process failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def first_calls(folder: str, index: int) -> dict[str, float]:
    """Seconds until the result is there, on a device that has been used: it made the arguments."""
    package = load(Path(folder))
    package.serve_all()
    place = place_of(package, index)
    own, theirs = getattr(package.module, package.function), getattr(torch.nn.functional, package.function)
    with torch.inference_mode():
        args, named = as_written(package, arguments(package, index, place))
        first, second = (sample(lambda: own(*args, **named), place)(1)[1] for _ in range(2))
        after = sample(lambda: theirs(*args, **named), place)(1)[1]
    return {"first call": first, "second call": second, "PyTorch's first call, after these": after}


def tell_processes(record: dict[str, Any]) -> None:
    print(f"{record['package']} {record['workload']}, in fresh processes, after PyTorch was imported")
    for name, ms in record["ms"].items():
        print(f"  {name:44} {ms['median']:8.2f} ms  ({ms['low']:.2f} to {ms['high']:.2f})")


if __name__ == "__main__":
    sys.exit(main())
