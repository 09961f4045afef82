"""The pages of reports, kept up to date while a search goes on, and Optuna's dashboard beside them.

Bottle finds the page of an address, waitress serves it. The database is only read.
"""

import hashlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import waitress.server
from bottle import Bottle, request, response
from sqlalchemy import select

from evo.analysis.outcome import read_outcome
from evo.analysis.runs import RunSummary, find_run, list_runs
from evo.errors import EvoError, UnknownNameError, UsageError
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.liveness import gone
from evo.lineage.read import resolve_run
from evo.lineage.store import Store
from evo.report.page import policy_of, render, render_body, render_frame
from evo.report.trials import TrialMirror

_THREADS = 8
_OPTUNA = ("/dashboard", "/api/", "/static/", "/csv/", "/favicon.ico")
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
]


def open_server(host: str, port: int, app: WSGIApplication) -> Any:
    """A waitress server that listens and does not serve yet. Raises UsageError for an address that cannot be had."""
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
    """Whether a Host header names this server in a way that no other site can. served: the address that was asked for.

    The page of another site can make its own name point here (DNS rebinding) and then read what is served. It cannot do so
    with an address, the name localhost, or the name that was asked for.
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

    named: the database as commands have to name it; None for the default. trials: Optuna's studies, and `optuna` the
    application that shows them; None without.
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
        self._app = Bottle()
        self._app.get("/", callback=lambda: self._frame("evo: runs", "/body", None))
        self._app.get("/body", callback=self._body)
        self._app.get("/run/<name>", callback=self._run_frame)
        self._app.get("/run/<name>/body", callback=self._body)
        self._app.install(_explained)
        self._app.default_error_handler = lambda error: _refusal(error.status_line)

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        own = self._optuna is None or not environ.get("PATH_INFO", "").startswith(_OPTUNA)
        policy = [("Content-Security-Policy", policy_of(live=True)), ("Cache-Control", "no-cache")]  # Optuna has its own

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [*headers, *_HEADERS, *(policy if own else [])], *rest)

        if not is_own_host(environ.get("HTTP_HOST", ""), self._host):
            refusal = "421 Misdirected Request", b"this server goes by another name\n"
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            refusal = "405 Method Not Allowed", b"nothing can be changed here\n"
        elif self._optuna is None or own:
            return self._app(environ, begin)  # type: ignore[no-any-return]
        else:
            return self._optuna(environ, begin)
        begin(refusal[0], [("Content-Type", "text/plain; charset=utf-8")])
        return [refusal[1]]

    def _run_frame(self, name: str) -> str:
        with Store.open(self._db, write=False) as store:
            run = find_run(store, name)
        if self._trials is not None:
            self._trials.asked_for.add(run.name)
        return self._frame(f"{run.name}: evo", f"/run/{quote(run.name, safe='')}/body", run)

    def _frame(self, title: str, body: str, run: RunSummary | None) -> str:
        """A page whose script fetches its body, again and again. body: the address of that. What is known of the run, or the
        list's head, stands where the body will have it."""
        file = command_line(self._named, "report", "RUN", "--out", "report.html")
        frame = render("live.html.j2", error="", source=body, optuna=self._optuna is not None, file=file, run=run)
        return render_frame(title, frame, live=True)

    def _body(self, name: str | None = None) -> str:
        """The body of a run's page, or of the index; status 304 if the browser has it as it is."""
        with self._making, Store.open(self._db, write=False) as store:  # one page at a time, as a search needs the cores
            tag = _tag(store, name)
            response.set_header("ETag", tag)
            if request.get_header("If-None-Match") == tag:
                response.status = 304
                return ""
            if name is not None:
                return render_body(read_outcome(store, name, db=self._named), live=True)
            start = command_line(self._named, "search", "KERNEL")
            return render("index.html.j2", runs=list_runs(store), place=str(store), start=start)


def _tag(store: Store, name: str | None) -> str:
    """A tag that changes whenever the page of a run, or of all runs, does."""
    with store.reading() as connection:
        query = select(m.Run.id, m.Run.uid, m.Run.updated, m.Run.status)
        query = query if name is None else query.where(m.Run.id == resolve_run(connection, name))
        rows = connection.execute(query).all()
        dead = gone(store, connection, {row.id: row.status for row in rows})
    state = [(row.uid, row.updated, row.status, row.id in dead) for row in rows]
    return f'"{hashlib.sha256(repr(state).encode()).hexdigest()[:24]}"'


def _explained(callback: Callable[..., str]) -> Callable[..., bytes]:
    """A wrapper of every page: an error that evo knows becomes a page with its sentence."""

    def answer(*args: Any, **kwargs: Any) -> bytes:
        try:
            text = callback(*args, **kwargs)
        except EvoError as error:
            response.status = 404 if isinstance(error, UnknownNameError) else 503
            text = _refusal(str(error))
        return text.encode("utf-8", "replace")

    return answer


def _refusal(why: str) -> str:
    return render_frame("This cannot be shown", render("live.html.j2", error=why), live=True)
