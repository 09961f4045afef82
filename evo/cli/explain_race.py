"""evo explain --measure: what nobody has measured yet of a candidate's edits, timed in one race and told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from evo.analysis.explanation import EditCredit, Explanation
from evo.cli.recorded import Recorded
from evo.cli.search import worker_settings
from evo.cli.tables import (
    DISTURBED_NOTE,
    cell,
    change_text,
    factor,
    figure,
    interval,
    make_table,
    marked,
    say,
    timing_record,
)
from evo.errors import UsageError
from evo.evaluation import Timing
from evo.problem.genome import Genome
from evo.problem.kernel import load_kernel
from evo.search.ablation import Ablation, PairedGain, measure_ablation
from evo.search.run import open_executor
from evo.search.tasks import TaskExecutor
from evo.targets import find_target

__all__ = ["ablation_record", "measure_edits", "tell_race"]


def measure_edits(recorded: Recorded, found: Explanation, *, kernel_digest: str, seed: int) -> Ablation:
    """The edits of an explanation, timed in one race on this machine. kernel_digest: of the kernel as it was searched.
    Raises UsageError where the candidate's code does not run here."""
    request, record = recorded.request, recorded.record
    target = find_target(record.target)
    if reason := target.runs(record.arch):
        raise UsageError(f"code for {record.arch} cannot be timed here: {reason}")
    here = target.device().name
    if here != record.device:
        typer.echo(f"evo: timed on {here}; the recorded figures are of {record.device}", err=True)
    kernel = load_kernel(record.kernel)
    if kernel.digest != kernel_digest:
        typer.echo(f"evo: kernel {kernel.name} has changed since: what its template renders now is timed", err=True)
    base, edits = Genome.of(found.base), [credit.change for credit in found.edits]
    if sys.stderr.isatty():  # nothing is shown until the end
        what = f"{len(edits)} edit{'s' * (len(edits) != 1)}"
        typer.echo(f"evo: building, gating and timing {what}; this takes a minute or more", err=True)
    with open_executor(record.target, worker_settings(record.target, recorded.db)) as executor:
        task = TaskExecutor(
            executor=executor,
            kernel=record.kernel,
            target=record.target,
            arch=record.arch,
            workload=request.workload,
            seed=seed,
        )
        return measure_ablation(task, base, request.genome, edits)


def ablation_record(ablation: Ablation, credits: Sequence[EditCredit]) -> dict[str, Any]:
    """As plain data, with each edit as the change that it is."""
    changes = [credit.change for credit in credits]
    return {
        "start": timing_record(ablation.start),
        "end": timing_record(ablation.end),
        "reference": {"contender": ablation.reference.contender, **timing_record(ablation.reference)},
        "gain": asdict(ablation.total),
        "without": [
            {
                "change": changes[w.edit],
                "gain": asdict(w.gain) | {"tie": w.gain.tie} if w.gain else None,
                "timing": timing_record(w.timing) if w.timing else None,
                "reason": w.reason,
            }
            for w in ablation.without
        ],
        "path": [
            {
                "changes": [changes[edit] for edit in step.edits],
                "gain": asdict(step.gain) | {"tie": step.gain.tie},
                "timing": timing_record(step.timing),
            }
            for step in ablation.path
        ],
        "disturbed": ablation.disturbed,
        "discarded_rounds": ablation.discarded,
        "races": ablation.races,
        "seconds": round(ablation.seconds, 2),
    }


def tell_race(console: Console, found: Explanation, ablation: Ablation) -> None:
    """The way there, edit by edit, all of one race: if that was disturbed, so is every figure of it."""
    spoilt = ablation.disturbed
    again = f", {ablation.discarded} disturbed rounds taken again" if ablation.discarded else ""
    say(
        console,
        f"timed again from {found.base_from} at {_us(ablation.start)} us to {_us(ablation.end)} us, all in one race{again}:"
        f" {marked(factor(ablation.total.gain), spoilt)} ({interval(ablation.total.low, ablation.total.high)})",
    )
    right = ("median us", "gain", "taken out")
    table = make_table("edit", "median us", "gain", "interval", "taken out", "interval ", right=right)
    alone = {w.edit: w for w in ablation.without}
    for step in ablation.path:
        changes = "; ".join(change_text(found.edits[edit].change) for edit in step.edits)
        out = alone[step.edits[0]] if len(step.edits) == 1 else None
        table.add_row(
            cell(changes),
            _us(step.timing),
            marked(_gain(step.gain), spoilt),
            interval(step.gain.low, step.gain.high),
            "" if out is None else marked(_gain(out.gain), spoilt and out.gain is not None),
            "" if out is None else interval(out.gain.low, out.gain.high) if out.gain else cell(out.reason[:60]),
        )
    console.print(table)
    say(
        console,
        "gain: over the line before, made in this order; taken out: what the finished kernel loses without that edit alone."
        " Of the same rounds, so that the machine's changes cancel",
        "dim",
    )
    if spoilt:
        held = f"; it was so in {ablation.races} races in a row" if ablation.races > 1 else ""
        note = f"{DISTURBED_NOTE}{held}. Stop other programs, or measure on a quiet machine"
        say(console, note, "bold red")


def _us(timing: Timing) -> str:
    return marked(figure(timing.median_us), timing.disturbed)


def _gain(gain: PairedGain | None) -> str:
    return factor(None) if gain is None else "tie" if gain.tie else factor(gain.gain)
