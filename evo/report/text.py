"""Words and figures as pages print them. Text out of a database is made inert first."""

import re
from collections.abc import Sequence

from evo.analysis.finals import Cover, RunFinals, WorkloadFinals
from evo.analysis.named import short as short
from evo.analysis.runs import lacking
from evo.environment import command_line
from evo.errors import UsageError
from evo.evaluation import Timing, within_noise
from evo.lineage import RunStatus

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|m|h|d)?", re.IGNORECASE | re.ASCII)
TOO_BUSY = "too busy to measure: other programs disturbed its race, and others may be faster"
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def visible(text: str, *, lines: bool = False) -> str:
    """`text` with every character that does not print (control characters, changes of direction) as its escape. lines:
    whether line ends and tabs stay as they are."""

    def shown(found: re.Match[str]) -> str:
        if found[0].isprintable() or (lines and found[0] in "\n\t"):
            return found[0]
        return found[0].encode("unicode_escape", "surrogatepass").decode("ascii")

    return re.sub("[^ -~]", shown, text)


def times(ratio: float | None, noise: float | None = None, disturbed: bool = False) -> str:
    """The speed-up of a ratio of times: 1.234x; a tie if that is within the noise floor. No figure where it is not sure."""
    if disturbed:
        return "too busy"
    return "tie" if within_noise(ratio, noise) else "–" if not ratio else f"{1 / ratio:.3f}×"


def interval(low: float | None, high: float | None) -> str:
    """The interval of a speed-up, from that of the ratio of times."""
    return f"{1 / high:.3f} to {1 / low:.3f}" if low and high else ""


def micro(us: float, disturbed: bool = False) -> str:
    """Microseconds with as many digits as a measurement has; two, if it was disturbed."""
    if disturbed:
        return f"{(about := float(f'{us:.2g}')):,.{0 if about >= 10 else 1}f}"
    return f"{us:,.{2 if us < 100 else 1 if us < 1000 else 0}f}"


def timed(us: float, disturbed: bool = False) -> str:
    """A time with its unit: milliseconds where microseconds have five digits."""
    return f"{micro(us / 1e3, disturbed)} ms" if us >= 1e4 else f"{micro(us, disturbed)} us"


def span(low: float | None, high: float | None, disturbed: bool = False) -> str:
    """The interval of a time with its unit; empty without one, or if it was disturbed."""
    if disturbed or low is None or high is None:
        return ""
    return f"{micros(low / 1e3, high / 1e3)} ms" if high >= 1e4 else f"{micros(low, high)} us"


def micros(low: float | None, high: float | None, disturbed: bool = False) -> str:
    """The interval of a time in microseconds; empty without one, or if it was disturbed."""
    return "" if disturbed or low is None or high is None else f"{micro(low)} to {micro(high)}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"


def counted(number: int, noun: str) -> str:
    """1 candidate, 2 candidates."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def parse_duration(text: str, option: str = "--budget") -> float:
    """The seconds of a text such as 90, 90s, 1.5m, 2h or 1d. Raises UsageError."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{option} {text!r} is not a duration; write e.g. 60s, 10m or 2h")
    return float(found[1]) * _SECONDS[(found[2] or "s").lower()]


def lacks(kinds: Sequence[str]) -> str:
    """A warning, before a search or after a check, of a gate that lacks cases which a kernel's arguments ask for."""
    return (
        f"{lacking(kinds)}; what passes it may be wrong there, and finals confirm no winner (cases follow from the kernel's"
        " `data`, `cases`, `dimensions` and `validate`)"
    )


def value_text(value: object) -> str:
    """A parameter's value; a dash where the parameter has no part in the genome."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def cover_line(cover: Cover) -> str:
    told = f"{counted(cover.variants, 'variant')} for {counted(len(cover.points), 'workload')}"
    return f"{told}: {cover.worst:.1%} off the best of its workload at worst, {cover.median:.1%} in the median"


def no_winner(run: RunFinals, held: WorkloadFinals, db: str) -> str:
    """Why a workload has no winner, and the best candidate instead."""
    task = run.tasks[held.task]
    shown = f"; the best candidate so far: {command_line(db, 'show', short(task.best))}" if task.best else ""
    judged = task.best or any(f.task == held.task for f in run.refused_in_finals)
    if judged and run.status == RunStatus.FINISHED:
        return f"unconfirmed: the finals have no winner{shown}"
    if not task.candidates:
        return "no candidate was finished within the budget: give it a larger one"
    return f"no final has named a winner{shown}" if task.best else "no candidate passed the gate and its timed calls"


def reference_of(baselines: Sequence[Timing]) -> str:
    """The name of the baseline that speed-ups are over."""
    name = next((t.contender for t in baselines if t.ratio is None), "torch")
    return "PyTorch" if name == "torch" else name
