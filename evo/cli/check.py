"""evo check, sanitize, bench: tests of correctness and speed without a search.

They take all structural branches of a kernel; a recorded candidate, compiled anew or under sanitizers; the best known
candidate and the default, in a race with the baselines.
"""

import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evo.analysis.candidates import CandidateRecord
from evo.analysis.named import find_candidate, find_winners, is_of, may_be_candidate, workload_of
from evo.analysis.runs import find_best
from evo.cli.options import Db, Json, Seed, TargetName, Trust, answer, print_json
from evo.cli.recorded import again_line, drawn_case, source_remarks, task_of, trusted, verdicts_of
from evo.environment import DEFAULT_DB, cache_dir
from evo.errors import DeviceError, EvoError, StoreError, UnknownNameError, UsageError
from evo.evaluation import Build, Status
from evo.executors import device_arch, device_name
from evo.executors._processes import SCRATCH
from evo.job.job import check_workloads, load_context
from evo.job.values import draw_seed, parse_legal
from evo.lineage.database import shown
from evo.lineage.store import Store
from evo.measure import RaceResult, Request
from evo.measure.cases import count_kinds, is_case_text, parse_case, required_cases
from evo.problem.genome import Genome
from evo.problem.loading import find_kernel, load_function, names_near, recorded_kernel
from evo.problem.render import unread_parameters
from evo.report.progress import CheckLines
from evo.report.terminal import Terminal, brief_workload, make_console, notice, short_workload, time_cells, unless_busy
from evo.report.text import counted, lacks, short
from evo.sanitize import choose_tools
from evo.search.check import (
    Checked,
    check_candidate,
    check_kernel,
    check_samples,
    check_workloads_of,
    cost_faults,
    reference_faults,
    right_by_default_alone,
)
from evo.search.place import Place, open_workers
from evo.search.tasks import TaskExecutor
from evo.targets import find_target

_SHOWN = 3
"""Number of a sanitizer's messages that are printed."""


def check(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL|CANDIDATE|FILE", help="A kernel's name or folder, a recorded candidate, or a NAME.tuned.toml."
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option(help="sm_89: compiled also without a GPU, gated on any as new; compute_89: its PTX."),
    ] = None,
    target: TargetName = None,
    workload: Annotated[list[str] | None, typer.Option(help="Workload, not the kernel's own; repeat for more.")] = None,
    seed: Seed = None,
    cases: Annotated[int, typer.Option(help="Number of random cases to gate on, too.", min=0)] = 0,
    case: Annotated[
        list[str] | None, typer.Option(help="Case to gate on, too, written as in a refusal; repeat for more.")
    ] = None,
    compile_only: Annotated[bool, typer.Option(help="Compile only; run nothing.")] = False,
    samples: Annotated[
        int, typer.Option(help="Number of other points to compile: ends of each parameter, and random ones.", min=0)
    ] = 12,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compile every structural branch of a template and samples of its space, gate and time the branches; or a candidate
    anew; or all that a tuned file has, beside PyTorch."""
    drawn = draw_seed(seed)
    if kernel.endswith(".toml"):
        for option, value in (("--target", target), ("--arch", arch), ("--workload", workload), ("--case", case)):
            if value:
                raise UsageError(f"{option} is not for a tuned file, which says what is checked: leave it out")
        from evo.cli.tuned import check_tuned  # other checks do not need it

        check_tuned(Path(kernel), drawn, cases, compile_only, db, json)
        return
    if (candidate := _recorded(kernel, db)) is not None:
        for option, value in (("--target", target), ("--arch", arch), ("--workload", workload)):
            if value:
                raise UsageError(f"{option} is recorded with candidate {kernel}: leave it out")
        trusted(trust, candidate.kernel)
        _check_candidate(candidate, drawn, cases, case or [], compile_only, db, json)
        return
    problem, target, arch = load_context(kernel, target, arch)
    load_function(problem)  # which only an export uses
    named = tuple(problem.workload(target, w) for w in workload or ())
    own, near = (named, ()) if named else check_workloads_of(problem, target)
    named_cases = tuple(parse_case(problem, target, text) for text in case or ())
    why_not = why_not_here(target, arch)
    with open_workers(target, cache_dir(db)) as executor:
        task = TaskExecutor(
            problem=problem, executor=executor, kernel=kernel, target=target, arch=arch, workload=own[0], seed=drawn
        )
        branches, not_timed = check_kernel(
            task,
            (*own, *near),
            timed=frozenset(w for w in own if all(size for _, size in w.dims)),
            gate=not (why_not or compile_only),
            cases=named_cases,
            random_cases=cases,
            observe=None if json else CheckLines("branches"),
        )
        told = None if json else CheckLines("other points")
        gate = branches[0].passed and not (why_not or compile_only)
        sampled = check_samples(task, samples, gate=gate, observe=told) if branches[0].build.binary else []
    unread, points = list[str](), [(b.workload, b.genome) for b in branches]
    if all(b.build.binary for b in branches):  # else the compiler tells what the template lacks
        unread = unread_parameters(problem, target, find_target(target).limits(arch), points)
    kinds = {w.key: count_kinds(problem, target, w) for w in (*own, *near)}
    gated = {w.key: len((*problem.cases(target, w), *required_cases(problem, target, w))) for w in (*own, *near)}
    record = {
        "kernel": problem.name,
        "arch": arch,
        "seed": drawn,
        "faults": cost_faults(problem, (*own, *near))
        + (reference_faults(problem, target, own) if why_not and not compile_only else []),
        "kinds": {
            key: {"counts": of, "missing": [kind for kind, n in of.items() if not n], "cases": gated[key]}
            for key, of in kinds.items()
        },
        "compiled_only": "--compile-only leaves out the gate and the clock" if compile_only else why_not,
        "unread": unread,
        "branches": [_branch_record(b) for b in branches],
        "samples": [_branch_record(b) | {"faults": faults} for b, faults in sampled],
        "right_by_default_alone": right_by_default_alone([checked for checked, _ in sampled]),
        "not_timed": [{"workload": w.key, "reason": reason} for w, reason in not_timed.items()],
    }
    answer(json, record, _print_branches, shlex.join(["evo", "check", kernel, "--target", target]), cases)
    if record["faults"] or not all(b.passed for b in branches):
        raise typer.Exit(1)


def _recorded(name: str, db: str) -> CandidateRecord | None:
    """The candidate of a name, or the winner of a run of that name; None for a kernel's name. Raises UnknownNameError with
    similar kernels' names for a word that is none of these."""
    with suppress(UnknownNameError):
        find_kernel(name)
        return None
    try:
        with Store.open(db, write=False) as store:
            return find_candidate(store, name, db)
    except (UnknownNameError, StoreError):
        if may_be_candidate(name):
            raise
    raise UnknownNameError("kernel or candidate", name, names_near(name))


def why_not_here(target: str, arch: str) -> str:
    """Why code for `arch` can only be compiled here; empty if it runs here."""
    try:
        return find_target(target).runs(arch)
    except DeviceError as error:
        return error.what


# -- the branches of a kernel ---------------------------------------------------------------------------------


def _branch_record(branch: Checked) -> dict[str, Any]:
    build, measured = branch.build, branch.measurement
    binary = build.binary
    gate = timed = None
    if measured is not None:
        gate = str(Status.OK if branch.passed_gate else measured.status)
        if branch.timed:
            timed = str(measured.status) if branch.passed_gate else "not run"
    return {
        "workload": branch.workload.key,
        "passed": branch.passed,
        "changes": branch.changes,
        "genome": branch.genome.parameters,
        "build": str(build.status),
        "compile_s": round(build.seconds, 3),
        **{name: getattr(binary, name, None) for name in ("registers", "spill_bytes", "smem_static_bytes")},
        "smem_dynamic_bytes": build.smem_dynamic_bytes,
        "occupancy": build.occupancy,
        "code_bytes": len(binary.code) if binary else None,
        "gate": gate,
        "cases": len(branch.gate_checks),
        "left_out": dict(measured.left_out) if measured else {},
        "timed": timed,
        "case": drawn_case(measured.checks[-1]) if measured and measured.checks else "",
        "log": (measured.log if measured and measured.log else "") or (build.log if not binary else ""),
    }


def _print_left_out(console: Terminal, results: Sequence[dict[str, Any]]) -> None:
    """Prints how many cases could not be run, a line for each reason."""
    left_out = {case: reason for result in results for case, reason in result["left_out"].items()}
    for why in dict.fromkeys(left_out.values()):
        first, *others = (case for case, reason in left_out.items() if reason == why)
        console.say(f"{counted(1 + len(others), 'case')} not run: {why}; the first: {first}", "dim")


def _print_branches(console: Terminal, record: dict[str, Any], again: str, random_cases: int) -> None:
    rows, refusals, branches = [], dict[str, list[str]](), record["branches"]
    for b in branches:
        workload = short_workload(b["workload"], record["kernel"])
        name = " ".join(f"{k}={v}" for k, v in b["changes"].items()) or "default"
        known = b["registers"] is not None
        gated = f"{b['cases']} ok" if b["gate"] == "ok" else b["gate"] or "-"
        row = {
            "workload": workload,
            "branch (what differs from the default)": name,
            ">registers": b["registers"],
            ">spills B": b["spill_bytes"] if known else None,
            ">smem B": (b["smem_static_bytes"] or 0) + (b["smem_dynamic_bytes"] or 0) if known else None,
            ">occupancy": None if b["occupancy"] is None else f"{b['occupancy']:.0%}",
            ">compile s": f"{b['compile_s']:.2f}",
            ">gate": (gated if b["build"] == "ok" else b["build"]).replace("_", " "),
            ">timed size": (b["timed"] or "-").replace("_", " "),
        }
        rows.append(row)
        if not b["passed"]:
            refusals.setdefault(b["log"], []).append(f"{workload} {name}")
    console.print_rows(rows, ["" if b["passed"] else "red" for b in branches])
    for log, (first, *others) in refusals.items():
        console.say(f"{first}{f' and {len(others)} more' if others else ''}: {log}", "red", lines=True)
    compiled = sum(b["build"] == "ok" for b in branches)
    text = f"{record['kernel']} for {record['arch']}: {compiled} of {len(branches)} branches compiled"
    if gated := [b for b in branches if b["gate"]]:
        text += f", {sum(b['gate'] == 'ok' for b in gated)} of {len(gated)} passed the gate"
        text += f" and {counted(random_cases, 'random case')}" if random_cases else ""
        if timed := [b for b in gated if b["timed"]]:
            text += f", {sum(b['passed'] for b in timed)} of {len(timed)} at the size that is timed"
        text += f" (seed {record['seed']})"
    console.say(text)
    _print_samples(console, record["samples"], record["seed"])
    if refused := [b for b in branches if b["case"]]:
        words = "--workload", refused[-1]["workload"], "--seed", str(record["seed"]), "--case", refused[-1]["case"]
        console.say(f"to repeat the last refusal:  {again} {shlex.join(words)}")
    for untimed in record["not_timed"]:
        console.say(f"{untimed['workload']} was only gated, and not timed: {untimed['reason']}")
    _print_left_out(console, branches)
    _print_kinds(console, record)
    for fault in record["faults"]:
        console.say(fault, "bold red")
    for name in record["right_by_default_alone"]:
        what = f"every value of {name} that was tried, but {branches[0]['genome'][name]}, is refused by the gate"
        console.say(f"{what}: if {name} changes the result, take it out of the space in kernel.py", "yellow")
    for name in record["unread"]:
        console.say(f"parameter {name} changes nothing: neither the template nor a launch reads it")
    if record["compiled_only"]:
        console.say(f"compiled only: {record['compiled_only']}")


def _print_samples(console: Terminal, samples: Sequence[dict[str, Any]], seed: int) -> None:
    """Prints what is wrong with other points of the space, a line for each of which something is."""
    bad = [s for s in samples if s["faults"]]
    if samples:
        what = f"{len(bad)} with faults" if bad else "all compile, none spills"
        console.say(f"{counted(len(samples), 'other point')}, ends of the space and random ones (seed {seed}): {what}")
    for sample in bad:
        values = " ".join(f"{name}={value}" for name, value in sample["changes"].items())
        console.say(f"{values}: {'; '.join(sample['faults'])}", "yellow", lines=True)


def _print_kinds(console: Terminal, record: dict[str, Any]) -> None:
    """Prints how many cases the gate has, and of each kind, a line for all workloads with the same numbers."""
    same: dict[tuple[int, str], list[str]] = {}
    for key, found in record["kinds"].items():
        text = ", ".join(f"{number} {kind}" for kind, number in found["counts"].items())
        same.setdefault((found["cases"], text), []).append(short_workload(key, record["kernel"]))
    for (cases, text), (first, *others) in same.items():
        where = f"{first}{f' and {len(others)} more' if others else ''}"
        console.say(f"the gate has {counted(cases, 'case')} for {where}: {text}", "dim")
    for key, found in record["kinds"].items():
        if found["missing"]:
            console.say(f"{short_workload(key, record['kernel'])}: {lacks(found['missing'])}", "yellow")


# -- a recorded candidate, compiled anew ----------------------------------------------------------------------


def _check_candidate(
    recorded: CandidateRecord,
    seed: int,
    random_cases: int,
    texts: Sequence[str],
    compile_only: bool,
    db: str,
    json: bool,
) -> None:
    target = recorded.target
    why_not = why_not_here(target, recorded.arch)
    if why_not and not compile_only:
        raise DeviceError(f"{why_not}; to compile it only, add --compile-only")
    observe = None if json else CheckLines("workloads")
    kernel = recorded_kernel(recorded.kernel, None)
    cases = tuple(parse_case(kernel, target, text) for text in texts)
    # An empty cache: the compiler must make the code now.
    cache = tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-")
    with cache as folder, open_workers(target, Path(folder)) as executor:
        task = task_of(recorded, executor, seed)
        genome = Genome.of(recorded.parameters)
        results = check_candidate(
            task, genome, gate=not compile_only, cases=cases, random_cases=random_cases, observe=observe
        )
    record = {
        **_known(recorded, seed),
        "passed": all(r.passed for r in results),
        "remarks": source_remarks(recorded, results[0].build.source_digest, db) or _code_remarks(recorded, results[0].build),
        "recorded": list(verdicts_of(recorded)),
        "workloads": [_workload_record(r) for r in results],
    }
    answer(json, record, _print_candidate, db)
    if not record["passed"]:
        raise typer.Exit(1)


def _known(recorded: CandidateRecord, seed: int) -> dict[str, Any]:
    """The first keys of a record of --json. seed: the seed of the data."""
    known = {name: getattr(recorded, name) for name in ("kernel", "target", "arch")}
    return {"candidate": recorded.id, **known, "seed": seed}


def _code_remarks(recorded: CandidateRecord, now: Build) -> list[str]:
    """Remarks if the same source has become other machine code."""
    then = recorded.build
    if then is None or not then.code_hash or now.binary is None or now.binary.code_hash == then.code_hash:
        return []
    return [f"the same source, but other machine code than recorded (compiler: {then.compiler} then, {now.compiler} now)"]


def _workload_record(result: Checked) -> dict[str, Any]:
    build, measured = result.build, result.measurement
    checks = measured.checks if measured else ()
    seen = {c.case for c in checks}
    status = measured.status if measured else build.status
    return {
        "workload": result.workload.key,
        "build": str(build.status),
        "gate": str(measured.status) if measured else None,
        "passed": result.passed,
        "cases": [asdict(c) for c in checks],
        "left_out": dict(measured.left_out) if measured else {},
        "not_run": [*(name for name in result.cases if name not in seen), *result.left],
        "log": "" if status.passed else (measured.log if measured else build.log),
    }


def _print_candidate(console: Terminal, record: dict[str, Any], db: str) -> None:
    cases = [(w["workload"], c) for w in record["workloads"] for c in w["cases"]]
    rows = [
        {
            "workload": short_workload(workload, record["kernel"]),
            "case": c["case"],
            ">error": c["error"],
            ">allowed": c["allowed"],
            ">PyTorch's": c["torch_error"],
            "verdict": "ok" if c["passed"] else f"refused: {c['reason']}",
            ">data seed": c["seed"] or "",  # the data that are timed belong to no case
        }
        for workload, c in cases
        if not (c["passed"] and is_case_text(c["case"]))
    ]
    console.print_rows(rows, ["" if row["verdict"] == "ok" else "red" for row in rows])
    for w in record["workloads"]:
        name = short_workload(w["workload"], record["kernel"])
        if w["log"] and w["gate"] != "wrong":
            status = (w["gate"] if w["build"] == "ok" else w["build"]).replace("_", " ")
            console.say(f"{name}: {status}: {w['log'].strip()}", "red", lines=True)
        if w["not_run"] and w["gate"] not in (None, "ok"):
            console.say(f"{name}: {counted(len(w['not_run']), 'case')} not run after that", "dim")
    _print_left_out(console, record["workloads"])
    for remark in record["remarks"]:
        console.say(remark, "yellow")
    name = short(record["candidate"])
    for last in (w["cases"][-1] for w in record["workloads"] if w["cases"]):
        if is_case_text(last["case"]) and not last["passed"]:
            console.say(f"to repeat the last alone:  {again_line(db, name, record['seed'], last['case'])}", "red")
    for verdict in record["recorded"]:
        again = again_line(db, name, verdict["seed"], verdict["case"], verdict["random_cases"])
        console.say(
            f"recorded in the {verdict['stage']}: {verdict['passed']} of {verdict['cases']} cases passed;"
            f" to repeat it:  {again}",
        )
    ended = "passed" if record["passed"] else "did NOT pass"
    drawn = sum(is_case_text(c["case"]) for _, c in cases)
    among = f", {drawn} of them random" if drawn else ""
    what = f"{ended} ({len(cases)} cases{among}, seed {record['seed']})" if cases else f"{ended}: compiled, not gated"
    text = f"candidate {name} of {record['kernel']} for {record['arch']} {what}"
    console.say(text, "" if record["passed"] else "bold red")


# -- a recorded candidate, under sanitizers -------------------------------------------------------------------


def sanitize(
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
    limit: Annotated[float, typer.Option(help="Time limit of each tool in seconds.", min=1.0)] = 180.0,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Run a recorded candidate under sanitizers: accesses out of bounds, races, undefined behaviour, unset memory."""
    drawn = draw_seed(seed)
    records = []
    with Store.open(db, write=False) as store:
        winners = find_winners(store, candidate, db)
    for recorded in winners:
        trusted(trust, recorded.kernel)
        tools = choose_tools(recorded.target, tool)
        request = Request(
            kernel=recorded.kernel,
            target=recorded.target,
            arch=recorded.arch,
            device_arch=device_arch(find_target(recorded.target), recorded.arch),
            genome=Genome.of(recorded.parameters),
            workload=workload_of(recorded),
            seed=drawn,
        )
        with open_workers(recorded.target, cache_dir(db), Place(builders=1)) as executor:
            found = executor.sanitize(request, tools, limit).result()
        record = {
            **_known(recorded, drawn),
            "clean": all(r.clean for r in found.reports),
            "remarks": source_remarks(recorded, found.source_digest, db),
            "cases": found.cases,
            "tools": [asdict(r) | {"clean": r.clean, "seconds": round(r.seconds, 2)} for r in found.reports],
        }
        records.append(record)
        if not json:
            _print_sanitized(make_console(), record)
    if json:
        print_json(records)
    if not all(r["clean"] for r in records):
        raise typer.Exit(1)


def _print_sanitized(console: Terminal, record: dict[str, Any]) -> None:
    calls = f"{counted(len(record['cases']), 'call')}, seed {record['seed']}"
    console.say(f"candidate {short(record['candidate'])} of {record['kernel']} for {record['arch']}: {calls}")
    for remark in record["remarks"]:
        console.say(remark, "yellow")
    for t in record["tools"]:
        verdict = "clean" if t["clean"] else counted(t["errors"], "error") if t["errors"] else "wrong outputs"
        console.say(f"{t['tool']:<10} {verdict}  ({t['seconds']:.1f} s)", "" if t["clean"] else "bold red")
        messages = [*t["messages"], *(f"refused by the gate: {w}" for w in t["wrong"])]
        for message in messages[:_SHOWN]:
            console.say(f"    {message}")
        if len(messages) > _SHOWN:
            console.say(f"    and {len(messages) - _SHOWN} more", "dim")
    console.say("every message, and the command that was run for each tool: --json", "dim")


# -- the best known candidate, in a race --------------------------------------------------------------------------

_ARITHMETIC = 16
"""Operations per byte above which a kernel's rate is given in TFLOP/s instead of GB/s."""


def bench(
    kernel: Annotated[str, typer.Argument(help="A kernel's name or folder.")],
    target: TargetName = None,
    workload: Annotated[list[str] | None, typer.Option(help="Workload; else the kernel's own. Repeat for more.")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="Architecture; else the device's. Repeat to race builds, e.g. compute_89.")
    ] = None,
    genome: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE,...: time the default with these values, too. Repeat for more.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Baselines, separated by commas; all of the kernel's if left out.")
    ] = None,
    seed: Seed = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Time the best known candidate and the kernel's default against its baselines, interleaved in one race."""
    problem, chosen, first = load_context(kernel, target, arch[0] if arch else None)
    archs = [first, *(arch or [])[1:]]
    for a in archs:
        find_target(chosen).limits(a)  # raises for an unknown architecture
        if reason := find_target(chosen).runs(a):
            raise UsageError(f"code for {a} cannot be timed here: {reason}")
    workloads = check_workloads(problem, chosen, workload or [])
    names = against.split(",") if against else [b.name for b in problem.baselines if b.runs_on(chosen)]
    for name in names:
        problem.baseline(name)
    limits = find_target(chosen).limits(first)
    for w in workloads:
        for text in genome or ():
            parse_legal(text, problem.space(chosen, w, limits), "--genome")  # raises before workers are opened
    drawn = draw_seed(seed)
    records = []
    with open_workers(chosen, cache_dir(db)) as executor:
        task = TaskExecutor(
            problem=problem, executor=executor, kernel=kernel, target=chosen, arch=first, workload=workloads[0], seed=drawn
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
    """The template's default and the database's best candidate for this workload and device. A line on stderr says why a
    recorded one is left out, or that there is none."""
    space, workload = task.space, task.workload
    default = "default", Genome.of(space.complete(space.default))
    if "://" not in db and not Path(db).exists():
        return [default]
    device = device_name(task.executor.target, task.arch)
    with Store.open(db, write=False) as store:
        found = [b for b in find_best(store, target=task.target) if b.workload == workload.key]
        known = [b for b in found if is_of(store, b.kernel, b.run, task.problem)]
    known.sort(key=lambda b: (b.device != device, b.rank))
    for best in known:
        if best.device != device:
            reason = f"it was timed on {best.device}, and this is {device}; --genome with its values times those here"
        elif broken := space.violations(best.parameters):
            reason = f"the kernel's search space does not have it any more ({'; '.join(broken)})"
        else:
            return [(short(best.id), Genome.of(best.parameters)), default]
        notice(f"{short(best.id)}, found for {workload}, is left out: {reason}")
    if not known:
        nothing = f"no candidate of this kernel as it is now is recorded for {workload} in {shown(db)}"
        notice(f"{nothing}: the template's default is timed")
    return [default]


def _for_each(
    contenders: Sequence[tuple[str, Genome]], task: TaskExecutor, archs: Sequence[str]
) -> Iterator[tuple[str, str, Genome]]:
    """Triples of name, architecture and genome for each contender and architecture, the genomes without parameters that an
    architecture does not have. A genome that is even so not legal there is left out, with a line on stderr."""
    for name, genome in contenders:
        yield name, archs[0], genome
        for arch in archs[1:]:
            space = replace(task, arch=arch).space
            point = space.adapted(genome.parameters)
            if broken := space.violations(point):
                notice(f"{name} is not legal for {arch} ({'; '.join(broken)}): it is not timed there")
            else:
                yield name, arch, Genome.of(point)


def _print_race(console: Terminal, task: TaskExecutor, result: RaceResult) -> None:
    cost = task.problem.cost(task.workload)
    arithmetic = cost.flops > _ARITHMETIC * cost.bytes
    timings = sorted(result.timings, key=lambda t: t.median_us)
    rows = []
    for t in timings:
        rate = f"{cost.flops / t.median_us / 1e6:,.1f}" if arithmetic else f"{cost.bytes / t.median_us / 1e3:,.0f}"
        unit = "TFLOP/s" if arithmetic else "GB/s"
        rows.append({"contender": t.contender, **time_cells(t), f">{unit}": unless_busy(rate, t.disturbed)})
    console.say(f"{task.problem.title}, {brief_workload(task.workload, task.problem)}", "italic")
    console.print_rows(rows)
    console.say_disturbed(*(t.disturbed for t in timings))
    for name, reason in result.refused:
        console.say(f"{name} was left out: {reason}", "yellow")
