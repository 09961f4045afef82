"""Runs: creating one, naming it, reading it back."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from sqlalchemy import Connection, insert, select

from evo.errors import StoreError, UnknownNameError, UsageError
from evo.lineage import LATEST, Environment, RunSpec, RunStatus, StoredRun
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.rows import read_environment
from evo.lineage.server import take_turns
from evo.problem.kernel import Workload

__all__ = ["insert_run", "iso", "read_run", "resolve_run"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OFFERED = 10


def iso(time: datetime) -> str:
    """A time as records carry it: ISO 8601 in UTC."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def insert_run(connection: Connection, spec: RunSpec, environment: Environment) -> int:
    """The id of a new run. Raises StoreError for a name that is taken or not legal."""
    if not -(2**63) <= spec.seed < 2**63:
        raise StoreError(f"the seed {spec.seed} is too large to be stored; choose one below 2**63")
    if not spec.workloads:
        raise StoreError("a run without workloads has nothing to search; name at least one")
    take_turns(connection)  # two runs must not find the same name free
    name = spec.name
    if name is None:
        name = _free_name(connection, spec.kernel)
    else:
        _check_name(connection, name)
    now = datetime.now(UTC)
    row = {
        "uid": secrets.token_hex(8),
        "name": name,
        "kernel": spec.kernel,
        "kernel_digest": spec.kernel_digest,
        "target": spec.target,
        "arch": spec.arch,
        "sampler": spec.sampler,
        "seed": spec.seed,
        "window": spec.window,
        "options": dict(spec.options),
        "budget": dict(spec.budget),
        "status": RunStatus.RUNNING.value,
        "stop_reason": "",
        "created": now,
        "updated": now,
        "finished": None,
        "elapsed_s": 0.0,
        "environment_id": _environment_id(connection, environment),
    }
    run_id = connection.scalar(insert(m.Run).returning(m.Run.id), row)
    assert isinstance(run_id, int)
    tasks = [
        {
            "run_id": run_id,
            "number": i,
            "workload": w.key,
            "dims": dict(w.dims),
            "dtype": w.dtype,
            "options": dict(w.options),
        }
        for i, w in enumerate(spec.workloads)
    ]
    connection.execute(insert(m.Task), tasks)
    return run_id


def _check_name(connection: Connection, name: str) -> None:
    if not _NAME.fullmatch(name) or name == LATEST:
        raise StoreError(
            f"{name!r} is not a name for a run; use 1 to 64 letters, digits, '.', '_' or '-', beginning with"
            f" a letter or digit, and not {LATEST!r}"
        )
    if connection.scalar(select(m.Run.id).where(m.Run.name == name)) is not None:
        raise StoreError(
            f"there is a run {name!r} already; choose another name, or continue it with:"
            f" {command_line(connection.engine.url, 'resume', name)}"
        )


def _free_name(connection: Connection, kernel: str) -> str:
    """<kernel>-<date>-<n>, the first n that is free."""
    kind = re.sub(r"[^A-Za-z0-9]+", "-", PurePath(kernel).name).strip("-")[:40] or "run"
    stem = f"{kind}-{datetime.now(UTC):%Y%m%d}-"
    taken = connection.scalars(select(m.Run.name).where(m.Run.name.startswith(stem, autoescape=True)))
    numbers = [int(name[len(stem) :]) for name in taken if name[len(stem) :].isdecimal()]
    return f"{stem}{max(numbers, default=0) + 1}"


def _environment_id(connection: Connection, environment: Environment) -> int:
    record = {**asdict(environment), "details": dict(environment.details)}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    known = connection.scalar(select(m.Environment.id).where(m.Environment.digest == digest))
    if known is None:
        known = connection.scalar(insert(m.Environment).returning(m.Environment.id), {**record, "digest": digest})
    assert known is not None
    return known


def resolve_run(connection: Connection, name: str) -> int:
    """The id of the run of this name, or whose name alone begins so, or of the last one created for "latest".

    Raises UnknownNameError, StoreError for a prefix of several names, or UsageError for what is not a text at all.
    """
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is not the name of a run; give names one by one, as texts")
    if name == LATEST:
        last = connection.scalar(select(m.Run.id).order_by(m.Run.id.desc()).limit(1))
        if last is None:
            start = command_line(connection.engine.url, "search", "KERNEL")
            raise StoreError(f"no run has been recorded in this database yet; start one with: {start}")
        return int(last)
    exact = connection.scalar(select(m.Run.id).where(m.Run.name == name))
    if exact is not None:
        return exact
    named = connection.execute(select(m.Run.id, m.Run.name).order_by(m.Run.id.desc())).all()
    found = [(run_id, known) for run_id, known in named if name and known.startswith(name)]
    if not found:
        raise UnknownNameError("run", name, [known for _, known in named][:_OFFERED])
    if len(found) > 1:
        several = ", ".join(known for _, known in found[:4])
        raise StoreError(f"{name!r} begins the names of {len(found)} runs ({several}, ...); write more of it")
    return found[0][0]


def read_run(connection: Connection, run_id: int) -> StoredRun:
    e = m.Environment
    row: Any = connection.execute(
        select(
            *(c for c in m.Run.__table__.c if c.name != "environment_id"),
            *(c for c in e.__table__.c if c.name not in ("id", "digest", "arch")),
            e.arch.label("environment_arch"),
        )
        .join_from(m.Run, e, m.Run.environment_id == e.id)
        .where(m.Run.id == run_id)
    ).one()
    return StoredRun(
        id=row.id,
        uid=row.uid,
        name=row.name,
        spec=RunSpec(
            kernel=row.kernel,
            kernel_digest=row.kernel_digest,
            target=row.target,
            arch=row.arch,
            sampler=row.sampler,
            seed=row.seed,
            window=row.window,
            workloads=tuple(_workloads(connection, run_id)),
            options=row.options,
            budget=row.budget,
            name=row.name,
        ),
        environment=read_environment(row),
        status=RunStatus(row.status),
        stop_reason=row.stop_reason,
        created=iso(row.created),
        updated=iso(row.updated),
        finished=iso(row.finished) if row.finished else None,
        elapsed_s=row.elapsed_s,
    )


def _workloads(connection: Connection, run_id: int) -> Sequence[Workload]:
    i = m.Task
    rows = connection.execute(select(i.dims, i.dtype, i.options).where(i.run_id == run_id).order_by(i.number))
    return [Workload.of(dims, dtype, options) for dims, dtype, options in rows]
