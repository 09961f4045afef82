"""evo kit: what a card that nobody here has makes of the shipped kernels, in one file to send back."""

import json as json_format
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from evo import ready
from evo.cli.options import Json, TargetName, print_json
from evo.cli.search import search_each, words
from evo.environment import DEFAULT_DB, command_line
from evo.errors import EngineError, UnknownNameError, UsageError
from evo.job.job import Job, choose_target, make_job
from evo.job.opening import check_early
from evo.lineage.database import EmptyError, locate
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.report.terminal import notice, say
from evo.report.text import counted, duration, parse_duration
from evo.runtime.manifest import MANIFEST, read_manifest
from evo.search.place import HERE
from evo.targets import find_target

_COMMAND_S = 1800
"""A package's check or bench that takes longer hangs."""
_LONGEST_DEVICE = 36
"""Characters of a device's name in a file's and a run's, which has 64 at most."""


@dataclass(frozen=True)
class _Package:
    """A shipped package. keys: the problems that it has variants for, for one target."""

    module: str
    kernel: str
    keys: tuple[str, ...]


def kit(
    context: typer.Context,
    budget: Annotated[str, typer.Option(help="Time to search, divided over the kernels by their problems.")] = "30m",
    target: TargetName = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; repeat for more.")] = None,
    db: Annotated[
        str | None,
        typer.Option("--db", help="File to leave; runs/evo-kit-DEVICE.db if left out.", show_default=False, metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Check, time and search the shipped kernels on this device, and leave one file to send back."""
    seconds = parse_duration(budget)
    target = choose_target(load_kernel(_packages("", kernel)[0].kernel), target, None, HERE)
    packages, device = _packages(target, kernel), find_target(target).device()
    named = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-")[:_LONGEST_DEVICE].strip("-")
    db = db or str(Path(DEFAULT_DB).with_name(f"evo-kit-{named}.db"))
    if (file := locate(db).path) is None:
        raise UsageError(f"--db {db!r} is on a server, and evo kit leaves a file: name one")
    jobs = _jobs(packages, target, named, seconds)
    check_early(jobs[0][2], db, taken=False)
    if not json:
        _announce(jobs, f"{device.name} ({device.arch})", seconds, db)
    typed = {name: value for name, value in context.params.items() if value not in (None, ())}
    again = ("kit", *words(context, typed))
    try:
        records, failed = search_each(_tried(jobs, db, json), db, "evo kit", again, json=json)
    except KeyboardInterrupt:  # while a package was tried
        notice(f"interrupted; everything finished is stored. Continue with: {command_line(db, *again)}")
        raise typer.Exit(130) from None
    shipped = _shipped(db, jobs)
    wrong = [v for known in shipped.values() for v in known.get("variants", ()) if v["right"] is False]
    if json:
        print_json({"file": str(file), "device": device.name, "target": target, "shipped": shipped, "searches": records})
    elif shipped:
        say(
            f"{db}: {decimal(file.stat().st_size)}, the searches of {counted(len(shipped), 'kernel')} and what was checked"
            " and timed; this one file is what to send (docs/database.md#from-a-card-that-we-do-not-have)"
        )
    if failed or wrong:
        raise typer.Exit(failed or 1)


def _packages(target: str, only: list[str] | None) -> list[_Package]:
    """The shipped packages, also those of backward passes."""
    found = []
    try:
        for module, folder in ready.packages().items():
            manifest = read_manifest(folder / MANIFEST)
            variants = [v for v in manifest["variants"] if v["target"] == target]
            keys = dict.fromkeys(p["workload"]["key"] for v in variants for p in (v, *v.get("points", ())))
            found.append(_Package(module, manifest["kernel"]["name"], tuple(keys)))
    except ImportError as error:
        raise EngineError(f"what is shipped cannot be read: {error}; install evo again") from error
    if unknown := next((name for name in only or () if name not in {p.kernel for p in found}), None):
        raise UnknownNameError("shipped kernel", unknown, [p.kernel for p in found])
    return [p for p in found if p.kernel in (only or {p.kernel})]


def _jobs(packages: list[_Package], target: str, device: str, seconds: float) -> list[tuple[_Package, dict[str, Any], Job]]:
    """A search for each package, behind its options: few variants for the problems that it is shipped for, beginning with
    its own; the kernel's own problems where nothing of it is for the target."""
    found = []
    for package in packages:
        told: dict[str, Any] = {"target": target, "name": f"{package.kernel}-{device}"}
        if package.keys:
            told |= {"cover": package.keys, "start": (package.module,)}
        found.append((package, told, make_job(package.kernel, told)))
    problems = sum(len(job.workloads) for _, _, job in found)
    timed = []
    for package, told, job in found:
        told["budget"] = f"{max(1.0, seconds * len(job.workloads) / problems):.1f}s"
        timed.append((package, told, make_job(package.kernel, told)))
    return timed


def _announce(jobs: list[tuple[_Package, dict[str, Any], Job]], device: str, seconds: float, db: str) -> None:
    tried = sum(bool(p.keys) for p, _, _ in jobs)
    problems = sum(len(job.workloads) for _, _, job in jobs)
    first = f"checks and times {counted(tried, 'shipped package')} (minutes)" if tried else "finds nothing shipped for it"
    say(f"on {device} evo kit {first}, and searches {counted(problems, 'problem')} of {counted(len(jobs), 'kernel')}")
    say(f"for {duration(seconds)} in all (finals on a busy machine take longer): {', '.join(p.kernel for p, _, _ in jobs)}")
    say(f"it leaves one file, {db}, and sends nothing anywhere; ^C keeps what is finished, and the same command goes on")


def _shipped(db: str, jobs: list[tuple[_Package, dict[str, Any], Job]]) -> dict[str, Any]:
    """What the database has of each kernel's package, by the kernels that it has the runs of. A writer that closes the
    database last leaves all of it in one file."""
    found = dict[str, Any]()
    with suppress(EmptyError), Store.open(db, write=True, create=False) as store:
        for package, _, job in jobs:
            with suppress(UnknownNameError):
                found[package.kernel] = store.run(str(job.name)).spec.options.get("shipped", {})
    return found


def _tried(
    jobs: list[tuple[_Package, dict[str, Any], Job]], db: str, quiet: bool
) -> Iterator[tuple[Mapping[str, Any], Job]]:
    """The jobs, each with how its package did, which is tried just before unless the database has its run."""
    known = _shipped(db, jobs)
    for number, (package, told, job) in enumerate(jobs, 1):
        heading = f"[{number}/{len(jobs)}] {package.kernel}"
        shipped: dict[str, Any] = {}
        if package.keys and package.kernel not in known:
            if not quiet:
                say(f"{heading}: trying the shipped package …")
            shipped = _try(package.module)
            heading += f": {_summary(shipped)}"
        if not quiet:
            say(heading)
        yield told, replace(job, shipped=shipped)


def _try(module: str) -> dict[str, Any]:
    """How a package does on this device, in processes of its own: the variants that run here, with verdict and times, the
    cases that were wrong, and what ended a command that did not answer."""
    variants = list[dict[str, Any]]()
    found = {"package": module, "variants": variants, "fault": ""}
    for command in ("check", "bench"):
        told: Any = None
        try:
            line = [sys.executable, "-m", module, command, "--json"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
            why = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
            told = json_format.loads(done.stdout or "null")
        except (subprocess.TimeoutExpired, ValueError) as error:
            why = str(error)
        if told is None:
            return found | {"fault": f"{command}: {why}"}
        for v in (v for v in told if not v["unavailable"]):
            known = next((k for k in variants if k["variant"] == v["variant"]), None)
            if known is None:
                names = ("variant", "candidate", "workload", "arch", "standing")
                variants.append(known := {name: v[name] for name in names} | {"right": None})
            if command == "check":
                known |= {"right": v["right"], "seed": v["seed"], "wrong": [c for c in v["cases"] if c["reason"]]}
            else:
                known["timings"] = v["timings"]
        if not variants:
            break
    return found


def _summary(shipped: Mapping[str, Any]) -> str:
    """One line on a package that was tried."""
    variants = shipped["variants"]
    wrong = [v["variant"] for v in variants if v["right"] is False]
    said = [f"{counted(len(variants), 'variant')} of it run here" if variants else "nothing of it runs here"]
    if wrong:
        said.append(f"WRONG: {', '.join(map(str, wrong))}")
    elif variants:
        said.append("all right")
    sure = [v["timings"][0]["speedup"] for v in variants if v.get("timings") and not v["timings"][0]["disturbed"]]
    if sure:
        middle = exp(sum(map(log, sure)) / len(sure))
        said.append(f"{min(sure):.2f} to {max(sure):.2f} times PyTorch's speed, {middle:.2f} in the mean")
    return "; ".join([*said, *filter(None, [shipped["fault"]])])
