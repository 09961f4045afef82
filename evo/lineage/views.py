"""The views: what a database shows to those who open it with other programs.

Their names and columns are stable: columns may be added at the end, and none is renamed or taken away. They are
made anew by every migration (SQLite cannot alter a table that a view reads), so a change here needs a revision,
if an empty one. `docs/database.md` describes them; the SQL is understood by SQLite, PostgreSQL and DuckDB alike.
"""

from __future__ import annotations

from evo.lineage.columns import PASSED_VALUES

__all__ = ["VIEWS"]


# The winner of a task, or else its candidate with the lowest score that its last final, if any, has not refused.
_LEADER = f"""
    COALESCE(i.winner_id, (
        SELECT c.id
        FROM candidate c
        WHERE c.run_id = i.run_id AND c.task = i.number AND c.score IS NOT NULL
            AND NOT EXISTS (
                SELECT 1
                FROM final f
                WHERE f.candidate_id = c.id AND f.status NOT IN ({PASSED_VALUES})
                    AND f.round = (SELECT MAX(l.round) FROM final l WHERE l.candidate_id = c.id)
            )
        ORDER BY c.score, c.id
        LIMIT 1
    ))"""

# CROSS JOIN: SQLite then keeps to this order, and does not begin with every timing there is.
_V_BEST = f"""
CREATE VIEW v_best AS
SELECT
    kernel, target, device, arch, workload, dtype, run, candidate, "order", operator, is_winner, stage, protocol,
    median_us, low_us, high_us, speedup, speedup_low, speedup_high, score, genome, created
FROM (
    SELECT
        measured.*,
        ROW_NUMBER() OVER (
            PARTITION BY kernel, target, device, workload ORDER BY ratio, "order", candidate
        ) AS place
    FROM (
        SELECT
            r.kernel, r.target, e.device, r.arch, i.workload, i.dtype, r.name AS run, c.public_id AS candidate,
            c."order", c.operator, CASE WHEN i.winner_id = c.id THEN 1 ELSE 0 END AS is_winner,
            t.stage, t.protocol, t.median_us, t.low_us, t.high_us, COALESCE(t.ratio, c.score) AS ratio,
            1.0 / NULLIF(COALESCE(t.ratio, c.score), 0) AS speedup,
            1.0 / NULLIF(t.ratio_high, 0) AS speedup_low,
            1.0 / NULLIF(t.ratio_low, 0) AS speedup_high,
            c.score, c.genome, c.created,
            ROW_NUMBER() OVER (
                PARTITION BY c.id
                ORDER BY t.round DESC, CASE t.protocol WHEN 'final' THEN 2 WHEN 'cold' THEN 1 ELSE 0 END DESC, t.id
            ) AS recency
        FROM (SELECT i.*, {_LEADER} AS leader_id FROM task i) i
        CROSS JOIN candidate c
        CROSS JOIN timing t
        CROSS JOIN run r
        CROSS JOIN environment e
        WHERE c.id = i.leader_id AND t.run_id = i.run_id AND t.candidate_id = c.id
            AND t.contender = 'candidate' AND t.workload = i.workload
            AND r.id = i.run_id AND e.id = r.environment_id
    ) measured
    WHERE recency = 1
) ranked
WHERE place = 1
"""

_V_LINEAGE = """
CREATE VIEW v_lineage AS
SELECT
    r.name AS run,
    r.kernel,
    i.workload,
    c.public_id AS child,
    c."order" AS child_order,
    c.operator,
    p.position,
    p.role,
    o.public_id AS parent,
    o."order" AS parent_order,
    c.status AS child_status,
    c.score AS child_score,
    o.score AS parent_score,
    o.score / NULLIF(c.score, 0) AS gain,
    c.genome AS child_genome,
    o.genome AS parent_genome
FROM candidate c
JOIN run r ON r.id = c.run_id
JOIN task i ON i.run_id = c.run_id AND i.number = c.task
LEFT JOIN parentage p ON p.child_id = c.id
LEFT JOIN candidate o ON o.id = p.parent_id
"""

_V_TIMINGS = """
CREATE VIEW v_timings AS
SELECT
    r.name AS run,
    r.kernel,
    r.target,
    r.arch,
    e.device,
    t.workload,
    c.public_id AS candidate,
    c."order",
    t.contender,
    t.stage,
    t.round,
    t.protocol,
    t.median_us,
    t.low_us,
    t.high_us,
    t.ratio,
    t.ratio_low,
    t.ratio_high,
    t.calls_per_sample,
    t.sets,
    t.samples_us,
    t.clocks
FROM timing t
JOIN run r ON r.id = t.run_id
JOIN environment e ON e.id = r.environment_id
LEFT JOIN candidate c ON c.id = t.candidate_id
"""

VIEWS = {"v_best": _V_BEST, "v_lineage": _V_LINEAGE, "v_timings": _V_TIMINGS}
"""By name, as the statement that makes it."""
