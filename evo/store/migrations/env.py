"""Run by alembic. evo hands over an open connection; a developer's command line hands over a URL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from evo.store.models import Base


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
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
url = context.config.get_main_option("sqlalchemy.url")
if given is not None:
    migrate(given)
elif context.is_offline_mode():
    context.configure(url=url, target_metadata=Base.metadata, literal_binds=True, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(url or "")
    with engine.connect() as opened:
        migrate(opened)
    engine.dispose()
