"""The live pages as a WSGI application: it reads the database, and changes nothing."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, unquote_to_bytes
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from markupsafe import Markup
from sqlalchemy import func, select

from evo.analysis import queries
from evo.analysis.records import Best, RunSummary
from evo.errors import EvoError, UnknownNameError
from evo.evaluation import within_noise
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.presence import gone
from evo.lineage.runs import resolve_run
from evo.lineage.store import Store
from evo.report.data import read_run_data
from evo.report.live.trials import TrialMirror
from evo.report.page import render, render_body, script, style

__all__ = ["LiveApp", "is_own_host"]

_PAGE_SIZE = 50
_KEPT = 6
_REST = 20.0
_LEAST_WAIT_S, _MOST_WAIT_S, _IDLE_WAIT_S = 2.0, 60.0, 15.0
_OPTUNA = ("/dashboard", "/api/", "/static/", "/csv/", "/favicon.ico")
_POLICY = (
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


def is_own_host(header: str, served: str) -> bool:
    """Whether a Host header names this server, served at `served`, by something that no stranger can make up.

    A page elsewhere may have its own name point here (DNS rebinding), and then read what is served; an address, the
    name localhost and the name that was asked to be served under cannot be had that way.
    """
    name = header.strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in (
            "localhost",
            served.lower(),
            *([socket.gethostname().lower()] if _is_everywhere(served) else []),
        )
    return address.is_loopback or _is_everywhere(served) or name == served.lower()


def _is_everywhere(served: str) -> bool:
    return served in ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: str
    body: bytes
    kind: str = "text/html; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class LiveApp:
    """Pages of one database.

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
        self._db, self._host, self._trials, self._optuna, self._rest = db, host, trials, optuna, rest
        self._named = named
        self._made: OrderedDict[str, tuple[str, str, float]] = OrderedDict()
        self._making = threading.Lock()
        self._assets = {
            "/assets/style.css": ("text/css; charset=utf-8", style().encode()),
            "/assets/tips.js": ("text/javascript; charset=utf-8", script().encode()),
            "/assets/live.js": ("text/javascript; charset=utf-8", script("live").encode()),
        }

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if not is_own_host(environ.get("HTTP_HOST", ""), self._host):
            return _send(_plain("421 Misdirected Request", "this server goes by another name"), environ, start)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _send(_plain("405 Method Not Allowed", "nothing can be changed here"), environ, start)
        path = environ.get("PATH_INFO", "/") or "/"
        if path.startswith(_OPTUNA):
            if self._optuna is None:
                return _send(_plain("404 Not Found", "Optuna's dashboard is not installed"), environ, start)
            return self._optuna(environ, _hardened(start))
        try:
            answer = self._answer(path, environ)
        except UnknownNameError as error:
            answer = self._failed("404 Not Found", error)
        except EvoError as error:
            answer = self._failed("503 Service Unavailable", error)
        return _send(answer, environ, start)

    def _answer(self, path: str, environ: WSGIEnvironment) -> _Answer:
        if path in self._assets:
            kind, body = self._assets[path]
            return _Answer(status="200 OK", body=body, kind=kind)
        parts = [_decoded(p) for p in path.strip("/").split("/")]
        if parts == [""]:
            page = _page_number(environ)
            return self._frame("evo: runs", f"/body?page={page}")
        if parts == ["body"]:
            page = _page_number(environ)
            return self._part(environ, f"index {page}", self._index_stamp, lambda store: self._index(store, page))
        if parts[0] == "run" and len(parts) in (2, 3) and parts[2:] in ([], ["body"]):
            with Store.open(self._db, write=False) as store:
                name = store.run(parts[1]).name
            if self._trials is not None:
                self._trials.want(name)
            if len(parts) == 2:
                return self._frame(f"{name}: evo", f"/run/{quote(name, safe='')}/body")
            return self._part(environ, f"run {name}", lambda s: self._run_stamp(s, name), lambda s: self._run(s, name))
        return _plain("404 Not Found", "there is no such page")

    def _frame(self, title: str, body: str) -> _Answer:
        """The page around a part, which its script fetches, and fetches again."""
        note = "Optuna's dashboard is not installed: pip install 'evo-kernels[dashboard]'"
        file = command_line(self._named, "report", "RUN", "--out", "report.html")
        page = render("live.html.j2", title=title, body=body, optuna=self._optuna is not None, note=note, file=file)
        return _Answer(status="200 OK", body=page.encode("utf-8", "replace"))

    def _part(
        self,
        environ: WSGIEnvironment,
        key: str,
        stamp: Callable[[Store], tuple[str, bool]],
        make: Callable[[Store], str],
    ) -> _Answer:
        """What stands in a frame; 304 if the browser has it as it is."""
        with self._making, Store.open(self._db, write=False) as store:  # one at a time: a search needs the cores
            now, running = stamp(store)
            tag = f'"{hashlib.sha256(f"{key} {now}".encode()).hexdigest()[:24]}"'
            kept = self._made.get(key)
            known = environ.get("HTTP_IF_NONE_MATCH") == tag
            if not known and (kept is None or kept[0] != tag):
                began = time.monotonic()
                text = make(store)
                kept = tag, text, time.monotonic() - began
                self._made[key] = kept
                self._made.move_to_end(key)
                while len(self._made) > _KEPT:
                    self._made.popitem(last=False)
        cost = kept[2] if kept is not None else 0.0
        wait = min(max(_LEAST_WAIT_S, self._rest * cost), _MOST_WAIT_S) if running else _IDLE_WAIT_S
        headers = (("ETag", tag), ("X-Wait-Seconds", f"{wait:.1f}"))
        if known:
            return _Answer(status="304 Not Modified", body=b"", headers=headers)
        assert kept is not None
        return _Answer(status="200 OK", body=kept[1].encode("utf-8", "replace"), headers=headers)

    @staticmethod
    def _index_stamp(store: Store) -> tuple[str, bool]:
        with store.reading() as connection:
            number, last = connection.execute(select(func.count(m.Run.id), func.max(m.Run.updated))).one()
            keys = connection.scalars(select(m.Run.id).where(m.Run.status == RunStatus.RUNNING.value)).all()
            running = len(keys) - len(gone(store, connection, dict.fromkeys(keys, RunStatus.RUNNING.value)))
        return f"{number} {last} {running}", bool(running)

    def _index(self, store: Store, page: int) -> str:
        with store.reading() as connection:
            number = connection.scalar(select(func.count()).select_from(m.Run)) or 0
            names = connection.scalars(
                select(m.Run.name).order_by(m.Run.id.desc()).limit(_PAGE_SIZE).offset((page - 1) * _PAGE_SIZE)
            ).all()
        rows = [_index_row(store, queries.run(store, name)) for name in names]
        pages = max(1, -(-number // _PAGE_SIZE))
        start = command_line(self._named, "search", "KERNEL")
        return render("index.html.j2", start=start, rows=rows, place=str(store), number=number, page=page, pages=pages)

    def _run(self, store: Store, name: str) -> str:
        data = read_run_data(store, name, db=self._named)
        return render(
            "live-run.html.j2", body=Markup(render_body(data, live=True)), links=self._studies(store, name), run=name
        )

    def _run_stamp(self, store: Store, name: str) -> tuple[str, bool]:
        with store.reading() as connection:
            key, uid, updated, status = connection.execute(
                select(m.Run.id, m.Run.uid, m.Run.updated, m.Run.status).where(m.Run.id == resolve_run(connection, name))
            ).one()
            searching = status == RunStatus.RUNNING.value and not gone(store, connection, {key: status})
        return f"{uid} {updated} {status} {searching} {self._studies(store, name)}", searching

    def _studies(self, store: Store, name: str) -> list[tuple[str, str]]:
        """Workloads, and where Optuna's dashboard shows the trials of each."""
        if self._optuna is None or self._trials is None:
            return []
        ids = self._trials.study_ids(name, [w.key for w in store.run(name).spec.workloads])
        return [(workload, f"/dashboard/studies/{key}") for workload, key in ids.items()]

    def _failed(self, status: str, error: EvoError) -> _Answer:
        return _Answer(status=status, body=render("failed.html.j2", said=str(error)).encode("utf-8", "replace"))


def _index_row(store: Store, run: RunSummary) -> dict[str, Any]:
    best: Best | None = min(queries.best(store, run=run.name), key=lambda b: (b.unconfirmed, b.ratio), default=None)
    noise = queries.noise_floors(store, run.name)
    tie = best is not None and within_noise(best.ratio, noise.get(best.workload))
    return {"run": run, "best": best, "tie": tie, "href": f"/run/{quote(run.name, safe='')}"}


def _page_number(environ: WSGIEnvironment) -> int:
    text = parse_qs(environ.get("QUERY_STRING", "")).get("page", ["1"])[0]
    return max(1, min(int(text), 10**6)) if text.isdecimal() and len(text) < 8 else 1


def _decoded(part: str) -> str:
    """WSGI hands paths over as the bytes of latin-1; they were UTF-8."""
    return unquote_to_bytes(part.encode("latin-1", "replace")).decode("utf-8", "replace")


def _plain(status: str, text: str) -> _Answer:
    return _Answer(status=status, body=f"{text}\n".encode(), kind="text/plain; charset=utf-8")


def _send(answer: _Answer, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
    headers = [
        ("Content-Type", answer.kind),
        ("Content-Length", str(len(answer.body))),
        ("Content-Security-Policy", _POLICY),
        ("Cache-Control", "no-cache"),
        *_HEADERS,
        *answer.headers,
    ]
    start(answer.status, headers)
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else answer.body]


def _hardened(start: StartResponse) -> StartResponse:
    """Optuna's pages have a policy of their own; the other headers are added."""

    def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        return start(status, [*headers, *_HEADERS], *rest)

    return begin
