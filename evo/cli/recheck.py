"""evo check CANDIDATE: a recorded candidate, compiled anew and gated again."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evo.cli.options import command_line
from evo.cli.recorded import Recorded, source_remark
from evo.cli.tables import short_id, short_workload
from evo.lineage import Stage
from evo.problem.kernel import load_kernel
from evo.search.check import Onlooker, Trial, check_candidate
from evo.search.run import RunSettings, default_builders, open_executor
from evo.targets import find_target

__all__ = ["print_recheck", "recheck"]


def recheck(recorded: Recorded, *, gate: bool, seed: int, tell: Onlooker) -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    request = recorded.request
    kernel, target = load_kernel(request.kernel), find_target(request.target)
    # A cache of its own: what is checked is what the compiler makes now, not what it once made.
    with tempfile.TemporaryDirectory(prefix="evo-check-") as folder:
        settings = RunSettings(builders=default_builders(target), cache_dir=Path(folder))
        with open_executor(request.target, settings) as executor:
            trials = check_candidate(executor, kernel, request, gate=gate, seed=seed, tell=tell)
    return {
        "candidate": recorded.record.id,
        "kernel": request.kernel,
        "target": request.target,
        "arch": request.arch,
        "seed": seed,
        "passed": all(t.passed for t in trials),
        "remarks": list(_remarks(recorded, trials[0])),
        "recorded": list(_verdicts(recorded)),
        "workloads": [_trial_record(t) for t in trials],
    }


def _remarks(recorded: Recorded, trial: Trial) -> Iterator[str]:
    """How this build differs from the recorded one, where it does."""
    then, now = recorded.record.build, trial.build
    if remark := source_remark(recorded, now.source_digest):
        yield remark
    elif then is not None and then.code_hash and now.binary is not None and now.binary.code_hash != then.code_hash:
        compilers = f": {then.compiler} then, {now.compiler} now" if then.compiler != now.compiler else ""
        yield f"the same source, but other machine code than recorded{compilers}"


def _verdicts(recorded: Recorded) -> Iterator[dict[str, Any]]:
    """What the database says, round by round, each with the seed that repeats it."""
    rounds = defaultdict(list)
    for check in recorded.record.checks:
        rounds[check.round, check.stage].append(check)
    for (round_, stage), checks in sorted(rounds.items()):
        yield {
            "stage": stage,
            "round": round_,
            "cases": len(checks),
            "passed": sum(c.passed for c in checks),
            "seed": recorded.seeds[Stage(stage)],
        }


def _trial_record(trial: Trial) -> dict[str, Any]:
    build, measured = trial.build, trial.measurement
    checks = measured.checks if measured else ()
    cases = [
        {
            "case": c.case,
            "error": c.error,
            "allowed": c.allowed,
            "torch_error": c.torch_error,
            "passed": c.passed,
            "reason": c.reason,
            "seed": c.seed,
        }
        for c in checks
    ]
    seen = {c.case for c in checks}
    status = measured.status if measured else build.status
    return {
        "workload": trial.workload.key,
        "build": str(build.status),
        "gate": str(measured.status) if measured else None,
        "passed": trial.passed,
        "cases": cases,
        "not_run": [name for name in trial.cases if name not in seen],
        "log": "" if status.passed else (measured.log if measured else build.log),
    }


def print_recheck(console: Console, record: dict[str, Any], db: str) -> None:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("workload")
    table.add_column("case")
    for heading in ("error", "allowed", "PyTorch's"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", overflow="fold")
    table.add_column("data seed", justify="right", style="dim")
    for trial in record["workloads"]:
        workload = short_workload(trial["workload"])
        for c in trial["cases"]:
            table.add_row(
                workload,
                c["case"],
                *(_number(c[name]) for name in ("error", "allowed", "torch_error")),
                "ok" if c["passed"] else f"refused: {c['reason']}",
                str(c["seed"] or ""),  # timed data are of no case
                style="" if c["passed"] else "red",
            )
        if trial["gate"] not in (None, "ok", "wrong") or trial["build"] != "ok":
            status = (trial["gate"] if trial["build"] == "ok" else trial["build"]).replace("_", " ")
            table.add_row(workload, "", "", "", "", f"{status}: {trial['log'].strip()}", "", style="red")
        if trial["gate"] not in (None, "ok") and trial["not_run"]:
            table.add_row(workload, f"{len(trial['not_run'])} more", "", "", "", "not run after that", "", style="dim")
    if table.row_count:
        console.print(table)
    for remark in record["remarks"]:
        console.print(remark, style="yellow", highlight=False, soft_wrap=True)
    name = short_id(record["candidate"])
    for verdict in record["recorded"]:
        console.print(
            f"recorded in the {verdict['stage']}: {verdict['passed']} of {verdict['cases']} cases passed;"
            f" to repeat it:  {command_line(db, 'check', name, '--seed', str(verdict['seed']))}",
            highlight=False,
            soft_wrap=True,
        )
    count = sum(len(t["cases"]) for t in record["workloads"])
    ended = "passed" if record["passed"] else "did NOT pass"
    what = f"{ended} ({count} cases, seed {record['seed']})" if count else f"{ended}: compiled, not gated"
    console.print(
        f"candidate {name} of {record['kernel']} for {record['arch']} {what}",
        style="" if record["passed"] else "bold red",
        highlight=False,
        soft_wrap=True,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
