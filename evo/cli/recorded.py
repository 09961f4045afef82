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
    """The executor that builds, gates and times a candidate, and others beside it."""
    from evo.search.tasks import TaskExecutor  # most commands only read the database

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
    """Loads what a database calls its kernels if --trust is given, so that `recorded_kernel` takes them for the user's own.
    Raises as `load_kernel` does."""
    for kernel in dict.fromkeys(kernels) if trust else ():
        load_kernel(kernel)


def look(trust: bool, *kernels: tuple[str, str]) -> None:
    """Does what `trusted` does for a record that can be shown without its kernel; a line on stderr names a kernel that is
    not run. kernels: each with the recorded digest."""
    for name, digest in dict.fromkeys(kernels):
        try:
            trusted(trust, name)
            recorded_kernel(name, digest)
        except EvoError as error:
            if trust or type(error) is UsageError:  # a missing kernel is not worth a line
                notice(str(error))


def source_remarks(record: CandidateRecord, digest: str, db: str) -> list[str]:
    """Remarks if the source rendered now, which has that digest, is not the recorded one."""
    if record.build is None or digest in ("", record.build.source_digest):
        return []
    return [
        f"kernel {record.kernel} has changed since: what its template renders now is not the recorded source"
        f" (that: {command_line(db, 'show', short(record.id), '--source')}); the present one is looked at"
    ]


def drawn_case(last: Check) -> str:
    """The random case by which the last check of a verdict refused; empty for one of the kernel's own."""
    return last.case if not last.passed and is_case_text(last.case) else ""


def verdicts_of(recorded: CandidateRecord) -> Iterator[dict[str, Any]]:
    """The recorded verdicts, round by round, each with the values that repeat it."""
    for (round_, stage), group in groupby(recorded.checks, lambda check: (check.round, check.stage)):
        checks = list(group)
        yield {
            "stage": stage,
            "round": round_,
            "cases": len(checks),
            "passed": sum(c.passed for c in checks),
            "seed": recorded.seeds[stage],
            "case": drawn_case(checks[-1]),
            # Only finals have random cases, beside the one of the timed size that every gate has.
            "random_cases": max(0, sum(is_case_text(c.case) for c in checks) - 1),
        }


def again_line(db: str, candidate: str, seed: int, case: str = "", random_cases: int = 0) -> str:
    """The command that repeats a verdict. random_cases: the number that were run, used unless `case` names one."""
    options = ("--case", case) if case else ("--cases", str(random_cases)) if random_cases else ()
    return command_line(db, "check", candidate, "--seed", str(seed), *options)
