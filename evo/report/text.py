"""Words and figures as pages print them. Text out of a database is made inert first."""

import re
from collections.abc import Sequence

from evo.analysis.named import short as short
from evo.analysis.runs import lacking
from evo.errors import UsageError
from evo.evaluation import within_noise

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|m|h|d)?", re.IGNORECASE | re.ASCII)
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
