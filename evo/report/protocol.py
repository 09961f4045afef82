"""How it was measured, on what, and how to do it again: in words, with the values that were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evo.analysis.records import RunSummary, TimingRecord
from evo.lineage.database import command_line
from evo.report.data import RunData, WorkloadData
from evo.report.findings import size
from evo.report.text import counted, percent, short

__all__ = ["command", "commands", "environment_rows", "measured_rows", "protocol_words", "setup_rows"]

_ENVIRONMENT = ("device", "arch", "driver", "cuda", "nvrtc", "compiler", "torch", "python", "evo")


def protocol_words(data: WorkloadData) -> list[str]:
    """How the figures of a workload came about, a sentence or two each."""
    said = []
    leader = data.leader
    if leader is not None and leader.checks:
        latest = max(c.round for c in leader.checks)
        cases = [c for c in leader.checks if c.round == latest]
        passed = sum(c.passed for c in cases)
        where = "the finals" if latest else "the search"
        said.append(
            f"Right first: the leader passed {passed} of {counted(len(cases), 'gate case')} in {where}, against a float64"
            " reference, with an error of at most twice PyTorch's own plus rounding."
        )
    search = next((t for t in (leader.timings if leader else ()) if t.round == 0 and t.protocol != "hot"), None)
    if search is not None:
        said.append(f"In the search: {_race_words(search)}")
    timing = data.timing
    if timing is not None and timing.stage == "final":
        said.append(
            f"In the finals: {_race_words(timing)} The finalists were gated again on other data and raced in a fresh"
            " process; the fastest ran once more, in another, beside the baselines and a second copy of itself."
        )
        if spoilt := timing.clocks.get("discarded"):
            said.append(f"Taken again, as something had disturbed them: {counted(int(spoilt), 'round')} of that race.")
        if timing.disturbed:
            said.append(
                f"Disturbed, and not taken again: {counted(int(timing.clocks['disturbed']), 'round')} of that race. Do not"
                " trust its figures."
            )
    if data.noise is not None:
        said.append(
            "Noise floor: the 95% interval of the ratio between the winner and its twin reaches"
            f" ±{percent(data.noise, 2)} from 1. A speed-up nearer to 1 than that is called a tie."
        )
    elif timing is not None:
        said.append("No noise floor was recorded: no final has timed the leader beside a second copy of itself.")
    return said


def _race_words(t: TimingRecord) -> str:
    cache = "a filled cache" if t.protocol == "hot" else "cold caches"
    calls = counted(t.calls_per_sample, "call")
    return (
        f"protocol “{t.protocol}” with {cache}, {counted(len(t.samples_us), 'round')} with the contenders taking turns,"
        f" {calls} a sample over {counted(t.sets, 'set')} of buffers."
    )


def measured_rows(data: WorkloadData) -> list[tuple[str, str]]:
    """Clocks and what else was read during the leader's last race."""
    timing = data.timing
    clocks = timing.clocks if timing else {}
    return [(name.replace("_", " "), f"{value:g}" if value is not None else "–") for name, value in clocks.items()]


def environment_rows(run: RunSummary) -> list[tuple[str, str]]:
    """What the run was measured on and with."""
    known = run.environment
    rows = [(name, str(known.get(name) or "")) for name in _ENVIRONMENT]
    rows += _flat(known.get("details") or {})
    return [(name, value) for name, value in rows if value]


def setup_rows(run: RunSummary) -> list[tuple[str, str]]:
    """How the run was set up."""
    rows = [
        ("run", run.name),
        ("kernel", run.kernel),
        ("digest of the kernel", run.kernel_digest),
        ("target", f"{run.target}, {run.arch}"),
        ("sampler", run.sampler),
        ("seed", str(run.seed)),
        ("candidates in flight", str(run.window)),
        *((f"budget, {name}", value) for name, value in _flat(run.budget)),
        *_flat(run.options),
        ("status", f"{run.status}{f': {run.stop_reason}' if run.stop_reason else ''}"),
        ("started", run.created),
        ("ended", run.finished or "–"),
    ]
    return [(name, value) for name, value in rows if value]


def _flat(record: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested names and values, a row each; what is not set is left out."""
    rows: list[tuple[str, str]] = []
    for name, value in record.items():
        title = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += _flat(value, f"{title}, ")
        elif value is not None and value != "":
            rows.append((title, str(value).lower() if isinstance(value, bool) else str(value)))
    return rows


def command(data: RunData, *words: str) -> str:
    """One to be typed, about the run's database."""
    return command_line(data.db, *words)


def commands(data: RunData) -> list[tuple[str, str]]:
    """What each is for, and the command."""
    run = data.run
    again = ["search", run.kernel, "--target", run.target, "--arch", run.arch]
    for w in data.workloads:
        again += ["--workload", w.task.workload]
    again += ["--sampler", run.sampler, "--seed", str(run.seed)]
    budget = run.budget
    if budget.get("seconds") is not None:
        again += ["--budget", f"{budget['seconds']:g}s"]
    for name in ("evaluations", "patience"):
        if budget.get(name) is not None:
            again += [f"--{name}", str(budget[name])]
    for name, value in (run.options.get("fixed") or {}).items():
        again += ["--fix", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    if run.window % 2 == 0:  # two a builder, but eight at least; another machine would take another number of them
        again += ["--builders", str(run.window // 2)]
    found = [("search again", command(data, *again))]
    for w in data.workloads:
        if w.leader is not None:
            what = f", {size(w)}" if len(data.workloads) > 1 else ""
            leader = short(w.leader.id)
            found.append((f"build the leader anew and gate it on fresh data{what}", command(data, "check", leader)))
            found.append((f"all that is known of it{what}", command(data, "show", leader)))
    if any(w.confirmed for w in data.workloads):
        name = "".join(ch if ch.isalnum() else "_" for ch in run.kernel.rstrip("/").rpartition("/")[2])
        found.append(("use it in PyTorch", command(data, "export", run.name, "--out", f"my_{name}")))
    return found
