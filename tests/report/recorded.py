"""Runs as searches leave them: the real sampler proposes, arithmetic stands in for the machine, the real store records."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from evo.evaluation import FINALIST, Binary, Build, Candidate, Check, Evaluation, Status, Timing
from evo.lineage import RunStatus, Stage, StoredRun
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Space, Value
from evo.search.samplers import find_sampler
from evo.targets import find_target
from tests.lineage import samples as s

ARCH = "sm_90"
WORKLOADS = ("rows=4096,cols=4096,dtype=float16", "rows=4096,cols=1024,dtype=float32")
HOSTILE = "<script>alert(1)</script>\x1b[31m\x00\u202e"

ENVIRONMENT = replace(s.ENVIRONMENT, device="NVIDIA H200", arch=ARCH)
PASSED = Check(case="normal", passed=True, error=1e-7, allowed=1e-5, torch_error=2e-7, seed=3)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be recorded. Each status that is not OK is of so many candidates in a thousand."""

    name: str = "sample"
    evaluations: int = 400
    workloads: tuple[str, ...] = WORKLOADS[:1]
    finals: bool = True
    status: RunStatus = RunStatus.FINISHED
    failing: Mapping[Status, int] | None = None
    seed: int = 1
    log: str = "candidate.cu(7): error: too many resources requested"
    kernel: str = "layernorm"
    noise: float = 0.002
    disturbed: float = 0.0
    confirmed: float = 1.01
    """The winner's ratio in the race that confirmed it, over that of the search."""


PLANS = (
    Plan(name="one", evaluations=240),
    Plan(name="two", evaluations=160, workloads=WORKLOADS, log=f"{HOSTILE} error", seed=5),
    Plan(name="nofinals", evaluations=60, finals=False, status=RunStatus.INTERRUPTED),
    Plan(name="failures", evaluations=30, failing={Status.COMPILE_ERROR: 700, Status.WRONG: 300}),
    Plan(name="single", evaluations=1, failing={}),
    Plan(name="empty", evaluations=0),
    Plan(name="gone", evaluations=40, kernel=f"/nowhere/{HOSTILE}"),
    Plan(name="changed", evaluations=60, confirmed=1.2),
    Plan(name="tie", evaluations=40, noise=9.0),
)

_FAILING = {Status.COMPILE_ERROR: 60, Status.WRONG: 40, Status.TIMEOUT: 8, Status.ILLEGAL_ADDRESS: 6}


def record_run(store: Store, plan: Plan) -> StoredRun:
    """Records it as a search would, in one transaction."""
    recording = Recording(store, plan)
    recording.advance(plan.evaluations)
    return recording.finish()


class Recording:
    """A run that goes on as it is told to."""

    def __init__(self, store: Store, plan: Plan) -> None:
        kernel = load_kernel("layernorm")
        self._store, self._plan = store, plan
        self._workloads = tuple(kernel.workload("cuda", text) for text in plan.workloads)
        spec = replace(
            s.SPEC,
            kernel=plan.kernel,
            kernel_digest=kernel.digest,
            arch=ARCH,
            seed=plan.seed,
            workloads=self._workloads,
            options={"sampler": {}, "fixed": {}, "gate_seed": 11},
            budget={"seconds": 600.0, "evaluations": plan.evaluations, "patience": None},
            name=plan.name,
        )
        self.run = store.create_run(spec, ENVIRONMENT)
        limits = find_target("cuda").limits(ARCH)
        spaces = (kernel.space("cuda", w, limits) for w in self._workloads)
        self._searches = [Landscape(space, plan, i) for i, space in enumerate(spaces)]
        self._order = 0

    def advance(self, evaluations: int) -> None:
        with self._store.transaction():
            for order in range(self._order, self._order + evaluations):
                task = order % len(self._workloads)
                self._searches[task].step(self._store, self.run, order, task, self._workloads[task])
        self._order += evaluations

    def finish(self) -> StoredRun:
        plan = self._plan
        for task, search in enumerate(self._searches):
            if plan.finals and search.scores:
                _hold_finals(self._store, self.run, task, self._workloads[task], search, plan)
        stopped = "time is up" if plan.status is RunStatus.FINISHED else ""
        self._store.set_status(self.run, plan.status, reason=stopped, elapsed_s=0.25 * self._order)
        return self._store.run(self.run.name)


class Landscape:
    """One task: its sampler, and a device on which every choice multiplies the time."""

    def __init__(self, space: Space, plan: Plan, task: int) -> None:
        self._plan, self._rng = plan, random.Random(plan.seed + task)
        self._sampler = find_sampler("evolution")(space, plan.seed + task, {"children": 1, "pool": 20})
        self._factors: dict[tuple[str, Value], float] = {}
        for p in space.parameters:
            weight = self._rng.choice((0.02, 0.05, 0.1, 0.3))
            for value in p.values:
                self._factors[p.name, value] = 1 + weight * self._rng.random()
        self._local: dict[int, int] = {}
        self.scores: dict[int, float] = {}
        self.genomes: dict[int, Genome] = {}

    def step(self, store: Store, run: StoredRun, order: int, task: int, workload: Workload) -> None:
        proposal = self._sampler.ask(order)
        evaluation = self._evaluate(proposal.genome, workload)
        ref = Candidate(order=order, task=task, proposal=proposal)
        store.add(run, ref, evaluation, elapsed_s=0.25 * order + 1.5)
        self._sampler.tell(order, evaluation.score)
        self.genomes[order] = proposal.genome
        if evaluation.score is not None:
            self.scores[order] = evaluation.score

    def _evaluate(self, genome: Genome, workload: Workload) -> Evaluation:
        status, code = self._status(genome), genome.digest.encode()
        built = status is not Status.COMPILE_ERROR
        binary = Binary(code=code, code_hash=hashlib.sha256(code).hexdigest(), registers=64, spill_bytes=0)
        build = Build(
            status=Status.OK if built else status,
            arch=ARCH,
            compiler="nvrtc 13.0",
            source_digest=genome.digest,
            binary=binary if built else None,
            log="" if built else self._plan.log,
        )
        if status is not Status.OK:
            wrong = Check(case="large means", passed=False, error=1.0, allowed=0.1, reason=self._plan.log, seed=3)
            checks = (wrong,) if status is Status.WRONG else ()
            return Evaluation(status=status, build=build, checks=checks, log="" if checks or not built else "it is gone")
        ratio = 0.45 * math.prod(self._factors.get(item, 1.0) for item in genome.items)
        ratio *= 1 + 0.004 * self._rng.gauss(0, 1)
        spoilt = float(self._rng.random() < self._plan.disturbed)
        timings = (timing(workload, ratio, rounds=6, disturbed=spoilt),)
        return Evaluation(status=status, build=build, checks=(PASSED,), timings=timings, seconds=0.024, gate_seconds=0.004)

    def _status(self, genome: Genome) -> Status:
        draw = int(genome.digest[:8], 16) % 1000
        for status, share in (_FAILING if self._plan.failing is None else self._plan.failing).items():
            if draw < share:
                return status
            draw -= share
        return Status.OK


def timing(
    workload: Workload,
    ratio: float,
    *,
    contender: str = "candidate",
    protocol: str = "cold",
    rounds: int = 30,
    **clocks: float,
) -> Timing:
    us, spread = 31.0 * ratio, 0.006 if protocol == "cold" else 0.002
    reference = contender == "torch"
    return replace(
        s.timing(workload, contender=contender),
        protocol=protocol,
        median_us=us,
        low_us=us * (1 - spread),
        high_us=us * (1 + spread),
        samples_us=(us,) * rounds,
        ratio=None if reference else ratio,
        ratio_low=None if reference else ratio * (1 - spread),
        ratio_high=None if reference else ratio * (1 + spread),
        clocks={"sm_mhz": 1980.0, "power_w": 410.0, "disturbed": 0.0, "discarded": 0.0, **clocks},
    )


def _hold_finals(store: Store, run: StoredRun, task: int, workload: Workload, search: Landscape, plan: Plan) -> None:
    best = sorted(search.scores, key=lambda order: search.scores[order])[:3]
    ratio = search.scores[best[0]] * plan.confirmed
    for order in best:
        timings = [timing(workload, search.scores[order] * 1.01, protocol="final")]
        if order == best[0]:
            raced = replace(timings[0], contender=FINALIST)
            timings = [timing(workload, ratio, protocol="final"), raced]
        measurement = Evaluation(status=Status.OK, checks=(PASSED,), timings=tuple(timings))
        store.add_final(run, order, measurement, elapsed_s=run.elapsed_s)
    beside = [
        timing(workload, 1.0, contender="torch", protocol="final"),
        timing(workload, 0.55, contender="copy", protocol="final"),
        timing(workload, ratio, contender="twin", protocol="final", noise_floor=plan.noise),
    ]
    store.add_baselines(run, task, beside, stage=Stage.FINAL)
    store.set_winner(run, task, best[0])
