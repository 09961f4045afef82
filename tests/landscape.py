"""A machine made of arithmetic: an executor whose verdicts and times follow from the genome alone.

It stands in where a test is about the order of things and must know every measurement beforehand. The real
executor is tested in tests/executors, the real machine in tests/test_whole_run.py.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from evo.errors import DeviceError
from evo.evaluation import Binary, Build, Check, Evaluation, Status, Timing
from evo.executors import InFlight
from evo.job.job import Job, plan_run
from evo.lineage import RunSpec, StoredRun
from evo.lineage.store import Store
from evo.measure import RaceRequest, RaceResult, Request
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.sanitize import Sanitized
from evo.search.loop import Budget
from evo.search.place import Place
from evo.search.tasks import OpenRun
from evo.targets import find_target
from evo.testing.spaces import Result


def random_search(kernel: str, evaluations: int = 20, name: str | None = None) -> RunSpec:
    """Of the first workload that a kernel has for the CPU."""
    problem = load_kernel(kernel)
    job = Job(
        kernel=problem,
        kernel_name=kernel,
        target="cpu",
        arch="native",
        workloads=problem.workloads["cpu"][:1],
        sampler="random",
        seed=5,
        place=Place(builders=4),
        budget=Budget(evaluations=evaluations),
        name=name,
    )
    return plan_run(job)


def opened(run: StoredRun, store: Store, executor: Any) -> OpenRun:
    return OpenRun(run=run, kernel=load_kernel(run.spec.kernel), store=store, executor=executor)


def _hash(genome: Genome, salt: str) -> int:
    return int(hashlib.sha256(f"{salt}{genome.digest}".encode()).hexdigest()[:8], 16)


def best_score(results: Sequence[Result]) -> float:
    return min(r.score for r in results if r.score is not None)


def code_of(genome: Genome) -> str:
    """Some genomes share machine code: a hint that the compiler ignores."""
    kept = {k: v for k, v in genome.parameters.items() if k != "prefetch_bytes"}
    return hashlib.sha256(Genome.of(kept).to_json().encode()).hexdigest()


def ratio_of(genome: Genome) -> float:
    kept = Genome.of({k: v for k, v in genome.parameters.items() if k != "prefetch_bytes"})
    return 0.5 + (_hash(kept, "time") % 1000) / 1000


def status_of(genome: Genome) -> Status:
    pick = int(code_of(genome)[:4], 16) % 10
    return {0: Status.COMPILE_ERROR, 1: Status.WRONG}.get(pick, Status.OK)


def timing(workload: str, ratio: float, contender: str = "candidate", protocol: str = "cold") -> Timing:
    us = 100 * ratio
    return Timing(
        workload=workload,
        contender=contender,
        protocol=protocol,
        median_us=us,
        low_us=us,
        high_us=us,
        samples_us=(us, us),
        ratio=ratio,
        ratio_low=ratio,
        ratio_high=ratio,
    )


class LandscapeExecutor:
    """Results arrive in an order of chance: `delays` seeds it. Nothing else depends on it. change: what is made of them."""

    target, builders, devices, losses = find_target("cpu"), 8, 1, 0

    def __init__(
        self, delays: int, longest_s: float = 0.004, change: Callable[[Any, Any], Any] = lambda request, found: found
    ) -> None:
        self.change = change
        self._rng, self._lock, self._longest_s = random.Random(delays), threading.Lock(), longest_s
        self._pool = ThreadPoolExecutor(max_workers=8)
        self.built: list[str] = []
        self.measured: list[str] = []

    def _later(self, request: Request | RaceRequest, found: object) -> Future[Any]:
        result = self.change(request, found)
        with self._lock:
            delay = self._rng.random() * self._longest_s
        return self._pool.submit(lambda: (time.sleep(delay), result)[1])

    def build(self, request: Request) -> Future[Build]:
        self.built.append(request.genome.digest)
        status = status_of(request.genome)
        if status is Status.COMPILE_ERROR:
            build = Build(status=status, arch="none", compiler="none", source_digest="", log="error: no")
        else:
            binary = Binary(code=b"code", code_hash=code_of(request.genome))
            build = Build(
                status=Status.OK, arch="none", compiler="none", source_digest="0" * 64, source="text", binary=binary
            )
        return self._later(request, build)

    def measure(self, request: Request) -> Future[Evaluation]:
        self.measured.append(request.genome.digest)
        if status_of(request.genome) is Status.WRONG:
            check = Check(case="normal", passed=False, reason="off", seed=request.seed)
            return self._later(request, Evaluation(status=Status.WRONG, checks=(check,), log="off"))
        timings = (timing(request.workload.key, ratio_of(request.genome)),) if request.time else ()
        passed = Check(case="normal", passed=True, error=0.0, allowed=1.0, seed=request.seed)
        return self._later(request, Evaluation(status=Status.OK, checks=(passed,), timings=timings))

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        key = request.workload.key
        timings = [timing(key, ratio_of(g), n, "final") for n, g, _ in request.contenders]
        if request.hot:
            timings += [timing(key, 0.9 * ratio_of(g), n, "hot") for n, g, _ in request.contenders]
        timings += [timing(key, 1.0, "torch", "final"), timing(key, 0.4, "copy", "final")]
        return self._later(request, RaceResult(timings=tuple(timings)))

    def sanitize(self, request: Request, tools: Sequence[str], limit_s: float) -> Future[Sanitized]:
        failed: Future[Sanitized] = Future()
        failed.set_exception(DeviceError("there is no memory checker of a landscape"))
        return failed

    def in_flight(self) -> tuple[InFlight, ...]:
        return ()

    def renew_device(self) -> None:
        return None

    def wind_down(self) -> None:
        """Results that are on their way come, and are not waited for."""

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Hanging(LandscapeExecutor):
    """The first candidate has no result before somebody has seen that it is waited for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen = threading.Event()
        self._first: Request | None = None

    def measure(self, request: Request) -> Future[Evaluation]:
        if self._first is not None:
            return super().measure(request)
        self._first = request
        measured = super().measure(request)
        return self._pool.submit(lambda: (self.seen.wait(60), measured.result())[1])

    def in_flight(self) -> tuple[InFlight, ...]:
        if self._first is None or self.seen.is_set():
            return ()
        first = self._first
        return (InFlight(genome=first.genome, workload=first.workload, stage="gate", seconds=7.0, left_s=23.0),)
