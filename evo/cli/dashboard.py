"""evo dashboard."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from evo.cli.options import DEFAULT_DB, Db, Json, lasting_db, print_json
from evo.lineage.store import Store

__all__ = ["register"]

_NICENESS = 10
"""A search that runs beside it needs the cores more."""


def register(app: typer.Typer) -> None:
    app.command("dashboard")(dashboard)


def dashboard(
    port: Annotated[int, typer.Option(help="Port to serve at; 0 for any that is free.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to serve at. Whoever reaches another than this can read all.")
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
        pass  # says at once what is wrong with it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    installed = importlib.util.find_spec("optuna_dashboard") is not None
    trials = TrialMirror(db, optuna or _journal(db)) if installed or optuna is not None else None
    try:
        os.nice(_NICENESS)
        shown = _optuna_app(trials) if installed and trials is not None else None
        pages = LivePages(db, host, named=lasting_db(db), trials=trials, optuna=shown)
        server = open_server(host, port, pages)
        if trials is not None:
            trials.start()
        _tell(server_url(server), trials, shown is not None, host, json=json)
        server.run()
    except KeyboardInterrupt:  # between two steps; while it serves, the server sees to it
        pass
    finally:
        if trials is not None:
            trials.stop()


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _journal(db: str) -> Path:
    """runs/lineage.db has runs/lineage.optuna.log."""
    if "://" in db and not db.startswith("sqlite:///"):
        return Path("runs/lineage.optuna.log")
    return Path(db.removeprefix("sqlite:///")).with_suffix(".optuna.log")


def _optuna_app(trials: Any) -> Any:
    import optuna_dashboard

    return optuna_dashboard.wsgi(trials.storage)


def _tell(url: str, trials: Any, shown: bool, host: str, *, json: bool) -> None:
    journal = str(trials.journal) if trials is not None else None
    if json:
        print_json({"url": url, "optuna": f"{url}dashboard" if shown else None, "journal": journal})
        return
    typer.echo(f"serving {url}  (Ctrl-C ends it)")
    if shown:
        typer.echo(f"trials in Optuna's dashboard: {url}dashboard; its storage: {journal}")
    else:
        typer.echo(
            "Optuna's dashboard is not installed, so trials are not shown; with it: pip install 'evo-kernels[dashboard]'"
        )
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        typer.echo(f"evo: whoever can reach {host} can read the whole database here; there is no password", err=True)
