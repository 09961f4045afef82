"""How far a check is, said on stderr while it takes long: what is printed in the end stands on stdout alone."""

from __future__ import annotations

import time

import typer

from evo.cli.screen import LONG_S, told
from evo.search.check import Standing

__all__ = ["StandingLines"]

_LINE_EVERY_S = 5.0


class StandingLines:
    """A line every few seconds, and one for whatever takes long. `what`: is counted, in the plural."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = time.monotonic()
        self._named: tuple[object, ...] = ()

    def __call__(self, standing: Standing) -> None:
        work = standing.work
        due = time.monotonic() - self._last >= _LINE_EVERY_S
        long = work is not None and work.seconds >= LONG_S
        named = (work.genome, work.workload, work.stage, work.again) if work is not None and long else ()
        if not due and (not long or named == self._named):
            return
        self._last, self._named = time.monotonic(), named
        text = f"{standing.done} of {standing.count} {self._what} done"
        if work is not None and long:
            changes = " ".join(f"{k}={v}" for k, v in standing.changes.items())
            text += f"; waiting for {work.workload}{changes and f' with {changes}'}: {told(work)}"
        typer.echo(f"evo: {text}", err=True)
