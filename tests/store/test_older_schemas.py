"""Databases of every schema that there has been are brought up to date, and lose nothing by it, come what may."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import samples as s
from alembic.script import ScriptDirectory
from older import SCHEMAS, make_older
from sqlalchemy import create_engine, inspect

from evo.errors import StoreError
from evo.evaluation import Status
from evo.store import RunStatus, queries
from evo.store.database import locate
from evo.store.schema import alembic_config
from evo.store.store import Store

TABLES = (
    "environment", "run", "island", "artefact", "candidate", "parentage", "build", '"check"', "timing", "final"
)  # fmt: skip


def test_there_is_a_database_of_every_schema_but_the_newest() -> None:
    script = ScriptDirectory.from_config(alembic_config())
    assert {*SCHEMAS} == {r.revision for r in script.walk_revisions()} - {script.get_current_head()}


def contents(where: str | Path) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table; columns that a migration has added are left out by name."""
    location = locate(where)
    engine = create_engine(location.url)
    try:
        with engine.connect() as connection:
            found = {}
            for table in TABLES:
                known = COLUMNS[table.strip('"')]
                names = ", ".join(f'"{c}"' for c in known)
                rows = connection.exec_driver_sql(f"SELECT {names} FROM {table}").all()
                found[table] = sorted(tuple(map(str, row)) for row in rows)
            return found
    finally:
        engine.dispose()


def _columns() -> dict[str, list[str]]:
    raw = sqlite3.connect(":memory:")
    raw.executescript(SCHEMAS["0001"].read_text())
    found = {t.strip('"'): [row[1] for row in raw.execute(f"PRAGMA table_info({t})")] for t in TABLES}
    raw.close()
    return found


COLUMNS = _columns()


@pytest.mark.parametrize("revision", SCHEMAS)
def test_an_older_database_keeps_every_row(revision: str, where: str) -> None:
    make_older(revision, where)
    before = contents(where)
    assert all(before.values())
    with pytest.raises(StoreError, match=rf"is of an older evo \(schema {revision}\); the next search"):
        Store.open(where, write=False)
    assert contents(where) == before
    for _ in range(2):  # the second time there is nothing to do
        Store.open(where, write=True).close()
        assert contents(where) == before
    with Store.open(where, write=True) as store:
        run = store.run("old")
        evaluations = store.evaluations(run)
        assert [e.ref.order for e in evaluations] == list(range(8))
        assert evaluations[2].evaluation == s.without_artefacts(s.passed(2, 0.5))
        assert evaluations[3].evaluation.status is Status.SAME_CODE
        assert [p.order for p in evaluations[2].ref.proposal.parents] == [0, 1]
        assert queries.best(store, "layernorm")[0].id == evaluations[2].public_id
        assert queries.source(store, evaluations[2].public_id) == s.build(2).source
        assert store.run("cut-off").status is RunStatus.INTERRUPTED
        store.add(run, s.ref(8, 2), s.passed(8), elapsed_s=11.0)
        store.add(s.new_run(store, "new"), s.ref(0), s.passed(0), elapsed_s=0.0)


# The n-th statement is its last: the process is gone before or after the database has carried it out.
UPGRADE = f"""
import os, signal, sys
sys.path[:0] = [{str(s.CHECKOUT)!r}]
from sqlalchemy import Engine, event
from evo.store import database
from evo.store.store import Store
where, last, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
count = 0
def note(*arguments):
    global count
    count += 1
    if count == last:
        os.kill(os.getpid(), signal.SIGKILL)
event.listen(Engine, f"{{when}}_cursor_execute", note)
Store.open(where, write=True).close()
print(count)
"""


def upgrade(where: str, last: int, when: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(UPGRADE), where, str(last), when]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("revision", SCHEMAS)
def test_an_upgrade_killed_at_any_statement_loses_nothing(revision: str, where: str, tmp_path: Path) -> None:
    rng = random.Random(revision)
    make_older(revision, where)
    before = contents(where)
    probe = tmp_path / "probe.db"
    make_older(revision, probe)
    counted = upgrade(str(probe), -1, "before")
    assert counted.returncode == 0, counted.stderr
    points = range(2, int(counted.stdout) + 1)
    for point in sorted(rng.sample(points, 5)):
        when = rng.choice(["before", "after"])
        killed = upgrade(where, point, when)
        assert killed.returncode in (-signal.SIGKILL, 0), killed.stderr
        assert contents(where) == before
        if "://" not in where:
            with sqlite3.connect(where) as raw:
                assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            raw.close()
    with Store.open(where, write=True) as store:
        assert contents(where) == before
        assert len(store.evaluations(store.run("old"))) == 8
        with store.reading() as connection:
            assert set(inspect(connection).get_view_names()) == {"v_best", "v_lineage", "v_timings"}


def test_a_large_rebuild_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """Of the kind that copies every table, by the clock and not by statements: the commit itself can be hit."""
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "large")
        with store.transaction():
            for order in range(400):
                store.add(run, s.ref(order, *range(max(0, order - 1), order)), s.passed(order), elapsed_s=0.0)
        store.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
    before = contents(path)
    script = f"""
import shutil, sys
from pathlib import Path
sys.path[:0] = [{str(s.CHECKOUT)!r}]
from evo.store import schema
from evo.store.store import Store
package = Path(sys.argv[2])
if not package.exists():
    shutil.copytree(Path(schema.__file__).parent / "migrations", package / "migrations")
    head = schema.revisions()[-1]
    tables = ("candidate", "timing", "check", "build", "run", "parentage")
    (package / "migrations" / "versions" / "v9999_next.py").write_text(
        "import sqlalchemy as sa\\nfrom alembic import op\\n"
        f"revision, down_revision, branch_labels, depends_on = '9999', '{{head}}', None, None\\n"
        "def upgrade():\\n"
        + "".join(
            f"    with op.batch_alter_table('{{t}}', recreate='always') as table:\\n"
            f"        table.add_column(sa.Column('note', sa.Text(), server_default='x'))\\n"
            for t in tables
        )
    )
schema.__file__ = str(package / "schema.py")
print("begins", flush=True)
Store.open(sys.argv[1], write=True).close()
print("ends", flush=True)
"""
    rng, ended = random.Random(1), False
    for turn in range(40):
        command = [sys.executable, "-c", script, str(path), str(tmp_path / "newer")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            time.sleep(rng.uniform(0.0, 0.05 + 0.03 * turn))
            os.kill(process.pid, signal.SIGKILL)
            ended = process.stdout.read() == "ends\n"
        assert contents(path) == before
        with sqlite3.connect(path) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
            (version,) = raw.execute("SELECT version_num FROM alembic_version").fetchone()
        raw.close()
        if ended or version == "9999":
            break
    assert version == "9999"
