"""What a run found, in words and rows: the headline, the table of the final race, and how far both can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from evo.analysis.finalists import QUOTED, TWO_RACES, Finalist, shift_sentence
from evo.analysis.records import CandidateRecord, TimingRecord
from evo.evaluation import within_noise
from evo.report.data import RunData, WorkloadData
from evo.report.text import counted, duration, interval, micro, percent, short, times, value_text
from evo.report.yardsticks import ceiling_remark, regret_remark

__all__ = [
    "Fact",
    "FinalistRow",
    "RaceRow",
    "confirmation_sentences",
    "facts",
    "finalist_rows",
    "finalists_sentence",
    "hardly_tried",
    "headline",
    "race_rows",
    "remarks",
    "run_headline",
    "size",
]

MARK_NOTE = "something slowed the device down while this was timed: do not trust the figure"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure with its name. note: what stands beside it, smaller. marked: disturbed."""

    name: str
    value: str
    note: str = ""
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class RaceRow:
    """A contender of the race. share: its time over the ceiling's."""

    name: str
    role: str
    median: str
    interval: str
    speedup: str
    speedup_interval: str
    share: str
    samples: int
    marked: bool
    leader: bool = False


@dataclass(frozen=True, kw_only=True)
class FinalistRow:
    """A finalist of the last final. behind: the winner's speed-up over this one's in the race of all of them; search: what
    it seemed to be there."""

    name: str
    order: int
    median: str
    interval: str
    speedup: str
    speedup_interval: str
    behind: str
    behind_interval: str
    search: str
    marked: bool
    leader: bool


def size(data: WorkloadData) -> str:
    """The workload in short: 4096 × 4096 float16."""
    return f"{' × '.join(str(v) for v in data.task.dims.values())} {data.task.dtype}"


def _reference(data: WorkloadData) -> str:
    found = data.reference
    return "PyTorch" if found is None or found.contender == "torch" else found.contender


def headline(data: WorkloadData) -> str:
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
    ratio, name = timing.ratio, _reference(data)
    mark = " (disturbed)" if timing.disturbed else ""
    if data.tie:
        return f"A tie with {name}{mark}: the difference is within the noise floor."
    if not data.confirmed or timing.stage != "final":
        return f"{times(ratio)} {name} by the search's own timing{mark}, not confirmed by finals."
    if ratio > 1:
        return f"Nothing faster than {name}{mark}: the best has {times(ratio)} of its speed."
    return f"{times(ratio)} the speed of {name}{mark}."


def run_headline(run: RunData) -> str:
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


def facts(data: WorkloadData) -> list[Fact]:
    """The figures beside the headline."""
    found, timing = [], data.timing
    if timing is not None and timing.ratio:
        stage = "final" if timing.stage == "final" else "search only"
        value = "tie" if data.tie else times(timing.ratio)
        note = f"95% {interval(timing.ratio_low, timing.ratio_high)}, {stage}"
        found.append(Fact(name="speed-up", value=value, note=note, marked=timing.disturbed))
        found.append(
            Fact(
                name="median time",
                value=f"{micro(timing.median_us)} µs",
                note=f"{micro(timing.low_us)} to {micro(timing.high_us)} µs",
                marked=timing.disturbed,
            )
        )
    if data.noise is not None:
        found.append(Fact(name="noise floor", value=f"±{percent(data.noise, 2)}", note="the winner against its twin"))
    if timing is not None and (bound := data.ceiling):
        found.append(
            Fact(
                name=f"of the {bound.contender} ceiling",
                value=percent(bound.median_us / timing.median_us),
                note=f"{bound.contender}: {micro(bound.median_us)} µs",
                marked=bound.disturbed,
            )
        )
    if data.regret is not None:
        found.append(Fact(name="selection regret", value=percent(data.regret, 1), note="the search over the final"))
    if data.candidates is not None:
        passed = int(data.candidates.passed.sum())
        refused = f", {len(data.refused)} refused later" if data.refused else ""
        found.append(Fact(name="candidates", value=f"{data.number:,}", note=f"{passed:,} passed the search{refused}"))
    if data.leader is not None:
        found.append(_leader_fact(data, data.leader))
    return found


def _leader_fact(data: WorkloadData, leader: CandidateRecord) -> Fact:
    """When it was found; and who seemed faster at the end of the search, if that was another."""
    note = f"{short(leader.id)} #{leader.order}"
    last = data.milestones[-1] if data.milestones else None
    if last is not None and last.order != leader.order:
        note += f"; the fastest in the search was #{last.order}, after {duration(last.elapsed_s)}"
    name = f"{'winner' if data.confirmed else 'best'} found after"
    return Fact(name=name, value=duration(leader.elapsed_s), note=note)


def race_rows(data: WorkloadData) -> list[RaceRow]:
    """The leader and what ran beside it, the fastest first."""
    timing, bound = data.timing, data.ceiling
    if timing is None or data.leader is None:
        return []
    rows = [(timing, True), *((t, False) for t in data.baselines)]
    rows.sort(key=lambda r: r[0].median_us)
    return [_row(data, t, bound, leader=leader) for t, leader in rows]


def _row(data: WorkloadData, timing: TimingRecord, bound: TimingRecord | None, *, leader: bool) -> RaceRow:
    assert data.leader is not None
    return RaceRow(
        name=short(data.leader.id) if leader else timing.contender,
        role=("winner" if data.confirmed else "best so far") if leader else data.roles.get(timing.contender, ""),
        median=micro(timing.median_us),
        interval=f"{micro(timing.low_us)} to {micro(timing.high_us)}",
        speedup="tie" if within_noise(timing.ratio, data.noise) else times(timing.ratio) if timing.ratio else "1",
        speedup_interval=interval(timing.ratio_low, timing.ratio_high),
        share=f"{timing.median_us / bound.median_us:.3f}" if bound else "",
        samples=len(timing.samples_us),
        marked=timing.disturbed,
        leader=leader,
    )


def finalist_rows(data: WorkloadData) -> list[FinalistRow]:
    """Who was raced in the last final, the winner first; nobody if it was alone, for the race is told already."""
    return [_finalist_row(data, f) for f in data.finalists] if len(data.finalists) > 1 else []


def _finalist_row(data: WorkloadData, f: Finalist) -> FinalistRow:
    behind = "" if f.behind is None else "tie" if f.tie else f"{f.behind:.3f}×"
    return FinalistRow(
        name=short(f.id),
        order=f.order,
        median=micro(f.median_us) if f.median_us else "",
        interval=f"{micro(f.low_us)} to {micro(f.high_us)}" if f.low_us and f.high_us else "",
        speedup="tie" if within_noise(f.ratio, data.noise) else times(f.ratio),
        speedup_interval=interval(f.ratio_low, f.ratio_high),
        behind="winner" if f.winner else behind,
        behind_interval=f"{f.behind_low:.3f} to {f.behind_high:.3f}" if f.behind_low and f.behind_high else "",
        search=times(f.score),
        marked=f.disturbed,
        leader=f.winner,
    )


def finalists_sentence(data: WorkloadData) -> str:
    """Who cannot be told from the winner, in words; empty where nobody won."""
    if not any(f.winner for f in data.finalists):
        return ""
    ties = [f for f in data.finalists if f.tie]
    if not ties:
        return "No other finalist ties with the winner."
    names = ", ".join(f"{short(f.id)} #{f.order}" for f in ties)
    return f"{counted(len(ties), 'finalist ties', 'finalists tie')} with the winner: {names}."


def confirmation_sentences(data: WorkloadData) -> list[str]:
    """The figure to quote, and what sets it apart from those of the finalists' race."""
    again = data.confirmation
    if again is None or not data.one_race:
        return [] if again is None else _sentences(TWO_RACES)
    value = "a tie" if within_noise(again.ratio, data.noise) else times(again.ratio)
    took = f"{micro(again.median_us)} µs" if again.median_us is not None else "no time"
    said = [
        f"Confirmed: the winner ran once more, alone with the baselines, in a fresh process and on other data: {took},"
        f" {value} ({interval(again.ratio_low, again.ratio_high)}){' !' if again.disturbed else ''}.",
        *_sentences(QUOTED[again.disturbed]),
    ]
    return said + _sentences(shift_sentence(again.shift) if again.shift is not None else "")


def remarks(data: WorkloadData) -> list[str]:
    """What has to be said beside the table, a sentence each."""
    said: list[str] = []
    timing, race = data.timing, data.race
    if timing is None:
        return said
    if race is None:
        said.append(
            "No finals have timed this candidate: the figure is the search's own, which is too good on average for the best"
            " of many."
        )
    elif not race.beside:
        said.append(
            "The baselines ran beside the run's winner, in the race after this candidate's own; only its speed-up compares"
            " times of one race."
        )
    if data.regret is not None and data.leader is not None and data.leader.score:
        said.append(
            f"The search had it at {times(data.leader.score)}; the final figure is the one to quote (selection regret"
            f" {percent(data.regret, 1)})."
        )
        said += _sentences(regret_remark(data.regret, data.noise))
    if data.confirmed and (bound := data.ceiling) is not None and timing.stage == "final":
        said += _sentences(ceiling_remark(timing.median_us / bound.median_us, bound.contender, data.noise))
    if (hot := data.hot) is not None:
        gain = f", {times(hot.ratio)} the reference, which has them there too" if hot.ratio else ""
        said.append(f"With all data in the cache: {micro(hot.median_us)} µs{gain}{' !' if hot.disturbed else ''}.")
    for f in data.refused:
        why = f"{f.status.replace('_', ' ')}: {f.reason}"
        said.append(f"Finalist {short(f.id)} (#{f.order}) was refused by the finals: {why}")
    return said


def _sentences(*said: str) -> list[str]:
    """Those that say something, as they stand by themselves."""
    return [f"{one[:1].upper()}{one[1:]}." for one in said if one]


def hardly_tried(data: WorkloadData) -> list[str]:
    """Values of the parameters that mattered most of which the run cannot tell whether they are slow, a sentence each."""
    said, known = [], data.importance
    if known.least:
        parts = []
        for one in known.least:
            fared = f"best {times(one.tried.best)}" if one.tried.best else "none with a time"
            parts.append(f"{one.parameter}={value_text(one.value)} ({one.tried.candidates:,} of {one.of:,}, {fared})")
        said.append(f"Tried least of what mattered most: {', '.join(parts)}.")
    if known.never:
        said.append(f"Never tried, though legal: {', '.join(f'{name}={value_text(value)}' for name, value in known.never)}.")
    return said
