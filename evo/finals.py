"""The finals: the best candidates of a search, gated anew and timed against each other in a fresh process.

A search picks its best by many noisy timings, so the best of them is partly lucky (the winner's curse). Here the
finalists meet new data and a new seed in a process that has seen none of them, are also compiled and gated for
neighbouring sizes, and then run interleaved with PyTorch and with a copy of the same size. Only these figures
are reported.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass

from evo.errors import EvoError
from evo.evaluation import Build, CandidateRef, Check, Measurement, Status, Timing
from evo.executors import BuildRequest, Executor, MeasureRequest, RaceRequest
from evo.genome import Genome
from evo.kernel import Kernel, Limits, Workload

__all__ = ["FINAL_SEED_STEP", "Finalist", "Finals", "Setting", "hold_finals"]

FINAL_SEED_STEP = 7_919
"""Finals draw their data with the search's seed plus this."""

_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same over all finals of a run."""

    kernel: Kernel
    kernel_name: str
    target: str
    arch: str
    limits: Limits
    seed: int


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A finalist with what the finals found out about it."""

    ref: CandidateRef
    measurement: Measurement

    @property
    def timing(self) -> Timing | None:
        return self.measurement.timings[0] if self.measurement.timings else None


@dataclass(frozen=True, kw_only=True)
class Finals:
    """Finalists, fastest first (the refused ones last), and the baselines' timings."""

    finalists: tuple[Finalist, ...]
    baselines: tuple[Timing, ...]
    ceiling: str = ""
    """The fastest baseline of role ceiling."""

    @property
    def winner(self) -> Finalist | None:
        first = self.finalists[0] if self.finalists else None
        return first if first is not None and first.timing is not None else None

    def baseline(self, name: str) -> Timing | None:
        return next((t for t in self.baselines if t.contender == name), None)


def hold_finals(executor: Executor, setting: Setting, elites: list[CandidateRef]) -> Finals:
    """Gates and races the elites of one island. The device process must be fresh (`Executor.renew_device`).

    Raises EvoError if the race itself cannot be held.
    """
    if not elites:
        return Finals(finalists=(), baselines=())
    workload = elites[0].workload
    builds = {ref.order: _build(executor, setting, ref.proposal.genome, workload) for ref in elites}
    near = {ref.order: _build_neighbours(executor, setting, ref.proposal.genome, workload) for ref in elites}
    verdicts = {
        ref.order: _gate(executor, setting, ref.proposal.genome, workload, builds[ref.order], near[ref.order])
        for ref in elites
    }
    passed = [ref for ref in elites if verdicts[ref.order].status is Status.OK]
    ceilings = tuple(b.name for b in setting.kernel.baselines if b.role == "ceiling")
    timings: tuple[Timing, ...] = ()
    refused: dict[str, str] = {}
    if passed:
        request = RaceRequest(
            kernel=setting.kernel_name,
            target=setting.target,
            workload=workload,
            contenders=tuple((str(r.order), r.proposal.genome, builds[r.order].result()) for r in passed),
            baselines=ceilings,
            seed=setting.seed,
        )
        for _ in range(_ATTEMPTS):
            outcome = executor.race(request).result()
            if outcome.timings:
                break
            executor.renew_device()
        else:
            raise EvoError(f"the finals of {workload} could not be timed: {outcome.log}; resume the run to try again")
        timings, refused = outcome.timings, dict(outcome.refused)
    finalists = [_finalist(ref, verdicts[ref.order], timings, refused) for ref in elites]
    finalists.sort(key=lambda f: f.timing.ratio if f.timing and f.timing.ratio is not None else float("inf"))
    orders = {str(ref.order) for ref in elites}
    baselines = tuple(t for t in timings if t.contender not in orders)
    bounds = [t for t in baselines if t.contender in ceilings]
    return Finals(
        finalists=tuple(finalists),
        baselines=baselines,
        ceiling=min(bounds, key=lambda t: t.median_us).contender if bounds else "",
    )


def _finalist(ref: CandidateRef, verdict: Measurement, timings: tuple[Timing, ...], refused: dict[str, str]) -> Finalist:
    name = str(ref.order)
    own = tuple(dataclasses.replace(t, contender="candidate") for t in timings if t.contender == name)
    if name in refused:
        wrong = Check(case="timed", passed=False, reason=refused[name])
        verdict = dataclasses.replace(
            verdict, status=Status.WRONG, checks=(*verdict.checks, wrong), log=refused[name]
        )
    elif own:
        verdict = dataclasses.replace(verdict, timings=own)
    return Finalist(ref=ref, measurement=verdict)


def _build(executor: Executor, setting: Setting, genome: Genome, workload: Workload) -> Future[Build]:
    return executor.build(
        BuildRequest(
            kernel=setting.kernel_name, target=setting.target, arch=setting.arch, genome=genome, workload=workload
        )
    )


def _build_neighbours(
    executor: Executor, setting: Setting, genome: Genome, workload: Workload
) -> list[tuple[Workload, Future[Build]]]:
    """Sizes that the genome is legal for; the others it could not be used for anyway."""
    return [
        (near, _build(executor, setting, genome, near))
        for near in setting.kernel.neighbours(setting.target, workload)
        if setting.kernel.space(setting.target, near, setting.limits).is_legal(genome.parameters)
    ]


def _gate(
    executor: Executor,
    setting: Setting,
    genome: Genome,
    workload: Workload,
    build: Future[Build],
    near: list[tuple[Workload, Future[Build]]],
) -> Measurement:
    """One verdict over the workload and its neighbours, up to the first refusal."""
    checks: tuple[Check, ...] = ()
    seconds = gate_seconds = 0.0
    for size, future in [(workload, build), *near]:
        built = future.result()
        if built.binary is None:
            log = f"for {size}: {built.log}"
            return Measurement(status=built.status, checks=(), log=log, seconds=seconds, gate_seconds=gate_seconds)
        measured = executor.measure(
            MeasureRequest(
                kernel=setting.kernel_name,
                target=setting.target,
                genome=genome,
                workload=size,
                build=built,
                seed=setting.seed,
                time=False,
            )
        ).result()
        checks += measured.checks
        seconds += measured.seconds
        gate_seconds += measured.gate_seconds
        if measured.status is not Status.OK:
            return dataclasses.replace(
                measured, checks=checks, log=f"for {size}: {measured.log}", seconds=seconds, gate_seconds=gate_seconds
            )
    return Measurement(status=Status.OK, checks=checks, seconds=seconds, gate_seconds=gate_seconds)
