"""The output of a search while it runs: a live screen on a terminal, plain lines elsewhere, lines of JSON in a log."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evo.analysis.runs import find_run
from evo.errors import UsageError
from evo.evaluation import Status
from evo.executors import InFlight
from evo.problem.kernel import Workload
from evo.problem.space import Point
from evo.report.terminal import Terminal, brief_workload, handling, make_table, notice
from evo.report.text import counted, duration, lacks
from evo.search.loop import Budget, Improvement, Progress, Search, StopReason
from evo.search.run import Outcome, execute
from evo.search.tasks import OpenRun

LINE_EVERY_S = 5.0

ENDING = "ending when what is being timed is done, in 10 s at most; a second signal ends it at once"

LONG_S = 3.0
"""Seconds in flight after which a candidate is named."""

STAGES = {
    "asked": "at the cluster",
    "build": "being compiled",
    "ready": "held up, until the device and its data are ready,",
    "gate": "in the gate",
    "timing": "being timed",
}


class LineTimer:
    """Tells when the next line on progress is due: every five seconds, after a minute every minute."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= (LINE_EVERY_S if now - self._began < 60 else 12 * LINE_EVERY_S)
        self._last = now if due else self._last
        return due


class PlainLines(nullcontext[None]):
    """Prints a line whenever something better is found, and one every five seconds, after a minute every minute; nothing on
    a quiet console."""

    def __init__(self, console: Console, workloads: Sequence[str]) -> None:
        super().__init__()
        self._console, self._workloads = console, workloads
        self._improvements, self._timer = 0, LineTimer()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        new = progress.improvements[self._improvements :]
        kept = {found.task: found for found in new if found.replayed}
        for found in new:
            if found.replayed and found is not kept[found.task]:
                continue  # only the best from before the run was resumed is printed
            workload = self._workloads[found.task]
            before = "kept from before: " if found.replayed else ""
            self.say(f"{found.elapsed_s:7.1f} s  {workload}: {before}candidate {found.order} is {_about(found)} PyTorch")
        self._improvements = len(progress.improvements)
        if self._timer.is_due():
            waiting = _waiting(progress)
            self.say(f"{progress.elapsed_s:7.1f} s  {_counts(progress)}{waiting and f' | {waiting}'}")


def check_log(path: Path | None) -> None:
    """Raises UsageError for a --log that cannot be written."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise UsageError(f"--log {path} cannot be written: {error.strerror}") from error


class JsonLog:
    """Appends a line of JSON to a file for each message and improvement, and for the progress, as often as `PlainLines`."""

    def __init__(self, path: Path, run: str, workloads: Sequence[str]) -> None:
        self._path, self._run, self._workloads = path, run, workloads
        self._improvements, self._timer, self._ending = 0, LineTimer(), False
        self._write("begun")

    def end(self, text: str, outcome: Outcome | None) -> None:
        """outcome: None if the search was interrupted."""
        finals = zip(self._workloads, outcome.finals, strict=False) if outcome is not None else ()
        winners = [
            {"workload": workload, "order": held.winner.candidate.order, "speedup": timing.speedup}
            for workload, held in finals
            if held.winner and (timing := held.winner.timing) and timing.ratio
        ]
        self._write("ended", text=text, winners=winners)

    def _write(self, event: str, **more: Any) -> None:
        record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, "run": self._run, **more}
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:  # a full disk must not end a long search
            file.write(json.dumps(record) + "\n")

    def say(self, text: str) -> None:
        self._write("said", text=text)

    def update(self, progress: Progress) -> None:
        if progress.interrupted and not self._ending:
            self._ending = True
            self.say(ENDING)
        for found in (f for f in progress.improvements[self._improvements :] if not f.replayed):
            workload, gain = self._workloads[found.task], 1 / found.ratio
            self._write("better", elapsed_s=found.elapsed_s, workload=workload, order=found.order, speedup=gain)
        self._improvements = len(progress.improvements)
        if self._timer.is_due():
            status = {str(status): count for status, count in progress.by_status.items()}
            self._write(
                "progress",
                elapsed_s=progress.elapsed_s,
                finished=progress.finished,
                by_status=status,
                building=progress.building,
                measuring=progress.measuring,
                incidents=progress.incidents,
            )


class LiveScreen:
    """A screen, drawn in place, of the best so far, rate, states, failures by kind, busy share and time left. It owns the
    terminal while it is entered."""

    def __init__(self, console: Console, title: str, workloads: Sequence[str], budget: Budget) -> None:
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
        best = make_table("workload", ">best", ">speed-up", "candidate")
        for task, workload in enumerate(self._workloads):
            if found := progress.best.get(task):
                us = f"about {found.timing.median_us:.3g} us"
                best.add_row(workload, us, Text(_about(found), style="bold green"), f"#{found.order}")
            else:
                best.add_row(workload, "…", "…", "")
        share, left = self._time_left(progress)
        bar = ProgressBar(total=1.0, completed=share, width=40)
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(left))
        told = (_waiting(progress), ENDING if progress.interrupted else "")
        waiting = [Text(text, style="yellow") for text in told if text]
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
    """Prints the progress of a check on stderr. what: the things that are counted, in the plural."""

    def __init__(self, what: str) -> None:
        self._what, self._timer = what, LineTimer()

    def __call__(self, done: int, count: int, work: InFlight | None, changes: Point) -> None:
        if not self._timer.is_due():
            return
        text = f"{done} of {count} {self._what} done"
        if work is not None and work.seconds >= LONG_S:
            values = " ".join(f"{k}={v}" for k, v in changes.items())
            text += f"; waiting for {work.workload}{values and f' with {values}'}: {told(work)}"
        notice(text)


def _about(found: Improvement) -> str:
    """A speed-up with two digits: the best of many short races is partly the luckiest, and the finals tell more."""
    return f"about {1 / found.ratio:.2g}x"


def busy_share(progress: Progress) -> float:
    """The share of the time since the first measurement in which the devices' processes worked, unfinished work included."""
    if progress.first_measured_s is None:
        return 0.0
    _, work = progress.waiting or (None, None)
    on_it = work.seconds if work is not None and work.stage in ("gate", "timing") else 0.0
    since_s = max(progress.elapsed_s - progress.first_measured_s, 1e-9)
    return min(1.0, (progress.spent.device_seconds + on_it) / (since_s * progress.devices))


def _counts(progress: Progress) -> str:
    rate = progress.finished / progress.elapsed_s if progress.elapsed_s else 0.0
    passed = "" if any(s.passed for s in progress.by_status) else ", none passed" if progress.by_status else ""
    return (
        f"{progress.finished} candidates{passed}, {rate:.1f}/s | building {progress.building}, measuring"
        f" {progress.measuring} | device busy {busy_share(progress):.0%}{incidents_text(progress.incidents)}"
    )


def incidents_text(counts: Mapping[str, int]) -> str:
    return "".join(f" | {name}: {count}" for name, count in counts.items())


def _waiting(progress: Progress) -> str:
    """A sentence on the candidate that the search has waited for long, or on what it waits for before its time begins."""
    order, work = progress.waiting or (None, None)
    if not progress.begun and order is not None:
        return "the device and its data are being made ready, and the time of the budget has not begun"
    return "" if work is None or work.seconds < LONG_S else f"waiting for candidate {order}: {told(work)}"


def told(work: InFlight) -> str:
    """The state of work in flight: "in the gate for 12 s; ended if there is no result within 18 s more"."""
    again = ", for the second time, in a fresh process" if work.again else ""
    left = "" if work.left_s is None else f"; ended if there is no result within {work.left_s:.0f} s more"
    return f"{STAGES[work.stage]} for {work.seconds:.0f} s{again}{left}"


def _failures(progress: Progress) -> str:
    failed = {s: n for s, n in sorted(progress.by_status.items()) if not s.passed}
    same = progress.by_status.get(Status.SAME_CODE, 0)
    parts = [f"{n} {s.value.replace('_', ' ')}" for s, n in failed.items()]
    if same:
        parts.append(f"{same} with machine code seen before")
    return "refused: " + ", ".join(parts) if failed else ", ".join(parts)


# -- carrying it out ----------------------------------------------------------------------------------------------


def follow(
    opened: OpenRun,
    console: Terminal,
    *,
    resumed: bool = False,
    ending: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    log: Path | None = None,
) -> Outcome | None:
    """Carries a run to its end and shows how it goes, unless the console is quiet. None: a signal has ended it in order, and
    everything finished is stored. resumed: the run had begun before; ending: the signals that do so; log: see `JsonLog`."""
    run, executor = opened.run, opened.executor
    budget = Budget(**run.spec.budget)
    if resumed:
        kept, limit = find_run(opened.store, run.name).evaluations, budget.evaluations
        reached = f"; --evaluations {limit} is reached already" if limit is not None and limit <= kept else ""
        searched = f"{counted(kept, 'candidate')} and {duration(run.elapsed_s)} of searching"
        console.say(f"run {run.name} is resumed: {searched} are kept{reached}")
    names = {workload: brief_workload(workload, opened.kernel) for workload in run.spec.workloads}
    screen: PlainLines | LiveScreen = PlainLines(console, [*names.values()])
    if console.is_terminal and not console.quiet:
        title = f"evo search {run.spec.kernel} · {run.environment.device} · {run.name}"
        screen = LiveScreen(console, title, [*names.values()], budget)
    written = JsonLog(log, run.name, [*names.values()]) if log else None
    shown = [screen, written] if written else [screen]

    def say(text: str) -> None:
        for each in shown:
            each.say(text)

    def update(progress: Progress) -> None:
        for each in shown:
            each.update(progress)

    outcome, why = None, "an error"
    with screen, ExitStack() as ending_log:
        if written:
            ending_log.callback(lambda: written.end(why, outcome))
        on = f"{run.environment.device}, {counted(executor.devices, 'device')}, {counted(executor.builders, 'builder')}"
        options = run.spec.options
        kind, how = ("given", "") if options.get("given") else ("known", " (--cold: none)")
        first = f", first {counted(len(starts), f'{kind} point')}{how}" if (starts := options.get("starts")) else ""
        limit_s = f"for {duration(budget.seconds)}, " if budget.seconds is not None else ""
        say(f"run {run.name}: {run.spec.kernel} on {on}, {limit_s}seed {run.spec.seed}{first}; starting …")
        for workload in run.spec.workloads:
            if missing := run.spec.options.get("missing_kinds", {}).get(workload.key):
                say(f"warning: {names[workload]}: {lacks(missing)}")
        try:
            with _signals(ending, said=isinstance(screen, LiveScreen)) as searching:

                def finals(workload: Workload, waits_s: float) -> None:
                    searching.clear()
                    again = f"; it is held again, for up to {math.ceil(waits_s)} s more"
                    busy = f": other programs disturb the race{again}" if waits_s else ""
                    say(f"finals of {names[workload]}{busy} …")

                outcome = execute(opened, update, on_search=searching.append, on_finals=finals)
            why = str(outcome.reason)
        except (KeyboardInterrupt, BrokenPipeError):  # the latter where nobody reads the output any more
            why = str(StopReason.INTERRUPTED)
    return None if why == StopReason.INTERRUPTED else outcome


@contextmanager
def _signals(ending: Sequence[signal.Signals], *, said: bool) -> Iterator[list[Search]]:
    """A list for the search that these signals end in order: the first when what is being timed is done, the second at
    once. While none is in it, they raise KeyboardInterrupt, and so they do where a search does not end at once. said: a
    screen says so."""
    searching: list[Search] = []
    received = 0

    def stop(number: int, frame: object) -> None:
        nonlocal received
        received += 1
        if not searching or searching[-1].over or received > _AT_ONCE:
            raise KeyboardInterrupt
        searching[-1].interrupt()
        if received == _AT_ONCE:  # unless the database or a sampler keeps it
            again = threading.Timer(_LONGEST_S, once_more, (searching[-1], number))
            again.daemon = True
            again.start()
        elif not said:
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"evo: {ENDING}\n".encode())

    def once_more(search: Search, number: int) -> None:
        if not search.over:
            os.kill(os.getpid(), number)

    with handling(ending, stop):
        try:
            yield searching
        finally:
            searching.clear()


_AT_ONCE, _LONGEST_S = 2, 0.5
"""Number of signals that end a search at once, and the seconds after which one raises an exception."""
