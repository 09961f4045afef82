"""Between what crosses the engine's seams and rows of tables, both ways."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from evo.errors import EngineError
from evo.evaluation import Binary, Build, Candidate, Check, Evaluation, Measurement, Status, Timing
from evo.lineage import Environment, Stage, StoredRun
from evo.lineage import models as m
from evo.lineage.columns import candidate_key, public_id

__all__ = [
    "BUILD_COLUMNS",
    "CHECK_COLUMNS",
    "TIMING_COLUMNS",
    "Row",
    "build_row",
    "candidate_row",
    "check_rows",
    "clean_text",
    "final_row",
    "parentage_rows",
    "read_build",
    "read_check",
    "read_environment",
    "read_timing",
    "timing_rows",
]

Row = dict[str, Any]


def clean_text(text: str) -> str:
    """`text` as every database takes it: compilers and crashed devices also emit NULs and broken UTF-8."""
    text = str(text)  # not a StrEnum, which drivers may take for something else
    if text.isascii():
        return text.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in text else text
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _number(value: float | None) -> float | None:
    """NaN becomes None: SQLite has none, and either means that no number could be had."""
    return None if value is None or math.isnan(value) else float(value)


def candidate_row(
    run: StoredRun, ref: Candidate, evaluation: Evaluation, *, elapsed_s: float, created: datetime
) -> Row:
    """The candidate itself, still without `source_sha`. Raises EngineError for an order that cannot be."""
    if not 0 <= ref.task < len(run.spec.workloads) or run.spec.workloads[ref.task] != ref.workload:
        raise EngineError(f"run {run.name!r} has no task {ref.task} with the workload {ref.workload.key}")
    genome, same = ref.proposal.genome.to_json(), evaluation.same_code_as
    return {
        "id": candidate_key(run.id, ref.order),
        "run_id": run.id,
        "order": ref.order,
        "task": ref.task,
        "public_id": public_id(run.uid, ref.order),
        "genome": genome,
        "genome_digest": hashlib.sha256(genome.encode()).hexdigest(),
        "source_sha": None,
        "operator": ref.proposal.operator,
        "status": evaluation.status.value,
        "score": _number(evaluation.score),
        "log": clean_text(evaluation.log),
        "same_code_as_id": None if same is None else candidate_key(run.id, same),
        "seconds": evaluation.seconds,
        "gate_seconds": evaluation.gate_seconds,
        "timing_seconds": evaluation.timing_seconds,
        "elapsed_s": elapsed_s,
        "created": created,
    }


def parentage_rows(run: StoredRun, ref: Candidate) -> list[Row]:
    """Raises EngineError for a parent that is not earlier than its child."""
    child = candidate_key(run.id, ref.order)
    for parent in ref.proposal.parents:
        if parent.order >= ref.order:
            raise EngineError(f"candidate {ref.order} of run {run.name!r} cannot come from the later {parent.order}")
    return [
        {"child_id": child, "position": i, "parent_id": candidate_key(run.id, p.order), "role": p.role}
        for i, p in enumerate(ref.proposal.parents)
    ]


def build_row(candidate_id: int, build: Build) -> Row:
    """The build, still without `binary_sha`."""
    binary, log = build.binary, clean_text(build.log)
    remarks = None if binary is None else clean_text(binary.log)
    return {
        "candidate_id": candidate_id,
        "arch": build.arch,
        "compiler": build.compiler,
        "status": build.status.value,
        "seconds": build.seconds,
        "cached": build.cached,
        "log": log,
        "binary_log": None if remarks == log else remarks,
        "source_digest": build.source_digest,
        "registers": binary and binary.registers,
        "spill_bytes": binary and binary.spill_bytes,
        "smem_static_bytes": binary and binary.smem_static_bytes,
        "smem_dynamic_bytes": build.smem_dynamic_bytes,
        "stack_bytes": binary and binary.stack_bytes,
        "occupancy": _number(build.occupancy),
        "code_hash": binary and binary.code_hash,
        "binary_sha": None,
    }


def check_rows(candidate_id: int, checks: Sequence[Check], stage: Stage, round_: int) -> list[Row]:
    return [
        {
            "candidate_id": candidate_id,
            "round": round_,
            "position": i,
            "stage": stage.value,
            "case": c.case,
            "passed": c.passed,
            "error": _number(c.error),
            "allowed": _number(c.allowed),
            "torch_error": _number(c.torch_error),
            "reason": clean_text(c.reason),
            "seed": c.seed,
        }
        for i, c in enumerate(checks)
    ]


def timing_rows(
    run: StoredRun,
    task: int,
    candidate_id: int | None,
    timings: Sequence[Timing],
    stage: Stage,
    round_: int,
) -> list[Row]:
    return [
        {
            "run_id": run.id,
            "task": task,
            "candidate_id": candidate_id,
            "round": round_,
            "stage": stage.value,
            "contender": t.contender,
            "workload": t.workload,
            "protocol": t.protocol,
            "median_us": t.median_us,
            "low_us": t.low_us,
            "high_us": t.high_us,
            "ratio": _number(t.ratio),
            "ratio_low": _number(t.ratio_low),
            "ratio_high": _number(t.ratio_high),
            "calls_per_sample": t.calls_per_sample,
            "sets": t.sets,
            "samples_us": list(t.samples_us),
            "clocks": {name: _number(value) for name, value in t.clocks.items()},
        }
        for t in timings
    ]


def final_row(candidate_id: int, measurement: Measurement, *, round_: int, created: datetime) -> Row:
    return {
        "candidate_id": candidate_id,
        "round": round_,
        "status": measurement.status.value,
        "log": clean_text(measurement.log),
        "seconds": measurement.seconds,
        "gate_seconds": measurement.gate_seconds,
        "timing_seconds": measurement.timing_seconds,
        "created": created,
    }


# In the order in which the readers below take them apart: by position, as a resumed search reads millions.
_b, _k, _t = m.Build, m.Check, m.Timing
BUILD_COLUMNS = (
    _b.status, _b.arch, _b.compiler, _b.seconds, _b.cached, _b.log, _b.binary_log, _b.source_digest,
    _b.registers, _b.spill_bytes, _b.smem_static_bytes, _b.smem_dynamic_bytes, _b.stack_bytes,
    _b.occupancy, _b.code_hash,
)  # fmt: skip
CHECK_COLUMNS = (_k.case, _k.passed, _k.error, _k.allowed, _k.torch_error, _k.reason, _k.seed)
TIMING_COLUMNS = (
    _t.workload, _t.contender, _t.protocol, _t.median_us, _t.low_us, _t.high_us, _t.samples_us, _t.ratio,
    _t.ratio_low, _t.ratio_high, _t.calls_per_sample, _t.sets, _t.clocks,
)  # fmt: skip


def read_build(row: Sequence[Any]) -> Build:
    """From values of BUILD_COLUMNS; without source text and code, which are artefacts."""
    (
        status, arch, compiler, seconds, cached, log, binary_log, source_digest, registers, spill_bytes,
        smem_static_bytes, smem_dynamic_bytes, stack_bytes, occupancy, code_hash,
    ) = row  # fmt: skip
    binary = None
    if status == Status.OK:
        binary = Binary(
            code=b"",
            code_hash=code_hash,
            log=log if binary_log is None else binary_log,
            registers=registers,
            spill_bytes=spill_bytes,
            smem_static_bytes=smem_static_bytes,
            stack_bytes=stack_bytes,
        )
    return Build(
        status=Status(status),
        arch=arch,
        compiler=compiler,
        source_digest=source_digest,
        seconds=seconds,
        cached=cached,
        log=log,
        binary=binary,
        smem_dynamic_bytes=smem_dynamic_bytes,
        occupancy=occupancy,
    )


def read_check(row: Sequence[Any]) -> Check:
    """From values of CHECK_COLUMNS."""
    case, passed, error, allowed, torch_error, reason, seed = row
    return Check(
        case=case,
        passed=passed,
        error=error,
        allowed=allowed,
        torch_error=torch_error,
        reason=reason,
        seed=seed,
    )


def read_timing(row: Sequence[Any]) -> Timing:
    """From values of TIMING_COLUMNS."""
    (
        workload, contender, protocol, median_us, low_us, high_us, samples_us, ratio, ratio_low, ratio_high,
        calls_per_sample, sets, clocks,
    ) = row  # fmt: skip
    return Timing(
        workload=workload,
        contender=contender,
        protocol=protocol,
        median_us=median_us,
        low_us=low_us,
        high_us=high_us,
        samples_us=tuple(samples_us),
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        calls_per_sample=calls_per_sample,
        sets=sets,
        clocks=clocks,
    )


def read_environment(row: Any) -> Environment:
    return Environment(
        device=row.device,
        arch=row.environment_arch,
        driver=row.driver,
        cuda=row.cuda,
        nvrtc=row.nvrtc,
        compiler=row.compiler,
        torch=row.torch,
        python=row.python,
        evo=row.evo,
        details=row.details,
    )
