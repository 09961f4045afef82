"""A run as T4, the results format of the auto-tuning community: every evaluated configuration with its times, or with the
kind of its failure.

One file for each workload of the run, NAME.t4.json, because times of different problems cannot be compared. Times are in
milliseconds. The objective is the median of the search's timing with cold caches. `ratio`, the time over PyTorch's in the
same race, is another measurement. Data without a place in T4 (candidate, operator, parents, status) are under "evo".
Reference: TuningSchema, T4 results schema 1.0.0 (https://github.com/odgaard/TuningSchema), as Kernel Tuner ships it. The
schema calls the time to compile compilation_time, and the tools that read it compilation: both are written.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from evo.errors import UsageError
from evo.evaluation import Evaluation, Status, Timing
from evo.export import Contents, Exporter
from evo.lineage import StoredEvaluation, StoredRun

_SCHEMA_VERSION = "1.0.0"
_INVALIDITY = {
    Status.OK: "correct",
    Status.SAME_CODE: "correct",
    Status.RENDER_ERROR: "compile",
    Status.COMPILE_ERROR: "compile",
    Status.COMPILE_TIMEOUT: "timeout",
    Status.TIMEOUT: "timeout",
    Status.WRONG: "correctness",
    Status.IMPOSSIBLE: "correctness",
}
"""Kinds of failures by status; all others are "runtime". T4 has timeout, compile, runtime, correctness, constraints and
correct."""


def _contents(run: StoredRun, evaluations: Sequence[StoredEvaluation]) -> Contents:
    """The content of an export. Raises UsageError for a run without candidates."""
    if not evaluations:
        raise UsageError(f"run {run.name!r} has no candidates yet: there is nothing to export")
    own = {e.candidate.order: e for e in evaluations}
    files = {}
    for number, workload in enumerate(run.spec.workloads):
        results = [_result(run, e, own) for e in evaluations if e.candidate.task == number]
        document = {"schema_version": _SCHEMA_VERSION, "metadata": _metadata(run, workload.key), "results": results}
        stem = re.sub(r"[^\w.=+-]+", "_", f"{run.name}-{number}-{run.spec.kernel.rpartition('/')[2]}")
        files[f"{stem}.t4.json"] = f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode()
    return {"run": run.name}, files


def _metadata(run: StoredRun, workload: str) -> dict[str, Any]:
    e = run.environment
    device = {"name": e.device, "arch": e.arch, "driver": e.driver, "cuda": e.cuda or e.details.get("cuda_driver", "")}
    return {
        "timeunit": "milliseconds",
        "environment": {
            "requirements": [f"{n}=={v}" for n, v in (("torch", e.torch), ("evo-kernels", e.evo)) if v],
            "device_query": {name: told for name, told in device.items() if told},
        },
        "evo": {
            "run": run.name,
            "kernel": run.spec.kernel,
            "kernel_digest": run.spec.kernel_digest,
            "workload": workload,
            "target": run.spec.target,
            "arch": run.spec.arch,
            "sampler": run.spec.sampler,
            "seed": run.spec.seed,
            "compiler": e.compiler or e.nvrtc,
        },
    }


def _result(run: StoredRun, stored: StoredEvaluation, others: Mapping[int, StoredEvaluation]) -> dict[str, Any]:
    evaluation, proposal = stored.evaluation, stored.candidate.proposal
    invalidity = _INVALIDITY.get(evaluation.status, "runtime")
    # A duplicate has the times of the original.
    timed = evaluation if evaluation.same_code_as is None else others[evaluation.same_code_as].evaluation
    timing = timed.timing()
    failed = "CompilationFailedConfig" if invalidity == "compile" else "RuntimeFailedConfig"  # as Kernel Tuner writes them
    value: float | str = timing.median_us / 1e3 if timing else failed
    measurements: list[dict[str, Any]] = [{"name": "time", "value": value, "unit": "ms" if timing else ""}]
    if timing is not None and timing.ratio is not None:
        measurements.append({"name": "ratio", "value": timing.ratio, "unit": ""})
    own = {
        "candidate": stored.public_id,
        "order": stored.candidate.order,
        "status": evaluation.status.value,
        "operator": proposal.operator,
        "parents": [p.order for p in proposal.parents],
        "elapsed_s": stored.elapsed_s,
    }
    if evaluation.same_code_as is not None:
        own["same_code_as"] = evaluation.same_code_as
    return {
        # When it was recorded, if the run was never interrupted: elapsed time does not count interruptions.
        "timestamp": (datetime.fromisoformat(run.created) + timedelta(seconds=stored.elapsed_s)).isoformat(),
        "configuration": dict(proposal.genome.parameters),
        "times": _times(evaluation, timing),
        "invalidity": invalidity,
        "correctness": 1.0 if evaluation.status.passed else 0.0,
        "measurements": measurements,
        "objectives": ["time"],
        "evo": own,
    }


def _times(evaluation: Evaluation, timing: Timing | None) -> dict[str, Any]:
    """framework: the rest of the evaluation, without compiling, checking and timing."""
    build_s = evaluation.build.seconds if evaluation.build else 0.0
    rest_s = evaluation.seconds - build_s - evaluation.gate_seconds - evaluation.timing_seconds
    times: dict[str, Any] = {
        "compilation_time": build_s * 1e3,
        "compilation": build_s * 1e3,
        "framework": max(0.0, rest_s) * 1e3,
        "search_algorithm": 0,
        "validation": evaluation.gate_seconds * 1e3,
    }
    if timing is not None:
        times["runtimes"] = [t / 1e3 for t in timing.samples_us]
    return times


EXPORTER = Exporter(
    name="t4",
    contents=_contents,
    advice=lambda out: [f"one file for each workload of the run, by the schema of T4 results {_SCHEMA_VERSION}"],
    holds="run",
)
