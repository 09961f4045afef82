"""Sentences and rows of a report: what a run found, how it was measured, and how to repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evo.analysis.importance import Importance, undersampled
from evo.lineage.database import command_line
from evo.report.text import counted, duration, micro, short, times, value_text

if TYPE_CHECKING:  # `evo importance` needs none of it
    from evo.analysis.descent import Kin
    from evo.analysis.outcome import RunOutcome, WorkloadOutcome
    from evo.analysis.runs import TaskSummary

__all__ = ["commands", "hardly_tried", "headline", "importance_gap", "remarks", "rows", "run_headline", "size", "subject"]

# What was found


def size(task: TaskSummary) -> str:
    """A workload in short: 4096 × 4096 float16."""
    return f"{' × '.join(str(v) for v in task.dims.values())} {task.dtype}"


def subject(kernel: str, tasks: Sequence[TaskSummary]) -> str:
    """What was searched, in short: the kernel, and its workload if there is one only."""
    name = kernel.rstrip("/").rpartition("/")[2]
    return f"{name}, {size(tasks[0])}" if len(tasks) == 1 else name


def headline(data: WorkloadOutcome) -> str:
    """One sentence on what was found for a workload."""
    timing = data.timing
    if not data.number:
        return "Nothing was evaluated."
    if data.leader is None or timing is None or not timing.ratio:
        passed = int(data.passed.sum())
        if data.refused:
            return f"No winner: the finals refused {counted(len(data.refused), 'finalist')}."
        return (
            f"Nothing was found: of {counted(data.number, 'candidate')} {passed or 'none'} passed the gate and its timed"
            " calls."
        )
    if data.busy:
        return "Not measured: the machine was too busy."
    reference = next((t.contender for t in data.baselines if t.ratio is None), "torch")
    name = "PyTorch" if reference == "torch" else reference
    if data.tie:
        return f"A tie with {name}: the difference is within the noise floor."
    if data.finals.not_confirmed and timing.stage == "final":
        return f"{times(timing.ratio)} the speed of {name}, {data.finals.not_confirmed}."
    if not data.confirmed or timing.stage != "final":
        return f"{times(timing.ratio)} {name} by the search's own timing, not confirmed by finals."
    if timing.ratio > 1:
        return f"Nothing faster than {name}: the best has {times(timing.ratio)} of its speed."
    return f"{times(timing.ratio)} the speed of {name}."


def run_headline(run: RunOutcome) -> str:
    """The title of the report."""
    known = [w for w in run.workloads if w.timing and w.timing.ratio]
    told = known if len(known) == 1 else run.workloads
    name = subject(run.run.kernel, [w.task for w in told])
    if len(told) == 1:
        return f"{name}: {headline(told[0])[:1].lower()}{headline(told[0])[1:]}".rstrip(".")
    if not known:
        return f"{name}: nothing was found"
    ratios = sorted(w.timing.ratio for w in known if w.timing and w.timing.ratio and not w.busy)
    if not ratios:
        return f"{name}: not measured, the machine was too busy"
    sure = "" if all(not w.finals.not_confirmed for w in known) else ", not all of them confirmed"
    return f"{name}: {times(ratios[-1])} to {times(ratios[0])} on {counted(len(known), 'workload')}{sure}"


def remarks(data: WorkloadOutcome) -> list[str]:
    """Sentences that belong beside the table of the race."""
    said = []
    if data.timing is not None and data.timing.stage != "final" and not data.busy:
        said.append(
            "No finals have timed this candidate: the figure is the search's own, which is too good on average for the best"
            " of many."
        )
    said += [f"{one[:1].upper()}{one[1:]}." for one in (data.finals.not_confirmed, *data.finals.remarks) if one]
    if (hot := data.finals.hot) is not None and not hot.disturbed:
        gain = f", {times(hot.ratio)} the reference, which has them there too" if hot.ratio else ""
        said.append(f"With all data in the cache: {micro(hot.median_us)} µs{gain}.")
    for f in data.refused:
        why = f"{f.status.replace('_', ' ')}: {f.reason}"
        said.append(f"Finalist {short(f.id)} (#{f.order}) was refused by the finals: {why}")
    return said


# What mattered


def importance_gap(data: WorkloadOutcome) -> str:
    """Why the importance of no parameter is known; empty where some is."""
    if data.important:
        return ""
    return "; ".join(dict.fromkeys(i.note for i in data.importance if i.note)) or "no candidate has a time"


def hardly_tried(records: Sequence[Importance]) -> str:
    """A sentence on the values of one workload's most important parameters that the run has hardly tried; empty without any.
    """
    parts = []
    for one in undersampled(records):
        fared = f"best {times(one.best)}" if one.best else "none with a time"
        parts.append(f"{one.parameter}={value_text(one.value)} ({one.candidates:,} of {one.of:,}, {fared})")
    return f"Tried least of what mattered most: {', '.join(parts)}." if parts else ""


def is_sure(step: Kin) -> bool:
    """Whether a step's gain over its first parent is known, and nothing disturbed the race of either."""
    return step.gain is not None and step.score is not None and step.parents[0].score is not None


_WORDS = {
    "arch": "architecture", "budget.evaluations": "budget of candidates", "cache_bytes": "last-level cache",
    "cpu_mhz": "clock of the cores", "created": "started", "cuda": "CUDA", "cuda_driver": "CUDA",
    "discarded": "disturbed rounds left out", "disturbed": "disturbed rounds kept", "driver": "driver or system",
    "elapsed_s": "time of searching", "evaluations": "candidates", "finalists": "finalists, at most",
    "gate_seed": "seed of the gate's data", "high_us": "95% interval, to", "kernel_digest": "digest of the kernel",
    "l2_bytes": "L2 cache", "load": "load of the machine", "low_us": "95% interval, from",
    "max_in_flight": "candidates in flight, at most", "median_us": "median time", "memory_bytes": "memory",
    "memory_mhz": "clock of the memory", "name": "run", "nvrtc": "NVRTC", "origins": "starts taken from",
    "passed": "passed the gate", "patience": "budget of candidates without a gain", "pci_bus": "PCI address",
    "power_w": "power", "python": "Python", "ratio": "time over the reference's",
    "ratio_high": "95% interval of that, to", "ratio_low": "95% interval of that, from",
    "sanitize_finals": "finals under the memory checker", "seconds": "budget of time", "seed": "seed of the proposals",
    "sets": "sets of data", "sm_mhz": "clock of the multiprocessors", "starts": "started from",
    "stop_reason": "ended because", "temperature_c": "temperature",
    "throttle_reasons": "bits of NVML's reasons for lower clocks", "torch": "PyTorch", "updated": "last written",
}  # fmt: skip
"""What a report calls the names of records that do not speak for themselves."""
_GROUPS = {"counts": "ended as ", "fixed": "fixed ", "missing_kinds": "no gate case, ", "sampler": "sampler option "}
"""What a report writes before names in a group; before those of others, nothing."""
_UNITS = {"us": "µs", "mhz": "MHz", "w": "W", "c": "°C"}


def rows(record: Mapping[str, Any], *left_out: str, group: str = "") -> list[tuple[str, str]]:
    """Nested names and values as rows of words, without what is not set or a tuple. left_out: names to leave out."""
    found: list[tuple[str, str]] = []
    for name, value in record.items():
        if isinstance(value, Mapping) and name not in left_out:
            found += rows(value, group=name)
        elif name not in left_out and value not in (None, "", []) and not isinstance(value, tuple):
            if group in _GROUPS:
                own = name.replace("_", " ") if group == "counts" else name
                found.append((_GROUPS[group] + own, _in_words("", value)))
                continue
            plain = name.rpartition("_")[0] if name.rpartition("_")[2] in {*_UNITS, "bytes"} else name
            title = _WORDS.get(f"{group}.{name}") or _WORDS.get(name) or plain.replace("_", " ")
            found.append((title, _in_words(name, value)))
    return list(dict.fromkeys(found))  # two names may mean the same


def _in_words(name: str, value: Any) -> str:
    """A value of a record, by its name, with its unit."""
    unit = name.rpartition("_")[2]
    if isinstance(value, list):
        return counted(len(value), "configuration") if name == "starts" else ", ".join(map(value_text, value))
    if name in ("created", "updated", "finished"):  # ISO 8601 in UTC
        return f"{value[:19].replace('T', ' ')} UTC"
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value)):
        return value_text(value)
    number = float(value)
    if unit == "bytes":
        return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
    if unit in ("s", "seconds"):
        return duration(number)
    if unit == "us":
        return f"{micro(number)} µs"
    return f"{number:,.4g} {_UNITS[unit]}" if unit in _UNITS else value_text(value)


# How to repeat it


def commands(data: RunOutcome) -> list[tuple[str, str]]:
    """Commands that repeat or continue the work, each with its purpose."""
    run = data.run
    again = ["search", run.kernel, "--target", run.target, "--arch", run.arch]
    for w in data.workloads:
        again += ["--cover" if run.options.get("cover") else "--workload", w.task.workload]
    again += ["--sampler", run.sampler, "--seed", str(run.seed)]
    for name, value in run.budget.items():
        if value is not None:
            again += ["--budget", f"{value:g}s"] if name == "seconds" else [f"--{name}", str(value)]
    for name, value in (run.options.get("fixed") or {}).items():
        again += ["--fix", f"{name}={value}"]
    for name, value in run.options.get("sampler", {}).items():
        again += ["--sampler-option", f"{name}={value}"]
    for point in run.options.get("starts", ()):
        again += ["--start", ",".join(f"{name}={value}" for name, value in point.items())]
    again += ["--finalists", str(run.options["finalists"])] if "finalists" in run.options else []
    again += ["--sanitize-finals"] if run.options.get("sanitize_finals") else []
    again += [] if run.options.get("starts") else ["--cold"]
    if run.max_in_flight % 2 == 0:  # two a builder, but eight at least; another machine would take another number of them
        again += ["--builders", str(run.max_in_flight // 2)]
    found = [("search again", command_line(data.db, *again))]
    for w in data.workloads:
        if w.leader is not None:
            what = f", {size(w.task)}" if len(data.workloads) > 1 else ""
            leader = short(w.leader.id)
            found.append((f"build the leader anew and gate it on fresh data{what}", command_line(data.db, "check", leader)))
            found.append((f"all that is known of it{what}", command_line(data.db, "show", leader)))
    if any(w.task.winner for w in data.workloads):
        name = "".join(ch if ch.isalnum() else "_" for ch in run.kernel.rstrip("/").rpartition("/")[2])
        found.append(("use it in PyTorch", command_line(data.db, "export", run.name, "--out", f"my_{name}")))
    return found
