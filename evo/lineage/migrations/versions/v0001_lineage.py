"""The lineage: runs, tasks, candidates with parents, builds, checks, timings and artefacts.

Revision 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

# A migration keeps its own copy of types and names: it must do the same after the models have changed.
revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DIGEST = sa.String(64)
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("nvrtc", sa.Text(), nullable=False),
        sa.Column("compiler", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("evo", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
        sa.UniqueConstraint("digest", name="uq_environment_digest"),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("kernel_digest", DIGEST, nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("window", sa.Integer(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("budget", sa.JSON(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=False),
        sa.Column("created", TIME, nullable=False),
        sa.Column("updated", TIME, nullable=False),
        sa.Column("finished", TIME, nullable=True),
        sa.Column("elapsed_s", sa.Double(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.CheckConstraint("status IN ('running', 'interrupted', 'finished', 'failed')", name=op.f("ck_run_status")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name="fk_run_environment_id_environment"),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.UniqueConstraint("name", name="uq_run_name"),
        sa.UniqueConstraint("uid", name="uq_run_uid"),
    )
    op.create_index("ix_run_kernel", "run", ["kernel"])
    op.create_table(
        "task",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("dims", sa.JSON(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("winner_id", KEY, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_task_run_id_run"),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_task"),
    )
    op.create_index("ix_task_workload", "task", ["workload"])
    op.create_table(
        "artefact",
        sa.Column("sha256", DIGEST, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("kind IN ('source', 'binary', 'ptx')", name=op.f("ck_artefact_kind")),
        sa.PrimaryKeyConstraint("sha256", name="pk_artefact"),
    )
    create_candidate()
    with op.batch_alter_table("task") as task:
        task.create_foreign_key("fk_task_winner_id_candidate", "candidate", ["winner_id"], ["id"])
    create_outcome()


def create_candidate() -> None:
    op.create_table(
        "candidate",
        sa.Column("id", KEY, autoincrement=False, nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("order", sa.BigInteger(), nullable=False),
        sa.Column("task", sa.Integer(), nullable=False),
        sa.Column("public_id", sa.String(16), nullable=False),
        sa.Column("genome", sa.Text(), nullable=False),
        sa.Column("genome_digest", DIGEST, nullable=False),
        sa.Column("source_sha", DIGEST, nullable=True),
        sa.Column("operator", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("same_code_as_id", KEY, nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("gate_seconds", sa.Double(), nullable=False),
        sa.Column("timing_seconds", sa.Double(), nullable=False),
        sa.Column("elapsed_s", sa.Double(), nullable=False),
        sa.Column("created", TIME, nullable=False),
        sa.CheckConstraint('id = run_id * 4294967296 + "order"', name=op.f("ck_candidate_key")),
        sa.ForeignKeyConstraint(
            ["run_id", "task"], ["task.run_id", "task.number"], name="fk_candidate_run_id_task_task"
        ),
        sa.ForeignKeyConstraint(["same_code_as_id"], ["candidate.id"], name="fk_candidate_same_code_as_id_candidate"),
        sa.ForeignKeyConstraint(["source_sha"], ["artefact.sha256"], name="fk_candidate_source_sha_artefact"),
        sa.PrimaryKeyConstraint("id", name="pk_candidate"),
        sa.UniqueConstraint("public_id", name="uq_candidate_public_id"),
    )
    op.create_index("ix_candidate_run_id_status", "candidate", ["run_id", "status"])
    op.create_index("ix_candidate_run_id_task_score", "candidate", ["run_id", "task", "score"])
    op.create_table(
        "parentage",
        sa.Column("child_id", KEY, autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_id", KEY, nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["child_id"], ["candidate.id"], name="fk_parentage_child_id_candidate"),
        sa.ForeignKeyConstraint(["parent_id"], ["candidate.id"], name="fk_parentage_parent_id_candidate"),
        sa.PrimaryKeyConstraint("child_id", "position", name="pk_parentage"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_parentage_parent_id", "parentage", ["parent_id"])


def create_outcome() -> None:
    op.create_table(
        "build",
        sa.Column("candidate_id", KEY, autoincrement=False, nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("compiler", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("cached", sa.Boolean(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("binary_log", sa.Text(), nullable=True),
        sa.Column("source_digest", DIGEST, nullable=False),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("smem_static_bytes", sa.Integer(), nullable=True),
        sa.Column("smem_dynamic_bytes", sa.Integer(), nullable=True),
        sa.Column("stack_bytes", sa.Integer(), nullable=True),
        sa.Column("occupancy", sa.Double(), nullable=True),
        sa.Column("code_hash", DIGEST, nullable=True),
        sa.Column("binary_sha", DIGEST, nullable=True),
        sa.ForeignKeyConstraint(["binary_sha"], ["artefact.sha256"], name="fk_build_binary_sha_artefact"),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidate.id"], name="fk_build_candidate_id_candidate"),
        sa.PrimaryKeyConstraint("candidate_id", name="pk_build"),
    )
    op.create_table(
        "final",
        sa.Column("candidate_id", KEY, autoincrement=False, nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("gate_seconds", sa.Double(), nullable=False),
        sa.Column("timing_seconds", sa.Double(), nullable=False),
        sa.Column("created", TIME, nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidate.id"], name="fk_final_candidate_id_candidate"),
        sa.PrimaryKeyConstraint("candidate_id", "round", name="pk_final"),
    )
    op.create_table(
        "check",
        sa.Column("candidate_id", KEY, autoincrement=False, nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("case", sa.Text(), nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Double(), nullable=True),
        sa.Column("allowed", sa.Double(), nullable=True),
        sa.Column("torch_error", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("stage IN ('search', 'final')", name=op.f("ck_check_stage")),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidate.id"], name="fk_check_candidate_id_candidate"),
        sa.PrimaryKeyConstraint("candidate_id", "round", "position", name="pk_check"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "timing",
        sa.Column("id", KEY, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("task", sa.Integer(), nullable=False),
        sa.Column("candidate_id", KEY, nullable=True),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("contender", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("low_us", sa.Double(), nullable=False),
        sa.Column("high_us", sa.Double(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=True),
        sa.Column("ratio_low", sa.Double(), nullable=True),
        sa.Column("ratio_high", sa.Double(), nullable=True),
        sa.Column("calls_per_sample", sa.Integer(), nullable=False),
        sa.Column("sets", sa.Integer(), nullable=False),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("clocks", sa.JSON(), nullable=False),
        sa.CheckConstraint("stage IN ('search', 'final')", name=op.f("ck_timing_stage")),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidate.id"], name="fk_timing_candidate_id_candidate"),
        sa.ForeignKeyConstraint(
            ["run_id", "task"], ["task.run_id", "task.number"], name="fk_timing_run_id_task_task"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_timing"),
    )
    op.create_index("ix_timing_run_id_candidate_id", "timing", ["run_id", "candidate_id"])


def downgrade() -> None:
    with op.batch_alter_table("task") as task:
        task.drop_constraint("fk_task_winner_id_candidate", type_="foreignkey")
    for table in ("timing", "check", "final", "build", "parentage", "candidate"):
        op.drop_table(table)
    for table in ("artefact", "task", "run", "environment"):
        op.drop_table(table)
