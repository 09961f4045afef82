"""evo explain --measure: what nobody has measured yet of a candidate's edits, timed in one race and told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from evo.analysis.candidates import CandidateRecord
from evo.analysis.explanation import EditCredit, Explanation
from evo.cli.recorded import task_of
from evo.cli.search import worker_settings
from evo.cli.tables import Terminal, change_text, counted, factor, figure, interval, marked, timing_record
from evo.errors import UsageError
from evo.evaluation import Timing
from evo.problem.genome import Genome
from evo.problem.kernel import load_kernel
from evo.search.ablation import Ablation, PairedGain, measure_ablation
from evo.search.run import open_executor
from evo.targets import find_target

__all__ = ["ablation_record", "measure_edits", "tell_race"]


def measure_edits(record: CandidateRecord, found: Explanation, *, kernel_digest: str, seed: int, db: str) -> Ablation:
    """The edits of an explanation, timed in one race on this machine. kernel_digest: of the kernel as it was searched.
    Raises UsageError where the candidate's code does not run here."""
    target = find_target(record.target)
    if reason := target.runs(record.arch):
        raise UsageError(f"code for {record.arch} cannot be timed here: {reason}")
    here = target.device().name
    if here != record.device:
        typer.echo(f"evo: timed on {here}; the recorded figures are of {record.device}", err=True)
    kernel = load_kernel(record.kernel)
    if kernel.digest != kernel_digest:
        typer.echo(f"evo: kernel {kernel.name} has changed since: what its template renders now is timed", err=True)
    edits = [credit.change for credit in found.edits]
    if sys.stderr.isatty():  # nothing is shown until the end
        typer.echo(f"evo: building, gating and timing {counted(len(edits), 'edit')}; this takes a minute or more", err=True)
    with open_executor(record.target, worker_settings(record.target, db)) as executor:
        task = task_of(record, executor, seed)
        return measure_ablation(task, Genome.of(found.base), Genome.of(record.parameters), edits)


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


def tell_race(console: Terminal, found: Explanation, ablation: Ablation) -> None:
    """The way there, edit by edit, all of one race: if that was disturbed, so is every figure of it."""
    spoilt = ablation.disturbed
    again = f", {ablation.discarded} disturbed rounds taken again" if ablation.discarded else ""
    console.say(
        f"timed again from {found.base_from} at {_us(ablation.start)} us to {_us(ablation.end)} us, all in one race{again}:"
        f" {marked(factor(ablation.total.gain), spoilt)} ({interval(ablation.total.low, ablation.total.high)})",
    )
    alone = {w.edit: w for w in ablation.without}
    rows = []
    for step in ablation.path:
        row = {
            "edit": "; ".join(change_text(found.edits[edit].change) for edit in step.edits),
            ">median us": _us(step.timing),
            **_gain_cells("gain", "interval", step.gain, spoilt),
            ">taken out": "",
            "interval ": "",
        }
        if len(step.edits) == 1:
            out = alone[step.edits[0]]
            row |= _gain_cells("taken out", "interval ", out.gain, spoilt) if out.gain else {"interval ": out.reason[:60]}
        rows.append(row)
    console.print_rows(rows)
    console.say(
        "gain: over the line before, made in this order; taken out: what the finished kernel loses without that edit alone."
        " Of the same rounds, so that the machine's changes cancel",
        "dim",
    )
    console.say_disturbed(spoilt)


def _us(timing: Timing) -> str:
    return marked(figure(timing.median_us), timing.disturbed)


def _gain_cells(name: str, limits: str, gain: PairedGain, spoilt: bool) -> dict[str, str]:
    value = "tie" if gain.tie else factor(gain.gain)
    return {f">{name}": marked(value, spoilt), limits: interval(gain.low, gain.high)}
