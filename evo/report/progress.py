"""The output of a search while it runs: a live screen on a terminal, plain lines elsewhere, lines of JSON in a log."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evo.analysis.runs import find_run
from evo.errors import UsageError
from evo.evaluation import Status
from evo.executors import InFlight
from evo.problem.space import Point
from evo.report.notebook import Cell, CellLive
from evo.report.terminal import Terminal, brief_workload, handling, make_table, notice, unless_busy
from evo.report.text import counted, duration, lacks, timed
from evo.search.finals import Step
from evo.search.loop import Budget, Improvement, Progress, Search, StopReason
from evo.search.run import Outcome, execute
from evo.search.tasks import OpenRun

LINE_EVERY_S = 5.0

ENDING = "ending after the present timing, in 10 s at most; a second signal ends it at once"

_FEW = 3
"""Number of workloads of which each has a line on the screen."""

LONG_S = 3.0
"""Seconds in flight after which a candidate is named."""

STAGES = {
    "asked": "at the cluster",
    "build": "being compiled",
    "ready": "preparing the device",
    "gate": "in the gate",
    "timing": "being timed",
}


class LineTimer:
    """Tells when the next line on progress is due: every five seconds, after a minute every minute."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._workload = ""

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= (LINE_EVERY_S if now - self._began < 60 else 12 * LINE_EVERY_S)
        self._last = now if due else self._last
        return due

    def is_due_in_finals(self, step: Step, workload: str) -> bool:
        """Also with the first step of a workload, and where a race is held again."""
        first, self._workload = workload != self._workload, workload
        return self.is_due() or first or step.waits_s > 0


class PlainLines(nullcontext[None]):
    """Prints a line whenever something better is found, and one every five seconds, after a minute every minute; nothing on
    a quiet console."""

    def __init__(self, console: Console, workloads: Sequence[str]) -> None:
        super().__init__()
        self._console, self._workloads = console, workloads
        self._improvements, self._timer = 0, LineTimer()
        self._prepares: int | None = None
        """The number of finished candidates when it was last said that the device is prepared; None if it is not."""

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
            _, work = progress.waiting or (None, None)
            preparing = not progress.begun or (work is not None and work.stage == "ready")
            said, self._prepares = self._prepares, progress.finished if preparing else None
            if preparing and said == self._prepares:
                return
            parts = (_best(progress, self._workloads), _counts(progress), _waiting(progress))
            self.say(f"{progress.elapsed_s:7.1f} s  {' | '.join(filter(None, parts))}")

    def finals(self, step: Step, workload: str) -> None:
        if self._timer.is_due_in_finals(step, workload):
            self.say(_finals(step, workload))


def check_log(path: Path | None) -> None:
    """Raises UsageError for a --log that cannot be written."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise UsageError(f"--log {str(path)!r} cannot be written: {error.strerror}") from error


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

    def finals(self, step: Step, workload: str) -> None:
        if self._timer.is_due_in_finals(step, workload):
            self.say(_finals(step, workload))


class LiveScreen:
    """A screen, drawn in place, of the best so far, rate, states, failures by kind, busy share and time left; then of the
    finals. It owns the terminal while it is entered."""

    def __init__(self, console: Console, title: str, workloads: Sequence[str], budget: Budget) -> None:
        self._console, self._title = console, title
        self._workloads, self._budget = workloads, budget
        self._live: CellLive | Live = (
            CellLive(console)
            if isinstance(console, Cell)
            else Live(console=console, refresh_per_second=8, transient=True)
        )
        self._shown = 0.0
        self._best: RenderableType = Text()

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._draw(Text(text), refresh=True)

    def update(self, progress: Progress) -> None:
        if time.monotonic() - self._shown < 0.1:
            return
        self._shown = time.monotonic()
        self._draw(self._body(progress))

    def finals(self, step: Step, workload: str) -> None:
        began = time.monotonic()

        class Countdown:
            """Is drawn anew while the step goes on."""

            def __rich__(self) -> Table:
                since_s = time.monotonic() - began
                spent_s = step.spent_s + since_s
                return _bar(spent_s / (spent_s + max(1.0, step.left_s - since_s)), _left(step, since_s))

        self._draw(Group(self._best, Text(), Countdown(), Text(f"finals of {workload}: {step.text}")), refresh=True)

    def _draw(self, body: RenderableType, *, refresh: bool = False) -> None:
        self._live.update(Panel(body, title=self._title, border_style="cyan"), refresh=refresh)

    def _body(self, progress: Progress) -> Group:
        best = make_table("workload", ">best", ">speed-up", "candidate")
        known = _leaders(progress)
        for task in _shown(len(self._workloads), known):
            if (found := known.get(task)) is None:
                best.add_row(self._workloads[task], "…", "…", "")
                continue
            busy = found.timing.disturbed
            gain = Text(unless_busy(_about(found), busy), style="yellow" if busy else "bold green")
            best.add_row(self._workloads[task], f"about {timed(found.timing.median_us, True)}", gain, f"#{found.order}")
        if left_out := len(self._workloads) - best.row_count:
            best.add_row(f"and {left_out} between", "", "", "")
        self._best = best
        told = (_failures(progress), _waiting(progress), ENDING if progress.interrupted else "")
        waiting = [Text(text, style="yellow") for text in told if text]
        bar = _bar(*self._time_left(progress))
        return Group(best, Text(), bar, Text(_counts(progress)), *waiting)

    def _time_left(self, progress: Progress) -> tuple[float, str]:
        budget = self._budget
        if budget.seconds is not None:
            left_s = max(1, round(budget.seconds - progress.elapsed_s))
            return min(1.0, progress.elapsed_s / budget.seconds), f"{duration(left_s)} left"
        if budget.evaluations is not None:
            share = progress.finished / budget.evaluations
            left = f", about {duration(max(1, round(progress.elapsed_s * (1 / share - 1))))} left" if share > 0 else ""
            return min(1.0, share), f"{progress.finished} of {counted(budget.evaluations, 'candidate')}{left}"
        return 0.0, f"until {budget.patience} candidates in a row bring nothing better"


class CheckLines:
    """Prints the progress of a check on stderr, as far as it has changed. what: the things that are counted, in the plural.
    """

    def __init__(self, what: str) -> None:
        self._what, self._timer, self._last = what, LineTimer(), ""

    def __call__(self, done: int, count: int, work: InFlight | None, changes: Point) -> None:
        if not self._timer.is_due():
            return
        text = f"{done} of {count} {self._what} done"
        if work is not None and work.seconds >= LONG_S:
            values = " ".join(f"{k}={v}" for k, v in changes.items())
            text += f"; waiting for {work.workload}{values and f' with {values}'}: {told(work)}"
        elif not done or text == self._last:
            return
        self._last = text
        notice(text)


def _about(found: Improvement) -> str:
    """A speed-up with two digits: the best of many short races is partly the luckiest, and the finals tell more."""
    return f"about {1 / found.ratio:.2g}x"


def _leaders(progress: Progress) -> dict[int, Improvement]:
    """The best so far of each task; a disturbed one where nothing else has passed."""
    return progress.unsure | progress.best


def _shown(tasks: int, known: Mapping[int, Improvement]) -> list[int]:
    """Up to three tasks; of more, those with the highest and the lowest speed-up."""
    if tasks <= _FEW:
        return list(range(tasks))
    ranked = sorted(known, key=lambda task: (known[task].timing.disturbed, known[task].ratio))
    return list(dict.fromkeys([ranked[0], ranked[-1]])) if ranked else [0]


def _best(progress: Progress, workloads: Sequence[str]) -> str:
    """The best so far, in a few words; empty until something has passed."""
    known = _leaders(progress)
    sure = sorted((found for found in known.values() if not found.timing.disturbed), key=lambda found: found.ratio)
    on = f" on {len(sure)} of {len(workloads)} workloads" if len(workloads) > 1 else ""
    if len(sure) > 1:
        return f"best about {1 / sure[-1].ratio:.2g}x to {1 / sure[0].ratio:.2g}x PyTorch{on}"
    if sure:
        return f"best {_about(sure[0])} PyTorch (candidate {sure[0].order}){on}"
    return f"{counted(len(known), 'candidate')} passed, too busy to time" if known else ""


def _bar(share: float, left: str) -> Table:
    line = Table.grid(padding=(0, 2))
    line.add_row(ProgressBar(total=1.0, completed=share, width=40), Text(left))
    return line


def _finals(step: Step, workload: str) -> str:
    return f"finals of {workload}: {step.text}; {_left(step)}"


def _left(step: Step, since_s: float = 0.0) -> str:
    """The time left, so many seconds after a step of finals has begun."""
    return f"about {duration(round(max(1.0, step.left_s - since_s)))} left"


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
    waiting = progress.measuring - progress.on_device
    return (
        f"{counted(progress.finished, 'candidate')}{passed}, {rate:.1f}/s | compiling {progress.building}, measuring"
        f" {progress.on_device}, {waiting} waiting | device busy {busy_share(progress):.0%}"
        f"{incidents_text(progress.incidents)}"
    )


def incidents_text(counts: Mapping[str, int]) -> str:
    return "".join(f" | {name}: {count}" for name, count in counts.items())


def _waiting(progress: Progress) -> str:
    """A sentence on the candidate that the search has waited for long, or on what it waits for before its time begins."""
    order, work = progress.waiting or (None, None)
    if not progress.begun and order is not None:
        return "preparing the device; the time of the budget has not begun"
    return "" if work is None or work.seconds < LONG_S else f"waiting for candidate {order}: {told(work)}"


def told(work: InFlight) -> str:
    """The state of work in flight: "in the gate for 12 s; without a result it is ended in 18 s"."""
    again = ", for the second time, in a fresh process" if work.again else ""
    left = "" if work.left_s is None else f"; without a result it is ended in {work.left_s:.0f} s"
    return f"{STAGES[work.stage]} for {work.seconds:.0f} s{again}{left}"


def _failures(progress: Progress) -> str:
    failed = {s: n for s, n in sorted(progress.by_status.items()) if not s.passed}
    same = progress.by_status.get(Status.SAME_CODE, 0)
    refused = ", ".join(f"{n} {s.value.replace('_', ' ')}" for s, n in failed.items())
    parts = (f"refused: {refused}" if failed else "", f"{same} had machine code seen before" if same else "")
    return " | ".join(filter(None, parts))


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
            each.say(console.words(text))

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

                def finals(step: Step) -> None:
                    searching.clear()
                    for each in shown:
                        each.finals(step, names[step.workload])

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
