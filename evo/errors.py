"""Every error that evo raises on purpose. A command ends with exit code 2 for a UsageError and 1 for any other."""

import difflib
import traceback
from collections.abc import Iterable


class EvoError(Exception):
    """One sentence that says what went wrong, where, what was found, and what to do next."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        told = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(self))
        return [f"{type(self).__name__}: {told}"]


class UsageError(EvoError):
    """The user asked for something that cannot be."""

    exit_code = 2


class UnknownNameError(UsageError):
    """No such kernel, target, sampler, parameter, run, ...; offers the nearest names there are."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted({*known})
        near = difflib.get_close_matches(name, names, n=3)
        offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}; {offer}")
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        return (UsageError, (str(self),))  # crosses process boundaries as its sentence


class KernelError(UsageError):
    """A kernel.py that does not state a usable problem."""


class TemplateError(UsageError):
    """A template that does not render."""


class SpaceError(UsageError):
    """A search space, or a point of it, that is not legal."""


class DeviceError(UsageError):
    """The machine lacks what was asked for: a GPU, a compiler, a driver. what: the message without its advice."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}: {advice}" if advice else what)
        self.what = what


class StoreError(UsageError):
    """A lineage database that cannot be used as it is: locked, foreign, newer, unwritable, full."""


class TakenError(StoreError):
    """A name for a new run that a run has."""


class CompileError(EvoError):
    """A candidate did not compile; `str()` is the compiler's log."""


class LaunchError(EvoError):
    """A candidate could not be loaded or launched."""


class EngineError(EvoError):
    """An invariant of evo does not hold, which is reported as a bug; never a fault of the user or of a candidate."""

    def _render_traceback_(self) -> list[str]:
        return traceback.format_exception(self)


def error_line(log: str) -> str:
    """The first line of a log that speaks of an error, or else the first."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
