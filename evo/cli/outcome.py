"""The end of a search: one record, printed as tables or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from evo.analysis.failures import read_failures
from evo.analysis.finals import RunFinals
from evo.analysis.runs import MILESTONES, read_history
from evo.cli.best import print_finals
from evo.environment import command_line
from evo.evaluation import PASSED, Costs, Timing
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.kernel import FUNCTION_FILES, Kernel
from evo.report.progress import LONG_S, STAGES, busy_share, incidents_text
from evo.report.terminal import Terminal, timing_record
from evo.report.text import counted, short
from evo.search.finals import Finalist
from evo.search.loop import Progress
from evo.search.run import Outcome

_REASON = 300
"""Largest number of characters of a reason that are printed."""


def outcome_record(
    outcome: Outcome, run: RunFinals, started: float, store: Store, resumed_from: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The record of an ended search, as plain data.

    run: the run as the database has it. started: the time.time() at which the command began. resumed_from: the candidates
    and seconds that a run had when it was resumed; costs are without these.
    """
    search, progress = outcome.search, outcome.search.progress
    before_search_s = max(0.0, search.started_unix - started)
    searched_s = max(progress.elapsed_s, 1e-9)
    own_s = max(0.0, progress.elapsed_s - outcome.run.elapsed_s)
    device_s = max(progress.spent.device_seconds, 1e-9)
    return {
        "run": run.name,
        **{name: getattr(run, name) for name in ("kernel", "target", "arch", "device", "sampler", "seed")},
        "stopped": str(outcome.reason),
        "candidates": progress.finished,
        "search_s": round(searched_s, 2),
        "command_s": round(time.time() - started, 2),
        "candidates_per_s": round(progress.finished / searched_s, 2),
        "by_status": {str(k): v for k, v in sorted(progress.by_status.items())},
        "incidents": progress.incidents,
        "refused_in_finals": [
            {"candidate": f.id, "order": f.order, "status": f.status, "log": f.reason} for f in run.refused_in_finals
        ],
        "first_failure": next((p.id for p in read_history(store, run.name) if p.status not in PASSED), None),
        "resumed_from": resumed_from,
        "since_resumed": {"candidates": progress.finished - progress.replayed, "search_s": round(own_s, 2)}
        if resumed_from
        else None,
        "device_busy_share": None if progress.first_measured_s is None else busy_share(progress),
        "gate_share": progress.spent.gate_seconds / device_s,
        "timing_share": progress.spent.timing_seconds / device_s,
        "timing_share_of_search": progress.spent.timing_seconds / max(own_s, 1e-9),
        **evaluation_costs(progress),
        "unfinished": unfinished(progress),
        "workloads": [_workload_record(outcome, run, task, before_search_s, store) for task in range(len(run.tasks))],
    }


def _workload_record(outcome: Outcome, run: RunFinals, task: int, before_search_s: float, store: Store) -> dict[str, Any]:
    """The record of a task's finals. Unlike that of `evo show RUN`, it has all finalists, also the refused, as they ran in
    the race of all of them, and the winner as in the race that confirmed it. refused_most: the most frequent reason of
    failures, where no candidate passed."""
    held, recorded = outcome.finals[task], run.finals[task]
    reasons = () if held.finalists else read_failures(store, run.name, task=task).reasons
    known = {name: value for name, value in vars(recorded).items() if name != "task"}  # the list is sorted by task
    return known | {
        "candidates": run.tasks[task].candidates,
        "refused_most": asdict(reasons[0]) if reasons else None,
        "winner": _finalist_record(outcome, held.winner, held.winner.timing) if held.winner else None,
        "finalists": [_finalist_record(outcome, f, f.raced) for f in held.finalists],
        "baselines": {t.contender: timing_record(t) for t in recorded.baselines},
        "hot": timing_record(recorded.hot) if recorded.hot else None,
        "ties_with_winner": [one.id for one in recorded.finalists if one.tie],
        "shift": recorded.confirmed.shift if recorded.confirmed else None,
        **_milestones(outcome, task, before_search_s),
    }


def _milestones(outcome: Outcome, task: int, before_search_s: float) -> dict[str, dict[str, float]]:
    """The seconds after which the search first reached each speed-up, by speed-up ("1.1x"). reached_s: since this command
    started. reached_before_s: seconds of search, for what an earlier command of this run had reached."""
    reached, before = {}, {}
    known = [i for i in outcome.search.progress.improvements if i.task == task]
    for milestone in MILESTONES:
        first = next((i for i in known if 1 / i.ratio >= milestone), None)
        if first is not None and first.replayed:
            before[f"{milestone}x"] = round(first.elapsed_s, 2)
        elif first is not None:
            reached[f"{milestone}x"] = round(before_search_s + first.elapsed_s - outcome.run.elapsed_s, 2)
    return {"reached_s": reached, "reached_before_s": before}


def _finalist_record(outcome: Outcome, finalist: Finalist, timing: Timing | None) -> dict[str, Any]:
    return {
        "candidate": public_id(outcome.run.uid, finalist.candidate.order),
        "order": finalist.candidate.order,
        "operator": finalist.candidate.proposal.operator,
        "genome": finalist.candidate.proposal.genome.parameters,
        "status": str(finalist.measurement.status),
        "log": finalist.measurement.log,
        **(timing_record(timing) if timing else {}),
    }


def print_outcome(console: Terminal, record: dict[str, Any], run: RunFinals, kernel: Kernel, db: str) -> None:
    """Prints the finals as `evo show RUN` does, and what the search cost."""
    print_finals(console, run, db, all_finalists=False)
    for workload in record["workloads"]:
        if not workload["finalists"]:
            console.say(_why_no_finalist(workload))
    refused = f" ({len(run.refused_in_finals)} of them refused by the finals)" if run.refused_in_finals else ""
    statuses = ", ".join(
        f"{number} {status.replace('_', ' ')}{refused if status == 'ok' else ''}"
        for status, number in record["by_status"].items()
    )
    searched = f"{counted(record['candidates'], 'candidate')} in {record['search_s']:g} s ({record['candidates_per_s']:g}/s)"
    incidents = incidents_text(record["incidents"])
    console.say(f"{searched}: {statuses or 'none was finished'}; stopped: {record['stopped']}{incidents}")
    if record["incidents"].get("processes lost"):
        console.say(
            "processes lost: workers that died, or took too long and were ended; new ones took their places, and their work"
            " was tried again or is counted above as it ended",
            "dim",
        )
    if (since := record["since_resumed"]) is not None:
        console.say(f"since it was resumed: {counted(since['candidates'], 'candidate')} in {since['search_s']:g} s")
    if (costs := record["evaluation_ms"]) is not None:
        parts = " + ".join(f"{ms:g} ms {what}" for what, ms in costs.items())
        console.say(f"device busy {record['device_busy_share'] or 0:.0%} of the time; a candidate costs on average {parts}")
    following: list[tuple[str, ...]] = [("show", run.name)]
    if winners := [held.winner for held in run.finals if held.winner]:
        following.append(("lineage", short(winners[0])))
        if any((kernel.folder / file).is_file() for file in FUNCTION_FILES):
            following.append(("export", run.name, "--out", f"my_{kernel.folder.name}"))
    elif run.refused_in_finals or record["first_failure"]:
        following = [("show", short(run.refused_in_finals[0].id if run.refused_in_finals else record["first_failure"]))]
        following.append(("failures", run.name))
    console.say(f"next:  {'   '.join(command_line(db, *words) for words in following)}")


def _why_no_finalist(workload: dict[str, Any]) -> str:
    key = workload["workload"]
    if not workload["candidates"]:
        return f"no candidate of {key} was finished within the budget: give it a larger one"
    text = f"no candidate passed the gate and its timed calls for {key}"
    if (most := workload["refused_most"]) is None:
        return text
    reason = most["example"][:_REASON] or "nothing was said"
    return f"{text}; most often: {most['candidates']} {most['status'].replace('_', ' ')}: {reason}"


def unfinished(progress: Progress) -> dict[str, Any] | None:
    """The candidate that an ended search was still waiting for; None if it had not waited long."""
    order, work = progress.waiting or (None, None)
    if work is None or work.seconds < LONG_S:
        return None
    return {"order": order, "what": STAGES[work.stage], "seconds": round(work.seconds, 2)}


def evaluation_costs(progress: Progress) -> dict[str, dict[str, float] | None]:
    """The milliseconds of building (several builders at once) and of the parts of the device process's work.

    evaluation_ms: average over finished candidates, None if there are none; unfinished_ms: sum over those without a result.
    """
    number = progress.finished - progress.replayed
    whole, finished = _parts(progress.spent), _parts(progress.spent_on_finished)
    return {
        "evaluation_ms": {n: round(1e3 * s / number, 2) for n, s in finished.items()} if number else None,
        "unfinished_ms": {n: round(1e3 * max(0.0, s - finished[n]), 2) for n, s in whole.items()},
    }


def _parts(costs: Costs) -> dict[str, float]:
    known = costs.load_seconds + costs.gate_seconds + costs.timing_seconds
    return {
        "building": costs.build_seconds,
        "loading": costs.load_seconds,
        "gating": costs.gate_seconds,
        "timing": costs.timing_seconds,
        "other": max(0.0, costs.device_seconds - known),
    }
