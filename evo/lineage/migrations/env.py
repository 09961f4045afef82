"""Run by alembic. evo hands over an open connection; a developer's command line hands over a URL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from evo.lineage.models import VIEWS, Base


def run() -> None:
    """The migrations, with the views out of their way: SQLite alters no table that a view reads."""
    with context.begin_transaction():
        for name in VIEWS:
            context.execute(f"DROP VIEW IF EXISTS {name}")
        context.run_migrations()
        if not reached_head():
            return
        for statement in VIEWS.values():
            context.execute(statement.strip())


def reached_head() -> bool:
    """False for the older schemas that a developer may ask for: the views are those of the newest."""
    if context.is_offline_mode():
        return context.get_revision_argument() == context.get_head_revision()
    return context.get_context().get_current_heads() == (context.get_head_revision(),)


def migrate(connection: Connection) -> None:
    # Batch mode: SQLite cannot alter most of a table, so alembic copies it instead.
    # Transactional: a process killed half way leaves the schema it found.
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        transactional_ddl=True,
        compare_server_default=True,
    )
    run()


given = context.config.attributes.get("connection")
url = context.config.get_main_option("sqlalchemy.url")
if given is not None:
    migrate(given)
elif context.is_offline_mode():
    context.configure(url=url, target_metadata=Base.metadata, literal_binds=True, transactional_ddl=True)
    run()
else:
    engine = create_engine(url or "")
    with engine.connect() as opened:
        migrate(opened)
    engine.dispose()
