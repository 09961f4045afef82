"""The end of a search: one record, printed as tables or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from evo.analysis.failures import read_failures
from evo.analysis.finals import WorkloadFinals, ceiling_note, read_finals, refused_finalists
from evo.analysis.runs import find_run, read_history
from evo.cli.options import command_line
from evo.cli.screen import LONG_S, busy_share, doing
from evo.cli.tables import Cells, make_table, marked, print_table, say, short_id, speedup, timing_record
from evo.evaluation import PASSED, Costs, Timing
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
    """Everything that is printed, as plain data.

    started: when the command began, as time.time(). resumed_from: the candidates and seconds that a run had when it was
    resumed; costs are those of what came after.
    """
    run, search, progress = outcome.run, outcome.search, outcome.search.progress
    before_search_s = max(0.0, search.started_unix - started)
    searched_s = max(progress.elapsed_s, 1e-9)
    own_s = max(0.0, progress.elapsed_s - run.elapsed_s)
    device_s = max(progress.spent.device_seconds, 1e-9)
    recorded = {f.task: f for f in read_finals(store, run.name, {f.ceiling for f in outcome.finals})}
    tried = find_run(store, run.name).tasks
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
        "first_failure": next((p.id for p in read_history(store, run.name) if p.status not in PASSED), None),
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
            {"candidates": tried[task].candidates, "refused_most": _refused_most(store, run.name, task, held)}
            | _workload_record(outcome, task, held, before_search_s, recorded[task])
            for task, held in enumerate(outcome.finals)
        ],
    }


def _refused_most(store: Store, run: str, task: int, finals: Finals) -> dict[str, Any] | None:
    """The most frequent reason why a candidate did not pass, where none did."""
    reasons = () if finals.finalists else read_failures(store, run, task=task).reasons
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
    """When the search first timed each speed-up. reached_s: in seconds from the start of this command; reached_before_s:
    before the run was resumed, in seconds of searching."""
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
        _print_workload(console, workload, finals.ceiling, record, db)
    refused = record["refused_in_finals"]
    for f in refused:
        reason = f"{f['status'].replace('_', ' ')}: {f['log']}"
        say(console, f"finalist {short_id(f['candidate'])} was refused by the finals: {reason}")
    statuses = ", ".join(_status_text(status, number, len(refused)) for status, number in record["by_status"].items())
    rate = f"{record['candidates']} candidates in {record['search_s']:g} s ({record['candidates_per_s']:g}/s)"
    say(console, f"{rate}{': ' if statuses else ''}{statuses}.")
    say(console, f"{_cost_text(record)}.")
    if left := record["unfinished"]:
        say(
            console,
            f"when it stopped, candidate {left['order']} had been {left['what']} for {left['seconds']:.0f} s, without a"
            " result",
        )
    winners = [w["winner"]["candidate"] for w in record["workloads"] if w["winner"]]
    following = []
    if winners:
        out = f"my_{Path(record['kernel']).name}"
        following = [("lineage", short_id(winners[0])), ("export", record["run"], "--out", out)]
    elif failed := refused[0]["candidate"] if refused else record["first_failure"]:
        following = [("show", short_id(failed))]
    if following:
        say(console, f"next:  {'   '.join(command_line(db, *words) for words in following)}")


def _print_workload(console: Console, workload: dict[str, Any], ceiling: str, record: dict[str, Any], db: str) -> None:
    say(console, workload["workload"], "bold")
    print_table(console, race_table(workload, ceiling))
    if ceiling:
        say(console, f"of a copy: its time {ceiling_note(ceiling)}", "dim")
    if workload["disturbed"]:
        bench = command_line(db, "bench", record["kernel"], "--workload", workload["workload"])
        say(
            console,
            "! something slowed the device down while these were timed: do not trust the figures. Stop other programs,"
            f" or let it cool, and run  {bench}",
            "bold red",
        )
    if workload["winner"] is None:
        say(console, _why_no_winner(workload, searched=bool(record["candidates"])))
    if "hot" in workload:
        hot = workload["hot"]
        us = marked(f"{hot['median_us']:.2f} us", hot["disturbed"])
        say(console, f"with all data in the cache: {us}, {hot['speedup']:.3f}x PyTorch, which has them there too")
    _print_trust(console, workload)
    for remark in workload["remarks"]:
        say(console, remark, "yellow")
    if tied := workload["ties_with_winner"]:
        many = f"{len(tied)} other finalists tie" if len(tied) > 1 else "another finalist ties"
        say(console, f"{many} with the winner:  {command_line(db, 'show', record['run'])}")
    for name, since in (
        ("reached_before_s", "of searching, before the run was resumed"),
        ("reached_s", "from the start of the command"),
    ):
        if reached := ", ".join(f"{k} after {v:g} s" for k, v in workload[name].items()):
            say(console, f"reached {reached} {since}, as the search timed it")


def _why_no_winner(workload: dict[str, Any], *, searched: bool) -> str:
    """searched: a candidate of any workload was finished."""
    key = workload["workload"]
    if not workload["candidates"]:
        return f"no candidate{f' of {key}' if searched else ''} was finished within the budget: give it a larger one"
    if workload["finalists"]:
        return f"no winner: the finals confirmed none of what passed the search for {key}"
    text = f"no candidate passed the gate and its timed calls for {key}"
    if (most := workload["refused_most"]) is None:
        return text
    reason = most["example"][:_REASON] or "nothing was said"
    return f"{text}; most often: {most['candidates']} {most['status'].replace('_', ' ')}: {reason}"


def _status_text(status: str, number: int, refused: int) -> str:
    """8 ok (2 of them refused by the finals)"""
    text = f"{number} {status.replace('_', ' ')}"
    return f"{text} ({refused} of them refused by the finals)" if status == "ok" and refused else text


def unfinished(progress: Progress) -> dict[str, Any] | None:
    """The candidate that an ended search was still waiting for, if it had waited long."""
    waiting = progress.waiting
    if waiting is None or waiting.work.seconds < LONG_S:
        return None
    return {"order": waiting.order, "what": doing(waiting.work), "seconds": round(waiting.work.seconds, 2)}


def evaluation_costs(progress: Progress) -> dict[str, dict[str, float] | None]:
    """Where time goes, in milliseconds: building (several builders at once), and the parts of the device process's work.

    evaluation_ms: of a finished candidate on average, None if there is none; unfinished_ms: of all that have no result.
    """
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


def _cost_text(record: dict[str, Any]) -> str:
    """The cost of the device and the candidates in this part of the run, and why it ended."""
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


def race_table(workload: dict[str, Any], ceiling: str) -> Cells:
    """Winner and baselines, timed interleaved in one race. ceiling: the baseline that times are compared to as a copy."""
    noise = f" ±{workload['noise_floor']:.2%}" if "noise_floor" in workload else ""
    columns = ("median us", "95% interval", f"speed-up{noise}", "95% interval ", "of a copy")
    table = make_table("contender", *columns, right=columns)
    bound = workload["baselines"].get(ceiling)
    rows = [] if workload["winner"] is None else [(short_id(workload["winner"]["candidate"]), workload["winner"])]
    for name, record in [*rows, *workload["baselines"].items()]:
        gain = speedup(record["ratio"], workload.get("noise_floor")) if "ratio" in record else "1"
        table.add_row(
            name,
            marked(f"{record['median_us']:.2f}", record["disturbed"]),
            f"{record['low_us']:.2f} to {record['high_us']:.2f}",
            marked(gain, record["disturbed"] and "speedup" in record),
            f"{record['speedup_low']:.3f} to {record['speedup_high']:.3f}" if "speedup" in record else "",
            f"{record['median_us'] / bound['median_us']:.3f}" if bound else "",
            style="bold green" if record is workload["winner"] else "",
        )
    return table
