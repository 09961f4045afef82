"""Recorded candidates as they are to be built anew, and the commands that repeat their verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from evo.analysis.candidates import CandidateRecord
from evo.analysis.named import workload_of
from evo.environment import command_line
from evo.errors import EvoError, UsageError
from evo.evaluation import Check
from evo.measure.cases import is_case_text
from evo.problem.loading import load_kernel, recorded_kernel
from evo.report.terminal import notice
from evo.report.text import short

if TYPE_CHECKING:
    from evo.executors import Executor
    from evo.search.tasks import TaskExecutor


def task_of(record: CandidateRecord, executor: Executor, seed: int) -> TaskExecutor:
    """What builds, gates and times a recorded candidate, and others beside it."""
    from evo.search.tasks import TaskExecutor  # most commands only look at what is recorded

    return TaskExecutor(
        problem=recorded_kernel(record.kernel, None),
        executor=executor,
        kernel=record.kernel,
        target=record.target,
        arch=record.arch,
        workload=workload_of(record),
        seed=seed,
    )


def trusted(trust: bool, *kernels: str) -> None:
    """With --trust, loads what a database calls its kernels: `recorded_kernel` then takes them for the user's own. Raises as
    `load_kernel` does."""
    for kernel in dict.fromkeys(kernels) if trust else ():
        load_kernel(kernel)


def look(trust: bool, *kernels: tuple[str, str]) -> None:
    """Does what `trusted` does, where the record can be shown without its kernel. kernels: each with the digest recorded. A
    line on stderr says which one is not run."""
    for name, digest in dict.fromkeys(kernels):
        try:
            trusted(trust, name)
            recorded_kernel(name, digest)
        except EvoError as error:
            if trust or type(error) is UsageError:  # others are as little here with --trust
                notice(str(error))


def source_remarks(record: CandidateRecord, digest: str, db: str) -> list[str]:
    """What is to be said where the source rendered now, of that digest, is not the recorded one; empty if it is."""
    if record.build is None or digest in ("", record.build.source_digest):
        return []
    return [
        f"kernel {record.kernel} has changed since: what its template renders now is not the recorded source"
        f" (that: {command_line(db, 'show', short(record.id), '--source')}); the present one is looked at"
    ]


def drawn_case(last: Check) -> str:
    """The case by which the last check of a verdict refused, where it is none of the kernel's own; else empty."""
    return last.case if not last.passed and is_case_text(last.case) else ""


def verdicts_of(recorded: CandidateRecord) -> Iterator[dict[str, Any]]:
    """The recorded verdicts, round by round, each with what repeats it."""
    for (round_, stage), group in groupby(recorded.checks, lambda check: (check.round, check.stage)):
        checks = list(group)
        yield {
            "stage": stage,
            "round": round_,
            "cases": len(checks),
            "passed": sum(c.passed for c in checks),
            "seed": recorded.seeds[stage],
            "case": drawn_case(checks[-1]),
            # Of the finals; one of the timed size comes with every gate.
            "random_cases": max(0, sum(is_case_text(c.case) for c in checks) - 1),
        }


def again_line(db: str, candidate: str, seed: int, case: str = "", random_cases: int = 0) -> str:
    """The command that repeats a verdict. random_cases: all that were run, unless one is named."""
    options = ("--case", case) if case else ("--cases", str(random_cases)) if random_cases else ()
    return command_line(db, "check", candidate, "--seed", str(seed), *options)
