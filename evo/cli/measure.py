"""evo bench."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from evo.analysis import queries
from evo.cli.options import (
    DEFAULT_DB,
    Db,
    Json,
    TargetName,
    check_seed,
    choose_arch,
    make_console,
    parse_values,
    print_json,
)
from evo.cli.recorded import is_of, may_have_been
from evo.cli.search import KernelContext, load_context
from evo.cli.tables import DISTURBED_NOTE, marked, short_id, timing_record
from evo.errors import EvoError, UsageError
from evo.evaluation import Build, Timing
from evo.executors import BuildRequest, RaceRequest
from evo.lineage.database import shown
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.search.run import check_workloads
from evo.targets import find_target

__all__ = ["register"]

_ARITHMETIC = 16
"""Operations a byte from which a kernel is told by its arithmetic, not by the bytes it moves."""


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


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
    seed: Annotated[
        int | None,
        typer.Option(help="Draws the data; random if left out.", callback=check_seed),
    ] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Time the best known candidate and the kernel's default beside its baselines, interleaved in one race."""
    if (Path(kernel) / "manifest.json").is_file():
        given: dict[str, object] = {"--target": target, "--workload": workload, "--against": against, "--seed": seed}
        given |= {"--arch": arch, "--genome": genome}
        for option, value in given.items():
            if value is not None and value != []:
                raise UsageError(f"{kernel} is an exported module, which times its own variants: leave out {option}")
        raise typer.Exit(_bench_module(Path(kernel), json))
    context = load_context(kernel, target, arch[0] if arch else None, db)
    problem, chosen = context.kernel, context.target
    archs = [context.arch, *(choose_arch(chosen, a) for a in (arch or [])[1:])]
    for a in archs:
        if reason := find_target(chosen).runs(a):
            raise UsageError(f"code for {a} cannot be timed here: {reason}")
    workloads = check_workloads(problem, chosen, workload or [])
    names = against.split(",") if against else [b.name for b in problem.baselines if chosen in b.targets]
    for name in names:
        problem.baseline(name)
    drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
    named = [_named(context, w, genome or []) for w in workloads]
    records = []
    with context.open_executor() as executor:
        for w, extra in zip(workloads, named, strict=True):
            contenders = [*_contenders(context, w, db), *extra]
            asked = [
                (f"{n} {a}" if len(archs) > 1 else n, g, executor.build(_request(kernel, chosen, a, g, w)))
                for n, a, g in _for_each(contenders, problem, w, archs, chosen)
            ]
            builds = [(n, g, built.result()) for n, g, built in asked]
            request = RaceRequest(
                kernel=kernel,
                target=chosen,
                workload=w,
                contenders=tuple(_compiled(builds)),
                baselines=tuple(names),
                seed=drawn,
            )
            result = executor.race(request).result()
            if not result.timings:
                raise EvoError(f"the race for {w} could not be held: {result.log}")
            records.append({"workload": w.key, "timings": [_record(t) for t in result.timings]})
            records[-1]["refused"] = [{"name": n, "reason": r} for n, r in result.refused]
            if not json:
                _print(make_console(), problem, w, result.timings, result.refused)
    if json:
        record = {"kernel": problem.name, "target": chosen, "arch": context.arch, "archs": archs, "seed": drawn}
        print_json({**record, "workloads": records})


def _contenders(context: KernelContext, workload: Workload, db: str) -> list[tuple[str, Genome]]:
    """The template's default, and the best candidate that the database has for this workload and device. If it has one that
    is left out, or none, that is said."""
    kernel, target = context.kernel, context.target
    space = kernel.space(target, workload, find_target(target).limits(context.arch))
    default = "default", Genome.of(space.complete(space.default))
    if "://" not in db and not Path(db).exists():
        return [default]
    device = find_target(target).device().name
    with Store.open(db, write=False) as store:
        of_workload = [b for b in queries.best(store, target=target) if b.workload == workload.key]
        known = [b for b in of_workload if is_of(store, b.kernel, b.run, kernel)]
    known.sort(key=lambda b: (b.device != device, b.unconfirmed, b.ratio))
    for best in known:
        if best.device != device:
            reason = f"it was timed on {best.device}, and this is {device}; --genome with its values times those here"
        elif broken := space.violations(best.parameters):
            reason = f"the kernel's search space does not have it any more ({'; '.join(broken)})"
        else:
            return [(short_id(best.id), Genome.of(best.parameters)), default]
        typer.echo(f"evo: {short_id(best.id)}, found for {workload}, is left out: {reason}", err=True)
    if not known:
        nothing = f"no candidate of this kernel is recorded for {workload} in {shown(db)}"
        if others := sorted({b.kernel for b in of_workload if may_have_been(b.kernel, kernel)}):
            nothing += f" (what is recorded of {', '.join(others)} was found with other files)"
        typer.echo(f"evo: {nothing}: the template's default is timed", err=True)
    return [default]


def _for_each(
    contenders: Sequence[tuple[str, Genome]], kernel: Kernel, workload: Workload, archs: Sequence[str], target: str
) -> Iterator[tuple[str, str, Genome]]:
    """(name, architecture, genome): each for all architectures, without what one of them does not have. What is not legal
    there even so is left out, and said."""
    for name, genome in contenders:
        yield name, archs[0], genome
        for arch in archs[1:]:
            space = kernel.space(target, workload, find_target(target).limits(arch))
            if starts := space.with_initial_points([genome.parameters]).initial_points:
                yield name, arch, Genome.of(starts[0])
                continue
            broken = space.violations(space.complete({n: v for n, v in genome.parameters.items() if n in space.by_name}))
            typer.echo(f"evo: {name} is not legal for {arch} ({'; '.join(broken)}): it is not timed there", err=True)


def _named(context: KernelContext, workload: Workload, texts: list[str]) -> list[tuple[str, Genome]]:
    """The default with the values of each text. Raises UsageError for one that is not legal."""
    space = context.kernel.space(context.target, workload, find_target(context.target).limits(context.arch))
    found = []
    for text in texts:
        values = parse_values(filter(None, text.split(",")), space, "--genome")
        point = space.complete({**space.default, **values})
        if broken := space.violations(point):
            raise UsageError(f"--genome {text!r} is not legal for {workload}: {'; '.join(broken)}")
        found.append((text, Genome.of(point)))
    return found


def _request(kernel: str, target: str, arch: str, genome: Genome, workload: Workload) -> BuildRequest:
    return BuildRequest(kernel=kernel, target=target, arch=arch, genome=genome, workload=workload)


def _compiled(builds: list[tuple[str, Genome, Build]]) -> list[tuple[str, Genome, Build]]:
    for name, _, build in builds:
        if build.binary is None:
            raise EvoError(f"{name} does not compile ({build.status}): {build.log.strip()[:400]}")
    return builds


def _record(timing: Timing) -> dict[str, Any]:
    return {"contender": timing.contender, **timing_record(timing)}


def _print(
    console: Console, kernel: Kernel, workload: Workload, timings: tuple[Timing, ...], refused: Any
) -> None:
    cost = kernel.cost(workload)
    table = Table(title=f"{kernel.title}, {workload.key}", title_justify="left", header_style="dim", box=None)
    table.add_column("contender")
    arithmetic = cost.flops > _ARITHMETIC * cost.bytes
    rate = "TFLOP/s" if arithmetic else "GB/s"
    for heading in ("median us", "95% interval", rate, "speed-up over PyTorch", "95% interval"):
        table.add_column(heading, justify="right")
    for t in sorted(timings, key=lambda t: t.median_us):
        record = timing_record(t)
        table.add_row(
            t.contender,
            marked(f"{t.median_us:.2f}", record["disturbed"]),
            f"{t.low_us:.2f} to {t.high_us:.2f}",
            f"{cost.flops / t.median_us / 1e6:,.1f}" if arithmetic else f"{cost.bytes / t.median_us / 1e3:,.0f}",
            marked(f"{record['speedup']:.3f}x", record["disturbed"]) if "speedup" in record else "1",
            f"{record['speedup_low']:.3f} to {record['speedup_high']:.3f}" if "speedup" in record else "",
        )
    console.print(table)
    if any(record["disturbed"] for record in map(timing_record, timings)):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)
    for name, reason in refused:
        console.print(f"{name} was left out: {reason}", style="yellow", highlight=False)


def _bench_module(folder: Path, json: bool) -> int:
    """An exported module measures itself, in a process that has nothing of evo."""
    if not (folder / "__main__.py").is_file():
        raise UsageError(f"{folder} has a manifest.json but no __main__.py: it is not an exported module")
    command = [sys.executable, "-m", folder.resolve().name, "bench", *(["--json"] if json else [])]
    return subprocess.run(command, cwd=folder.resolve().parent, check=False).returncode
