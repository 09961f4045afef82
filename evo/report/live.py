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
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import waitress.server
from bottle import Bottle, HTTPError, request, response
from sqlalchemy import func, select

from evo.analysis.best import Best, find_best
from evo.analysis.outcome import read_outcome
from evo.analysis.runs import RunSummary, find_run
from evo.errors import EvoError, UnknownNameError, UsageError
from evo.evaluation import within_noise
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.liveness import gone
from evo.lineage.read import resolve_run
from evo.lineage.store import Store
from evo.report.page import read_script, read_style, render, render_body
from evo.report.trials import TrialMirror

__all__ = ["LivePages", "is_own_host", "open_server", "server_url"]

_PAGE_SIZE, _MOST_PAGES = 50, 10**6
_KEPT = 6
_REST = 10.0
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
    trials: Optuna's studies, and `optuna` the application that shows them; None without. rest: a page asks again after so
    many times what making it took, for the search needs the cores more.
    """

    def __init__(
        self,
        db: str,
        host: str,
        *,
        named: str | None = None,
        trials: TrialMirror | None = None,
        optuna: WSGIApplication | None = None,
        rest: float = _REST,
    ) -> None:
        self._db, self._host, self._named, self._rest = db, host, named, rest
        self._trials, self._optuna = trials, optuna
        self._made: OrderedDict[str, tuple[str, str, float]] = OrderedDict()
        self._making = threading.Lock()
        self._assets = {
            "style.css": ("text/css; charset=utf-8", read_style()),
            "page.js": ("text/javascript; charset=utf-8", read_script()),
            "live.js": ("text/javascript; charset=utf-8", read_script("live")),
        }
        self._app = Bottle()
        self._app.get("/", callback=self._index_frame)
        self._app.get("/body", callback=self._index)
        self._app.get("/run/<name>", callback=self._run_frame)
        self._app.get("/run/<name>/body", callback=self._run)
        self._app.get("/assets/<name>", callback=self._asset)
        self._app.install(_explained)
        self._app.default_error_handler = _plain

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        added = _OWN_HEADERS

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [*headers, *added], *rest)

        refusal = ""
        if not is_own_host(environ.get("HTTP_HOST", ""), self._host):
            refusal = "421 Misdirected Request: this server goes by another name"
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            refusal = "405 Method Not Allowed: nothing can be changed here"
        elif environ.get("PATH_INFO", "").startswith(_OPTUNA):
            if self._optuna is not None:
                added = _HEADERS
                return self._optuna(environ, begin)
            refusal = "404 Not Found: Optuna's dashboard is not installed"
        if refusal:
            status, _, said = refusal.partition(": ")
            begin(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{said}\n".encode()]
        return self._app(environ, begin)  # type: ignore[no-any-return]

    def _asset(self, name: str) -> str:
        if name not in self._assets:
            raise HTTPError(404)
        response.content_type, text = self._assets[name]
        return text

    def _index_frame(self) -> str:
        return self._frame("evo: runs", f"/body?page={_page_number()}")

    def _run_frame(self, name: str) -> str:
        with Store.open(self._db, write=False) as store:
            name = store.run(name).name
        if self._trials is not None:
            self._trials.want(name)
        return self._frame(f"{name}: evo", f"/run/{quote(name, safe='')}/body")

    def _frame(self, title: str, body: str) -> str:
        """The page around a part, which its script fetches, and fetches again."""
        file = command_line(self._named, "report", "RUN", "--out", "report.html")
        return render(
            "live.html.j2", error="", title=title, body=body, optuna=self._optuna is not None, file=file
        )

    def _index(self) -> str:
        page = _page_number()

        def make(store: Store) -> str:
            with store.reading() as connection:
                number = connection.scalar(select(func.count()).select_from(m.Run)) or 0
                names = connection.scalars(
                    select(m.Run.name).order_by(m.Run.id.desc()).limit(_PAGE_SIZE).offset((page - 1) * _PAGE_SIZE)
                ).all()
            return render(
                "index.html.j2",
                start=command_line(self._named, "search", "KERNEL"),
                rows=[_index_row(store, find_run(store, name)) for name in names],
                place=str(store),
                number=number,
                page=page,
                pages=max(1, -(-number // _PAGE_SIZE)),
            )

        return self._part(f"index {page}", None, make)

    def _run(self, name: str) -> str:
        def make(store: Store) -> str:
            return render_body(read_outcome(store, name, db=self._named), live=True, studies=self._studies(store, name))

        return self._part(f"run {name}", name, make)

    def _part(self, key: str, run: str | None, make: Callable[[Store], str]) -> str:
        """What stands in a frame; 304 if the browser has it as it is. It is made anew where the run, or any run, changed."""
        with self._making, Store.open(self._db, write=False) as store:  # one at a time: a search needs the cores
            state, running = self._state(store, run)
            tag = f'"{hashlib.sha256(f"{key} {state}".encode()).hexdigest()[:24]}"'
            kept = self._made.get(key)
            known = request.get_header("If-None-Match") == tag
            if not known and (kept is None or kept[0] != tag):
                began = time.monotonic()
                text = make(store)
                kept = self._made[key] = tag, text, time.monotonic() - began
                self._made.move_to_end(key)
                while len(self._made) > _KEPT:
                    self._made.popitem(last=False)
        cost = kept[2] if kept is not None else 0.0
        wait_s = min(max(_LEAST_WAIT_S, self._rest * cost), _MOST_WAIT_S) if running else _IDLE_WAIT_S
        response.set_header("ETag", tag)
        response.set_header("X-Wait-Seconds", f"{wait_s:.1f}")
        if known or kept is None:
            response.status = 304
            return ""
        return kept[1]

    def _state(self, store: Store, name: str | None) -> tuple[str, bool]:
        """What changes whenever a page of the run, or of all runs, does; and whether a search goes on there."""
        with store.reading() as connection:
            some = select(m.Run.id, m.Run.uid, m.Run.updated, m.Run.status)
            some = some if name is None else some.where(m.Run.id == resolve_run(connection, name))
            rows = connection.execute(some).all()
            dead = gone(store, connection, {row.id: row.status for row in rows})
        running = [row.id for row in rows if row.status == RunStatus.RUNNING.value and row.id not in dead]
        last = max((row.updated for row in rows), default=None)
        studies = self._studies(store, name) if name is not None else ()
        return f"{[row.uid for row in rows]} {last} {running} {studies}", bool(running)

    def _studies(self, store: Store, name: str) -> tuple[tuple[str, str], ...]:
        """Workloads, and where Optuna's dashboard shows the trials of each."""
        if self._optuna is None or self._trials is None:
            return ()
        run = store.run(name)
        ids = self._trials.study_ids(run.name, [w.key for w in run.spec.workloads])
        return tuple((workload, f"/dashboard/studies/{key}") for workload, key in ids.items())


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


def _index_row(store: Store, run: RunSummary) -> dict[str, Any]:
    best: Best | None = min(find_best(store, run=run.name), key=lambda b: (b.unconfirmed, b.ratio), default=None)
    tie = best is not None and within_noise(best.ratio, best.noise_floor)
    return {"run": run, "best": best, "tie": tie, "href": f"/run/{quote(run.name, safe='')}"}


def _page_number() -> int:
    text = request.query.get("page", "1")
    return max(1, min(int(text), _MOST_PAGES)) if text.isdecimal() and len(text) < 8 else 1
