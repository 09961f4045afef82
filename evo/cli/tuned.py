"""evo rebuild, and evo check of a tuned file: what a repository keeps of searches, built and measured again."""

from collections.abc import Iterator
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from evo.cli.check import why_not_here
from evo.cli.export import tell_written
from evo.cli.options import Json, answer, print_json
from evo.environment import cache_dir
from evo.errors import CompileError, DeviceError, EvoError, error_line
from evo.evaluation import Build, Status, Timing
from evo.executors import device_name
from evo.export import MANIFEST, ExportItem, ExportRequest, find_exporter
from evo.export._tuned import changed, figures_of, not_legal, read_tuned, to_build
from evo.export._winners import export_winners
from evo.problem.loading import load_kernel
from evo.report.terminal import Terminal, notice, short_workload
from evo.report.text import counted, interval, times
from evo.search.check import check_candidate
from evo.search.place import open_workers
from evo.search.tasks import Patience, TaskExecutor
from evo.targets import find_target

_TOLERANCE = 0.05
"""Share of its speed-up that a point may have lost, beyond both intervals and the noise floor."""
_PATIENCE_S = 20.0
"""Seconds that all races of a file together may wait for a quiet machine."""


def rebuild(
    file: Annotated[Path, typer.Argument(help="A NAME.tuned.toml, as evo export --tuned writes it.")],
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture to build for; the measured one if left out; repeat for more."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; exported/NAME if left out.")] = None,
    device: Annotated[
        str | None, typer.Option(help="A part of the name of the devices whose results count; all if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Make the package of a tuned file: no search, no database, and no GPU."""
    parts = read_tuned(file)
    folder = out or Path("exported") / file.name.partition(".")[0]
    exporter, replaced = find_exporter("module"), (folder / MANIFEST).is_file()
    for remark in changed(file, parts):
        notice(remark)
    asked, remarks = to_build(file, parts, folder, device)
    try:
        written, more = export_winners(asked, exporter, arch or ())
    except CompileError as error:
        raise EvoError(f"{file}: a point does not compile ({error_line(str(error))}); evo check {file} says which") from None
    if json:
        print_json([str(p) for p in written])
    of = counted(sum(len(part.items) for part in asked), "result")
    tell_written(exporter, folder, written, remarks + more, f"{of} of {file}", replaced, json)


# -- is it still so? ---------------------------------------------------------------------------------------------


def check_tuned(file: Path, seed: int, random_cases: int, compile_only: bool, db: str, json: bool) -> None:
    """Builds, gates and times the points of a file again, as far as that is possible here."""
    parts = read_tuned(file)
    remarks, points, torch = changed(file, parts), list[dict[str, Any]](), version("torch")
    others = sorted({str(part.environment.get("torch", torch)) for part in parts} - {torch})
    remarks += [f"results were measured beside PyTorch {other}, and here is {torch}" for other in others]
    patience = Patience(
        left_s=_PATIENCE_S, tell=lambda workload, left_s: notice(f"{workload}: waiting up to {left_s:.0f} s for quiet")
    )
    for target, group in groupby(sorted(parts, key=_target), key=_target):
        with open_workers(target, cache_dir(db)) as executor:
            for part, item in [(asked, item) for asked in group for item in asked.items]:
                task = TaskExecutor(
                    problem=load_kernel(part.kernel),
                    executor=executor,
                    kernel=part.kernel,
                    target=target,
                    arch=part.arch,
                    workload=item.workload,
                    seed=seed,
                    patience=patience,
                )
                found = {"verdict": "", "reason": "", "gate": None, "now": None}
                try:
                    for told in _judged(part, item, task, random_cases, compile_only):
                        found |= told
                except DeviceError as error:
                    found |= {"verdict": "undecided", "reason": str(error)}
                known = {"kernel": task.problem.name, "target": target, "arch": part.arch, **part.environment}
                known |= {"workload": item.workload.key, "point": item.genome.parameters, "candidate": item.candidate}
                points.append({**known, "then": figures_of(item), **found, "passed": found["verdict"] not in _FAILED})
    record = {"file": str(file), "seed": seed, "remarks": remarks, "points": points}
    answer(json, record | {"passed": all(p["passed"] for p in points)}, _print)
    if not all(p["passed"] for p in points):
        raise typer.Exit(1)


def _target(part: ExportRequest) -> str:
    return part.target


_FAILED = ("not legal", "does not compile", "wrong", "slower")


def _judged(
    part: ExportRequest, item: ExportItem, task: TaskExecutor, random_cases: int, compile_only: bool
) -> Iterator[dict[str, Any]]:
    """What is found of a point, step by step; of equal keys the last counts. Raises DeviceError."""
    if broken := not_legal(part, item):
        yield {"verdict": "not legal", "reason": f"it is not in the search space any more: {broken}"}
        return
    elsewhere = "only compiled" if compile_only else why_not_here(part.target, part.arch)
    results = check_candidate(task, item.genome, gate=not elsewhere, random_cases=random_cases)
    if bad := next((r for r in results if not r.passed), None):
        ran, at = bad.measurement, "" if bad.workload == item.workload else f"{bad.workload.key}: "
        if ran is None:
            yield {"verdict": "does not compile", "reason": at + error_line(bad.build.log)}
        else:
            log = error_line(ran.log) or str(ran.status)
            yield {"verdict": "wrong", "gate": str(ran.status), "reason": at + log}
        return
    if elsewhere:
        yield {"verdict": "compiles", "reason": elsewhere}
        return
    yield {"verdict": "right", "gate": str(Status.OK)}
    here, measured_on = device_name(find_target(part.target), part.arch), part.environment["device"]
    then = figures_of(item)
    if here != measured_on:
        yield {"reason": f"it was measured on {measured_on}, and this is {here}"}
    elif "speedup" not in then:
        yield {"reason": "the file has no sure time of it"}
    else:
        yield _raced(item, task, results[0].build, then)


def _raced(item: ExportItem, task: TaskExecutor, build: Build, then: dict[str, Any]) -> dict[str, Any]:
    """The verdict of a race with PyTorch; slower is what two races find."""
    least = (then.get("interval") or [then["speedup"]])[0] * (1 - _TOLERANCE - then.get("noise", 0.0))
    for last in (False, True):
        result = task.race([("candidate", item.genome, build)])
        own: Timing | None = next((t for t in result.timings if t.contender == "candidate"), None)
        if own is None or not own.ratio:
            refused = dict(result.refused).get("candidate")
            return {"verdict": "wrong" if refused else "undecided", "reason": refused or result.log}
        if own.disturbed:
            return {"verdict": "undecided", "reason": "this machine is too busy to measure it"}
        limits = [1 / ratio for ratio in (own.ratio_high, own.ratio_low) if ratio]
        now = {"time_us": own.median_us, "speedup": 1 / own.ratio, "interval": limits}
        if (limits or [1 / own.ratio])[-1] >= least:
            return {"verdict": "as fast", "now": now}
        if last:
            return {"verdict": "slower", "now": now, "reason": f"its speed-up is below {least:.3f}, the least expected"}
    raise AssertionError


def _print(console: Terminal, record: dict[str, Any]) -> None:
    rows = [
        {
            "kernel": p["kernel"],
            "workload": short_workload(p["workload"], p["kernel"]),
            "device": p["device"],
            ">speed-up then": _gain(p["then"]),
            ">now": _gain(p["now"] or {}),
            "verdict": p["verdict"],
        }
        for p in record["points"]
    ]
    console.print_rows(rows, ["" if p["passed"] else "red" for p in record["points"]])
    for p in record["points"]:
        if p["reason"]:
            name = short_workload(p["workload"], p["kernel"])
            console.say(f"{name}: {p['verdict']}: {p['reason']}", "" if p["passed"] else "red")
    for remark in record["remarks"]:
        console.say(remark, "yellow")
    number = {v: sum(p["verdict"] == v for p in record["points"]) for v in (p["verdict"] for p in record["points"])}
    console.say(f"{record['file']}: {', '.join(f'{n} {verdict}' for verdict, n in number.items())} (seed {record['seed']})")


def _gain(figures: dict[str, Any]) -> str | None:
    if "speedup" not in figures:
        return None
    told, limits = times(1 / figures["speedup"]), figures.get("interval") or ()
    return f"{told} ({interval(*(1 / s for s in reversed(limits)))})" if len(limits) == 2 else told
