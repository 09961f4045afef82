"""Records that a search could have made, with every field set to something of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from evo.analysis.candidates import TimingRecord, read_artefacts
from evo.errors import StoreError
from evo.evaluation import Binary, Build, Candidate, Check, Evaluation, Parent, Proposal, Status, Timing
from evo.lineage import Environment, RunSpec, StoredRun, models
from evo.lineage.read import record_of
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.space import Value
from tests.lineage.postgres import PASSWORD

SMALL = Workload.of({"rows": 1024, "cols": 512}, "float32", {"weight": True, "eps": 1e-5})
LARGE = Workload.of({"rows": 4096, "cols": 8192}, "float16", {"weight": False, "eps": 1e-6})

ENVIRONMENT = Environment(
    device="NVIDIA L4",
    arch="sm_89",
    driver="580.1",
    cuda="13.0",
    nvrtc="13.0.48",
    compiler="nvrtc 13.0",
    torch="2.13.0",
    python="3.11.7",
    evo="0.1.0",
    details={"sm_clock_mhz": 2040, "ecc": True},
)

SPEC = RunSpec(
    kernel="layernorm",
    kernel_digest=hashlib.sha256(b"layernorm").hexdigest(),
    target="cuda",
    arch="sm_89",
    sampler="evolution",
    seed=-7,
    max_in_flight=16,
    workloads=(SMALL, LARGE),
    options={"sampler": {"population": 24}, "fixed": {"vector": 4}},
    budget={"seconds": 600.0, "evaluations": None},
)


def genome(order: int) -> Genome:
    return Genome.of({"threads": order, "vector": 4, "path": "registers", "fast": True})


def ref(
    order: int, *parents: Parent | int, task: int = 0, operator: str = "mutation", point: Mapping[str, Value] | None = None
) -> Candidate:
    """point: its parameters, if others than its own ones are wanted."""
    made_from = tuple(p if isinstance(p, Parent) else Parent(p) for p in parents)
    made = Genome.of(point) if point else genome(order)
    proposal = Proposal(genome=made, operator=operator, parents=made_from)
    return Candidate(order=order, task=task, proposal=proposal)


def build(order: int, *, code: bytes | None = None) -> Build:
    code = b"\x7fELF" + order.to_bytes(4, "big") * 50 if code is None else code
    return Build(
        status=Status.OK,
        arch="sm_89",
        compiler="nvrtc 13.0",
        source_digest=hashlib.sha256(b"source %d" % order).hexdigest(),
        source=f"// candidate {order}: \N{GREEK SMALL LETTER MU}s\n" + "__syncthreads();\n" * 40,
        seconds=0.125 + order,
        cached=True,
        log="2 warnings",
        binary=Binary(
            code=code,
            code_hash=hashlib.sha256(code).hexdigest(),
            log="ptxas info : Used 40 registers",
            registers=40,
            spill_bytes=8,
            smem_static_bytes=1024,
            stack_bytes=16,
            launch={"smem_bytes": 49152, "entry": "mangled"},
        ),
        smem_dynamic_bytes=49152,
        occupancy=0.75,
    )


def timing(workload: Workload = SMALL, ratio: float = 0.5, *, contender: str = "candidate") -> Timing:
    return Timing(
        workload=workload.key,
        contender=contender,
        protocol="cold",
        median_us=20.1 * ratio,
        low_us=19.9 * ratio,
        high_us=20.3 * ratio,
        samples_us=(20.1 * ratio, 0.1 + 0.2, 1e-17),
        ratio=ratio,
        ratio_low=ratio - 0.01,
        ratio_high=ratio + 0.01,
        calls_per_sample=12,
        sets=3,
        clocks={"sm_mhz": 1980.0, "power_w": 61.25},
    )


def passed(order: int, ratio: float = 0.5, *, task: int = 0) -> Evaluation:
    workload = SPEC.workloads[task]
    return Evaluation(
        status=Status.OK,
        build=build(order),
        checks=(
            Check(case="normal", passed=True, error=1e-7, allowed=1e-5, torch_error=2e-7, reason="close", seed=3),
            Check(case="large", passed=True, error=0.0, allowed=1e-3, torch_error=1e-4, reason="exact", seed=2**40),
        ),
        timings=(timing(workload, ratio), timing(workload, 1.0, contender="torch")),
        log="fine",
        seconds=1.5,
        gate_seconds=0.5,
        timing_seconds=0.75,
    )


def same_code(order: int, original: int, ratio: float = 0.5) -> Evaluation:
    return replace(passed(order, ratio), status=Status.SAME_CODE, same_code_as=original)


def refused(order: int) -> Evaluation:
    check = Check(
        case="constant rows",
        passed=False,
        error=float("inf"),
        allowed=1e-5,
        torch_error=1e-7,
        reason="Infinity where the reference is 0",
        seed=1,
    )
    return Evaluation(status=Status.WRONG, build=build(order), checks=(check,), seconds=0.25, gate_seconds=0.2)


def not_compiled(order: int) -> Evaluation:
    failed = Build(
        status=Status.COMPILE_ERROR,
        arch="sm_89",
        compiler="nvrtc 13.0",
        source_digest=hashlib.sha256(b"broken %d" % order).hexdigest(),
        source="this is not C++",
        seconds=0.5,
        log='candidate.cu(1): note\ncandidate.cu(1): error: identifier "this" is undefined',
    )
    return Evaluation(status=Status.COMPILE_ERROR, build=failed)


def failed(status: Status) -> Evaluation:
    """One that never got as far as a build, or of which nothing is left but a log."""
    return Evaluation(status=status, log=f"\n{status}: it is gone\nand more", seconds=30.0)


def final(ratio: float, *, task: int = 0) -> Evaluation:
    rounds = (20.1 * ratio, 20.3 * ratio, 19.9 * ratio)
    measured = replace(timing(SPEC.workloads[task], ratio), protocol="final", samples_us=rounds)
    seconds = {"seconds": 4.0, "gate_seconds": 1.0, "timing_seconds": 3.0}
    return replace(passed(0), build=None, timings=(measured,), log="raced", **seconds)


def refused_final() -> Evaluation:
    return Evaluation(status=Status.WRONG, checks=refused(0).checks, log="not so right", seconds=1.0)


def new_run(store: Store, name: str | None = None) -> StoredRun:
    return store.create_run(replace(SPEC, name=name), ENVIRONMENT)


def filled(store: Store, name: str | None = None, number: int = 1) -> StoredRun:
    """A run of so many candidates that passed, all recorded in one transaction."""
    run = new_run(store, name)
    with store.transaction():
        for order in range(number):
            store.add(run, ref(order), passed(order), elapsed_s=float(order))
    return run


def without_artefacts(evaluation: Evaluation) -> Evaluation:
    """An evaluation as `Store.evaluations` gives it back, since source and code are artefacts."""
    if evaluation.build is None:
        return evaluation
    binary = evaluation.build.binary
    lean = None if binary is None else replace(binary, code=b"")
    return replace(evaluation, build=replace(evaluation.build, source="", binary=lean))


def baselines(store: Store, run: str) -> list[TimingRecord]:
    """Times of a run's baselines, in the order they were recorded."""
    t = models.Timing
    query = select(t.__table__).where(t.candidate_id.is_(None), t.run_id == store.run(run).id)
    with store.reading() as connection:
        return [record_of(TimingRecord, row) for row in connection.execute(query.order_by(t.id))]


def kept(store: Store, name: str) -> tuple[bytes | None, bytes | None]:
    """Source and code of a candidate as they are stored."""
    c, b = models.Candidate, models.Build
    query = select(c.source_sha, b.binary_sha).join_from(c, b, b.candidate_id == c.id, isouter=True)
    with store.reading() as connection:
        source, code = connection.execute(query.where(c.public_id == name)).one()
        found = read_artefacts(connection, [digest for digest in (source, code) if digest])
    return found.get(source), found.get(code)


def rows(store: Store, sql: str) -> list[tuple[Any, ...]]:
    with store.reading() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(sql)]


def refusal(where: str | Path, *, write: bool) -> str:
    """The one sentence of a database that cannot be opened, which holds no password."""
    with pytest.raises(StoreError) as caught:
        Store.open(where, write=write).close()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300 + len(str(where)) * 2
    for secret in (PASSWORD, "correct%2Fhorse", "hunter2"):
        assert secret not in message
    return message


_PRELUDE = f"""
import sys
sys.path[:0] = [{str(Path(__file__).resolve().parents[2])!r}, {str(Path(__file__).parent)!r}]
import samples as s
from evo.errors import EvoError, StoreError
from evo.lineage.store import Store
"""


@contextmanager
def running(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script with these samples and has said a line; killed in the end. It may wait for its input."""
    command = program(script, *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def program(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> list[str]:
    """The command of a process that runs a script with these samples."""
    return [*prefix, sys.executable, "-c", _PRELUDE + textwrap.dedent(script), *map(str, arguments)]
