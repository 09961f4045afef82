"""evo replay: samplers on recorded spaces."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from evo.analysis.scores import Replayed
from evo.cli.options import Json, print_json
from evo.job.replays import REPEATS
from evo.job.replays import replay as replay_all
from evo.job.values import split_pairs
from evo.report.terminal import figure, interval, make_console, make_table, say
from evo.report.text import counted

_ENOUGH = 12
"""Least number of repeats with which a score means something."""


def replay(
    spaces: Annotated[list[Path], typer.Argument(help="Cache files of Kernel Tuner or T4 results, plain or gzipped.")],
    samplers: Annotated[
        str | None, typer.Option(help="Names, or files of one's own, separated by commas; all names if left out.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Replays of a sampler on a space, each from another default.", min=1)
    ] = REPEATS,
    in_flight: Annotated[int, typer.Option(help="Proposals made before the first result is told.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first repeat; the next ones follow.")] = 0,
    sampler_options: Annotated[
        list[str] | None, typer.Option("--sampler-option", help="SAMPLER.NAME=VALUE; repeat for more.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for figures: the score over the budget of each space.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of processes; one a core if left out.", min=1)] = None,
    json: Json = False,
) -> None:
    """Score samplers on recorded search spaces: 0 is random search, 1 the best configuration at once."""
    found = replay_all(
        spaces,
        samplers or (),
        repeats=repeats,
        in_flight=in_flight,
        seed=seed,
        sampler_options=split_pairs(sampler_options or (), "--sampler-option"),
        plot=plot,
        jobs=jobs,
        ending=(signal.SIGINT, signal.SIGTERM),
    )
    if json:
        print_json(found)
    else:
        _print(found)
        if plot is not None and found.figures:
            say(f"{plot}: {counted(len(found.figures), 'figure')}, as SVG and as PNG")
    if found.interrupted:
        raise typer.Exit(130)


def _print(found: Replayed) -> None:
    table = make_table("space", "sampler", ">score", ">interval", ">first tenth", ">evaluations", ">ms a proposal")
    several = len(found.spaces) > 1
    for s in [*found.scores, *(found.means if several else ())]:
        scored = (figure(s.score, 3), interval(s.low, s.high), figure(s.first_tenth, 3))
        row = scored if s.score is not None else ("n/a", "", "n/a")
        table.add_row(s.space, s.sampler, *row, figure(s.evaluations, 0), figure(s.proposal_ms))
    make_console().print_table(table)
    if reasons := {s.space: s.reason for s in found.scores if s.reason}:
        for name, reason in reasons.items():
            say(f"{name}: n/a, since {reason}")
        if several:
            say(f"{counted(len(reasons), 'space')} of {len(found.spaces)} left out of the means")
    made = {s.repeats for s in found.scores} or {0}  # fewer than were asked for, where the command was interrupted
    repeats = f"{f'{min(made)} to ' if len(made) > 1 else ''}{counted(max(made), 'repeat')}"
    how = f"{repeats}, seed {found.seed}, {found.in_flight} in flight"
    told = f"{how}; score: 0 is random search on average, 1 the best at once"
    say(told if min(made) >= _ENOUGH else f"{told}; so few say little: they differ by tenths")
