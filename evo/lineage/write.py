"""Writing records as rows, table by table."""

import functools
import hashlib
import json
import math
import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from sqlalchemy import Connection, Insert, bindparam, func, insert, select

from evo.errors import EngineError, StoreError, TakenError
from evo.evaluation import Build, Candidate, Check, Evaluation, Timing
from evo.lineage import LATEST, Environment, RunSpec, RunStatus, Stage, StoredRun
from evo.lineage import models as m
from evo.lineage.database import command_line
from evo.lineage.liveness import write_alone
from evo.lineage.read import BINARY_NAMES, BUILD_NAMES, CHECK_NAMES, TIMING_NAMES, at_once
from evo.runtime.manifest import compiled_when_loaded

Row = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COMPRESSION = 6
_Place = tuple[str, int, int]


class Bases:
    """The texts that others are packed against. The texts of one task differ little: most are compressed with an earlier one
    as preset dictionary, and take a tenth. A text unlike its base is stored whole, and is the base of those after it.
    """

    def __init__(self) -> None:
        self._bases: dict[_Place, tuple[Any, bytes, int]] = {}
        """The last text that was stored whole, as its key, the text and its packed size, by kind, run and task."""

    def forget(self) -> None:
        """Forgets all bases. It is called when rows are taken away, because a base may be among them."""
        self._bases.clear()

    def pack(self, place: _Place, text: bytes, key: Any) -> tuple[Any, bytes]:
        """The key of the text's base, None where it is stored whole, and its data. key: the text's own key."""
        if place in self._bases:
            base, known, size = self._bases[place]
            data = compress(text, known)
            alone = size * len(text) / len(known)  # about what it takes without a base
            if 2 * len(data) <= alone or 2 * len(data) <= len(compress(text)):
                return base, data
        whole = compress(text)
        self._bases[place] = key, text, len(whole)
        return None, whole


def compress(text: bytes, base: bytes = b"") -> bytes:
    """The compressed text. base: preset dictionary, which `evo.lineage.read.unpack` needs, too."""
    packer = zlib.compressobj(_COMPRESSION, zdict=base) if base else zlib.compressobj(_COMPRESSION)
    return packer.compress(text) + packer.flush()


def clean_text(text: str) -> str:
    """`text` without NULs and broken UTF-8, which compilers and crashed devices emit and databases refuse."""
    text = str(text)  # drivers may take a StrEnum for something else
    if text.isascii():
        return text.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in text else text
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _stored(value: Any) -> Any:
    """A field's value as a column takes it. NaN, which SQLite does not have, becomes None."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {name: _stored(part) for name, part in value.items()}
    return value


def _fields(record: Any, names: Iterable[str]) -> Row:
    return {name: _stored(getattr(record, name)) for name in names}


def insert_timings(
    connection: Connection, run: StoredRun, task: int, key: int | None, timings: Sequence[Timing], stage: Stage, round_: int
) -> None:
    """Inserts timings. key: that of the timed candidate, None for baselines. round_: 0 for the search, else the final's."""
    place = {"run_id": run.id, "task": task, "candidate_id": key, "round": round_, "stage": stage.value}
    insert_rows(connection, "timing", [{**place, **_fields(timing, TIMING_NAMES)} for timing in timings])


def detail_row(bases: Bases, task: int, key: int, round_: int, told: Row) -> Row:
    """The row of a candidate's details. told: the fields of `evo.lineage.read.Detail` beside key and round."""
    text = json.dumps(told, separators=(",", ":")).encode()
    kind = f"detail {round_} {'gated' if told['cases'] else 'not built'}"
    base, data = bases.pack((kind, key // m.ORDERS_PER_RUN, task), text, key)
    return {"candidate_id": key, "round": round_, "base_id": base, "data": data}


def _told(checks: Sequence[Check], build: Build | None = None) -> Row:
    told: Row = {"cases": [list(_fields(check, CHECK_NAMES).values()) for check in checks]}
    if build is not None:
        told |= {"log": clean_text(build.log), "remarks": clean_text(build.binary.log) if build.binary else ""}
        told |= {"launch": dict(build.launch)} if build.launch else {}
    return told


def insert_final(
    connection: Connection, bases: Bases, run: StoredRun, task: int, key: int, measurement: Evaluation
) -> None:
    """Inserts a finalist's re-timing, as the next round of its candidate."""
    round_ = 1 + (connection.scalar(select(func.max(m.Final.round)).where(m.Final.candidate_id == key)) or 0)
    outcome = _fields(measurement, ("status", "log", "seconds", "gate_seconds", "timing_seconds"))
    row = {"candidate_id": key, "round": round_, **outcome, "created": datetime.now(UTC)}
    insert_rows(connection, "final", [row])
    if measurement.checks:
        insert_rows(connection, "detail", [detail_row(bases, task, key, round_, _told(measurement.checks))])
    insert_timings(connection, run, task, key, measurement.timings, Stage.FINAL, round_)


def insert_candidate(
    connection: Connection, bases: Bases, run: StoredRun, candidate: Candidate, evaluation: Evaluation, *, elapsed_s: float
) -> None:
    """Inserts a candidate with all that belongs to it. Raises EngineError for one that contradicts its run, and
    IntegrityError for one that the tables refuse."""
    row, parentage = _candidate_row(run, candidate, evaluation), _parentage_rows(run, candidate)
    row |= {"source_sha": None, "elapsed_s": elapsed_s, "created": datetime.now(UTC)}
    key, builds, artefacts = row["id"], [], dict[str, tuple[str, bytes]]()

    def keep(kind: str, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        artefacts[digest] = kind, content
        return digest

    if (build := evaluation.build) is not None:
        built = {"candidate_id": key, **_fields(build, BUILD_NAMES)}
        built |= {"binary_sha": None, **{name: getattr(build.binary, name, None) for name in BINARY_NAMES}}
        if build.source:
            row["source_sha"] = keep("source", build.source.encode("utf-8", "surrogatepass"))
        if build.binary is not None and build.binary.code:
            if compiled_when_loaded(build.arch):
                built["binary_sha"] = keep("ptx", build.binary.code)
            elif _leads(connection, run, candidate, evaluation):
                built["binary_sha"] = keep("binary", build.binary.code)
        builds.append(built)
    if artefacts:
        write_alone(connection)
    known = known_artefacts(connection, artefacts)
    for digest, (kind, content) in artefacts.items():
        if digest not in known:
            base, data = bases.pack((kind, run.id, candidate.task), content, digest)
            artefact = {"sha256": digest, "kind": kind, "size": len(content), "data": data, "base_sha": base}
            insert_rows(connection, "artefact", [artefact])
    insert_rows(connection, "candidate", [row])
    insert_rows(connection, "parentage", parentage)
    insert_rows(connection, "build", builds)
    if evaluation.checks or evaluation.build is not None:
        told = _told(evaluation.checks, evaluation.build)
        insert_rows(connection, "detail", [detail_row(bases, candidate.task, key, 0, told)])
    insert_timings(connection, run, candidate.task, key, evaluation.timings, Stage.SEARCH, 0)


def _leads(connection: Connection, run: StoredRun, candidate: Candidate, evaluation: Evaluation) -> bool:
    """Whether a candidate is the fastest of its task so far. Only its machine code is kept; others are built again."""
    values = {"run": run.id, "of_task": candidate.task, "than": evaluation.score}
    return evaluation.score is not None and connection.scalar(_NO_SLOWER, values) is None


_c = m.Candidate
_NO_SLOWER = select(_c.id).where(
    _c.run_id == bindparam("run"), _c.task == bindparam("of_task"), _c.score <= bindparam("than")
).limit(1)  # fmt: skip
_KNOWN = select(m.Artefact.sha256).where(m.Artefact.sha256.in_(bindparam("digests", expanding=True)))
"""The stored ones of some digests. Statements are made once, because making one takes longer than carrying it out."""


def _candidate_row(run: StoredRun, candidate: Candidate, evaluation: Evaluation) -> Row:
    """The row of a candidate. Raises EngineError for an impossible order or task."""
    if not 0 <= candidate.task < len(run.spec.workloads):
        raise EngineError(f"run {run.name!r} has no task {candidate.task}")
    genome, same = candidate.proposal.genome.to_json(), evaluation.same_code_as
    return {
        "id": m.candidate_key(run.id, candidate.order),
        "run_id": run.id,
        "order": candidate.order,
        "task": candidate.task,
        "public_id": m.public_id(run.uid, candidate.order),
        "genome": genome,
        "operator": candidate.proposal.operator,
        "same_code_as_id": None if same is None else m.candidate_key(run.id, same),
        **_fields(evaluation, ("status", "score", "log", "seconds", "gate_seconds", "timing_seconds")),
    }


def _parentage_rows(run: StoredRun, candidate: Candidate) -> list[Row]:
    """The rows of a candidate's parents. Raises EngineError for a parent that is not earlier."""
    child = m.candidate_key(run.id, candidate.order)
    for parent in candidate.proposal.parents:
        if parent.order >= candidate.order:
            raise EngineError(f"candidate {candidate.order} of run {run.name!r} cannot come from the later {parent.order}")
    return [
        {"child_id": child, "position": i, "parent_id": m.candidate_key(run.id, p.order), "role": p.role}
        for i, p in enumerate(candidate.proposal.parents)
    ]


def known_artefacts(connection: Connection, digests: Collection[str]) -> set[str]:
    """The digests among these whose artefacts are stored."""
    return {sha256 for some in at_once(digests) for sha256 in connection.scalars(_KNOWN, {"digests": some})}


def insert_rows(connection: Connection, table: str, rows: Sequence[Row]) -> None:
    """Inserts any number of rows that all have the same keys. Raises IntegrityError for what the table refuses."""
    if rows:
        connection.execute(_insertion(table), rows)


@functools.cache
def _insertion(table: str) -> Insert:
    return insert(m.Base.metadata.tables[table])


def insert_run(connection: Connection, spec: RunSpec, environment: Environment) -> int:
    """Inserts a run and returns its id. Raises StoreError for a name that is taken or not legal."""
    if not -(2**63) <= spec.seed < 2**63:
        raise StoreError(f"the seed {spec.seed} is too large to be stored; choose one below 2**63")
    if not spec.workloads:
        raise StoreError("a run without workloads has nothing to search; name at least one")
    write_alone(connection)  # two runs must not find the same name free
    if spec.name is not None:
        check_name(connection, spec.name)
    now = datetime.now(UTC)
    row = {
        **vars(spec),
        "name": spec.name or _free_name(connection, spec.kernel),
        "uid": secrets.token_hex(8),
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
    del row["workloads"]
    run_id = connection.scalar(insert(m.Run).returning(m.Run.id), row)
    assert isinstance(run_id, int)
    tasks = [
        {
            "run_id": run_id, "number": i, "workload": w.key, "dims": dict(w.dims), "dtype": w.dtype,
            "options": dict(w.options),
        }
        for i, w in enumerate(spec.workloads)
    ]  # fmt: skip
    connection.execute(insert(m.Task), tasks)
    return run_id


def is_run_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name != LATEST


def check_run_name(name: str) -> None:
    """Raises StoreError for a name that no run may have."""
    if not is_run_name(name):
        raise StoreError(
            f"{name!r} is not a name for a run; use 1 to 64 letters, digits, '.', '_' or '-', beginning with"
            f" a letter or digit, and not {LATEST!r}"
        )


def check_name(connection: Connection, name: str) -> None:
    """Raises StoreError for a name that no run may have, or that a run has already."""
    check_run_name(name)
    if connection.scalar(select(m.Run.id).where(m.Run.name == name)) is not None:
        raise TakenError(
            f"there is a run {name!r} already; choose another name, or continue it with:"
            f" {command_line(connection.engine.url, 'resume', name)}"
        )


def _free_name(connection: Connection, kernel: str) -> str:
    """The name <kernel>-<date>-<n> with the first free n."""
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
