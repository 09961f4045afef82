"""The live pages are served to their own user only, and change nothing; Optuna's users find the trials they know."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from wsgiref.util import setup_testing_defaults

import pytest
from recorded import HOSTILE, WORKLOADS, Plan, Recording, record_run

from evo.analysis.candidates import read_candidate
from evo.analysis.runs import find_run, read_history
from evo.errors import UsageError
from evo.evaluation import Status
from evo.lineage.store import Store
from evo.report.live import LivePages, is_own_host, open_server
from evo.report.trials import TrialMirror, study_name
from tests.lineage import samples as s


class Client:
    """Asks a WSGI application as a browser would."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        environ: dict[str, Any] = {}
        setup_testing_defaults(environ)
        path, _, query = path.partition("?")
        environ |= {
            "REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "wsgi.input": BytesIO(),
            "HTTP_HOST": "127.0.0.1:8765",
        } | {f"HTTP_{k.upper()}": v for k, v in headers.items()}  # fmt: skip
        answer: list[Any] = []
        body = b"".join(self.app(environ, lambda status, head, *rest: answer.extend((status, head))))
        return int(answer[0].split()[0]), {k.lower(): v for k, v in answer[1]}, body.decode()


@pytest.fixture
def client(database: Path) -> Client:
    return Client(LivePages(str(database), "127.0.0.1"))


@pytest.mark.parametrize(
    ("header", "served", "own"),
    [
        ("127.0.0.1:8765", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("[::1]:8765", "::1", True),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("localhost.evil.example:8765", "127.0.0.1", False),
        ("192.168.1.7:8765", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("192.168.1.7:8765", "0.0.0.0", True),
        ("evil.example:8765", "0.0.0.0", False),
        ("gpu-box:8765", "gpu-box", True),
    ],
)
def test_only_a_name_that_no_stranger_can_point_here_is_answered(header: str, served: str, own: bool) -> None:
    assert is_own_host(header, served) is own


def test_a_foreign_host_header_gets_nothing_and_nobody_can_change_anything(client: Client) -> None:
    for path in ("/", "/body", "/run/one", "/dashboard", "/nothing"):
        status, _, body = client.get(path, host="evil.example")
        assert status == 421
        assert "one" not in body.split()
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.get(path, method=method)[0] == 405


def test_every_page_forbids_what_it_does_not_need(client: Client) -> None:
    for path in ("/", "/body", "/run/one", "/run/one/body", "/run/nobody", "/nothing"):
        _, headers, _ = client.get(path)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_index_lists_the_runs_the_latest_first_and_links_to_them(client: Client) -> None:
    status, _, body = client.get("/body")
    assert status == 200
    assert body.index("/run/tie") < body.index("/run/two") < body.index("/run/one")
    assert '<td class="n">tie</td>' in body[body.index("/run/tie") : body.index("/run/two")]
    assert '<td class="n">tie</td>' not in body[body.index("/run/two") :]
    assert "<script" not in body
    assert "&lt;script&gt;" in body


def test_a_page_that_has_not_changed_is_not_sent_again(client: Client) -> None:
    status, headers, body = client.get("/run/one/body")
    assert status == 200
    again = client.get("/run/one/body", if_none_match=headers["etag"])
    assert (again[0], again[2]) == (304, "")
    assert client.get("/run/one/body")[2] == body


def test_what_is_not_there_is_one_sentence(client: Client) -> None:
    status, _, body = client.get("/run/<b>nobody")
    assert status == 404
    assert "&lt;b&gt;nobody" in body
    for path in ("/run/one/body/more", "/../../etc/passwd", "/dashboard", "/assets/page.js"):
        assert client.get(path)[0] == 404


def test_a_database_that_goes_away_is_said_and_comes_back(database: Path, tmp_path: Path) -> None:
    path = tmp_path / "moved.db"
    path.write_bytes(database.read_bytes())
    client = Client(LivePages(str(path), "127.0.0.1"))
    assert client.get("/run/one/body")[0] == 200
    path.rename(tmp_path / "elsewhere.db")
    status, _, body = client.get("/run/one/body")
    assert status == 503
    assert "there is no database" in body
    (tmp_path / "elsewhere.db").rename(path)
    assert client.get("/run/one/body")[0] == 200


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot serve at 127.0.0.1, port {port}"):
            open_server("127.0.0.1", port, lambda *_: [])
    with pytest.raises(UsageError, match="--port 99999"):
        open_server("127.0.0.1", 99999, lambda *_: [])


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[tuple[Store, Recording, TrialMirror]]:
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        search = Recording(store, Plan(name="live", evaluations=60, workloads=WORKLOADS))
        search.advance(40)
        mirror = TrialMirror(str(path), tmp_path / "optuna.log")
        mirror.copy(store, "live")
        yield store, search, mirror
        mirror.stop()


def _trials(mirror: TrialMirror) -> int:
    return sum(len(mirror.storage.get_all_trials(s._study_id)) for s in mirror.storage.get_all_studies())


def test_a_study_of_each_task_has_its_candidates_as_trials(mirrored: tuple[Store, Recording, TrialMirror]) -> None:
    import optuna

    store, _, mirror = mirrored
    task = find_run(store, "live").tasks[1]
    study = optuna.load_study(study_name=study_name("live", task.workload), storage=mirror.storage)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    points = [p for p in read_history(store, "live") if p.task == 1]
    by_name = {t.user_attrs["candidate"]: t for t in study.trials}
    assert by_name.keys() == {p.id for p in points}
    for p in points:
        trial, record = by_name[p.id], read_candidate(store, p.id)
        assert trial.params == record.parameters
        assert trial.value == p.score
        assert (trial.state == optuna.trial.TrialState.COMPLETE) == Status(p.status).passed
        assert trial.user_attrs["operator"] == p.operator
        assert trial.user_attrs["parents"] == [parent.id for parent in record.parents]
        assert trial.datetime_start <= trial.datetime_complete
    assert study.best_value == task.best_score
    assert study.best_trial.user_attrs["candidate"] == task.best


def test_a_trial_whose_machine_code_was_known_has_the_score_of_that(tmp_path: Path) -> None:
    import optuna

    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "twins")
        store.add(run, s.ref(0), s.passed(0, 0.5), elapsed_s=1.0)
        store.add(run, s.ref(1, 0), replace(s.same_code(1, 0), timings=()), elapsed_s=2.0)
        mirror = TrialMirror(str(path), tmp_path / "optuna.log")
        mirror.copy(store, "twins")
        study = optuna.load_study(study_name=study_name("twins", s.SMALL.key), storage=mirror.storage)
        mirror.stop()
    assert [t.state for t in study.trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert [(t.value, t.user_attrs["speedup"]) for t in study.trials] == [(0.5, 2.0)] * 2
    assert study.trials[1].user_attrs["status"] == "same_code"


def test_trials_are_added_as_the_search_goes_on_and_none_twice_and_by_one_dashboard(
    mirrored: tuple[Store, Recording, TrialMirror], tmp_path: Path
) -> None:
    store, search, mirror = mirrored
    search.advance(20)
    mirror.copy(store, "live")
    other = TrialMirror(str(tmp_path / "lineage.db"), tmp_path / "optuna.log")
    assert (_trials(mirror), _trials(other)) == (60, 60)
    assert (mirror.writes, other.writes) == (True, False)
    other.stop()
    mirror.stop()
    again = TrialMirror(str(tmp_path / "lineage.db"), tmp_path / "optuna.log")
    again.copy(store, "live")
    assert (again.writes, _trials(again)) == (True, 60)
    again.stop()


def test_a_run_that_took_over_a_name_gets_a_study_of_its_own_also_where_its_kernel_is_gone(
    mirrored: tuple[Store, Recording, TrialMirror], tmp_path: Path
) -> None:
    _, _, mirror = mirrored
    mirror.stop()
    with Store.open(tmp_path / "other.db", write=True) as other:
        plan = Plan(name="live", evaluations=12, workloads=WORKLOADS, finals=False, kernel=f"/nowhere/{HOSTILE}")
        record_run(other, plan)
        mirror = TrialMirror(str(tmp_path / "other.db"), tmp_path / "optuna.log")
        mirror.copy(other, "live")
        assert _trials(mirror) == 12
        for trial in mirror.storage.get_all_trials(mirror.storage.get_all_studies()[0]._study_id):
            assert trial.user_attrs["elsewhere"] == read_candidate(other, trial.user_attrs["candidate"]).parameters
        mirror.stop()


def test_what_is_not_a_journal_is_not_written_to(database: Path, tmp_path: Path) -> None:
    before = database.read_bytes()
    with pytest.raises(UsageError, match="is not a journal of Optuna's"):
        TrialMirror(str(database), database)
    with pytest.raises(UsageError, match="Is a directory; name another file"):
        TrialMirror(str(database), tmp_path)
    assert database.read_bytes() == before


@contextmanager
def _serving(database: Path, *options: str, program: tuple[str, ...] = ("-m", "evo")) -> Iterator[Any]:
    """The command itself, which ends without complaint when it is told to. Gives its output."""
    command = [sys.executable, *program, "dashboard", "--db", str(database), "--port", "0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as running:
        try:
            yield running.stdout
            running.send_signal(signal.SIGINT if options else signal.SIGTERM)
            _, err = running.communicate(timeout=60)
            assert (running.returncode, err) == (0, "")
        finally:
            running.kill()


def test_the_command_serves_its_pages_and_optunas_and_ends_when_told_to(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard")
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        record_run(store, Plan(name="served", evaluations=30))
    with _serving(path, "--json") as out:
        said = json.loads(out.readline())
        assert said.keys() == {"url", "optuna", "journal"}
        with urlopen(f"{said['url']}run/served/body", timeout=60) as answer:
            assert "30 candidates" in answer.read().decode()
        with urlopen(said["optuna"], timeout=60) as answer:
            assert "Optuna" in answer.read().decode()
        names: list[str] = []
        while not names:  # the studies are written beside
            with urlopen(f"{said['url']}api/studies", timeout=60) as answer:
                names = [s["study_name"] for s in json.load(answer)["study_summaries"]]
        assert names[0].startswith("served/rows=4096")
        assert Path(said["journal"]) == path.with_suffix(".optuna.log")


def test_without_optunas_dashboard_the_command_says_what_to_install(database: Path) -> None:
    program = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'optuna_dashboard' else find(name, *rest)\n"
        "from evo.cli import main; main()"
    )
    with _serving(database, program=("-c", program)) as out:
        assert out.readline().startswith("serving http://127.0.0.1:")
        assert "pip install 'evo-kernels[dashboard]'" in out.readline()
    assert not database.with_suffix(".optuna.log").exists()
