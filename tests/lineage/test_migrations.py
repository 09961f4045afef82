"""Migrations and models say the same, on SQLite and PostgreSQL, from wherever evo is installed."""

from __future__ import annotations

import io
import re
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import samples as s
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SAWarning
from sqlalchemy.schema import CreateTable

from evo.lineage.database import locate
from evo.lineage.models import Base
from evo.lineage.schema import alembic_config, revisions
from evo.lineage.store import Store


@pytest.fixture
def connection(where: str, tmp_path: Path) -> Iterator[Connection]:
    url = locate(where).url if "://" in where else f"sqlite:///{tmp_path / 'lineage.db'}"
    engine = create_engine(url)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
    with warnings.catch_warnings():  # candidates have a task, tasks have a winner
        warnings.filterwarnings("ignore", "Cannot correctly sort tables", SAWarning)
        return compare_metadata(context, Base.metadata)


def test_the_migrations_arrive_at_the_models(connection: Connection) -> None:
    assert len(differences(connection)) > 10
    command.upgrade(alembic_config(connection), "head")
    assert differences(connection) == []


def test_the_tables_are_word_for_word_those_of_the_models(tmp_path: Path) -> None:
    """What autogenerate does not compare: check constraints, names of keys, row ids."""

    def tables(path: Path) -> dict[str, set[str]]:
        with sqlite3.connect(path) as raw:
            found = raw.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
        raw.close()
        return {
            name: set(re.split(r",?\s*\n\s*", sql.replace('"', "")))
            for name, sql in found
            if "alembic" not in name and not sql.startswith("CREATE VIEW")
        }

    Store.open(tmp_path / "migrated.db", write=True).close()
    engine = create_engine(f"sqlite:///{tmp_path / 'created.db'}")
    Base.metadata.create_all(engine)
    engine.dispose()
    migrated, created = tables(tmp_path / "migrated.db"), tables(tmp_path / "created.db")
    assert migrated.keys() == created.keys()
    for name, sql in migrated.items():
        assert sql == created[name]


def test_the_names_of_the_files_are_those_of_the_revisions() -> None:
    script = ScriptDirectory.from_config(alembic_config())
    assert [r.revision for r in script.walk_revisions()][::-1] == list(revisions())


def test_every_migration_can_be_taken_back(connection: Connection) -> None:
    config = alembic_config(connection)
    command.upgrade(config, "head")
    for revision in ScriptDirectory.from_config(config).walk_revisions():
        command.downgrade(config, revision.down_revision or "base")
    assert inspect(connection).get_table_names() == ["alembic_version"]
    assert inspect(connection).get_view_names() == []
    command.upgrade(config, "head")
    assert differences(connection) == []


def test_the_migrations_are_good_sql_for_postgresql() -> None:
    script = io.StringIO()
    config = alembic_config()
    config.output_buffer = script
    config.set_main_option("sqlalchemy.url", "postgresql://host/name")
    command.upgrade(config, "head", sql=True)
    text = script.getvalue()
    names = set(re.findall(r"CREATE TABLE \"?(\w+)\"?", text))
    assert names == {*Base.metadata.tables, "alembic_version"}
    assert "ALTER TABLE task ADD CONSTRAINT fk_task_winner_id_candidate" in text
    assert "TIMESTAMP WITH TIME ZONE" in text
    for table in Base.metadata.tables.values():
        for line in str(CreateTable(table).compile(dialect=postgresql.dialect())).splitlines():
            assert line.strip().rstrip(",") in text
    # A key must hold run * 2**32 + order; a 32-bit one would overflow with the first candidate.
    assert "id BIGINT NOT NULL" in text
    assert text.count("candidate_id BIGINT") == 4


def test_every_constraint_has_a_name_that_is_ours() -> None:
    for table in Base.metadata.tables.values():
        for constraint in table.constraints:
            assert re.match(rf"(pk|fk|uq|ck)_{table.name}", str(constraint.name)), (table.name, constraint)
        for index in table.indexes:
            assert str(index.name).startswith(f"ix_{table.name}_")


def test_an_upgrade_that_is_cut_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lineage.db"
    from alembic.operations import Operations

    def fail(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Operations, "batch_alter_table", fail)
        with pytest.raises(KeyboardInterrupt):
            Store.open(path, write=True)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    with Store.open(path, write=True) as store:
        s.new_run(store)


def test_no_ini_file_and_no_current_folder_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = alembic_config().get_main_option("script_location")
    assert location is not None
    assert Path(location).is_absolute()
    assert sorted(p.name for p in Path(location).iterdir() if p.name != "__pycache__") == [
        "env.py",
        "script.py.mako",
        "versions",
    ]


def test_a_developer_can_write_the_next_migration(tmp_path: Path) -> None:
    """`alembic revision --autogenerate` in a copy of the folder, from a URL alone, gives a file that runs."""
    import shutil

    from alembic.config import Config

    from evo.lineage import schema

    folder = tmp_path / "migrations"
    shutil.copytree(Path(schema.__file__).parent / "migrations", folder)
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(folder))
    config.set_main_option("sqlalchemy.url", f"sqlite:///{tmp_path / 'lineage.db'}")
    command.upgrade(config, "head")
    newest = ScriptDirectory.from_config(config).get_current_head()
    made = command.revision(config, "nothing new", autogenerate=True, rev_id="9999")
    assert made is not None
    assert not isinstance(made, list)
    text = Path(made.path).read_text()
    assert text.startswith(f'"""nothing new.\n\nRevision 9999, after {newest};')
    assert "    pass" in text
    command.upgrade(config, "head")
    command.check(config)


def test_an_older_schema_is_refused_to_read_and_upgraded_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a newer evo would do: the same folder with one more revision."""
    import shutil

    from evo.errors import StoreError
    from evo.lineage import schema

    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "old")
        store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=0.0)
        store.set_winner(run, 0, 1)
        before = store.evaluations(run)
    package = tmp_path / "newer"
    shutil.copytree(Path(schema.__file__).parent / "migrations", package / "migrations")
    newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
    (package / "migrations" / "versions" / "v9999_next.py").write_text(
        "import sqlalchemy as sa\n"
        "from alembic import op\n"
        f"revision, down_revision, branch_labels, depends_on = '9999', '{newest}', None, None\n"
        "def upgrade():\n"
        "    with op.batch_alter_table('candidate', recreate='always') as table:\n"
        "        table.add_column(sa.Column('note', sa.Text(), server_default='x'))\n"
        "    with op.batch_alter_table('run', recreate='always') as table:\n"
        "        table.add_column(sa.Column('note', sa.Text(), server_default='y'))\n"
    )
    monkeypatch.setattr(schema, "__file__", str(package / "schema.py"))
    with pytest.raises(StoreError, match="of an older evo"):
        Store.open(path, write=False)
    with Store.open(path, write=True) as store:
        run = store.run("old")
        assert store.evaluations(run) == before
        store.add(run, s.ref(2, 1), s.passed(2), elapsed_s=0.0)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*), max(note) FROM candidate").fetchone() == (3, "x")
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
        assert raw.execute("SELECT winner_id % 4294967296 FROM task WHERE number = 0").fetchone() == (1,)
        assert raw.execute("SELECT count(*) FROM v_lineage").fetchone() == (3,)
        (index,) = raw.execute("SELECT sql FROM sqlite_master WHERE name = 'ix_candidate_source_sha'").fetchone()
        assert index.endswith("WHERE source_sha IS NOT NULL")
    raw.close()
