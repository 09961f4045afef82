"""evo bench."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from evo.analysis.best import find_best
from evo.cli.options import DEFAULT_DB, Db, Json, Seed, TargetName, draw_seed, make_console, parse_legal, print_json
from evo.cli.recorded import is_of
from evo.cli.search import choose_arch, load_context, open_workers
from evo.cli.tables import Terminal, time_cells
from evo.errors import EvoError, UsageError
from evo.lineage.database import shown
from evo.lineage.store import Store
from evo.measure import RaceResult
from evo.problem.genome import Genome
from evo.report.text import short
from evo.search.run import check_workloads
from evo.search.tasks import TaskExecutor
from evo.targets import find_target

_ARITHMETIC = 16
"""Operations per byte from which the rate of a kernel is given in TFLOP/s instead of GB/s."""


def bench(
    kernel: Annotated[str, typer.Argument(help="A kernel's name or folder, or an exported module's folder.")],
    target: TargetName = None,
    workload: Annotated[list[str] | None, typer.Option(help="Repeat for more; the kernel's own if left out.")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="The device's own if left out; repeat to race builds, e.g. compute_89.")
    ] = None,
    genome: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE,...: also the default with these values. Repeat for more.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Baselines, separated by commas; all of the kernel's if left out.")
    ] = None,
    seed: Seed = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Time the best known candidate and the kernel's default against its baselines, interleaved in one race."""
    if (Path(kernel) / "manifest.json").is_file():
        given = {"target": target, "workload": workload, "against": against, "seed": seed, "arch": arch, "genome": genome}
        for option, value in given.items():
            if value not in (None, []):
                raise UsageError(f"{kernel} is an exported module, which times its own variants: leave out --{option}")
        raise typer.Exit(_bench_module(Path(kernel), json))
    problem, chosen, first = load_context(kernel, target, arch[0] if arch else None)
    archs = [first, *(choose_arch(chosen, a) for a in (arch or [])[1:])]
    for a in archs:
        if reason := find_target(chosen).runs(a):
            raise UsageError(f"code for {a} cannot be timed here: {reason}")
    workloads = check_workloads(problem, chosen, workload or [])
    names = against.split(",") if against else [b.name for b in problem.baselines if chosen in b.targets]
    for name in names:
        problem.baseline(name)
    drawn = draw_seed(seed)
    records = []
    with open_workers(chosen, db) as executor:
        task = TaskExecutor(
            executor=executor, kernel=kernel, target=chosen, arch=first, workload=workloads[0], seed=drawn
        )
        tasks = [replace(task, workload=w) for w in workloads]
        named = [[(text, parse_legal(text, task.space, "--genome")) for text in genome or ()] for task in tasks]
        for task, extra in zip(tasks, named, strict=True):
            building = []
            for name, a, g in _for_each([*_contenders(task, db), *extra], task, archs):
                building.append((f"{name} {a}" if len(archs) > 1 else name, g, replace(task, arch=a).build(g)))
            builds = [(name, g, built.result()) for name, g, built in building]
            for name, _, build in builds:
                if build.binary is None:
                    raise EvoError(f"{name} does not compile ({build.status}): {build.log.strip()[:400]}")
            result = task.race(builds, names)
            if not result.timings:
                raise EvoError(f"the race for {task.workload} could not be held: {result.log}")
            record = {
                "workload": task.workload.key,
                "timings": result.timings,
                "refused": [{"name": n, "reason": r} for n, r in result.refused],
            }
            records.append(record)
            if not json:
                _print_race(make_console(), task, result)
    if json:
        head = {"kernel": problem.name, "target": chosen, "arch": first, "archs": archs, "seed": drawn}
        print_json({**head, "workloads": records})


def _contenders(task: TaskExecutor, db: str) -> list[tuple[str, Genome]]:
    """The template's default, and the best candidate that the database has for this workload and device. A line on stderr
    says why a recorded one is left out, or that there is none."""
    space, workload = task.space, task.workload
    default = "default", Genome.of(space.complete(space.default))
    if "://" not in db and not Path(db).exists():
        return [default]
    device = find_target(task.target).device().name
    with Store.open(db, write=False) as store:
        found = [b for b in find_best(store, target=task.target) if b.workload == workload.key]
        known = [b for b in found if is_of(store, b.kernel, b.run, task.problem)]
    known.sort(key=lambda b: (b.device != device, b.unconfirmed, b.ratio))
    for best in known:
        if best.device != device:
            reason = f"it was timed on {best.device}, and this is {device}; --genome with its values times those here"
        elif broken := space.violations(best.parameters):
            reason = f"the kernel's search space does not have it any more ({'; '.join(broken)})"
        else:
            return [(short(best.id), Genome.of(best.parameters)), default]
        typer.echo(f"evo: {short(best.id)}, found for {workload}, is left out: {reason}", err=True)
    if not known:
        nothing = f"no candidate of this kernel as it is now is recorded for {workload} in {shown(db)}"
        typer.echo(f"evo: {nothing}: the template's default is timed", err=True)
    return [default]


def _for_each(
    contenders: Sequence[tuple[str, Genome]], task: TaskExecutor, archs: Sequence[str]
) -> Iterator[tuple[str, str, Genome]]:
    """(name, architecture, genome) of each contender for all architectures, without parameters that one does not have.

    A genome that is not legal for an architecture even so is left out, with a line on stderr."""
    for name, genome in contenders:
        yield name, archs[0], genome
        for arch in archs[1:]:
            space = replace(task, arch=arch).space
            if starts := space.with_initial_points([genome.parameters]).initial_points:
                yield name, arch, Genome.of(starts[0])
                continue
            broken = space.violations(space.complete({n: v for n, v in genome.parameters.items() if n in space.by_name}))
            typer.echo(f"evo: {name} is not legal for {arch} ({'; '.join(broken)}): it is not timed there", err=True)


def _print_race(console: Terminal, task: TaskExecutor, result: RaceResult) -> None:
    cost = task.problem.cost(task.workload)
    arithmetic = cost.flops > _ARITHMETIC * cost.bytes
    timings = sorted(result.timings, key=lambda t: t.median_us)
    rows = []
    for t in timings:
        rate = f"{cost.flops / t.median_us / 1e6:,.1f}" if arithmetic else f"{cost.bytes / t.median_us / 1e3:,.0f}"
        rows.append({"contender": t.contender, **time_cells(t), f">{'TFLOP/s' if arithmetic else 'GB/s'}": rate})
    console.say(f"{task.problem.title}, {task.workload.key}", "italic")
    console.print_rows(rows)
    console.say_disturbed(*(t.disturbed for t in timings))
    for name, reason in result.refused:
        console.say(f"{name} was left out: {reason}", "yellow")


def _bench_module(folder: Path, json: bool) -> int:
    """An exported module measures itself, in a process of its own that does not import evo."""
    if not (folder / "__main__.py").is_file():
        raise UsageError(f"{folder} has a manifest.json but no __main__.py: it is not an exported module")
    command = [sys.executable, "-m", folder.resolve().name, "bench", *(["--json"] if json else [])]
    return subprocess.run(command, cwd=folder.resolve().parent, check=False).returncode
