"""The end of a search: one record, printed as tables or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from evo.analysis.failures import read_failures
from evo.analysis.finals import Confirmation, RunFinals, WorkloadFinals
from evo.analysis.runs import MILESTONES, read_history
from evo.environment import command_line
from evo.evaluation import PASSED, UNCHECKED, Costs, Timing
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.kernel import FUNCTION_FILES, Kernel, Workload
from evo.report.progress import LONG_S, STAGES, busy_share, incidents_text
from evo.report.terminal import Terminal, brief_workload, speedup, timing_record
from evo.report.text import counted, cover_line, no_winner, reference_of, short, timed
from evo.search.finals import Finalist
from evo.search.loop import Progress
from evo.search.run import Outcome

_REASON = 120
"""Largest number of characters of a reason that are printed."""
_FEW = 3
"""Number of workloads of which each has a line."""


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
    """Prints in six lines at most what was found and what to do next; `evo show RUN` has the rest."""
    if run.cover is not None:
        console.say(cover_line(run.cover), "bold")
    held = sorted(run.finals, key=_rank)
    names = [brief_workload(Workload.of(task.dims, task.dtype, task.options), kernel) for task in run.tasks]
    if len(held) == 1:
        _print_only(console, names[0], held[0], run, record["workloads"][0]["refused_most"], db)
    elif len(held) <= _FEW:
        for one in run.finals:
            console.say(_in_one_line(names[one.task], one))
    else:
        sure = [h for h in held if h.confirmed is not None]
        won = sum(h.winner is not None for h in held)
        busy = f", {won - len(sure)} of them too busy to measure" if won > len(sure) else ""
        rest = "" if run.cover is not None else f"; all of them:  {command_line(db, 'best', '--run', run.name)}"
        console.say(f"{won} of {len(held)} workloads have a winner{busy}{rest}")
        for name, one in {"best": sure[0], "worst": sure[-1]}.items() if sure else ():
            console.say(f"{name} {_in_one_line(names[one.task], one)}")
    confirmed = any(h.confirmed is not None for h in held)
    if not confirmed and any(h.winner for h in held):
        again = command_line(db, "resume", run.name)
        why = "no speed-up was shown, for other programs disturbed the race"
        console.say(f"{why}; on a quiet machine run:  {again}", "bold")
    beside = next((h.baselines for h in held if h.baselines), ())
    if confirmed and len(held) > 1 and run.cover is None and beside:
        others = "".join(f", beside {t.contender}" for t in beside if t.ratio is not None)
        console.say(f"speed-up over {reference_of(beside)} with its interval, ± noise floor{others}", "dim")
    refused = f", {len(run.refused_in_finals)} of them refused by the finals" if run.refused_in_finals else ""
    console.say(
        f"{counted(record['candidates'], 'candidate')} in {record['search_s']:g} s, {run.passed} passed the search{refused}:"
        f" {record['stopped']}{incidents_text(record['incidents'])}"
    )
    following: list[tuple[str, ...]] = [("show", run.name)]
    if winners := [h for h in run.finals if h.winner]:
        if confirmed and any(h.confirmed is None for h in winners):
            following = [("resume", run.name), *following]
        if any((kernel.folder / file).is_file() for file in FUNCTION_FILES):
            following.append(("export", run.name, "--out", f"my_{kernel.name}"))
    elif run.refused_in_finals or record["first_failure"]:
        following = [("show", short(run.refused_in_finals[0].id if run.refused_in_finals else record["first_failure"]))]
        following.append(("failures", run.name))
    console.say(f"next:  {'   '.join(command_line(db, *words) for words in following)}")


def _rank(held: WorkloadFinals) -> tuple[bool, float]:
    return held.confirmed is None, held.confirmed.ratio if held.confirmed is not None else 0.0


def _speed(held: WorkloadFinals, times: Confirmation, over: str = "") -> str:
    """A winner's speed-up with its interval and its noise floor."""
    noise = "" if held.noise_floor is None else f" ±{held.noise_floor:.2%}"
    within = f" ({1 / times.ratio_high:.3f} to {1 / times.ratio_low:.3f})" if times.ratio_low and times.ratio_high else ""
    return f"{speedup(times.ratio, held.noise_floor)}{over}{within}{over and noise and ', noise floor'}{noise}"


def _print_only(
    console: Terminal, name: str, held: WorkloadFinals, run: RunFinals, refused_most: Mapping[str, Any] | None, db: str
) -> None:
    """Prints what was found for the only workload. refused_most: as in the record."""
    if held.winner is None:
        console.say(f"no winner for {name}: {no_winner(run, held, db)}", "bold red")
        if most := refused_most:
            reason = most["example"][:_REASON] or "nothing was said"
            console.say(f"most often: {most['candidates']} {most['status'].replace('_', ' ')}: {reason}")
        elif refused := next((f for f in run.refused_in_finals if f.task == held.task), None):
            console.say(f"{short(refused.id)} was refused: {refused.status.replace('_', ' ')}: {refused.reason[:_REASON]}")
        return
    unchecked = "; not all could be checked" if any(UNCHECKED in remark for remark in held.remarks) else ""
    winner, found = f"winner {short(held.winner)} for {name}", held.confirmed
    if held.not_confirmed:
        console.say(held.not_confirmed, "bold red")
    if found is None:
        console.say(f"{winner}: too busy to measure{unchecked}", "bold yellow")
        return
    console.say(f"{winner}: {timed(found.median_us)}{unchecked}", "bold")
    tie = speedup(found.ratio, held.noise_floor) == "tie"
    console.say(_speed(held, found, f" {'with' if tie else 'the speed of'} {reference_of(held.baselines)}"), "bold green")
    beside = ", ".join(f"{t.contender} {timed(t.median_us)}" for t in held.baselines)
    console.say(f"in one race with {beside}, caches cold")


def _in_one_line(name: str, held: WorkloadFinals) -> str:
    if held.winner is None:
        return f"{name}: no winner"
    found = f"{name}: candidate {short(held.winner)}"
    if held.confirmed is None:
        return f"{found}, too busy to measure"
    doubt = ", not confirmed" if held.not_confirmed else ""
    return f"{found}, {timed(held.confirmed.median_us)}, {_speed(held, held.confirmed)}{doubt}"


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
