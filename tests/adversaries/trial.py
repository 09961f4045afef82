"""Tries cheats as a search would: built, gated and timed by an executor, and their neighbours gated as in the finals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evo.evaluation import Evaluation, Status
from evo.executors import Executor, ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import Request
from evo.measure.cases import far_cases, is_case_text, random_cases
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.search.tasks import RANDOM_CASES

from .cheats import Cheat

__all__ = ["FOLDER", "Verdict", "try_all", "verdicts_of", "workload_for"]

FOLDER = Path(__file__).parent

PATIENCE_S = 120.0
"""How long anything may take: the machine may be busy."""


_STAGES = {"drawn": ("drawn", "gate"), "chance": ("drawn", "timed"), "far": ("far", "launch")}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a cheat. `stage` is empty where it was accepted."""

    cheat: Cheat
    stage: str
    status: Status
    reason: str
    smallest: str = ""
    """The smallest case by which it was refused, where another was found than the first."""

    @property
    def as_expected(self) -> bool:
        return (
            self.stage in _STAGES.get(self.cheat.stage, (self.cheat.stage,))
            and self.cheat.reason in self.reason
            and self.cheat.case in self.reason.split(":")[0]
        )


def workload_for(target: str, dtype: str) -> Workload:
    cols = 512 if target == "cuda" else 256
    return load_kernel(str(FOLDER)).workload(target, f"rows=96,cols={cols},dtype={dtype}")


def verdicts_of(
    target: str, arch: str, workload: Workload, cheats: Sequence[Cheat], config: ExecutorConfig, **how: Any
) -> dict[str, Verdict]:
    """By name, from an executor of their own. `how`: see `try_all`."""
    executor = LocalExecutor(target, config)
    try:
        return {v.cheat.name: v for v in try_all(executor, target, arch, workload, cheats, **how)}
    finally:
        executor.close()


def try_all(
    executor: Executor,
    target: str,
    arch: str,
    workload: Workload,
    cheats: Sequence[Cheat],
    *,
    neighbours: bool = True,
    timed: bool = True,
    folder: Path = FOLDER,
) -> Iterator[Verdict]:
    """Verdicts in order. `neighbours`: also for the sizes that a finalist is gated at. `timed`: whether those who pass
    the gate are timed. `folder`: the kernel's."""
    kernel = load_kernel(str(folder))
    near = kernel.neighbours(target, workload) if neighbours else ()
    drawn = tuple(random_cases(kernel, target, workload, 1, 4 * RANDOM_CASES))
    far = far_cases(kernel, target, workload)

    def request(cheat: Cheat, size: Workload) -> Request:
        genome = Genome.of({"cheat": cheat.name})
        return Request(kernel=str(folder), target=target, arch=arch, genome=genome, workload=size, seed=1)

    def sizes(cheat: Cheat) -> list[Workload]:
        return [workload, *(near if cheat.stage in ("", "neighbour") else ())]

    builds = [[(size, executor.build(request(cheat, size))) for size in sizes(cheat)] for cheat in cheats]
    for cheat, futures in zip(cheats, builds, strict=True):
        verdict = Verdict(cheat=cheat, stage="", status=Status.OK, reason="")
        for size, future in futures:
            build = future.result(PATIENCE_S)
            if build.binary is None:
                verdict = Verdict(cheat=cheat, stage="build", status=build.status, reason=build.log)
                break
            # In a search without the random cases, in the finals without the timing.
            number = {"drawn": len(drawn), "": RANDOM_CASES}.get(cheat.stage, 0) if size == workload else 0
            cases = drawn[:number] + (far if cheat.stage in ("", "far") and size == workload else ())
            asked = replace(request(cheat, size), build=build, time=timed and size == workload, cases=cases)
            measured = executor.measure(asked).result(PATIENCE_S)
            if measured.status is not Status.OK:
                stage = _stage(measured) if size == workload else "neighbour"
                failed = [c for c in measured.checks if not c.passed]
                reason = f"{failed[0].case}: {failed[0].reason}" if failed else measured.log
                smallest = failed[-1].case if len(failed) > 1 else ""
                verdict = Verdict(cheat=cheat, stage=stage, status=measured.status, reason=reason, smallest=smallest)
                break
        yield verdict


def _stage(measured: Evaluation) -> str:
    if measured.status is Status.LOAD_ERROR:
        return "load"
    if measured.status is Status.IMPOSSIBLE:
        return "timed"
    if measured.status is Status.WRONG:
        case = next(c.case for c in measured.checks if not c.passed)
        if ",far=" in case:
            return "far"
        return "timed" if case == "timed" else "drawn" if is_case_text(case) else "gate"
    return "launch"
