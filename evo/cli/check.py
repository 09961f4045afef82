"""evo check, evo sanitize: whether code is right, without a search.

What is compared: all structural branches of a kernel, a recorded candidate compiled anew, or a candidate under sanitizers.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from evo.cli.options import (
    DEFAULT_DB,
    Db,
    Json,
    Seed,
    TargetName,
    command_line,
    draw_seed,
    make_console,
    print_json,
)
from evo.cli.recorded import Recorded, find_candidate, find_winners, may_be_candidate, source_remark
from evo.cli.screen import CheckLines
from evo.cli.search import load_context
from evo.cli.tables import make_table, print_table, say, short_id, short_workload, visible
from evo.errors import DeviceError, KernelError, UnknownNameError, UsageError
from evo.evaluation import Status
from evo.problem.kernel import find_kernel
from evo.sanitize import Sanitized, choose_tools, sanitize
from evo.search.check import Checked, check_candidate, check_kernel, check_workloads_of
from evo.search.run import RunSettings, default_builders, open_executor
from evo.search.tasks import TaskExecutor
from evo.targets import find_target

__all__ = ["register"]

_SHOWN = 3
"""Messages of a sanitizer that are printed."""


def register(app: typer.Typer) -> None:
    app.command("check")(check)
    app.command("sanitize")(sanitize_candidate)


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
    seed: Seed = None,
    compile_only: Annotated[bool, typer.Option(help="Do not run anything.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compile every structural branch of a kernel's template, and gate and time those that can run here; or a candidate
    anew."""
    drawn = draw_seed(seed)
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
    with context.open_executor() as executor:
        task = TaskExecutor(
            executor=executor, kernel=kernel, target=context.target, arch=context.arch, workload=own[0], seed=drawn
        )
        branches, not_timed = check_kernel(
            task,
            (*own, *near),
            timed=frozenset(w for w in own if all(size for _, size in w.dims)),
            gate=not (why_not or compile_only),
            observe=None if json else CheckLines("branches"),
        )
    if json:
        print_json(
            {
                "arch": context.arch,
                "seed": drawn,
                "branches": [_branch_record(b) for b in branches],
                "not_timed": [{"workload": w.key, "reason": reason} for w, reason in not_timed.items()],
            }
        )
    else:
        console = make_console()
        _print_branches(console, branches)
        say(console, _summary(f"{problem.name} for {context.arch}", branches, drawn))
        for w, reason in not_timed.items():
            say(console, f"{w} was only gated, and not timed: {reason}")
        if why_not:
            say(console, why_not)
    if not all(b.passed for b in branches):
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


def _why_not_here(target: str, arch: str) -> str:
    """Why code for `arch` is only compiled here; empty if it is run."""
    try:
        reason = find_target(target).runs(arch)
    except DeviceError as error:
        reason = str(error)
    return reason and f"compiled only: {reason}"


# -- the branches of a kernel ---------------------------------------------------------------------------------


def _branch_record(branch: Checked) -> dict[str, Any]:
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
        "cases": len(branch.gate_checks),
        "timed": _timed(branch),
        "log": (measured.log if measured and measured.log else "") or (build.log if not binary else ""),
    }


def _gate(branch: Checked) -> str | None:
    """The verdict of the gate; None if it did not run."""
    if branch.measurement is None:
        return None
    return str(Status.OK if branch.passed_gate else branch.measurement.status)


def _timed(branch: Checked) -> str | None:
    """The verdict at the size that is timed; None if that was not to be run."""
    if branch.measurement is None or not branch.timed:
        return None
    return str(branch.measurement.status) if branch.passed_gate else "not run"


def _print_branches(console: Console, branches: Sequence[Checked]) -> None:
    figures = ("registers", "spills B", "smem B", "occupancy", "compile s", "gate", "timed size")
    table = make_table("workload", "branch (what differs from the default)", *figures, right=figures)
    for branch in branches:
        record = _branch_record(branch)
        known = record["registers"] is not None
        smem = (record["smem_static_bytes"] or 0) + (record["smem_dynamic_bytes"] or 0)
        verdict = f"{branch.cases_passed} ok" if branch.passed_gate else record["gate"] or "-"
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
    print_table(console, table)
    for branch in branches:
        if not branch.passed:
            console.print(
                f"{branch.workload} {branch.changes}: {_branch_record(branch)['log']}", style="red", highlight=False
            )


def _summary(what: str, branches: Sequence[Checked], seed: int) -> str:
    compiled = sum(b.build.status is Status.OK for b in branches)
    text = f"{what}: {compiled} of {len(branches)} branches compiled"
    gated = [b for b in branches if b.measurement is not None]
    if not gated:
        return text
    text += f", {sum(b.passed_gate for b in gated)} of {len(gated)} passed the gate"
    if timed := [b for b in gated if b.timed]:
        text += f", {sum(b.passed for b in timed)} of {len(timed)} at the size that is timed"
    return f"{text} (seed {seed})"


# -- a recorded candidate, compiled anew ----------------------------------------------------------------------


def _check_candidate(name: str, seed: int, compile_only: bool, db: str, json: bool) -> None:
    recorded = find_candidate(db, name)
    request = recorded.request
    why_not = _why_not_here(request.target, request.arch)
    if why_not and not compile_only:
        raise DeviceError(f"{why_not.removeprefix('compiled only: ')}; to compile it only, add --compile-only")
    target = find_target(request.target)
    observe = None if json else CheckLines("workloads")
    # A cache of its own: what is checked is what the compiler makes now, not what it once made.
    with tempfile.TemporaryDirectory(prefix="evo-check-") as folder:
        settings = RunSettings(builders=default_builders(target), cache_dir=Path(folder))
        with open_executor(request.target, settings) as executor:
            task = TaskExecutor(
                executor=executor,
                kernel=request.kernel,
                target=request.target,
                arch=request.arch,
                workload=request.workload,
                seed=seed,
            )
            results = check_candidate(task, request.genome, gate=not compile_only, observe=observe)
    record = {
        "candidate": recorded.record.id,
        "kernel": request.kernel,
        "target": request.target,
        "arch": request.arch,
        "seed": seed,
        "passed": all(r.passed for r in results),
        "remarks": list(_remarks(recorded, results[0])),
        "recorded": list(_verdicts(recorded)),
        "workloads": [_workload_record(r) for r in results],
    }
    if json:
        print_json(record)
    else:
        _print_candidate(make_console(), record, db)
    if not record["passed"]:
        raise typer.Exit(1)


def _remarks(recorded: Recorded, result: Checked) -> Iterator[str]:
    """How this build differs from the recorded one, where it does."""
    then, now = recorded.record.build, result.build
    if remark := source_remark(recorded, now.source_digest):
        yield remark
    elif then is not None and then.code_hash and now.binary is not None and now.binary.code_hash != then.code_hash:
        compilers = f": {then.compiler} then, {now.compiler} now" if then.compiler != now.compiler else ""
        yield f"the same source, but other machine code than recorded{compilers}"


def _verdicts(recorded: Recorded) -> Iterator[dict[str, Any]]:
    """The recorded verdicts, round by round, each with the seed that repeats it."""
    rounds = defaultdict(list)
    for check in recorded.record.checks:
        rounds[check.round, check.stage].append(check)
    for (round_, stage), checks in sorted(rounds.items()):
        yield {
            "stage": stage,
            "round": round_,
            "cases": len(checks),
            "passed": sum(c.passed for c in checks),
            "seed": recorded.record.seeds[stage],
        }


def _workload_record(result: Checked) -> dict[str, Any]:
    build, measured = result.build, result.measurement
    checks = measured.checks if measured else ()
    columns = ("case", "error", "allowed", "torch_error", "passed", "reason", "seed")
    seen = {c.case for c in checks}
    status = measured.status if measured else build.status
    return {
        "workload": result.workload.key,
        "build": str(build.status),
        "gate": str(measured.status) if measured else None,
        "passed": result.passed,
        "cases": [{name: getattr(c, name) for name in columns} for c in checks],
        "not_run": [name for name in result.cases if name not in seen],
        "log": "" if status.passed else (measured.log if measured else build.log),
    }


def _print_candidate(console: Console, record: dict[str, Any], db: str) -> None:
    figures = ("error", "allowed", "PyTorch's")
    table = make_table("workload", "case", *figures, "verdict", "data seed", right=(*figures, "data seed"))
    for result in record["workloads"]:
        workload = short_workload(result["workload"])
        for c in result["cases"]:
            table.add_row(
                workload,
                c["case"],
                *("-" if c[name] is None else f"{c[name]:.3g}" for name in ("error", "allowed", "torch_error")),
                "ok" if c["passed"] else f"refused: {c['reason']}",
                str(c["seed"] or ""),  # timed data are of no case
                style="" if c["passed"] else "red",
            )
        if result["gate"] not in (None, "ok", "wrong") or result["build"] != "ok":
            status = (result["gate"] if result["build"] == "ok" else result["build"]).replace("_", " ")
            log = Text(visible(f"{status}: {result['log'].strip()}", lines=True))
            table.add_row(workload, "", "", "", "", log, "", style="red")
        if result["gate"] not in (None, "ok") and result["not_run"]:
            table.add_row(workload, f"{len(result['not_run'])} more", "", "", "", "not run after that", "", style="dim")
    print_table(console, table)
    for remark in record["remarks"]:
        say(console, remark, "yellow")
    name = short_id(record["candidate"])
    for verdict in record["recorded"]:
        again = command_line(db, "check", name, "--seed", str(verdict["seed"]))
        say(
            console,
            f"recorded in the {verdict['stage']}: {verdict['passed']} of {verdict['cases']} cases passed;"
            f" to repeat it:  {again}",
        )
    count = sum(len(w["cases"]) for w in record["workloads"])
    ended = "passed" if record["passed"] else "did NOT pass"
    what = f"{ended} ({count} cases, seed {record['seed']})" if count else f"{ended}: compiled, not gated"
    text = f"candidate {name} of {record['kernel']} for {record['arch']} {what}"
    say(console, text, "" if record["passed"] else "bold red")


# -- a recorded candidate, under sanitizers -------------------------------------------------------------------


def sanitize_candidate(
    candidate: Annotated[
        str, typer.Argument(metavar="CANDIDATE|RUN", help="A candidate's identifier, or a run for its winners.")
    ],
    tool: Annotated[
        str,
        typer.Option(
            help="cuda: memcheck, racecheck, initcheck, synccheck. cpu: address, undefined, initcheck. all: each of them."
        ),
    ] = "all",
    seed: Seed = None,
    limit: Annotated[float, typer.Option(help="Seconds that each tool may take.", min=1.0)] = 180.0,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Run a recorded candidate under sanitizers: accesses out of bounds, races, undefined behaviour, unset memory."""
    drawn = draw_seed(seed)
    records = []
    for recorded in find_winners(db, candidate):
        tools = choose_tools(recorded.record.target, tool)
        found = sanitize(recorded.request, tools, seed=drawn, limit_s=limit, toolkits=_toolkits())
        records.append(_sanitized_record(recorded, found, drawn))
        if not json:
            _print_sanitized(make_console(), records[-1])
    if json:
        print_json(records)
    if not all(r["clean"] for r in records):
        raise typer.Exit(1)


def _toolkits() -> list[Path]:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]


def _sanitized_record(recorded: Recorded, found: Sanitized, seed: int) -> dict[str, Any]:
    remark = source_remark(recorded, found.source_digest)
    return {
        "candidate": recorded.record.id,
        "kernel": recorded.record.kernel,
        "target": recorded.record.target,
        "arch": recorded.record.arch,
        "seed": seed,
        "clean": found.clean,
        "remarks": [remark] if remark else [],
        "cases": list(found.cases),
        "tools": [
            {
                "tool": r.tool,
                "clean": r.clean,
                "errors": r.errors,
                "messages": list(r.messages),
                "wrong": list(r.wrong),
                "seconds": round(r.seconds, 2),
                "command": r.command,
            }
            for r in found.reports
        ],
    }


def _print_sanitized(console: Console, record: dict[str, Any]) -> None:
    name = short_id(record["candidate"])
    calls = f"{len(record['cases'])} calls, seed {record['seed']}"
    say(console, f"candidate {name} of {record['kernel']} for {record['arch']}: {calls}")
    for remark in record["remarks"]:
        say(console, remark, "yellow")
    for t in record["tools"]:
        errors = f"{t['errors']} error{'' if t['errors'] == 1 else 's'}"
        verdict = "clean" if t["clean"] else errors if t["errors"] else "wrong outputs"
        say(console, f"{t['tool']:<10} {verdict}  ({t['seconds']:.1f} s)", "" if t["clean"] else "bold red")
        for message in [*t["messages"], *(f"refused by the gate: {w}" for w in t["wrong"])][:_SHOWN]:
            say(console, f"    {message}")
        if (more := len(t["messages"]) + len(t["wrong"]) - _SHOWN) > 0:
            say(console, f"    and {more} more", "dim")
    say(console, "every message, and the command that was run for each tool: --json", "dim")
