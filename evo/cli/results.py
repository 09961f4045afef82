"""How the end of a search is told: one record, printed as tables or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evo.analysis.failures import failure_reasons, list_failures, refused_finalists
from evo.analysis.finals import WorkloadFinals, ceiling_note, read_finals
from evo.analysis.runs import candidates_by_task
from evo.cli.options import command_line
from evo.cli.screen import LONG_S, busy_share, doing
from evo.cli.tables import marked, say, short_id, speedup, timing_record, visible
from evo.evaluation import Costs, Timing
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.search.finals import Finalist, Finals
from evo.search.progress import Progress
from evo.search.run import Outcome

__all__ = ["evaluation_costs", "outcome_record", "print_outcome", "race_table", "unfinished"]

_MILESTONES = (1.1, 1.3, 1.5, 2.0)
_REASON = 300
"""Characters of a reason that are printed."""

def outcome_record(
    outcome: Outcome, started: float, store: Store, resumed_from: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that is printed, as plain data. `started`: when the command began, as time.time(). `resumed_from`: the
    candidates and seconds that a run had when it was resumed; costs are told of what came after."""
    run, search, progress = outcome.run, outcome.search, outcome.search.progress
    before_search_s = max(0.0, search.started_unix - started)
    searched_s = max(progress.elapsed_s, 1e-9)
    own_s = max(0.0, progress.elapsed_s - run.elapsed_s)
    device_s = max(progress.spent.device_seconds, 1e-9)
    recorded = {f.task: f for f in read_finals(store, run.name, {f.ceiling for f in outcome.finals})}
    tried = candidates_by_task(store, run.name)
    return {
        "run": run.name,
        "kernel": run.spec.kernel,
        "target": run.spec.target,
        "arch": run.spec.arch,
        "device": run.environment.device,
        "sampler": run.spec.sampler,
        "seed": run.spec.seed,
        "stopped": str(outcome.reason),
        "candidates": progress.finished,
        "search_s": round(searched_s, 2),
        "command_s": round(time.time() - started, 2),
        "candidates_per_s": round(progress.finished / searched_s, 2),
        "by_status": {str(k): v for k, v in sorted(progress.by_status.items())},
        "refused_in_finals": [
            {"candidate": f.id, "order": f.order, "status": f.status, "log": f.reason}
            for f in refused_finalists(store, run.name)
        ],
        "first_failure": next((f.id for f in list_failures(store, run.name, limit=1)), None),
        "resumed_from": resumed_from,
        "since_resumed": None
        if resumed_from is None
        else {"candidates": progress.finished - progress.replayed, "search_s": round(own_s, 2)},
        "device_busy_share": None if progress.first_measured_s is None else busy_share(progress),
        "gate_share": progress.spent.gate_seconds / device_s,
        "timing_share": progress.spent.timing_seconds / device_s,
        "timing_share_of_search": progress.spent.timing_seconds / max(own_s, 1e-9),
        **evaluation_costs(progress),
        "unfinished": unfinished(progress),
        "workloads": [
            {"candidates": tried.get(task, 0), "refused_most": _refused_most(store, run.name, task, held)}
            | _workload_record(outcome, task, held, before_search_s, recorded[task])
            for task, held in enumerate(outcome.finals)
        ],
    }


def _refused_most(store: Store, run: str, task: int, finals: Finals) -> dict[str, Any] | None:
    """The most frequent reason why a candidate did not pass, where none did."""
    reasons = () if finals.finalists else failure_reasons(store, run, task)
    return asdict(reasons[0]) if reasons else None


def _workload_record(
    outcome: Outcome, task: int, finals: Finals, before_search_s: float, recorded: WorkloadFinals
) -> dict[str, Any]:
    """Finalists as they ran in the race of all of them, the winner as in the one that confirmed it."""
    record: dict[str, Any] = {
        "workload": recorded.workload,
        "winner": None,
        "finalists": [_finalist_record(outcome, f, f.raced) for f in finals.finalists],
        "baselines": {t.contender: timing_record(t) for t in recorded.baselines},
        **_milestones(outcome, task, before_search_s),
        "ties_with_winner": [one.id for one in recorded.finalists if one.tie],
        "disturbed": recorded.disturbed,
        "discarded_rounds": recorded.discarded_rounds,
        "remarks": recorded.remarks,
    }
    if recorded.hot is not None:
        record["hot"] = timing_record(recorded.hot)
    if finals.winner is not None and recorded.confirmed is not None:
        record["winner"] = _finalist_record(outcome, finals.winner, finals.winner.timing)
        record["shift"] = recorded.confirmed.shift
        known = ("noise_floor", "claimed_speedup", "selection_regret", "times_ceiling", "ceiling")
        record |= {name: value for name in known if (value := getattr(recorded, name)) is not None}
    return record


def _milestones(outcome: Outcome, task: int, before_search_s: float) -> dict[str, dict[str, float]]:
    """When the search's own figure first was each speed-up: by this command, in seconds from its start; or before the run
    was resumed, in seconds of searching."""
    reached, before = {}, {}
    known = [i for i in outcome.search.progress.improvements if i.task == task]
    for milestone in _MILESTONES:
        first = next((i for i in known if 1 / i.ratio >= milestone), None)
        if first is not None and first.replayed:
            before[f"{milestone}x"] = round(first.elapsed_s, 2)
        elif first is not None:
            reached[f"{milestone}x"] = round(before_search_s + first.elapsed_s - outcome.run.elapsed_s, 2)
    return {"reached_s": reached, "reached_before_s": before}


def _finalist_record(outcome: Outcome, finalist: Finalist, timing: Timing | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "candidate": public_id(outcome.run.uid, finalist.candidate.order),
        "order": finalist.candidate.order,
        "operator": finalist.candidate.proposal.operator,
        "genome": finalist.candidate.proposal.genome.parameters,
        "status": str(finalist.measurement.status),
        "log": finalist.measurement.log,
    }
    return record | (timing_record(timing) if timing else {})


def print_outcome(console: Console, outcome: Outcome, record: dict[str, Any], db: str) -> None:
    """Tables and a few sentences; every figure is one of the record's."""
    for workload, finals in zip(record["workloads"], outcome.finals, strict=True):
        console.print(race_table(workload, finals.ceiling))
        if finals.ceiling:
            say(console, f"of a copy: its time {ceiling_note(finals.ceiling)}", "dim")
        if workload["disturbed"]:
            bench = command_line(db, "bench", record["kernel"], "--workload", workload["workload"])
            console.print(
                "! something slowed the device down while these were timed: do not trust the figures. Stop other programs,"
                f" or let it cool, and run  {bench}",
                style="bold red",
                highlight=False,
                soft_wrap=True,
            )
        if workload["winner"] is None:
            nothing = f"no candidate passed the gate and its timed calls for {workload['workload']}"
            if (most := workload["refused_most"]) is not None:
                reason = visible(most["example"][:_REASON]) or "nothing was said"
                nothing += f"; most often: {most['candidates']} {most['status'].replace('_', ' ')}: {reason}"
            if workload["finalists"]:
                nothing = f"no winner: the finals confirmed none of what passed the search for {workload['workload']}"
            if not workload["candidates"]:
                which = f" of {workload['workload']}" if record["candidates"] else ""
                nothing = f"no candidate{which} was finished within the budget: give it a larger one"
            console.print(nothing, highlight=False, markup=False, soft_wrap=True)
        if "hot" in workload:
            hot = workload["hot"]
            figure = marked(f"{hot['median_us']:.2f} us", hot["disturbed"])
            console.print(
                f"with all data in the cache: {figure},"
                f" {hot['speedup']:.3f}x PyTorch, which has them there too",
                highlight=False,
                soft_wrap=True,
            )
        _print_trust(console, workload)
        for said in workload["remarks"]:
            say(console, said, "yellow")
        if tied := workload["ties_with_winner"]:
            many = f"{len(tied)} other finalists tie" if len(tied) > 1 else "another finalist ties"
            shown = command_line(db, "show", record["run"])
            say(console, f"{many} with the winner:  {shown}")
        for name, since in (
            ("reached_before_s", "of searching, before the run was resumed"),
            ("reached_s", "from the start of the command"),
        ):
            if reached := ", ".join(f"{k} after {v:g} s" for k, v in workload[name].items()):
                console.print(f"reached {reached} {since}, as the search timed it", highlight=False)
    refused = record["refused_in_finals"]
    for f in refused:
        reason = f"{f['status'].replace('_', ' ')}: {f['log']}"
        console.print(
            f"finalist {short_id(f['candidate'])} was refused by the finals: {reason}", highlight=False, soft_wrap=True
        )
    statuses = ", ".join(_told(status, number, len(refused)) for status, number in record["by_status"].items())
    console.print(
        f"{record['candidates']} candidates in {record['search_s']:g} s ({record['candidates_per_s']:g}/s)"
        f"{': ' if statuses else ''}{statuses}.\n"
        f"{_course(record)}.",
        highlight=False,
        soft_wrap=True,
    )
    if left := record["unfinished"]:
        console.print(
            f"when it stopped, candidate {left['order']} had been {left['what']} for {left['seconds']:.0f} s, without a"
            " result",
            highlight=False,
            soft_wrap=True,
        )
    winners = [w["winner"]["candidate"] for w in record["workloads"] if w["winner"]]
    following = []
    if winners:
        out = f"my_{Path(record['kernel']).name}"
        following = [("lineage", short_id(winners[0])), ("export", record["run"], "--out", out)]
    elif failed := refused[0]["candidate"] if refused else record["first_failure"]:
        following = [("show", short_id(failed))]
    if following:
        commands = "   ".join(command_line(db, *words) for words in following)
        say(console, f"next:  {commands}")


def _told(status: str, number: int, refused: int) -> str:
    """8 ok (2 of them refused by the finals)"""
    told = f"{number} {status.replace('_', ' ')}"
    return f"{told} ({refused} of them refused by the finals)" if status == "ok" and refused else told


def unfinished(progress: Progress) -> dict[str, Any] | None:
    """The candidate that a search that was over waited for longer than for others."""
    waiting = progress.waiting
    if waiting is None or waiting.work.seconds < LONG_S:
        return None
    return {"order": waiting.order, "what": doing(waiting.work), "seconds": round(waiting.work.seconds, 2)}


def evaluation_costs(progress: Progress) -> dict[str, dict[str, float] | None]:
    """Where time goes, in milliseconds: building (in a builder, beside the others), and what the device process does.
    evaluation_ms: of a finished candidate on average, None if there is none; unfinished_ms: of all that have no result."""
    number, unfinished = progress.finished - progress.replayed, {}
    whole, finished = _parts(progress.spent), _parts(progress.spent_on_finished)
    for name, seconds in whole.items():
        unfinished[name] = round(1e3 * max(0.0, seconds - finished[name]), 2)
    average = {name: round(1e3 * seconds / number, 2) for name, seconds in finished.items()} if number else None
    return {"evaluation_ms": average, "unfinished_ms": unfinished}


def _parts(costs: Costs) -> dict[str, float]:
    known = costs.load_seconds + costs.gate_seconds + costs.timing_seconds
    return {
        "building": costs.build_seconds,
        "loading": costs.load_seconds,
        "gating": costs.gate_seconds,
        "timing": costs.timing_seconds,
        "other": max(0.0, costs.device_seconds - known),
    }


def _course(record: dict[str, Any]) -> str:
    """What the device and the candidates of this part of the run cost, and why it ended."""
    said = []
    if (since := record["since_resumed"]) is not None:
        number = since["candidates"]
        said.append(f"since it was resumed: {number} candidate{'' if number == 1 else 's'} in {since['search_s']:g} s")
    if record["device_busy_share"] is not None:
        said.append(f"device busy {record['device_busy_share']:.0%} of the time")
    if record["evaluation_ms"] is not None:
        said.append(f"a candidate costs on average {_sum(record['evaluation_ms'])}")
    elif any(record["unfinished_ms"].values()):
        spent = {what: ms for what, ms in record["unfinished_ms"].items() if ms}
        said.append(f"no candidate was finished; spent so far: {_sum(spent)}")
    return "; ".join([*said, f"stopped: {record['stopped']}"])


def _sum(parts: Mapping[str, float]) -> str:
    return " + ".join(f"{ms:g} ms {what}" for what, ms in parts.items())


def _print_trust(console: Console, workload: dict[str, Any]) -> None:
    """How far the figures can be trusted: the winner against itself, and against what the search said of it."""
    said = []
    if "noise_floor" in workload:
        said.append(f"±{workload['noise_floor']:.2%} is the noise floor: the winner against a second copy of itself")
    if "selection_regret" in workload:
        said.append(
            f"the search had it at {workload['claimed_speedup']:.3f}x: selection regret {workload['selection_regret']:.1%}"
        )
    if workload["discarded_rounds"]:
        said.append(f"{workload['discarded_rounds']} disturbed rounds taken again")
    if said:
        say(console, "; ".join(said))


def race_table(workload: dict[str, Any], ceiling: str) -> Table:
    """Winner, baselines and the ceiling among them, timed interleaved in one race."""
    table = Table(
        title=f"{workload['workload']}", title_justify="left", title_style="bold", header_style="dim", box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("contender")
    noise = f" ±{workload['noise_floor']:.2%}" if "noise_floor" in workload else ""
    for heading in ("median us", "95% interval", f"speed-up{noise}", "95% interval", "of a copy"):
        table.add_column(visible(heading), justify="right")
    bound = workload["baselines"].get(ceiling)
    rows = [] if workload["winner"] is None else [(short_id(workload["winner"]["candidate"]), workload["winner"], True)]
    rows += [(name, record, False) for name, record in workload["baselines"].items()]
    for name, record, ours in rows:
        style = "bold green" if ours else ""
        gain = speedup(record["ratio"], workload.get("noise_floor")) if "ratio" in record else "1"
        interval = f"{record['speedup_low']:.3f} to {record['speedup_high']:.3f}" if "speedup" in record else ""
        share = f"{record['median_us'] / bound['median_us']:.3f}" if bound else ""
        table.add_row(
            name,
            marked(f"{record['median_us']:.2f}", record["disturbed"]),
            f"{record['low_us']:.2f} to {record['high_us']:.2f}",
            marked(gain, record["disturbed"] and "speedup" in record),
            interval,
            share,
            style=style,
        )
    return table
