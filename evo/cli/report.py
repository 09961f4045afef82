"""evo report, evo dashboard: a run as one HTML file, and all runs as live pages."""

import importlib.util
import ipaddress
import os
import signal
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from evo.cli.options import Db, Json, RunName, Trust, print_json
from evo.cli.recorded import look
from evo.environment import DEFAULT_DB, lasting_db
from evo.lineage.database import locate
from evo.lineage.store import Store
from evo.report.terminal import say

_NICENESS = 10
"""Niceness of the server, since a search that runs at the same time needs the cores more."""


def report(
    run: RunName,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder for each figure as SVG and PNG.")
    ] = None,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Write what a run found, and how, as one self-contained HTML file."""
    from evo.analysis.outcome import read_outcome
    from evo.analysis.runs import find_run
    from evo.report.page import check_replaceable, render_page, write_figures, write_file
    from evo.report.sentences import run_headline
    from evo.report.text import visible

    started = time.monotonic()
    check_replaceable(out)
    with Store.open(db, write=False) as store:
        summary = find_run(store, run)
        look(trust, (summary.kernel, summary.kernel_digest))
        data = read_outcome(store, run, db=lasting_db(db))
    page = render_page(data).encode()
    write_file(out, page)
    written = write_figures(figures, data) if figures is not None else []
    title, size = visible(run_headline(data)), len(page)
    if json:
        print_json(
            {
                "run": data.run.name,
                "headline": title,
                "report": str(out),
                "bytes": size,
                "figures": [str(p) for p in written],
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        return
    say(f"{data.run.name}: {title}")
    say(f"{out}: {size / 1e3:,.0f} kB, one file that needs no network")
    if figures is not None:
        say(f"{figures}: {len(written)} files of {sum(p.suffix == '.svg' for p in written)} figures")


def dashboard(
    port: Annotated[int, typer.Option(help="Port to serve at; 0 for a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to serve at. Everyone who can reach another address can read all.")
    ] = "127.0.0.1",
    optuna: Annotated[
        Path | None, typer.Option(help="Journal file for Optuna's studies; beside the database if left out.")
    ] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Serve the runs and their reports as live pages, and their trials in Optuna's dashboard."""
    from evo.report.live import LivePages, open_server, server_url
    from evo.report.trials import TrialMirror

    with Store.open(db, write=False):
        pass  # a database that cannot be opened is refused at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    installed = importlib.util.find_spec("optuna_dashboard") is not None
    beside = (locate(db).path or Path("runs/lineage.db")).with_suffix(".optuna.log")
    trials = TrialMirror(db, optuna or beside) if installed or optuna is not None else None
    try:
        os.nice(_NICENESS)
        optuna_app = import_module("optuna_dashboard").wsgi(trials.storage) if installed and trials is not None else None
        pages = LivePages(db, host, named=lasting_db(db), trials=trials, optuna=optuna_app)
        server = open_server(host, port, pages)
        if trials is not None:
            trials.start()
        _print_addresses(server_url(server), trials, optuna_app is not None, host, json=json)
        server.run()
    except KeyboardInterrupt:  # while it serves, the server itself handles the signal
        pass
    finally:
        if trials is not None:
            trials.stop()


def _print_addresses(url: str, trials: Any, has_optuna: bool, host: str, *, json: bool) -> None:
    journal = str(trials.journal) if trials is not None else None
    if json:
        print_json({"url": url, "optuna": f"{url}dashboard" if has_optuna else None, "journal": journal})
        return
    say(f"serving {url}  (Ctrl-C ends it)")
    if has_optuna:
        say(f"trials in Optuna's dashboard: {url}dashboard; its storage: {journal}")
    else:
        say(
            "Optuna's dashboard is not installed, so trials are not shown; with it: pip install 'evo-kernels[dashboard]'"
        )
    with suppress(ValueError):  # a name
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    say(f"evo: everyone who can reach {host} can read the whole database; there is no password", err=True)
