"""A new database is made from the models; one of an older schema is brought up to date, and backed up before."""

from __future__ import annotations

import io
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import samples as s
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from evo.errors import StoreError
from evo.lineage import schema
from evo.lineage.backup import newest_backup
from evo.lineage.models import Base
from evo.lineage.schema import alembic_config, revisions
from evo.lineage.store import Store

MIGRATIONS = Path(schema.__file__).parent / "migrations"


def test_the_names_of_the_files_are_those_of_the_revisions() -> None:
    script = ScriptDirectory.from_config(alembic_config())
    assert [r.revision for r in script.walk_revisions()][::-1] == list(revisions())


def test_a_new_database_has_what_the_models_say(store: Store) -> None:
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


def test_a_key_of_postgresql_holds_every_candidate() -> None:
    """A 32-bit one would overflow with the first candidate of the second run."""
    tables = (CreateTable(table).compile(dialect=postgresql.dialect()) for table in Base.metadata.tables.values())
    text = "\n".join(map(str, tables))
    assert len(re.findall(r"\bid BIGINT NOT NULL|id BIGSERIAL NOT NULL", text)) == 2
    assert text.count("candidate_id BIGINT") == 4


def test_every_constraint_has_a_name_that_is_ours() -> None:
    for table in Base.metadata.tables.values():
        for constraint in table.constraints:
            assert re.match(rf"(pk|fk|uq|ck)_{table.name}", str(constraint.name)), (table.name, constraint)
        for index in table.indexes:
            assert str(index.name).startswith(f"ix_{table.name}_")


def test_a_database_whose_making_is_cut_off_is_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(schema, "revisions", fail)  # asked for when all tables have been made
        with pytest.raises(KeyboardInterrupt):
            Store.open(path, write=True)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    with Store.open(path, write=True) as store:
        s.new_run(store)


def test_a_developer_can_write_the_next_migration(tmp_path: Path) -> None:
    """`alembic revision --autogenerate` in a copy of the folder, from a URL alone, gives a file that runs."""
    Store.open(tmp_path / "lineage.db", write=True).close()
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder)
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(folder))
    config.set_main_option("sqlalchemy.url", f"sqlite:///{tmp_path / 'lineage.db'}")
    made = command.revision(config, "nothing new", autogenerate=True, rev_id="9999")
    assert made is not None
    assert not isinstance(made, list)
    text = Path(made.path).read_text()
    assert text.startswith(f'"""nothing new.\n\nRevision 9999, after {revisions()[-1]};')
    assert "    pass" in text
    command.upgrade(config, "head")
    command.check(config)


def test_an_older_schema_is_refused_to_read_and_upgraded_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newer evo would do: the same folder with one more revision, from wherever it is installed."""
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "old")
        store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=0.0)
        store.set_winner(run, 0, 1)
        before = store.evaluations(run)
    package = path.parent / "newer"
    shutil.copytree(MIGRATIONS, package / "migrations")
    (package / "migrations" / "versions" / "v9999_next.py").write_text(
        "import sqlalchemy as sa\n"
        "from alembic import op\n"
        f"revision, down_revision, branch_labels, depends_on = '9999', '{revisions()[-1]}', None, None\n"
        "def upgrade():\n"
        "    with op.batch_alter_table('candidate', recreate='always') as table:\n"
        "        table.add_column(sa.Column('note', sa.Text(), server_default='x'))\n"
        "    with op.batch_alter_table('run', recreate='always') as table:\n"
        "        table.add_column(sa.Column('note', sa.Text(), server_default='y'))\n"
    )
    monkeypatch.setattr(schema, "__file__", str(package / "schema.py"))
    monkeypatch.chdir(package)
    with pytest.raises(StoreError, match="of an older evo"):
        Store.open(path, write=False)
    assert newest_backup(path) is None
    with Store.open(path, write=True) as store:
        run = store.run("old")
        assert store.evaluations(run) == before
        store.add(run, s.ref(2, 1), s.passed(2), elapsed_s=0.0)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*), max(note) FROM candidate").fetchone() == (3, "x")
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
        assert raw.execute("SELECT winner_id % 4294967296 FROM task WHERE number = 0").fetchone() == (1,)
        assert raw.execute("SELECT count(*) FROM v_lineage").fetchone() == (3,)
    raw.close()
    monkeypatch.undo()
    backup = newest_backup(path)
    assert backup is not None
    with Store.open(backup, write=False) as store:
        assert store.evaluations(store.run("old")) == before
