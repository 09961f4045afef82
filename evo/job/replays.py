"""Replays of samplers on recorded spaces, in processes: what `evo replay` and `evo.replay` do."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import track

from evo.analysis.frame import Records
from evo.analysis.replay import Replay, begin_process, read_space
from evo.analysis.replay import replay as replay_once
from evo.analysis.scores import Replayed, Score, judge, mean_of
from evo.discovery import plugin_names
from evo.errors import EvoError, UsageError
from evo.job.values import check_seed, own_files, prefix_of, read_sampler_options
from evo.lineage.database import check_folder
from evo.report.progress import LINE_EVERY_S, LineTimer
from evo.report.terminal import handling, notice
from evo.report.text import duration
from evo.search.samplers import find_sampler

REPEATS = 25

_Asked = tuple[Path, str, Mapping[str, object], int, int]


def replay(
    spaces: str | Path | Sequence[str | Path],
    samplers: str | Sequence[str] = (),
    *,
    repeats: int = REPEATS,
    in_flight: int = 1,
    seed: int = 0,
    sampler_options: Mapping[str, object] | None = None,
    plot: str | Path | None = None,
    jobs: int | None = None,
    progress: bool = True,
    ending: Sequence[signal.Signals] = (signal.SIGINT,),
) -> Replayed:
    """Scores samplers on recorded spaces: 0 is random search, 1 the best configuration at once.

    spaces: cache files of Kernel Tuner or T4 results. samplers: names, or files of one's own; all names if left out.
    repeats: replays of a sampler on a space, each from another default. in_flight: proposals made before the first result
    is told. seed: of the first repeat; the next ones follow. sampler_options: values by SAMPLER.NAME. plot: a folder for
    figures. jobs: number of processes; one a core if left out. progress: prints how it goes. ending: the signals that end
    it; what was done by then is scored.

    Raises UsageError for files and options that cannot be replayed, before anything starts.
    """
    counts = {"repeats": repeats, "in_flight": in_flight, "jobs": jobs}
    if wrong := [name for name, n in counts.items() if n is not None and n < 1]:
        raise UsageError(f"{wrong[0]} must be at least 1, got {counts[wrong[0]]}")
    check_seed(seed)
    paths = list(dict.fromkeys(map(Path, [spaces] if isinstance(spaces, str | Path) else spaces)))
    given = samplers.split(",") if samplers and isinstance(samplers, str) else samplers
    names = list(dict.fromkeys(given)) or plugin_names("sampler")
    if not paths:
        raise UsageError("nothing to replay: name cache files of Kernel Tuner or T4 results")
    if plot is not None:
        if Path(plot).exists() and not Path(plot).is_dir():
            raise UsageError(f"figures cannot be written to {plot}, which is a file: name a folder")
        check_folder(Path(plot), "plot")
    options = _by_sampler(read_sampler_options(sampler_options or {}), names)
    for path in paths:
        space = read_space(path).space(random.Random(0))
        for name in names:
            find_sampler(name)(space, 0, options[name])
    pairs = [(path, name) for path in paths for name in names]
    asked = [(path, name, options[name], in_flight, seed + n) for n in range(repeats) for path, name in pairs]
    found: dict[tuple[Path, str], list[Replay]] = {}
    interrupted = False
    try:
        with handling(ending, lambda *_: _interrupt_once(ending)):
            for (path, name, *_), made in _replay_each(asked, jobs or os.cpu_count() or 1, ending, progress):
                found.setdefault((path, name), []).append(made)
    except KeyboardInterrupt:
        interrupted = True
        notice(f"interrupted; the scores are those of {sum(map(len, found.values()))} of {len(asked)} replays")
    scores = Records(judge(path, name, found[path, name], seed) for path, name in pairs if (path, name) in found)
    result = Replayed(
        seed=seed,
        repeats=repeats,
        in_flight=in_flight,
        interrupted=interrupted,
        spaces={path.name: {"path": str(path), "sha256": _digest(path), **read_space(path).facts} for path in paths},
        samplers={name: {"options": options[name], "files": own_files(name, options[name])} for name in names},
        scores=scores,
        means=Records(mean_of(name, scores) for name in names if any(s.sampler == name for s in scores)),
    )
    return replace(result, figures=_draw(Path(plot), scores)) if plot is not None else result


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _by_sampler(options: Mapping[str, object], names: Sequence[str]) -> dict[str, dict[str, object]]:
    """The options of each sampler, which a file of one's own is by its name without .py. Raises UsageError for an option
    that names none of them."""
    prefixes = {prefix_of(name): name for name in names}
    found: dict[str, dict[str, object]] = {name: {} for name in names}
    if options and len(prefixes) < len(names):
        raise UsageError(f"two of the samplers {', '.join(names)} have one name for their options: rename a file")
    for key, value in options.items():
        prefix = next((p for p in prefixes if key.startswith(p) and len(key) > len(p)), None)
        if prefix is None:
            told = f"sampler option {key} is of none of the samplers that are replayed ({', '.join(names)})"
            raise UsageError(f"{told}; write SAMPLER.NAME=VALUE, e.g. {next(iter(prefixes))}NAME=4")
        found[prefixes[prefix]][key.removeprefix(prefix)] = value
    return found


def _interrupt_once(ending: Sequence[signal.Signals]) -> NoReturn:
    """Handles a signal and ignores further ones, which would keep processes from being ended."""
    for number in ending:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Processes(SpawnContext):
    """Makes processes that do not run the program that replays once more: it may be a script without a guard."""

    NAME = "evo-replay"

    def __init__(self) -> None:
        self.made: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        self.made.append(process := SpawnProcess(*arguments, **named))
        process.name = self.NAME
        return process


def _leave_main_out() -> None:
    prepared: Any = spawn.get_preparation_data

    def prepared_without(name: str) -> dict[str, Any]:
        own = name == _Processes.NAME
        return {k: v for k, v in prepared(name).items() if not (own and k.startswith("init_main_from_"))}

    setattr(spawn, "get_preparation_data", prepared_without)  # noqa: B010


_leave_main_out()


def _replay_each(
    asked: Sequence[_Asked], jobs: int, ending: Sequence[signal.Signals], progress: bool
) -> Iterator[tuple[_Asked, Replay]]:
    """Yields the replays as they are done, about in their order. Progress is a bar on a terminal, elsewhere a line every few
    seconds, after a minute every minute. However it ends, it ends the processes. Raises EvoError if one is killed."""
    processes = _Processes()
    pool = ProcessPoolExecutor(min(jobs, len(asked)), processes, initializer=begin_process)
    console = Console(stderr=True, quiet=not progress)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # processes inherit it: ^C is for the command
    try:
        futures = {pool.submit(replay_once, *one): one for one in asked}
        done: SimpleQueue[Future[Replay]] = SimpleQueue()  # an interrupt within `as_completed` leaves futures locked
        for future in futures:
            future.add_done_callback(done.put)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if console.is_terminal:
            made = track((done.get() for _ in futures), "replaying", len(asked), console=console, transient=True)
        else:
            made = _told(done, len(asked), progress)
        for future in made:
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise EvoError("a process that replays was killed, perhaps for want of memory; try fewer --jobs") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes.made:
            with suppress(ValueError):  # it is closed
                process.kill()


def _told(done: SimpleQueue[Future[Replay]], total: int, progress: bool) -> Iterator[Future[Replay]]:
    """Yields the futures as they are done, and prints every few seconds how many are."""
    began, number, timer = time.monotonic(), 0, LineTimer()
    while number < total:
        with suppress(Empty):
            yield done.get(timeout=LINE_EVERY_S)
            number += 1
        if timer.is_due() and progress:
            left = f", about {duration((time.monotonic() - began) * (total / number - 1))} left" if number else ""
            notice(f"{number} of {total} replays are done{left}")


def _draw(folder: Path, scores: Sequence[Score]) -> list[str]:
    """Draws the curves of each space that has a score. Returns the files, without their suffixes."""
    from evo.report.page import draw_scores, write_figure  # the import takes a part of a second

    drawn = []
    for space in dict.fromkeys(score.space for score in scores if not score.reason):
        name = re.sub(r"\.json(\.gz)?$", "", space).replace(".", "-")
        write_figure(folder / name, draw_scores(name, space, [score for score in scores if score.space == space]))
        drawn.append(str(folder / name))
    return drawn
