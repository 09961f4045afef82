"""evo check."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from evo.checking import Branch, check_branches, check_workloads_of
from evo.cli.options import DEFAULT_DB, Db, Json, TargetName, make_console, print_json
from evo.cli.recheck import print_recheck, recheck
from evo.cli.recorded import find_candidate
from evo.cli.setup import set_up
from evo.errors import DeviceError, UnknownNameError, UsageError
from evo.evaluation import Status
from evo.kernel import find_kernel
from evo.targets import find_target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    kernel: Annotated[
        str, typer.Argument(metavar="KERNEL|CANDIDATE", help="A kernel's name or folder, or a recorded candidate.")
    ],
    arch: Annotated[
        str | None,
        typer.Option(help="sm_89: machine code, also without a GPU. compute_89: PTX, gated on any newer GPU."),
    ] = None,
    target: TargetName = None,
    workload: Annotated[list[str] | None, typer.Option(help="Instead of the kernel's own; repeat for more.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the gate's data; random if left out.")] = None,
    compile_only: Annotated[bool, typer.Option(help="Do not run anything.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compile every structural branch of a kernel's template, and gate those that can run here; or a candidate anew."""
    drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
    if not _is_kernel(kernel):
        for option, value in (("--target", target), ("--arch", arch), ("--workload", workload)):
            if value:
                raise UsageError(f"{option} is recorded with candidate {kernel}: leave it out")
        _check_candidate(kernel, drawn, compile_only, db, json)
        return
    setup = set_up(kernel, target, arch, db)
    problem = setup.kernel
    workloads = [problem.workload(setup.target, w) for w in workload or ()] or check_workloads_of(problem, setup.target)
    why_not = _why_not_here(setup.target, setup.arch)
    with setup.open_executor() as executor:
        branches = check_branches(
            executor,
            kernel,
            problem,
            setup.target,
            setup.arch,
            workloads,
            gate=not (why_not or compile_only),
            seed=drawn,
        )
    failed = [b for b in branches if not b.passed]
    if json:
        print_json({"arch": setup.arch, "seed": drawn, "branches": [_record(b) for b in branches]})
    else:
        _print(make_console(), problem.name, setup.arch, branches, why_not, drawn)
    if failed:
        raise typer.Exit(1)


def _is_kernel(name: str) -> bool:
    try:
        find_kernel(name)
    except UnknownNameError:
        return False
    return True


def _check_candidate(name: str, seed: int, compile_only: bool, db: str, json: bool) -> None:
    recorded = find_candidate(db, name)
    why_not = _why_not_here(recorded.record.target, recorded.record.arch)
    if why_not and not compile_only:
        raise DeviceError(f"{why_not.removeprefix('compiled only: ')}; to compile it only, add --compile-only")
    record = recheck(recorded, gate=not compile_only, seed=seed)
    if json:
        print_json(record)
    else:
        print_recheck(make_console(), record, db)
    if not record["passed"]:
        raise typer.Exit(1)


def _why_not_here(target: str, arch: str) -> str:
    """Why code for `arch` is only compiled here; empty if it is run."""
    try:
        reason = find_target(target).runs(arch)
    except DeviceError as error:
        reason = str(error)
    return reason and f"compiled only: {reason}"


def _record(branch: Branch) -> dict[str, Any]:
    build, measured = branch.build, branch.measurement
    binary = build.binary
    return {
        "workload": branch.workload.key,
        "changes": branch.changes,
        "genome": branch.genome.parameters,
        "build": str(build.status),
        "compile_s": round(build.seconds, 3),
        "registers": binary.registers if binary else None,
        "spill_bytes": binary.spill_bytes if binary else None,
        "smem_static_bytes": binary.smem_static_bytes if binary else None,
        "smem_dynamic_bytes": build.smem_dynamic_bytes,
        "occupancy": build.occupancy,
        "code_bytes": len(binary.code) if binary else None,
        "gate": str(measured.status) if measured else None,
        "cases": len(measured.checks) if measured else 0,
        "log": (measured.log if measured and measured.log else "") or (build.log if not binary else ""),
    }


def _print(console: Console, kernel: str, arch: str, branches: list[Branch], why_not: str, seed: int) -> None:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("workload")
    table.add_column("branch (what differs from the default)", overflow="fold")
    for heading in ("registers", "spills B", "smem B", "occupancy", "compile s", "gate"):
        table.add_column(heading, justify="right")
    for branch in branches:
        record = _record(branch)
        known = record["registers"] is not None
        smem = (record["smem_static_bytes"] or 0) + (record["smem_dynamic_bytes"] or 0)
        verdict = {None: "-", "ok": f"{record['cases']} ok"}.get(record["gate"], record["gate"])
        table.add_row(
            str(branch.workload),
            " ".join(f"{k}={v}" for k, v in branch.changes.items()) or "default",
            str(record["registers"]) if known else "-",
            str(record["spill_bytes"]) if known else "-",
            str(smem) if known else "-",
            f"{record['occupancy']:.0%}" if record["occupancy"] is not None else "-",
            f"{record['compile_s']:.2f}",
            verdict if record["build"] == "ok" else record["build"].replace("_", " "),
            style="" if branch.passed else "red",
        )
    console.print(table)
    for branch in branches:
        if not branch.passed:
            console.print(f"{branch.workload} {branch.changes}: {_record(branch)['log']}", style="red", highlight=False)
    compiled = sum(b.build.status is Status.OK for b in branches)
    gated = [b for b in branches if b.measurement is not None]
    console.print(
        f"{kernel} for {arch}: {compiled} of {len(branches)} branches compiled"
        + (f", {sum(b.passed for b in gated)} of {len(gated)} passed the gate (seed {seed})" if gated else ""),
        highlight=False,
    )
    if why_not:
        console.print(why_not, highlight=False, soft_wrap=True)
