"""The output of a search: while it runs a live screen on a terminal, plain lines elsewhere; at its end one record, printed
as tables or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evo.analysis.failures import read_failures
from evo.analysis.finals import RunFinals
from evo.analysis.runs import MILESTONES, read_history
from evo.cli.best import print_finals
from evo.cli.options import command_line
from evo.cli.tables import Terminal, make_table, say, timing_record
from evo.evaluation import PASSED, Costs, Status, Timing
from evo.executors import InFlight
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.kernel import FUNCTION_FILES, Kernel
from evo.problem.space import Point
from evo.report.text import counted, duration, short
from evo.search.finals import Finalist
from evo.search.loop import Budget, Improvement, Progress
from evo.search.run import Outcome

LINE_EVERY_S = 5.0

ENDING = "ending when what is being timed is done, in 10 s at most; a second signal ends it at once"

_REASON = 300
"""Largest number of characters of a reason that are printed."""

LONG_S = 3.0
"""Seconds in flight after which a candidate is named."""

_STAGES = {
    "asked": "at the cluster",
    "build": "being compiled",
    "ready": "held up, until the device and its data are ready,",
    "gate": "in the gate",
    "timing": "being timed",
}


class LineTimer:
    """Tells when the next line on progress is due: every five seconds, after a minute every minute."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= (LINE_EVERY_S if now - self._began < 60 else 12 * LINE_EVERY_S)
        self._last = now if due else self._last
        return due


class PlainLines(nullcontext[None]):
    """Prints a line whenever something better is found, and one every five seconds, after a minute every minute; nothing on
    a quiet console."""

    def __init__(self, console: Console, workloads: Sequence[str]) -> None:
        super().__init__()
        self._console, self._workloads = console, workloads
        self._improvements, self._timer = 0, LineTimer()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        new = progress.improvements[self._improvements :]
        kept = {found.task: found for found in new if found.replayed}
        for found in new:
            if found.replayed and found is not kept[found.task]:
                continue  # only the best from before the run was resumed is printed
            workload = self._workloads[found.task]
            before = "kept from before: " if found.replayed else ""
            self.say(f"{found.elapsed_s:7.1f} s  {workload}: {before}candidate {found.order} is {_about(found)} PyTorch")
        self._improvements = len(progress.improvements)
        if self._timer.is_due():
            waiting = _waiting(progress)
            self.say(f"{progress.elapsed_s:7.1f} s  {_counts(progress)}{waiting and f' | {waiting}'}")


class JsonLog:
    """Appends a line of JSON to a file for each message and improvement, and for the progress, as often as `PlainLines`."""

    def __init__(self, path: Path, run: str, workloads: Sequence[str]) -> None:
        self._path, self._run, self._workloads = path, run, workloads
        self._improvements, self._timer, self._ending = 0, LineTimer(), False
        self._write("begun")

    def end(self, text: str, outcome: Outcome | None) -> None:
        """outcome: None if the search was interrupted."""
        finals = zip(self._workloads, outcome.finals, strict=False) if outcome is not None else ()
        winners = [
            {"workload": workload, "order": held.winner.candidate.order, "speedup": timing.speedup}
            for workload, held in finals
            if held.winner and (timing := held.winner.timing) and timing.ratio
        ]
        self._write("ended", text=text, winners=winners)

    def _write(self, event: str, **more: Any) -> None:
        record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, "run": self._run, **more}
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:  # a full disk must not end a long search
            file.write(json.dumps(record) + "\n")

    def say(self, text: str) -> None:
        self._write("said", text=text)

    def update(self, progress: Progress) -> None:
        if progress.interrupted and not self._ending:
            self._ending = True
            self.say(ENDING)
        for found in (f for f in progress.improvements[self._improvements :] if not f.replayed):
            workload, gain = self._workloads[found.task], 1 / found.ratio
            self._write("better", elapsed_s=found.elapsed_s, workload=workload, order=found.order, speedup=gain)
        self._improvements = len(progress.improvements)
        if self._timer.is_due():
            status = {str(status): count for status, count in progress.by_status.items()}
            self._write(
                "progress",
                elapsed_s=progress.elapsed_s,
                finished=progress.finished,
                by_status=status,
                building=progress.building,
                measuring=progress.measuring,
                incidents=progress.incidents,
            )


class LiveScreen:
    """A screen, drawn in place, of the best so far, rate, states, failures by kind, busy share and time left. It owns the
    terminal while it is entered."""

    def __init__(self, console: Console, title: str, workloads: Sequence[str], budget: Budget) -> None:
        self._console, self._title = console, title
        self._workloads, self._budget = workloads, budget
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._shown = 0.0

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.update(Panel(Text(text), title=self._title, border_style="cyan"), refresh=True)

    def update(self, progress: Progress) -> None:
        if time.monotonic() - self._shown < 0.1:
            return
        self._shown = time.monotonic()
        self._live.update(Panel(self._body(progress), title=self._title, border_style="cyan"))

    def _body(self, progress: Progress) -> Group:
        best = make_table("workload", ">best", ">speed-up", "candidate")
        for task, workload in enumerate(self._workloads):
            if found := progress.best.get(task):
                us = f"about {found.timing.median_us:.3g} us"
                best.add_row(workload, us, Text(_about(found), style="bold green"), f"#{found.order}")
            else:
                best.add_row(workload, "…", "…", "")
        share, left = self._time_left(progress)
        bar = ProgressBar(total=1.0, completed=share, width=40)
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(left))
        told = (_waiting(progress), ENDING if progress.interrupted else "")
        waiting = [Text(text, style="yellow") for text in told if text]
        failures = Text(_failures(progress), style="yellow")
        return Group(best, Text(), line, Text(_counts(progress)), failures, *waiting)

    def _time_left(self, progress: Progress) -> tuple[float, str]:
        budget = self._budget
        if budget.seconds is not None:
            left = max(0.0, budget.seconds - progress.elapsed_s)
            return min(1.0, progress.elapsed_s / budget.seconds), f"{duration(left)} left"
        if budget.evaluations is not None:
            share = progress.finished / budget.evaluations
            left_s = progress.elapsed_s * (1 / share - 1) if share > 0 else 0.0
            return min(1.0, share), f"{progress.finished} of {budget.evaluations}, about {duration(left_s)} left"
        return 0.0, f"until {budget.patience} in a row bring nothing better"


class CheckLines:
    """Prints the progress of a check on stderr. what: the things that are counted, in the plural."""

    def __init__(self, what: str) -> None:
        self._what, self._timer = what, LineTimer()

    def __call__(self, done: int, count: int, work: InFlight | None, changes: Point) -> None:
        if not self._timer.is_due():
            return
        text = f"{done} of {count} {self._what} done"
        if work is not None and work.seconds >= LONG_S:
            values = " ".join(f"{k}={v}" for k, v in changes.items())
            text += f"; waiting for {work.workload}{values and f' with {values}'}: {told(work)}"
        say(f"evo: {text}", err=True)


def _about(found: Improvement) -> str:
    """A speed-up with two digits: the best of many short races is partly the luckiest, and the finals tell more."""
    return f"about {1 / found.ratio:.2g}x"


def busy_share(progress: Progress) -> float:
    """The share of the time since the first measurement in which the devices' processes worked, unfinished work included."""
    if progress.first_measured_s is None:
        return 0.0
    _, work = progress.waiting or (None, None)
    on_it = work.seconds if work is not None and work.stage in ("gate", "timing") else 0.0
    since_s = max(progress.elapsed_s - progress.first_measured_s, 1e-9)
    return min(1.0, (progress.spent.device_seconds + on_it) / (since_s * progress.devices))


def _counts(progress: Progress) -> str:
    rate = progress.finished / progress.elapsed_s if progress.elapsed_s else 0.0
    passed = "" if any(s.passed for s in progress.by_status) else ", none passed" if progress.by_status else ""
    return (
        f"{progress.finished} candidates{passed}, {rate:.1f}/s | building {progress.building}, measuring"
        f" {progress.measuring} | device busy {busy_share(progress):.0%}{_incidents(progress.incidents)}"
    )


def _incidents(counts: Mapping[str, int]) -> str:
    return "".join(f" | {name}: {count}" for name, count in counts.items())


def _waiting(progress: Progress) -> str:
    """A sentence on the candidate that the search has waited for long, or on what it waits for before its time begins."""
    order, work = progress.waiting or (None, None)
    if not progress.begun and order is not None:
        return "the device and its data are being made ready, and the time of the budget has not begun"
    return "" if work is None or work.seconds < LONG_S else f"waiting for candidate {order}: {told(work)}"


def told(work: InFlight) -> str:
    """The state of work in flight: "in the gate for 12 s; ended if there is no result within 18 s more"."""
    again = ", for the second time, in a fresh process" if work.again else ""
    left = "" if work.left_s is None else f"; ended if there is no result within {work.left_s:.0f} s more"
    return f"{_STAGES[work.stage]} for {work.seconds:.0f} s{again}{left}"


def _failures(progress: Progress) -> str:
    failed = {s: n for s, n in sorted(progress.by_status.items()) if not s.passed}
    same = progress.by_status.get(Status.SAME_CODE, 0)
    parts = [f"{n} {s.value.replace('_', ' ')}" for s, n in failed.items()]
    if same:
        parts.append(f"{same} with machine code seen before")
    return "refused: " + ", ".join(parts) if failed else ", ".join(parts)


# -- the end of a search --------------------------------------------------------------------------------------


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
    """The times at which the search first reached each speed-up. reached_s: seconds from the start of this command;
    reached_before_s: seconds of searching, for those before the run was resumed."""
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
    incidents = _incidents(record["incidents"])
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
    return {"order": order, "what": _STAGES[work.stage], "seconds": round(work.seconds, 2)}


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
