"""evo bench."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from evo.cli.options import (
    DEFAULT_DB,
    Db,
    Json,
    TargetName,
    cache_dir,
    choose_arch,
    choose_target,
    make_console,
    print_json,
)
from evo.cli.results import short_id, timing_record
from evo.errors import EvoError, UsageError
from evo.evaluation import Build, Timing
from evo.executors import BuildRequest, ExecutorConfig, RaceRequest
from evo.executors.local import LocalExecutor
from evo.genome import Genome
from evo.kernel import Kernel, Workload, load_kernel
from evo.run import check_workloads, default_builders
from evo.store import queries
from evo.store.store import Store
from evo.targets import find_target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    kernel: Annotated[str, typer.Argument(help="A kernel's name or folder, or an exported module's folder.")],
    target: TargetName = None,
    workload: Annotated[list[str] | None, typer.Option(help="Repeat for more; the kernel's own if left out.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Baselines, separated by commas; all of the kernel's if left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the data; random if left out.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Time the best known candidate and the kernel's default beside its baselines, interleaved in one race."""
    if (Path(kernel) / "manifest.json").is_file():
        given = {"--target": target, "--workload": workload, "--against": against, "--seed": seed}
        for option, value in given.items():
            if value is not None and value != []:
                raise UsageError(f"{kernel} is an exported module, which times its own variants: leave out {option}")
        raise typer.Exit(_bench_module(Path(kernel), json))
    problem = load_kernel(kernel)
    chosen = choose_target(target)
    arch = choose_arch(chosen, None)
    workloads = check_workloads(problem, chosen, workload or [])
    names = against.split(",") if against else [b.name for b in problem.baselines if chosen in b.targets]
    for name in names:
        problem.baseline(name)
    drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
    executor = LocalExecutor(
        chosen, ExecutorConfig(builders=default_builders(find_target(chosen)), cache_dir=cache_dir(db))
    )
    records = []
    try:
        for w in workloads:
            contenders = _contenders(problem, chosen, arch, w, db)
            builds = [(n, g, executor.build(_request(kernel, chosen, arch, g, w)).result()) for n, g in contenders]
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
    finally:
        executor.close()
    if json:
        print_json({"kernel": problem.name, "target": chosen, "arch": arch, "seed": drawn, "workloads": records})


def _contenders(kernel: Kernel, target: str, arch: str, workload: Workload, db: str) -> list[tuple[str, Genome]]:
    """The template's default, and the best candidate that the database has for this workload and device."""
    space = kernel.space(target, workload, find_target(target).limits(arch))
    found = [("default", Genome.of(space.complete(space.default)))]
    if "://" not in db and not Path(db).exists():
        return found
    device = find_target(target).device().name
    with Store.open(db, write=False) as store:
        for best in queries.best(store, kernel.name):
            same = best.workload == workload.key and best.target == target and best.device == device
            if same and space.is_legal(best.parameters):
                found.insert(0, (short_id(best.id), Genome.of(best.parameters, best.flags)))
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
    for heading in ("median us", "95% interval", "GB/s", "speed-up over PyTorch", "95% interval"):
        table.add_column(heading, justify="right")
    for t in sorted(timings, key=lambda t: t.median_us):
        record = timing_record(t)
        table.add_row(
            t.contender,
            f"{t.median_us:.2f}",
            f"{t.low_us:.2f} to {t.high_us:.2f}",
            f"{cost.bytes / t.median_us / 1e3:,.0f}",
            f"{record['speedup']:.3f}x" if "speedup" in record else "1",
            f"{record['speedup_low']:.3f} to {record['speedup_high']:.3f}" if "speedup" in record else "",
        )
    console.print(table)
    for name, reason in refused:
        console.print(f"{name} was left out: {reason}", style="yellow", highlight=False)


def _bench_module(folder: Path, json: bool) -> int:
    """An exported module measures itself, in a process that has nothing of evo."""
    if not (folder / "__main__.py").is_file():
        raise UsageError(f"{folder} has a manifest.json but no __main__.py: it is not an exported module")
    command = [sys.executable, "-m", folder.resolve().name, "bench", *(["--json"] if json else [])]
    return subprocess.run(command, cwd=folder.resolve().parent, check=False).returncode
