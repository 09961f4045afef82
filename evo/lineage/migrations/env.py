"""Run by alembic. evo hands over an open connection; a developer's command line hands over a URL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from evo.lineage.models import VIEWS, Base


def migrate(connection: Connection) -> None:
    """The migrations, with the views out of their way: SQLite alters no table that a view reads."""
    # Batch mode: SQLite cannot alter most of a table, so alembic copies it instead.
    # Transactional: a process killed half way leaves the schema it found.
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        transactional_ddl=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        for name in VIEWS:
            context.execute(f"DROP VIEW IF EXISTS {name}")
        context.run_migrations()
        for statement in VIEWS.values():
            context.execute(statement.strip())


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    engine = create_engine(context.config.get_main_option("sqlalchemy.url") or "")
    with engine.connect() as opened:
        migrate(opened)
    engine.dispose()
