"""The first schema: runs, tasks, candidates with parents, builds, checks, timings, finals and artefacts.

Revision 0001, the first. A new database is made from `evo.lineage.models` and marked with the newest revision, so there is
nothing to do here: this file is what the first change of the schema comes after.
"""

from __future__ import annotations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: no database is older than this one."""


def downgrade() -> None:
    """Nothing: there is no schema before this one."""
