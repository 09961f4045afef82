"""evo check."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from evo.cli.options import DEFAULT_DB, Db, Json, TargetName, check_seed, make_console, print_json
from evo.cli.recheck import print_recheck, recheck
from evo.cli.recorded import find_candidate, may_be_candidate
from evo.cli.search import load_context
from evo.cli.standing import StandingLines
from evo.errors import DeviceError, KernelError, UnknownNameError, UsageError
from evo.evaluation import Status
from evo.problem.kernel import find_kernel
from evo.search.check import Branch, BranchPlan, check_branches, check_workloads_of, unwatched
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
    seed: Annotated[
        int | None,
        typer.Option(help="Draws the gate's data; random if left out.", callback=check_seed),
    ] = None,
    compile_only: Annotated[bool, typer.Option(help="Do not run anything.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compile every structural branch of a kernel's template, and gate and time those that can run here; or a candidate
    anew."""
    drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
    if not _is_kernel(kernel):
        given = (("--target", target), ("--arch", arch), ("--workload", workload))
        for option, value in given if may_be_candidate(kernel) else ():
            if value:
                raise UsageError(f"{option} is recorded with candidate {kernel}: leave it out")
        _check_candidate(kernel, drawn, compile_only, db, json)
        return
    context = load_context(kernel, target, arch, db)
    problem = context.kernel
    named = tuple(problem.workload(context.target, w) for w in workload or ())
    own, near = (named, ()) if named else check_workloads_of(problem, context.target)
    why_not = _why_not_here(context.target, context.arch)
    plan = BranchPlan(
        kernel_name=kernel,
        kernel=problem,
        target=context.target,
        arch=context.arch,
        workloads=(*own, *near),
        timed=frozenset(w for w in own if all(size for _, size in w.dims)),
        gate=not (why_not or compile_only),
        seed=drawn,
    )
    with context.open_executor() as executor:
        branches, untimed = check_branches(executor, plan, unwatched if json else StandingLines("branches"))
    failed = [b for b in branches if not b.passed]
    if json:
        print_json(
            {
                "arch": context.arch,
                "seed": drawn,
                "branches": [_record(b) for b in branches],
                "not_timed": [{"workload": w.key, "reason": reason} for w, reason in untimed.items()],
            }
        )
    else:
        remarks = [f"{w} was only gated, and not timed: {reason}" for w, reason in untimed.items()]
        _print(make_console(), plan, branches, [*remarks, *filter(None, [why_not])])
    if failed:
        raise typer.Exit(1)


def _is_kernel(name: str) -> bool:
    try:
        find_kernel(name)
    except UnknownNameError:
        return False
    except KernelError:
        if not may_be_candidate(name):
            raise
        return False
    return True


def _check_candidate(name: str, seed: int, compile_only: bool, db: str, json: bool) -> None:
    recorded = find_candidate(db, name)
    why_not = _why_not_here(recorded.record.target, recorded.record.arch)
    if why_not and not compile_only:
        raise DeviceError(f"{why_not.removeprefix('compiled only: ')}; to compile it only, add --compile-only")
    tell = unwatched if json else StandingLines("workloads")
    record = recheck(recorded, gate=not compile_only, seed=seed, tell=tell)
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
        "gate": _gate(branch),
        "cases": branch.tried,
        "timed": _timed(branch),
        "log": (measured.log if measured and measured.log else "") or (build.log if not binary else ""),
    }


def _gate(branch: Branch) -> str | None:
    """What the gate said; None if it was not to be asked."""
    if branch.measurement is None:
        return None
    return str(Status.OK if branch.passed_gate else branch.measurement.status)


def _timed(branch: Branch) -> str | None:
    """What came of the size that is timed; None if that was not to be run."""
    if branch.measurement is None or not branch.timed:
        return None
    return str(branch.measurement.status) if branch.passed_gate else "not run"


def _print(console: Console, plan: BranchPlan, branches: list[Branch], remarks: list[str]) -> None:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("workload")
    table.add_column("branch (what differs from the default)", overflow="fold")
    for heading in ("registers", "spills B", "smem B", "occupancy", "compile s", "gate", "timed size"):
        table.add_column(heading, justify="right")
    for branch in branches:
        record = _record(branch)
        known = record["registers"] is not None
        smem = (record["smem_static_bytes"] or 0) + (record["smem_dynamic_bytes"] or 0)
        verdict = f"{branch.gated} ok" if branch.passed_gate else record["gate"] or "-"
        table.add_row(
            str(branch.workload),
            " ".join(f"{k}={v}" for k, v in branch.changes.items()) or "default",
            str(record["registers"]) if known else "-",
            str(record["spill_bytes"]) if known else "-",
            str(smem) if known else "-",
            f"{record['occupancy']:.0%}" if record["occupancy"] is not None else "-",
            f"{record['compile_s']:.2f}",
            (verdict if record["build"] == "ok" else record["build"]).replace("_", " "),
            (record["timed"] or "-").replace("_", " "),
            style="" if branch.passed else "red",
        )
    console.print(table)
    for branch in branches:
        if not branch.passed:
            console.print(f"{branch.workload} {branch.changes}: {_record(branch)['log']}", style="red", highlight=False)
    compiled = sum(b.build.status is Status.OK for b in branches)
    said = f"{plan.kernel.name} for {plan.arch}: {compiled} of {len(branches)} branches compiled"
    if gated := [b for b in branches if b.measurement is not None]:
        said += f", {sum(b.passed_gate for b in gated)} of {len(gated)} passed the gate"
    if timed := [b for b in gated if b.timed]:
        said += f", {sum(b.passed for b in timed)} of {len(timed)} at the size that is timed"
    console.print(f"{said} (seed {plan.seed})" if gated else said, highlight=False, soft_wrap=True)
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)
