"""evo replay: samplers on recorded spaces."""

import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, NoReturn

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import track

from evo.analysis.replay import Replay, Score, begin_process, judge, mean_of, read_space
from evo.analysis.replay import replay as replay_once
from evo.cli.options import Json, print_json
from evo.discovery import plugin_names
from evo.errors import EvoError, UsageError
from evo.job.values import read_numbers, split_pairs
from evo.lineage.database import check_folder
from evo.report.progress import LINE_EVERY_S, LineTimer
from evo.report.terminal import figure, handling, make_console, make_table, say
from evo.report.text import counted, duration
from evo.search.samplers import find_sampler

_ENOUGH = 12
"""Least number of repeats with which a score means something."""
_POINTS = 200
"""Number of points of a drawn curve."""
_ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the command, which then prints the scores that it has."""


def replay(
    spaces: Annotated[list[Path], typer.Argument(help="Cache files of Kernel Tuner or T4 results, plain or gzipped.")],
    samplers: Annotated[str | None, typer.Option(help="Names, separated by commas; all if left out.")] = None,
    repeats: Annotated[int, typer.Option(help="Replays of a sampler on a space, each from another default.", min=1)] = 25,
    in_flight: Annotated[int, typer.Option(help="Proposals made before the first result is told.", min=1)] = 1,
    sampler_options: Annotated[
        list[str] | None, typer.Option("--sampler-option", help="SAMPLER.NAME=VALUE; repeat for more.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for figures: the score over the budget of each space.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of processes; one a core if left out.", min=1)] = None,
    json: Json = False,
) -> None:
    """Score samplers on recorded search spaces: 0 is random search, 1 the best configuration at once."""
    names = samplers.split(",") if samplers else plugin_names("sampler")
    spaces = list(dict.fromkeys(spaces))
    if plot is not None and plot.exists() and not plot.is_dir():
        raise UsageError(f"--plot {plot} is a file: name a folder")
    if plot is not None:
        check_folder(plot, "--plot")
    options = _by_sampler(read_numbers(split_pairs(sampler_options or (), "--sampler-option")), names)
    for path in spaces:  # bad files and options are refused before anything starts
        space = read_space(path).space(random.Random(0))
        for name in names:
            find_sampler(name)(space, 0, options[name])
    pairs = [(path, name) for path in spaces for name in dict.fromkeys(names)]
    asked = [(path, name, options[name], in_flight, seed) for seed in range(repeats) for path, name in pairs]
    found: dict[tuple[Path, str], list[Replay]] = {}
    interrupted = False
    try:
        with handling(_ENDING, _interrupt_once):
            for (path, name, *_), made in _replay_all(asked, jobs or os.cpu_count() or 1):
                found.setdefault((path, name), []).append(made)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        done = sum(map(len, found.values()))
        say(f"evo: interrupted; the scores are those of {done} of {len(asked)} replays", err=True)
    scores = [judge(path, name, found[path, name]) for path, name in pairs if (path, name) in found]
    means = [mean_of(name, scores) for name in dict.fromkeys(s.sampler for s in scores)]
    figures = _draw(plot, found) if plot is not None else []
    _print(scores, means, figures, plot, in_flight, json=json)
    if interrupted:
        raise typer.Exit(130)


def _print(
    scores: Sequence[Score],
    means: Sequence[Score],
    figures: Sequence[str],
    plot: Path | None,
    in_flight: int,
    *,
    json: bool,
) -> None:
    made = {s.repeats for s in scores} or {0}  # fewer than were asked for, where the command was interrupted
    if json:
        print_json({"in_flight": in_flight, "repeats": min(made), "scores": scores, "means": means, "figures": figures})
        return
    table = make_table("space", "sampler", ">score", ">first tenth", ">evaluations", ">ms a proposal")
    spaces = {s.space for s in scores}
    for s in [*scores, *(means if len(spaces) > 1 else ())]:
        scored = [figure(s.score, 3), figure(s.tenths[0], 3)] if s.tenths is not None else ["n/a", "n/a"]
        row = *scored, figure(s.evaluations, 0), figure(s.proposal_ms)
        table.add_row(s.space, s.sampler, *row)
    make_console().print_table(table)
    if reasons := {s.space: s.reason for s in scores if s.reason}:
        for name, reason in reasons.items():
            say(f"{name}: n/a, since {reason}")
        if len(spaces) > 1:
            say(f"{counted(len(reasons), 'space')} of {len(spaces)} left out of the means")
    repeats = f"{f'{min(made)} to ' if len(made) > 1 else ''}{counted(max(made), 'repeat')}"
    told = f"{repeats}, {in_flight} in flight; score: 0 is random search on average, 1 the best at once"
    say(told if min(made) >= _ENOUGH else f"{told}; so few say little: they differ by tenths")
    if figures:
        say(f"{plot}: {counted(len(figures), 'figure')}, as SVG and as PNG")


def _by_sampler(options: Mapping[str, object], names: Sequence[str]) -> dict[str, dict[str, object]]:
    """The options of each sampler. Raises UsageError for an option that names none of them."""
    found: dict[str, dict[str, object]] = {name: {} for name in names}
    for key, value in options.items():
        sampler, _, option = key.partition(".")
        if sampler not in found or not option:
            told = f"--sampler-option {key} is of none of the samplers that are replayed ({', '.join(names)})"
            raise UsageError(f"{told}; write SAMPLER.NAME=VALUE, e.g. {names[0]}.NAME=4")
        found[sampler][option] = value
    return found


_Asked = tuple[Path, str, Mapping[str, object], int, int]


def _interrupt_once(*_: object) -> NoReturn:
    """Handles a signal and ignores further ones, which would keep processes from being ended."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _replay_all(asked: Sequence[_Asked], jobs: int) -> Iterator[tuple[_Asked, Replay]]:
    """Yields the replays as they are done, about in their order. Progress is a bar on a terminal, elsewhere a line every few
    seconds, after a minute every minute. However it ends, it ends the processes. Raises EvoError if one is killed."""
    pool = ProcessPoolExecutor(min(jobs, len(asked)), multiprocessing.get_context("spawn"), initializer=begin_process)
    console = Console(stderr=True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # processes inherit it: ^C is for the command
    try:
        futures = {pool.submit(replay_once, *one): one for one in asked}
        done: SimpleQueue[Future[Replay]] = SimpleQueue()  # an interrupt within `as_completed` leaves futures locked
        for future in futures:
            future.add_done_callback(done.put)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if console.is_terminal:
            made = track((done.get() for _ in futures), "replaying", len(asked), console=console, transient=True)
        else:
            made = _told(done, len(asked))
        for future in made:
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise EvoError("a process that replays was killed, perhaps for want of memory; try fewer --jobs") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pool.shutdown(wait=False, cancel_futures=True)
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                if any("spawn_main" in word for word in process.cmdline()):
                    process.kill()


def _told(done: SimpleQueue[Future[Replay]], total: int) -> Iterator[Future[Replay]]:
    """Yields the futures as they are done, and prints every few seconds how many are."""
    began, number, timer = time.monotonic(), 0, LineTimer()
    while number < total:
        with suppress(Empty):
            yield done.get(timeout=LINE_EVERY_S)
            number += 1
        if timer.is_due():
            left = f", about {duration((time.monotonic() - began) * (total / number - 1))} left" if number else ""
            say(f"evo: {number} of {total} replays are done{left}", err=True)


def _draw(folder: Path, found: Mapping[tuple[Path, str], Sequence[Replay]]) -> list[str]:
    """Draws the curves of each space that has a score. Returns the files, without their suffixes."""
    from evo.report.page import draw_curves, write_figure  # the import takes a part of a second

    drawn = []
    for path in dict.fromkeys(path for path, _ in found if not read_space(path).unscored):
        curves = {}
        for (other, name), replays in found.items():
            if other == path:
                curve = read_space(path).curve(replays)
                curves[name] = curve[np.linspace(0, len(curve) - 1, _POINTS).astype(int)].tolist()
        name = re.sub(r"(\.t4)?\.json(\.gz)?$", "", path.name)
        write_figure(folder / name, draw_curves(name, path.name, curves))
        drawn.append(str(folder / name))
    return drawn
