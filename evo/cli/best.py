"""evo best, runs, watch, compare, show: the fastest candidates, the runs, and the whole record of a run or candidate."""

import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from evo.analysis.candidates import CandidateRecord, read_candidate, read_source
from evo.analysis.failures import read_failures
from evo.analysis.finals import (
    Cover,
    CoveredPoint,
    Finalist,
    RunFinals,
    WorkloadFinals,
    ceiling_note,
    read_costs,
    read_run_finals,
)
from evo.analysis.named import find_candidate, find_named
from evo.analysis.runs import (
    UNCONFIRMED,
    Best,
    ComparedRun,
    Comparison,
    ListedRun,
    SettingDifference,
    find_best,
    find_run,
    list_runs,
)
from evo.analysis.runs import compare as compare_runs
from evo.analysis.times import RelativeTime
from evo.cli.options import Db, Json, RunName, Trust, answer, print_json
from evo.cli.recorded import again_line, look, verdicts_of
from evo.environment import DEFAULT_DB, command_line
from evo.errors import StoreError, UnknownNameError, UsageError
from evo.evaluation import AA_CONTROL, FINALIST, PASSED, Timing
from evo.lineage import LATEST, RunStatus
from evo.lineage.store import Store
from evo.report.terminal import (
    Terminal,
    factor,
    figure,
    interval,
    make_console,
    marked,
    median,
    say,
    share,
    short_workload,
    speedup,
    time_cells,
    unless_busy,
)
from evo.report.text import TOO_BUSY, counted, cover_line, duration, no_winner, short, span, timed, visible


def best(
    kernel: Annotated[str | None, typer.Argument(help="Only this kernel's.")] = None,
    run: Annotated[str | None, typer.Option(help="Only of this run.")] = None,
    target: Annotated[str | None, typer.Option(help="Only for this target.")] = None,
    device: Annotated[str | None, typer.Option(help="Only on devices with this in their name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Only for this dtype.")] = None,
    workload: Annotated[str | None, typer.Option(help="Only workloads with this in their name, e.g. rows=4096.")] = None,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show the fastest candidate for every kernel, device and workload."""
    with Store.open(db, write=False) as store:
        found = find_best(store, kernel, target=target, run=run, device=device, dtype=dtype, workload=workload)
        searched = () if found else list_runs(store)
    if kernel is not None and not found and kernel not in (kernels := {r.kernel for r in searched}):
        raise UnknownNameError("kernel in this database", kernel, kernels)
    if not json:
        look(trust, *((b.kernel, b.kernel_digest) for b in found))
    if found or json:
        answer(json, found, _print_best, db)
    if not found:
        reason = f"undisturbed in this database yet; start with: {command_line(db, 'search', kernel or 'KERNEL')}"
        if any(part is not None for part in (run, target, device, dtype, workload)):
            devices = ", ".join(sorted({r.device for r in searched}))
            reason = f"here of what you ask for; devices that were searched on: {visible(devices) or 'none'}"
        say(f"evo: nothing has passed the gate and its timed calls {reason}", err=True)
        raise typer.Exit(1)


def _print_best(console: Terminal, found: Sequence[Best], db: str) -> None:
    for (kernel, device), group in groupby(found, lambda b: (b.kernel, b.device)):
        console.say(f"{kernel} on {device}", "bold")
        console.print_rows(
            {
                "workload": short_workload(b.workload, kernel, b.kernel_digest),
                "candidate": short(b.id),
                ">median": median(b.median_us, b.disturbed),
                ">interval": span(b.low_us, b.high_us, b.disturbed),
                ">speed-up": _speedup_of(b),
                ">noise": "-" if b.noise_floor is None or b.disturbed else f"±{b.noise_floor:.2%}",
                "timed in": b.stage,
                "run": b.run,
            }
            for b in group
        )
    console.say(
        "speed-up: over the reference, in the same race; interval: 95%, or the range of fewer than ten samples",
        "dim",
    )
    _say_marks(console, found, db)


def _speedup_of(b: Best) -> str:
    return marked(speedup(b.ratio, b.noise_floor, disturbed=b.disturbed), False, unconfirmed=b.unconfirmed)


def _say_marks(console: Terminal, found: Sequence[Best | ComparedRun], db: str) -> None:
    """Explains the marks at the figures."""
    said = {
        UNCONFIRMED: "? unconfirmed: the finals refused their finalists and have no winner; this is the best of what is left"
    }
    runs: dict[str, dict[str, None]] = {}
    for b in (b for b in found if b.unconfirmed):
        runs.setdefault(said.get(b.finals or "", f"? {b.finals}"), {})[b.run] = None
    for note, names in runs.items():
        console.say(f"{note}:  " + "   ".join(command_line(db, "show", run) for run in names), "bold red")
    console.say_disturbed(*(b.disturbed for b in found))


def watch(run: RunName = LATEST, db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Follow a search from another terminal until it ends: what is recorded, and what is best so far."""
    console, told, last = make_console(), None, -math.inf
    with Store.open(db, write=False) as store:
        while True:
            found = find_run(store, run)
            run = found.name  # "latest" may name another run next time
            failed = [f"{n} {status.replace('_', ' ')}" for status, n in found.counts.items() if status not in PASSED]
            counts = ", ".join([f"{found.passed} passed the search", *failed]) if found.evaluations else "none yet"
            line = f"{found.name}: {found.status}, {counted(found.evaluations, 'candidate')} ({counts})"
            if console.is_terminal and not json:
                console.clear()
                console.say(line, "bold")
                _print_best(console, find_best(store, run=run), db)
            elif line != told and (found.status != RunStatus.RUNNING or time.monotonic() - last >= _LINE_EVERY_S):
                print_json(found) if json else console.say(line)
                told, last = line, time.monotonic()
            if found.status != RunStatus.RUNNING:
                if not (console.is_terminal or json) and (last_best := find_best(store, run=run)):
                    _print_best(console, last_best, db)
                break
            time.sleep(_WATCHED_EVERY_S)


_REASON = 300
"""Largest number of characters of a reason that are printed."""

_WATCHED_EVERY_S, _LINE_EVERY_S = 2.0, 60.0
"""Seconds between two looks at a run, and between two lines where there is no terminal."""


def runs(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """List the runs, the latest first."""
    with Store.open(db, write=False) as store:
        found = list_runs(store)
    if found or json:
        answer(json, found, _print_runs, db)
    else:
        start = command_line(db, "search", "KERNEL")
        say(f"evo: no run has been recorded in this database yet; start one with: {start}", err=True)


def _print_runs(console: Terminal, found: Sequence[ListedRun], db: str) -> None:
    console.print_rows(
        {
            "run": r.name,
            "kernel": f"{r.kernel} ({r.target})",
            "device": r.device,
            "status": r.status,
            ">tried": r.evaluations,
            ">passed": r.passed - r.refused_in_finals,
            ">time": "-" if r.status == RunStatus.RUNNING and not r.elapsed_s else duration(r.elapsed_s),
            ">best": _speedup_of(r.best[0]) if r.best else "-",
            "started": f"{r.created[:16].replace('T', ' ')} UTC",
        }
        for r in found
    )
    console.say("passed: not refused, by the search or its finals; best: the run's highest speed-up", "dim")
    if stopped := next((r.name for r in found if r.status == RunStatus.INTERRUPTED), None):
        console.say(f"to continue what was interrupted:  {command_line(db, 'resume', stopped)}", "dim")
    _say_marks(console, [r.best[0] for r in found if r.best], db)


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two runs or more, or unique beginnings of their names.")],
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compare runs: best, candidates, time to a speed-up, failures, and what was set differently."""
    with Store.open(db, write=False) as store:
        found = compare_runs(store, *runs)
        kernels = {summary.kernel: summary.kernel_digest for summary in (find_run(store, row.run) for row in found.rows)}
    names = list(dict.fromkeys(row.run for row in found.rows))
    if len(names) < 2:
        raise UsageError(f"there is nothing to compare {', '.join(names) or 'it'} with; name two runs")
    if not json:
        look(trust, *kernels.items())
    answer(json, found, _print_comparison, names, db, kernels)


def _print_comparison(
    console: Terminal, found: Comparison, names: Sequence[str], db: str, kernels: Mapping[str, str]
) -> None:
    """Prints runs side by side. kernels: digests by kernel."""
    for workload, group in groupby(found.rows, lambda row: row.workload):
        rows = list(group)
        devices = {row.device for row in rows}
        name = short_workload(workload, rows[0].kernel, kernels[rows[0].kernel])
        console.say(f"{name} on {rows[0].device}" if len(devices) == 1 else name, "bold")
        console.print_rows([_speed_cells(r, devices) for r in rows])
        console.print_rows([_effort_cells(r) for r in rows])
    console.say(
        "speed-up: over the reference baseline, a tie within the noise floor; behind: the first run's speed-up over this"
        " one's, where kernel and device are the same, a tie if its interval holds 1; a second: candidates a second, without"
        " the finals; to 1.1x: seconds of search until its own figure was that",
        "dim",
    )
    _say_marks(console, found.rows, db)
    _print_settings(console, found.settings, names)


def _speed_cells(r: ComparedRun, devices: Collection[str]) -> dict[str, object]:
    """Cells of a run's speed. devices: those of all compared runs."""
    first = r.behind is None or r.behind == 1
    gain = "too busy" if r.disturbed else speedup(1 / r.speedup if r.speedup else None, r.noise_floor)
    return {
        "run": r.run,
        **({"device": r.device} if len(devices) > 1 else {}),
        "best": short(r.best) if r.best else "-",
        ">speed-up": marked(gain, r.disturbed, unconfirmed=r.unconfirmed),
        "interval": interval(r.speedup_low, r.speedup_high),
        ">median": median(r.median_us, r.disturbed),
        ">behind": "" if first else "tie" if r.tie else factor(r.behind),
        "interval ": "" if first else interval(r.behind_low, r.behind_high),
    }


def _effort_cells(r: ComparedRun) -> dict[str, object]:
    """Cells of a run's effort."""
    return {
        "run": r.run,
        ">candidates": r.candidates,
        ">a second": figure(r.candidates_per_s, 1),
        ">failures": f"{r.failures} ({share(r.failures / r.candidates)})" if r.candidates else "-",
        **{f">to {gain}": "-" if t is None else f"{t:.1f} s" for gain, t in r.reached_s.items()},
    }


def _print_settings(console: Terminal, settings: Sequence[SettingDifference], names: Sequence[str]) -> None:
    if not settings:
        console.say("they were set up alike", "dim")
        return
    console.print()
    console.print_rows(
        {"what differs": setting.name, **{name: _short(setting.values.get(name)) for name in names}} for setting in settings
    )


def _short(value: object) -> object:
    """A value as it is printed, digests cut short."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else value


def show(
    name: Annotated[
        str, typer.Argument(metavar="CANDIDATE|RUN", help="Its identifier, a run's name, or a unique beginning of one.")
    ],
    source: Annotated[bool, typer.Option("--source", help="Print the candidate's source.")] = False,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show everything that is known of a candidate; or of a run its finalists, and which of them tie with the winner."""
    with Store.open(db, write=False) as store:
        record = find_candidate(store, name, db) if source else find_named(store, name)
        if not (json or source):
            look(trust, (record.kernel, record.kernel_digest))
        if not isinstance(record, CandidateRecord):
            run = read_run_finals(store, record.name)
            answer(json, run, _print_run, db, () if json else _no_finalists(store, run), () if json else _costs(store, run))
            return
        text = read_source(store, record.id) if source else None
        origin = "" if json or source or not record.origin else _origin_of(store, record.origin)
    if json:
        print_json(record, **({} if text is None else {"text": text}))
    elif text is None:
        _print_candidate(make_console(), record, origin, db)
        _print_timings(make_console(), record)
    else:
        typer.echo(visible(text, lines=True) if sys.stdout.isatty() else text)  # a file gets the very text


def _origin_of(store: Store, start: str) -> str:
    """The origin of a start, with run, workload and speed-up if it is a candidate of this database."""
    with suppress(UnknownNameError, StoreError):
        first = read_candidate(store, start)
        workload = short_workload(first.workload, first.kernel, first.kernel_digest)
        return f"{first.id} (of run {first.run}, {workload}, {speedup(first.score)})"
    return start


def _print_candidate(console: Terminal, record: CandidateRecord, origin: str, db: str) -> None:
    facts = Table.grid(padding=(0, 2))
    status = record.status + (f" ({short(record.same_code_as)})" if record.same_code_as else "")
    parents = " and ".join(f"{short(p.id)} (#{p.order}, {speedup(p.score)})" for p in record.parents)
    failed = [c for c in record.checks if not c.passed]
    rows = {
        "candidate": f"{record.id}{'  (winner of its run)' if record.winner else ''}",
        "run": f"{record.run}, candidate {record.order}, {record.elapsed_s:.1f} s into the search",
        "kernel": f"{record.kernel}, {short_workload(record.workload, record.kernel, record.kernel_digest)}",
        "device": f"{record.device} ({record.arch})",
        "status": status + (f" in the search, refused by the finals: {record.refusal}" if record.refusal else ""),
        "made by": record.operator + (f" of {parents or origin}" if parents or origin else ""),
        "children": str(len(record.children)),
        "genome": " ".join(f"{k}={v}" for k, v in record.parameters.items()),
    }
    if b := record.build:
        rows["build"] = f"{b.status} in {b.seconds:.2f} s{' (cached)' if b.cached else ''}, {b.compiler}"
        if b.registers is not None:
            rows["resources"] = (
                f"{b.registers} registers, {b.spill_bytes} bytes spilled, shared memory {b.smem_static_bytes} +"
                f" {b.smem_dynamic_bytes} bytes" + (f", occupancy {b.occupancy:.0%}" if b.occupancy is not None else "")
            )
        if b.launch:
            rows["launch"] = f"{' '.join(f'{name}={value}' for name, value in b.launch.items())}, by its compilation"
    rows["gate"] = f"{len(record.checks) - len(failed)} of {len(record.checks)} cases passed"
    if record.log.strip():
        rows["log"] = record.log.strip()
    for name, value in rows.items():
        facts.add_row(Text(name, style="dim"), Text(visible(value, lines=True)))
    console.print(facts, highlight=False)
    for stage, last in {v["stage"]: v for v in verdicts_of(record)}.items():
        command = again_line(db, short(record.id), last["seed"], last["case"], last["random_cases"])
        console.say(f"to repeat the {stage}'s verdict:  {command}")
    for check in failed:
        drawn = f" (seed {check.seed})" if check.seed else ""  # the data that are timed belong to no case
        console.say(f"refused: {check.case}: {check.reason}{drawn}", "red")


def _print_timings(console: Terminal, record: CandidateRecord) -> None:
    """Prints the timings race by race: the candidate's, then those beside it."""
    rows = list(_timing_rows(record))
    console.print_rows(rows, ["bold" if row["contender"] == "candidate" else "" for row in rows])
    timings = [*record.timings, *(t for race in record.final_races for t in race.timings)]
    if not timings:
        return
    note = "speed-up: over the reference baseline, in the same race"
    if record.noise_floor is not None:
        spoilt = any([t.disturbed for t in timings if t.contender == AA_CONTROL][-1:])
        note += (
            ("" if spoilt else f"; a tie within ±{record.noise_floor:.2%}, the noise floor")
            + "; twin: a second copy of the winner; all finalists: the race that chose the winner, which then ran once more"
            f" (without those that lost: winner's race){'' if spoilt else '; that is the figure to quote'}"
        )
    console.say(note, "dim")
    console.say_disturbed(*(t.disturbed for t in timings))


def _timing_rows(record: CandidateRecord) -> Iterator[dict[str, object]]:
    """Rows of timings: in each final the race of all finalists, then the one that confirmed the winner, hot after cold."""
    apart = {race.round for race in record.final_races if not race.beside}  # these confirmed another candidate
    timed = [(t, "all finalists" if t.contender == FINALIST or t.round in apart else "") for t in record.timings]
    for race in record.final_races:
        timed += [(t, "" if race.beside else "winner's race") for t in race.timings if race.beside or t.protocol != "hot"]
    for t, which in sorted(timed, key=lambda row: (row[0].round, row[1] != "all finalists", row[0].protocol == "hot")):
        stage = "search" if t.round == 0 else "final" if t.round == 1 else f"final {t.round}"
        hot = t.protocol == "hot"
        yield {
            "timed in": f"{stage}, {which}" if which else stage,
            "cache": "hot" if hot else "cold",
            "contender": "candidate" if t.contender == FINALIST else t.contender,
            **time_cells(t, None if hot or t.round == 0 else record.noise_floor),
            ">samples": len(t.samples_us),
            ">calls": t.calls_per_sample,
            ">sets": t.sets,
        }


def _no_finalists(store: Store, run: RunFinals) -> list[str]:
    """What refused most, for each workload of which nothing passed."""
    found = []
    for task in (t for t in run.tasks if t.best is None and t.candidates):
        said = f"no candidate passed the gate and its timed calls for {task.workload}"
        for most in read_failures(store, run.name, task=task.number).reasons[:1]:
            reason = most.example[:_REASON] or "nothing was said"
            said += f"; most often: {most.candidates} {most.status.replace('_', ' ')}: {reason}"
        found.append(said)
    return found


def _costs(store: Store, run: RunFinals) -> list[str]:
    """What a candidate of a run cost on average."""
    building_s, device_s, gate_s, timing_s = read_costs(store, run.name)
    if not device_s:
        return []
    busy = min(1.0, device_s * run.evaluations / max(run.elapsed_s, 1e-9))
    parts = {"gate": gate_s, "timing": timing_s, "else": max(0.0, device_s - gate_s - timing_s)}
    split = ", ".join(f"{what} {duration(seconds)}" for what, seconds in parts.items())
    built = f"{duration(building_s)} to build and " if building_s else ""
    cached = "" if building_s else ", built from the cache,"
    return [
        f"a candidate{cached} took on average {built}{duration(device_s)} on the device ({split}); the device was busy"
        f" {busy:.0%} of the time"
    ]


def _print_run(console: Terminal, run: RunFinals, db: str, without: Sequence[str], costs: Sequence[str]) -> None:
    """without, costs: sentences on workloads of which nothing passed, and on the time that candidates took."""
    stopped = f": {run.stop_reason}" if run.stop_reason else ""
    console.say(f"{run.name}: {run.kernel} ({run.target}) on {run.device}, {run.status}{stopped}")
    refused = f" ({len(run.refused_in_finals)} of them refused by the finals)" if run.refused_in_finals else ""
    counts = (f"{n} {status.replace('_', ' ')}{refused if status == 'ok' else ''}" for status, n in run.counts.items())
    told = f"{counted(run.evaluations, 'candidate')} in {duration(run.elapsed_s)} of searching"
    console.say(f"{told}: {', '.join(counts) or 'none was finished'}")
    for sentence in (*costs, *without):
        console.say(sentence)
    if run.status == RunStatus.INTERRUPTED:
        console.say(f"to continue it:  {command_line(db, 'resume', run.name)}")
    _print_finals(console, run, db)


def _print_finals(console: Terminal, run: RunFinals, db: str) -> None:
    """Prints for each workload the finalists, the winner beside the baselines, and who was refused."""
    if run.cover is not None:
        _print_cover(console, run, run.cover)
    for held in run.finals:
        refused = [f for f in run.refused_in_finals if f.task == held.task]
        console.say(short_workload(held.workload, run.kernel, run.kernel_digest), "bold")
        styles = ["bold" if f.winner else "" for f in held.finalists]
        console.print_rows((_finalist_cells(f, held.noise_floor) for f in held.finalists), styles)
        _print_confirmation(console, held, command_line(db, "resume", run.name))
        if held.winner is None:
            console.say(no_winner(run, held, db), "bold red" if run.status == RunStatus.FINISHED else "")
        for f in refused:
            why = f"{f.status.replace('_', ' ')}: {f.reason}"
            console.say(f"finalist {short(f.id)} #{f.order} was refused: {why}", "red")
    if any(held.winner for held in run.finals):
        console.say(
            "The first table of a workload is the race of all finalists, on new data. It decides the winner, unless it was"
            " disturbed: then the search's times do. behind: the winner's gain over this one in that race; a tie if its"
            " interval holds 1",
            "dim",
        )
    timed = [t for h in run.finals for t in (*h.finalists, *h.baselines, h.confirmed, h.hot) if t is not None]
    console.say_disturbed(*(t.disturbed for t in timed))


def _print_cover(console: Terminal, run: RunFinals, cover: Cover) -> None:
    held = {finals.workload: finals for finals in run.finals}

    def gain(p: CoveredPoint) -> str:
        finals = held[p.workload]
        return speedup(1 / p.speedup if p.speedup else 1.0, finals.noise_floor, disturbed=finals.disturbed)

    console.print_rows(
        {
            ">variant": p.variant or "reference",
            "serves": short_workload(p.workload, run.kernel, run.kernel_digest),
            "candidate": short(p.winner),
            ">speed-up": gain(p),
            ">off the best": unless_busy(f"{p.distance:.1%}", held[p.workload].disturbed),
        }
        for p in cover.points
    )
    console.say(cover_line(cover), "bold")
    console.say(
        "off the best: its time over the fastest finalist's in the same race; reference: the replaced function was faster,"
        " and serves that workload in an export",
        "dim",
    )


def _finalist_cells(f: Finalist, noise: float | None) -> dict[str, object]:
    behind = marked("winner", f.disturbed) if f.winner else ""
    return {
        "candidate": f"{short(f.id)} #{f.order}",
        **time_cells(f, noise),
        ">behind": behind if f.behind is None else "tie" if f.tie else factor(f.behind),
        "interval  ": interval(f.behind_low, f.behind_high) if f.behind is not None else "",
        ">in the search": speedup(f.score),
    }


def _print_confirmation(console: Terminal, held: WorkloadFinals, resume: str) -> None:
    """Prints the winner beside the baselines in the race that confirmed it, and what is unusual about its figures. resume:
    the command that holds finals again."""
    again = held.confirmed
    if held.winner is None or (again is None and not held.disturbed):
        return
    if held.not_confirmed:
        console.say(f"{held.not_confirmed}; {short(held.winner)} may be wrong there", "bold red")
    if again is None:
        console.say(
            f"{short(held.winner)} ran once more ({median(held.disturbed_us, True)}): {TOO_BUSY}. To time it again when the"
            f" machine is quiet:  {resume}",
            "bold yellow",
        )
        for remark in held.remarks:
            console.say(remark, "yellow")
        return
    console.say(
        f"{'' if held.not_confirmed else 'confirmed: '}{short(held.winner)} ran once more, with the baselines, in a fresh"
        f" process: {timed(again.median_us)}, {speedup(again.ratio, held.noise_floor)}"
        + ("" if held.not_confirmed else "; that is the figure to quote"),
        "bold",
    )
    bound = next((t.median_us for t in held.baselines if t.contender == held.ceiling), None)
    raced: list[tuple[str, Timing | RelativeTime]] = [(short(held.winner), again)]
    rows = [
        {
            "contender": name,
            **time_cells(t, held.noise_floor),
            **({">of a copy": figure(t.median_us / bound, 3)} if bound else {}),
        }
        for name, t in [*raced, *((t.contender, t) for t in held.baselines)]
    ]
    console.print_rows(rows, ["bold green", *[""] * len(held.baselines)])
    if held.ceiling is not None:
        console.say(f"of a copy: its time {ceiling_note(held.ceiling)}", "dim")
    said = []
    if held.hot is not None and not held.hot.disturbed:
        said.append(f"with all data in the cache: {timed(held.hot.median_us)}, {speedup(held.hot.ratio)} PyTorch there")
    if held.noise_floor is not None:
        said.append(f"±{held.noise_floor:.2%} is the noise floor: the winner against a second copy of itself")
    if held.selection_regret is not None:
        said.append(f"the search had it at {factor(held.claimed_speedup)}: selection regret {held.selection_regret:.1%}")
    if held.discarded_rounds:
        said.append(f"{held.discarded_rounds} disturbed rounds taken again")
    if said:
        console.say("; ".join(said))
    for remark in held.remarks:
        console.say(remark, "yellow")
