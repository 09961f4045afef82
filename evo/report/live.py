"""The report's pages, kept up to date while a search goes on, and Optuna's dashboard beside them.

Bottle finds the page of an address, waitress serves it. The database is read, and never changed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import quote
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import waitress.server
from bottle import Bottle, HTTPError, request, response
from sqlalchemy import select

from evo.analysis.outcome import read_outcome
from evo.analysis.runs import list_runs
from evo.errors import EvoError, UnknownNameError, UsageError
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.liveness import gone
from evo.lineage.read import resolve_run
from evo.lineage.store import Store
from evo.report.page import read_script, read_style, render, render_body
from evo.report.trials import TrialMirror

__all__ = ["LivePages", "is_own_host", "open_server", "server_url"]

_LISTED_RUNS = 500
_KEPT_PAGES = 6
_REST = 10.0
"""A page asks again after so many times what making it took, for the search needs the cores more."""
_LEAST_WAIT_S, _MOST_WAIT_S, _IDLE_WAIT_S = 2.0, 60.0, 15.0
_THREADS = 8
_OPTUNA = ("/dashboard", "/api/", "/static/", "/csv/", "/favicon.ico")
_POLICY = (  # of the own pages; Optuna's have one of theirs
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
]
_OWN_HEADERS = [*_HEADERS, ("Content-Security-Policy", _POLICY), ("Cache-Control", "no-cache")]


def open_server(host: str, port: int, app: WSGIApplication) -> Any:
    """A server of waitress that listens, but does not serve yet. Raises UsageError where that cannot be had."""
    if not 0 <= port < 2**16:
        raise UsageError(f"--port {port} is not one from 0 to 65535")
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UsageError(
            f"cannot serve at {host}, port {port}: {error.strerror or error}; choose another with --port or --host"
        ) from error
    logging.getLogger("waitress").setLevel(logging.ERROR)
    return waitress.server.create_server(app, sockets=[listening], threads=_THREADS, ident=None)


def server_url(server: Any) -> str:
    host = server.effective_host
    return f"http://{f'[{host}]' if ':' in host else host}:{server.effective_port}/"


def is_own_host(header: str, served: str) -> bool:
    """Whether a Host header names this server, served at `served`, by something that no stranger can make up.

    A page elsewhere may have its own name point here (DNS rebinding), and then read what is served; an address, the
    name localhost and the name that was asked to be served under cannot be had that way.
    """
    name = header.strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
    everywhere = served in ("0.0.0.0", "::")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", served.lower(), *([socket.gethostname().lower()] if everywhere else []))
    return address.is_loopback or everywhere or name == served.lower()


class LivePages:
    """The pages of one database, as a WSGI application.

    named: the database as commands have to name it; None for the one that they take by themselves.
    trials: Optuna's studies, and `optuna` the application that shows them; None without.
    """

    def __init__(
        self,
        db: str,
        host: str,
        *,
        named: str | None = None,
        trials: TrialMirror | None = None,
        optuna: WSGIApplication | None = None,
    ) -> None:
        self._db, self._host, self._named = db, host, named
        self._trials, self._optuna = trials, optuna
        self._making = threading.Lock()
        self._made = lru_cache(_KEPT_PAGES)(self._make)
        self._app = Bottle()
        self._app.get("/", callback=lambda: self._frame("evo: runs", "/body"))
        self._app.get("/body", callback=self._body)
        self._app.get("/run/<name>", callback=self._run_frame)
        self._app.get("/run/<name>/body", callback=self._body)
        self._app.get("/assets/<name>", callback=_asset)
        self._app.install(_explained)
        self._app.default_error_handler = _plain

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        own = not environ.get("PATH_INFO", "").startswith(_OPTUNA)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [*headers, *(_OWN_HEADERS if own else _HEADERS)], *rest)

        if not is_own_host(environ.get("HTTP_HOST", ""), self._host):
            refusal = "421 Misdirected Request", b"this server goes by another name\n"
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            refusal = "405 Method Not Allowed", b"nothing can be changed here\n"
        elif own:
            return self._app(environ, begin)  # type: ignore[no-any-return]
        elif self._optuna is not None:
            return self._optuna(environ, begin)
        else:
            refusal = "404 Not Found", b"Optuna's dashboard is not installed\n"
        begin(refusal[0], [("Content-Type", "text/plain; charset=utf-8")])
        return [refusal[1]]

    def _run_frame(self, name: str) -> str:
        with Store.open(self._db, write=False) as store:
            name = store.run(name).name
        if self._trials is not None:
            self._trials.want(name)
        return self._frame(f"{name}: evo", f"/run/{quote(name, safe='')}/body")

    def _frame(self, title: str, body: str) -> str:
        """The page around a part, which its script fetches, and fetches again."""
        file = command_line(self._named, "report", "RUN", "--out", "report.html")
        return render("live.html.j2", error="", title=title, body=body, optuna=self._optuna is not None, file=file)

    def _body(self, name: str | None = None) -> str:
        """What stands in the frame of a run, or of the index; 304 if the browser has it as it is."""
        with self._making:  # one at a time: a search needs the cores
            state, running = self._state(name)
            text, cost_s = self._made(name, state)
        tag = f'"{hashlib.sha256(f"{name} {state}".encode()).hexdigest()[:24]}"'
        wait_s = min(max(_LEAST_WAIT_S, _REST * cost_s), _MOST_WAIT_S) if running else _IDLE_WAIT_S
        response.set_header("ETag", tag)
        response.set_header("X-Wait-Seconds", f"{wait_s:.1f}")
        if request.get_header("If-None-Match") == tag:
            response.status = 304
            return ""
        return text

    def _state(self, name: str | None) -> tuple[str, bool]:
        """What changes whenever the page of a run, or of all runs, does; and whether a search goes on there."""
        with Store.open(self._db, write=False) as store, store.reading() as connection:
            some = select(m.Run.id, m.Run.uid, m.Run.updated, m.Run.status)
            some = some if name is None else some.where(m.Run.id == resolve_run(connection, name))
            rows = connection.execute(some).all()
            dead = gone(store, connection, {row.id: row.status for row in rows})
        running = [row.id for row in rows if row.status == RunStatus.RUNNING.value and row.id not in dead]
        last = max((row.updated for row in rows), default=None)
        return f"{[row.uid for row in rows]} {last} {running}", bool(running)

    def _make(self, name: str | None, state: str) -> tuple[str, float]:
        """What stands in a frame, and the seconds that making it took. It is kept as long as the state is the same."""
        began = time.monotonic()
        with Store.open(self._db, write=False) as store:
            if name is None:
                start = command_line(self._named, "search", "KERNEL")
                text = render("index.html.j2", runs=list_runs(store), most=_LISTED_RUNS, place=str(store), start=start)
            else:
                text = render_body(read_outcome(store, name, db=self._named), live=True)
        return text, time.monotonic() - began


def _asset(name: str) -> str:
    if name == "style.css":
        response.content_type = "text/css; charset=utf-8"
        return read_style()
    if name not in ("page.js", "live.js"):
        raise HTTPError(404)
    response.content_type = "text/javascript; charset=utf-8"
    return read_script(name)


def _explained(callback: Callable[..., str]) -> Callable[..., bytes]:
    """Bottle's way to wrap every page: an error that evo knows becomes a page that says it."""

    def answer(*args: Any, **kwargs: Any) -> bytes:
        try:
            text = callback(*args, **kwargs)
        except EvoError as error:
            response.status = 404 if isinstance(error, UnknownNameError) else 503
            text = render("live.html.j2", error=str(error), title="This cannot be shown")
        return text.encode("utf-8", "replace")

    return answer


def _plain(error: HTTPError) -> str:
    response.content_type = "text/plain; charset=utf-8"
    return "there is no such page\n" if error.status_code == 404 else f"{error.status_line}\n"
