"""What a run found, how it was measured and how to repeat it, in sentences and in rows of names and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evo.analysis.candidates import CandidateRecord, TimingRecord
from evo.analysis.finals import quoted
from evo.analysis.importance import undersampled
from evo.analysis.outcome import RunOutcome, WorkloadOutcome
from evo.analysis.runs import RunSummary
from evo.evaluation import within_noise
from evo.lineage.database import command_line
from evo.report.text import counted, duration, interval, micro, percent, short, times, value_text

__all__ = [
    "Fact",
    "command",
    "commands",
    "confirmation_sentences",
    "environment_rows",
    "facts",
    "finalists_sentence",
    "hardly_tried",
    "headline",
    "importance_gap",
    "measured_rows",
    "protocol_words",
    "remarks",
    "run_headline",
    "setup_rows",
    "size",
]

# What was found


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure with its name. note: what stands beside it, smaller. disturbed: it is not to be trusted."""

    name: str
    value: str
    note: str = ""
    disturbed: bool = False


def size(data: WorkloadOutcome) -> str:
    """The workload in short: 4096 × 4096 float16."""
    return f"{' × '.join(str(v) for v in data.task.dims.values())} {data.task.dtype}"


def headline(data: WorkloadOutcome) -> str:
    """One sentence: what was found for a workload."""
    timing = data.timing
    if not data.number:
        return "Nothing was evaluated."
    if data.leader is None or timing is None or not timing.ratio:
        passed = int(data.candidates.passed.sum()) if data.candidates else 0
        if data.refused:
            return f"No winner: the finals refused {counted(len(data.refused), 'finalist')}."
        return (
            f"Nothing was found: of {counted(data.number, 'candidate')} {passed or 'none'} passed the gate and its timed"
            " calls."
        )
    reference = next((t.contender for t in data.baselines if t.ratio is None), "torch")
    name = "PyTorch" if reference == "torch" else reference
    mark = " (disturbed)" if timing.disturbed else ""
    if data.tie:
        return f"A tie with {name}{mark}: the difference is within the noise floor."
    if not data.confirmed or timing.stage != "final":
        return f"{times(timing.ratio)} {name} by the search's own timing{mark}, not confirmed by finals."
    if timing.ratio > 1:
        return f"Nothing faster than {name}{mark}: the best has {times(timing.ratio)} of its speed."
    return f"{times(timing.ratio)} the speed of {name}{mark}."


def run_headline(run: RunOutcome) -> str:
    """The title of the report."""
    known = [w for w in run.workloads if w.timing and w.timing.ratio]
    name = run.run.kernel.rstrip("/").rpartition("/")[2]
    if len(run.workloads) == 1 or len(known) == 1:
        one = known[0] if known else run.workloads[0]
        return f"{name}, {size(one)}: {headline(one)[:1].lower()}{headline(one)[1:]}".rstrip(".")
    if not known:
        return f"{name}: nothing was found"
    ratios = sorted(w.timing.ratio for w in known if w.timing and w.timing.ratio)
    return f"{name}: {times(ratios[-1])} to {times(ratios[0])} on {counted(len(known), 'workload')}"


def facts(data: WorkloadOutcome) -> list[Fact]:
    """The figures beside the headline."""
    found, timing = [], data.timing
    if timing is not None and timing.ratio:
        stage = "final" if timing.stage == "final" else "search only"
        found += [
            Fact(
                name="speed-up",
                value="tie" if data.tie else times(timing.ratio),
                note=f"95% {interval(timing.ratio_low, timing.ratio_high)}, {stage}",
                disturbed=timing.disturbed,
            ),
            Fact(
                name="median time",
                value=f"{micro(timing.median_us)} µs",
                note=f"{micro(timing.low_us)} to {micro(timing.high_us)} µs",
                disturbed=timing.disturbed,
            ),
        ]
    if (noise := data.finals.noise_floor) is not None:
        found.append(Fact(name="noise floor", value=f"±{percent(noise, 2)}", note="the winner against its twin"))
    if timing is not None and (bound := data.ceiling):
        found.append(
            Fact(
                name=f"of the {bound.contender} ceiling",
                value=percent(bound.median_us / timing.median_us),
                note=f"{bound.contender}: {micro(bound.median_us)} µs",
                disturbed=bound.disturbed,
            )
        )
    if (regret := data.finals.selection_regret) is not None:
        found.append(Fact(name="selection regret", value=percent(regret, 1), note="the search over the final"))
    if data.candidates is not None:
        passed = int(data.candidates.passed.sum())
        refused = f", {len(data.refused)} refused later" if data.refused else ""
        found.append(Fact(name="candidates", value=f"{data.number:,}", note=f"{passed:,} passed the search{refused}"))
    if data.leader is not None:
        found.append(_leader_fact(data, data.leader))
    return found


def _leader_fact(data: WorkloadOutcome, leader: CandidateRecord) -> Fact:
    """When it was found; and which candidate seemed faster at the end of the search, if that was another."""
    note = f"{short(leader.id)} #{leader.order}"
    last = data.milestones[-1] if data.milestones else None
    if last is not None and last.order != leader.order:
        note += f"; the fastest in the search was #{last.order}, after {duration(last.elapsed_s)}"
    name = f"{'winner' if data.confirmed else 'best'} found after"
    return Fact(name=name, value=duration(leader.elapsed_s), note=note)


def finalists_sentence(data: WorkloadOutcome) -> str:
    """Which finalists cannot be told from the winner, in words; empty where nothing won."""
    if not any(f.winner for f in data.finals.finalists):
        return ""
    ties = [f for f in data.finals.finalists if f.tie]
    if not ties:
        return "No other finalist ties with the winner."
    names = ", ".join(f"{short(f.id)} #{f.order}" for f in ties)
    return f"{counted(len(ties), 'finalist ties', 'finalists tie')} with the winner: {names}."


def confirmation_sentences(data: WorkloadOutcome) -> list[str]:
    """The figure to quote, and what sets it apart from those of the finalists' race."""
    again = data.finals.confirmed
    if again is None:
        return []
    value = "a tie" if within_noise(again.ratio, data.finals.noise_floor) else times(again.ratio)
    return [
        "Confirmed: the winner ran once more, alone with the baselines, in a fresh process and on other data:"
        f" {micro(again.median_us)} µs, {value} ({interval(again.ratio_low, again.ratio_high)})"
        f"{' !' if again.disturbed else ''}.",
        *_sentences(quoted(again)),
    ]


def remarks(data: WorkloadOutcome) -> list[str]:
    """What has to be said beside the table of the race, a sentence each."""
    said: list[str] = []
    timing, finals = data.timing, data.finals
    if timing is None:
        return said
    if timing.stage != "final":
        said.append(
            "No finals have timed this candidate: the figure is the search's own, which is too good on average for the best"
            " of many."
        )
    if finals.selection_regret is not None and data.leader is not None and data.leader.score:
        said.append(
            f"The search had it at {times(data.leader.score)}; the final figure is the one to quote (selection regret"
            f" {percent(finals.selection_regret, 1)})."
        )
    said += _sentences(*finals.remarks)
    if (hot := finals.hot) is not None:
        gain = f", {times(hot.ratio)} the reference, which has them there too" if hot.ratio else ""
        said.append(f"With all data in the cache: {micro(hot.median_us)} µs{gain}{' !' if hot.disturbed else ''}.")
    for f in data.refused:
        why = f"{f.status.replace('_', ' ')}: {f.reason}"
        said.append(f"Finalist {short(f.id)} (#{f.order}) was refused by the finals: {why}")
    return said


def _sentences(*said: str) -> list[str]:
    """Those that say something, as they stand by themselves."""
    return [f"{one[:1].upper()}{one[1:]}." for one in said if one]


# What mattered


def importance_gap(data: WorkloadOutcome) -> str:
    """Why the importance of no parameter is known; empty where it is."""
    if data.important:
        return ""
    return "; ".join(dict.fromkeys(i.note for i in data.importance if i.note)) or "no candidate has a time"


def hardly_tried(data: WorkloadOutcome) -> str:
    """Values of the parameters that mattered most of which the run cannot tell whether they are slow; empty without any."""
    parts = []
    for one in undersampled(data.importance):
        fared = f"best {times(one.best)}" if one.best else "none with a time"
        parts.append(f"{one.parameter}={value_text(one.value)} ({one.candidates:,} of {one.of:,}, {fared})")
    return f"Tried least of what mattered most: {', '.join(parts)}." if parts else ""


# How it was measured, and on what


def protocol_words(data: WorkloadOutcome) -> list[str]:
    """How the figures of a workload came about, a sentence or two each."""
    said = []
    leader, timing = data.leader, data.timing
    if leader is not None and leader.checks:
        latest = max(c.round for c in leader.checks)
        cases = [c for c in leader.checks if c.round == latest]
        passed, where = sum(c.passed for c in cases), "the finals" if latest else "the search"
        said.append(
            f"Right first: the leader passed {passed} of {counted(len(cases), 'gate case')} in {where}, against a float64"
            " reference, with an error of at most twice PyTorch's own plus rounding."
        )
    search = next((t for t in (leader.timings if leader else ()) if t.round == 0 and t.protocol != "hot"), None)
    if search is not None:
        said.append(f"In the search: {_race_words(search)}")
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
    if data.finals.noise_floor is not None:
        said.append(
            "Noise floor: the 95% interval of the ratio between the winner and its twin reaches"
            f" ±{percent(data.finals.noise_floor, 2)} from 1. A speed-up nearer to 1 than that is called a tie."
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


def measured_rows(data: WorkloadOutcome) -> list[tuple[str, str]]:
    """Clocks and what else was read during the leader's last race."""
    clocks = data.timing.clocks if data.timing else {}
    return [(name.replace("_", " "), f"{value:g}" if value is not None else "–") for name, value in clocks.items()]


_ENVIRONMENT = ("device", "arch", "driver", "cuda", "nvrtc", "compiler", "torch", "python", "evo")


def environment_rows(run: RunSummary) -> list[tuple[str, str]]:
    """What the run was measured on and with."""
    known = run.environment
    rows = [(name, str(known.get(name) or "")) for name in _ENVIRONMENT]
    return [(name, value) for name, value in [*rows, *_flat(known.get("details") or {})] if value]


def setup_rows(run: RunSummary) -> list[tuple[str, str]]:
    """How the run was set up."""
    rows = [
        ("run", run.name),
        ("kernel", run.kernel),
        ("digest of the kernel", run.kernel_digest),
        ("target", f"{run.target}, {run.arch}"),
        ("sampler", run.sampler),
        ("seed", str(run.seed)),
        ("candidates in flight", str(run.max_in_flight)),
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


# How to repeat it


def command(data: RunOutcome, *words: str) -> str:
    """One to be typed, about the run's database."""
    return command_line(data.db, *words)


def commands(data: RunOutcome) -> list[tuple[str, str]]:
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
    if run.max_in_flight % 2 == 0:  # two a builder, but eight at least; another machine would take another number of them
        again += ["--builders", str(run.max_in_flight // 2)]
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
