"""The views v_best, v_lineage and v_timings, and indices of the references to artefacts.

Revision 0002, after 0001. The views are made where every migration ends (`env.py`).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# (table, column): rows without an artefact take no room in the index.
REFERENCES = (("candidate", "source_sha"), ("build", "binary_sha"))


def upgrade() -> None:
    for table, column in REFERENCES:
        stored = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"ix_{table}_{column}", table, [column], sqlite_where=stored, postgresql_where=stored)


def downgrade() -> None:
    for table, column in REFERENCES:
        op.drop_index(f"ix_{table}_{column}", table)
