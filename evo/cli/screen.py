"""What a running search shows: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evo.cli.tables import make_table
from evo.evaluation import Status
from evo.executors import InFlight
from evo.problem.kernel import Workload
from evo.report.text import duration
from evo.search.check import CheckProgress
from evo.search.progress import Budget, Improvement, Progress

__all__ = ["LINE_EVERY_S", "LONG_S", "CheckLines", "LiveScreen", "PlainLines", "Screen", "doing", "told"]

LINE_EVERY_S = 5.0

LONG_S = 3.0
"""A candidate that has been in flight for so long is named."""

_STAGES = {
    "build": "being compiled",
    "ready": "held up, until the device and its data are ready,",
    "gate": "in the gate",
    "timing": "being timed",
}


class Screen:
    """What shows a search, which owns the terminal while it is entered. This one prints nothing, for --json."""

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *ended: object) -> None:
        return None

    def update(self, progress: Progress) -> None:
        return None

    def say(self, text: str) -> None:
        return None


class PlainLines(Screen):
    """A line whenever something better is found, and one every few seconds."""

    def __init__(self, console: Console, workloads: tuple[Workload, ...]) -> None:
        self._console, self._workloads = console, workloads
        self._improvements = 0
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        new = progress.improvements[self._improvements :]
        kept = {found.task: found for found in new if found.replayed}
        for found in new:
            if found.replayed and found is not kept[found.task]:
                continue  # of what was found before the run was resumed, only the best is printed
            workload = self._workloads[found.task]
            before = "kept from before: " if found.replayed else ""
            gain = f"{1 / found.ratio:.3f}x PyTorch ({_interval(found)})"
            self.say(f"{found.elapsed_s:7.1f} s  {workload}: {before}candidate {found.order} is {gain}")
        self._improvements = len(progress.improvements)
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            waiting = _waiting(progress)
            self.say(f"{progress.elapsed_s:7.1f} s  {_counts(progress)}{waiting and f' | {waiting}'}")


class LiveScreen(Screen):
    """Best so far, rate, states, failures by kind, busy share, time left; drawn in place."""

    def __init__(self, console: Console, title: str, workloads: tuple[Workload, ...], budget: Budget) -> None:
        self._console, self._title = console, title
        self._workloads, self._budget = workloads, budget
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._shown = 0.0

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.update(Panel(Text(text), title=self._title, border_style="cyan"), refresh=True)

    def update(self, progress: Progress) -> None:
        if time.monotonic() - self._shown < 0.1:
            return
        self._shown = time.monotonic()
        self._live.update(Panel(self._body(progress), title=self._title, border_style="cyan"))

    def _body(self, progress: Progress) -> Group:
        best = make_table("workload", "best", "speed-up", "interval", "candidate", right=("best", "speed-up", "interval"))
        for task, workload in enumerate(self._workloads):
            if found := progress.best.get(task):
                gain = Text(f"{1 / found.ratio:.2f}x", style="bold green")
                us = f"{found.timing.median_us:.2f} us"
                best.add_row(str(workload), us, gain, _interval(found), f"#{found.order}")
            else:
                best.add_row(str(workload), "…", "…", "", "")
        share, left = self._time_left(progress)
        bar = ProgressBar(total=1.0, completed=share, width=40)
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(left))
        waiting = [Text(text, style="yellow")] if (text := _waiting(progress)) else []
        failures = Text(_failures(progress), style="yellow")
        return Group(best, Text(), line, Text(_counts(progress)), failures, *waiting)

    def _time_left(self, progress: Progress) -> tuple[float, str]:
        budget = self._budget
        if budget.seconds is not None:
            left = max(0.0, budget.seconds - progress.elapsed_s)
            return min(1.0, progress.elapsed_s / budget.seconds), f"{duration(left)} left"
        if budget.evaluations is not None:
            share = progress.finished / budget.evaluations
            left_s = progress.elapsed_s * (1 / share - 1) if share > 0 else 0.0
            return min(1.0, share), f"{progress.finished} of {budget.evaluations}, about {duration(left_s)} left"
        return 0.0, f"until {budget.patience} in a row bring nothing better"


class CheckLines:
    """How far a check is, on stderr: a line every few seconds.

    what: is counted, in the plural.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = time.monotonic()

    def __call__(self, progress: CheckProgress) -> None:
        if time.monotonic() - self._last < LINE_EVERY_S:
            return
        self._last = time.monotonic()
        text = f"{progress.done} of {progress.count} {self._what} done"
        if (work := progress.work) is not None and work.seconds >= LONG_S:
            changes = " ".join(f"{k}={v}" for k, v in progress.changes.items())
            text += f"; waiting for {work.workload}{changes and f' with {changes}'}: {told(work)}"
        typer.echo(f"evo: {text}", err=True)


def _interval(found: Improvement) -> str:
    """The interval of the speed-up; it says if something disturbed the timing."""
    low, high = found.timing.ratio_low or found.ratio, found.timing.ratio_high or found.ratio
    disturbed = ", disturbed" if found.timing.clocks.get("disturbed") else ""
    return f"{1 / high:.3f} to {1 / low:.3f}{disturbed}"


def busy_share(progress: Progress) -> float:
    """Share of the time since the first measurement in which the device process worked, unfinished work included."""
    if progress.first_measured_s is None:
        return 0.0
    _, work = progress.waiting or (None, None)
    on_it = work.seconds if work is not None and work.stage in ("gate", "timing") else 0.0
    return min(1.0, (progress.spent.device_seconds + on_it) / max(progress.elapsed_s - progress.first_measured_s, 1e-9))


def _counts(progress: Progress) -> str:
    rate = progress.finished / progress.elapsed_s if progress.elapsed_s else 0.0
    return (
        f"{progress.finished} candidates, {rate:.1f}/s | building {progress.building}, measuring"
        f" {progress.measuring} | device busy {busy_share(progress):.0%}"
    )


def _waiting(progress: Progress) -> str:
    """The candidate that the search waits for; empty before that takes long."""
    order, work = progress.waiting or (None, None)
    return "" if work is None or work.seconds < LONG_S else f"waiting for candidate {order}: {told(work)}"


def doing(work: InFlight) -> str:
    return _STAGES[work.stage]


def told(work: InFlight) -> str:
    """in the gate for 12 s; ended if there is no result within 18 s more"""
    again = ", for the second time, in a fresh process" if work.again else ""
    left = "" if work.left_s is None else f"; ended if there is no result within {work.left_s:.0f} s more"
    return f"{doing(work)} for {work.seconds:.0f} s{again}{left}"


def _failures(progress: Progress) -> str:
    failed = {s: n for s, n in sorted(progress.by_status.items()) if not s.passed}
    same = progress.by_status.get(Status.SAME_CODE, 0)
    parts = [f"{n} {s.value.replace('_', ' ')}" for s, n in failed.items()]
    if same:
        parts.append(f"{same} with machine code seen before")
    return "refused: " + ", ".join(parts) if failed else ", ".join(parts)
