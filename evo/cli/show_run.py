"""evo show RUN: the finalists of each of a run's workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from evo.analysis import queries
from evo.analysis.finalists import QUOTED, TWO_RACES, Finalist, WorkloadFinals, finals, shift_sentence
from evo.analysis.records import Failure, RunSummary
from evo.cli.cells import cell, factor, figure, interval
from evo.cli.options import command_line
from evo.cli.tables import DISTURBED_NOTE, Cells, make_table, marked, print_table, say, short_id, speedup
from evo.lineage import RunStatus
from evo.lineage.store import Store

__all__ = ["RunFinals", "print_run", "read_run", "run_json"]


@dataclass(frozen=True, kw_only=True)
class RunFinals:
    """A run, its finals by workload, and whom they refused."""

    run: RunSummary
    finals: tuple[WorkloadFinals, ...]
    refused: tuple[Failure, ...]


def read_run(store: Store, name: str) -> RunFinals:
    """Raises UnknownNameError, or StoreError for an ambiguous name."""
    run = queries.run(store, name)
    return RunFinals(run=run, finals=finals(store, run.name), refused=queries.refused_finalists(store, run.name))


def run_json(found: RunFinals) -> dict[str, Any]:
    return asdict(found.run) | {
        "finals": [asdict(f) for f in found.finals],
        "refused_in_finals": [asdict(f) for f in found.refused],
    }


def print_run(console: Console, found: RunFinals, db: str) -> None:
    run = found.run
    stopped = f": {run.stop_reason}" if run.stop_reason else ""
    say(
        console,
        f"{run.name}: {run.kernel} ({run.target}) on {run.device}, {run.status}{stopped}; {run.evaluations} candidates in"
        f" {run.elapsed_s:.0f} s, {run.passed} passed the search",
    )
    if run.status == RunStatus.INTERRUPTED:
        say(console, f"to continue it:  {command_line(db, 'resume', run.name)}")
    for held in found.finals:
        say(console, held.workload, "bold")
        if held.finalists:
            print_table(console, _table(held))
            _print_confirmation(console, held)
        if held.winner is None:
            _print_best(console, found, held, db)
        _print_refused(console, [f for f in found.refused if f.task == held.task])
    everyone = [f for held in found.finals for f in held.finalists]
    if any(held.winner and held.one_race for held in found.finals):
        say(
            console,
            "all figures of a table are of one race; behind: the winner's speed-up over this one's, round by round in the"
            " race of all finalists, a tie where the interval of that holds 1, as in evo diff",
            "dim",
        )
    marks = [held.confirmed.disturbed for held in found.finals if held.confirmed is not None and held.one_race]
    if any(marks) or any(f.disturbed for f in everyone):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


def _print_best(console: Console, found: RunFinals, held: WorkloadFinals, db: str) -> None:
    """Why there is no winner, and what there is instead."""
    run = found.run
    refused = any(f.task == held.task for f in found.refused)
    best = run.tasks[held.task].best
    shown = command_line(db, "show", short_id(best)) if best else ""
    left, style = "the best that they have not refused" if refused else "the best so far", ""
    if not held.finalists and not refused:
        reason = "no final has timed a candidate"
        left = "its best so far"
    elif run.status != RunStatus.FINISHED:
        reason = "the finals are not over"
    else:
        reason, style = "the finals confirmed nobody", "bold red"
    say(console, f"{reason}{f'; {left}: {shown}' if shown else ''}", style)


def _table(found: WorkloadFinals) -> Cells:
    right = ("median us", "speed-up", "behind", "in the search")
    noise = f" ±{found.noise_floor:.2%}" if found.noise_floor is not None else ""
    heading = f"speed-up{noise}"
    table = make_table(
        "candidate", "median us", "interval", heading, "interval ", "behind", "interval  ", "in the search",
        right=(*right, heading),
    )  # fmt: skip
    for f in found.finalists:
        table.add_row(
            cell(f"{short_id(f.id)} #{f.order}"),
            marked(figure(f.median_us), f.disturbed),
            interval(f.low_us, f.high_us, 2),
            marked(speedup(f.ratio, found.noise_floor), f.disturbed),
            interval(1 / f.ratio_high, 1 / f.ratio_low) if f.ratio_low and f.ratio_high else "",
            _behind(f),
            interval(f.behind_low, f.behind_high) if f.behind is not None else "",
            speedup(f.score),
            style="bold" if f.winner else "",
        )
    return table


def _print_confirmation(console: Console, found: WorkloadFinals) -> None:
    """The figure to quote, and what sets it apart from those of the table."""
    again = found.confirmed
    if again is None:
        return
    if not found.one_race:
        say(console, TWO_RACES, "yellow")
        return
    won = next(f for f in found.finalists if f.winner)
    limits = f" ({interval(1 / again.ratio_high, 1 / again.ratio_low)})" if again.ratio_low and again.ratio_high else ""
    gain = marked(f"{speedup(again.ratio, found.noise_floor)}{limits}", again.disturbed)
    say(
        console,
        f"confirmed: {short_id(won.id)} ran once more, alone with the baselines, in a fresh process and on other data:"
        f" {figure(again.median_us)} us ({interval(again.low_us, again.high_us, 2)}), {gain}; {QUOTED[again.disturbed]}",
        "bold",
    )
    if again.shift is not None:
        say(console, shift_sentence(again.shift), "yellow")


def _behind(f: Finalist) -> str:
    return "winner" if f.winner else "" if f.behind is None else "tie" if f.tie else factor(f.behind)


def _print_refused(console: Console, refused: Sequence[Failure]) -> None:
    for f in refused:
        say(console, f"finalist {short_id(f.id)} #{f.order} was refused: {f.status.replace('_', ' ')}: {f.reason}", "red")
