"""Made-up records of searches, for `lineage_scale.py`: as full, and as large, as those of real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from evo.evaluation import (
    Binary,
    Build,
    Candidate,
    Check,
    Evaluation,
    Parent,
    Proposal,
    Status,
    Timing,
)
from evo.lineage import Environment, RunSpec, StoredRun
from evo.problem.genome import Genome
from evo.problem.kernel import Workload

__all__ = ["Plan", "Search", "spec_of"]

_KERNELS = {
    "layernorm": "rows=4096,cols=8192",
    "attention": "batch=2,heads=8,rows=512",
    "softmax": "rows=4096,cols=1024",
}
_DEVICES = (("NVIDIA H200", "sm_90"), ("NVIDIA H100", "sm_90"), ("NVIDIA L4", "sm_89"), ("NVIDIA RTX 4090", "sm_89"))
_OPERATORS = ("mutation", "crossover", "neighbour", "block_swap", "random")
_CHECKS, _SAMPLES = 17, 24
_WARPS, _VECTORS, _PATHS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), ("registers", "shared", "global")


@dataclass(frozen=True, kw_only=True)
class Plan:
    db: str
    runs: int
    candidates: int  # of each run
    sources: bool
    seed: int = 1


def spec_of(number: int) -> tuple[RunSpec, Environment]:
    kernel = tuple(_KERNELS)[number % len(_KERNELS)]
    device, arch = _DEVICES[number // 3 % len(_DEVICES)]
    dims = {name: int(size) for name, size in (part.split("=") for part in _KERNELS[kernel].split(","))}
    workloads = tuple(Workload.of(dims, dtype, {"eps": 1e-5}) for dtype in ("float16", "bfloat16")[: 1 + number % 2])
    spec = RunSpec(
        kernel=kernel,
        kernel_digest=f"{number % 3:064x}",
        target="cuda",
        arch=arch,
        sampler="evolution",
        seed=number,
        max_in_flight=32,
        workloads=workloads,
        options={"sampler": {"population": 24}, "fixed": {}, "gate_seed": number},
        budget={"seconds": 600.0, "evaluations": None},
    )
    environment = Environment(device=device, arch=arch, driver="580.1", cuda="13.0", nvrtc="13.0.48", torch="2.13.0")
    return spec, environment


class Search:
    """Makes up the candidates of one run: an evolution whose scores go down."""

    def __init__(self, run: StoredRun, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.rng = random.Random(f"{plan.seed} {run.uid}")
        self.elite: list[list[tuple[float, int]]] = [[] for _ in run.spec.workloads]
        self.passed: list[list[int]] = [[] for _ in run.spec.workloads]
        self.source = "\n".join(f"  float v{i} = x[{i} * blockDim.x + threadIdx.x] * {i}.25f;" for i in range(350))

    def candidates(self) -> Iterator[tuple[Candidate, Evaluation]]:
        for order in range(self.plan.candidates):
            task = order % len(self.run.spec.workloads)
            yield self._ref(order, task), self._evaluation(order, task)

    def _ref(self, order: int, task: int) -> Candidate:
        rng, elite = self.rng, self.elite[task]
        operator = rng.choice(_OPERATORS) if elite else "random"
        wanted = 0 if operator == "random" else 2 if operator == "crossover" else 1
        parents = {rng.choice(elite)[1] for _ in range(wanted)} if elite else set()
        genome = Genome.of(
            {
                "warps": rng.choice(_WARPS),
                "vector": rng.choice(_VECTORS),
                "path": rng.choice(_PATHS),
                "unroll": rng.choice((1, 2, 4)),
                "persistent": rng.random() < 0.5,
                "rows_per_block": rng.randrange(1, 64),
                "prefetch": rng.randrange(0, 4),
                "serial": order,
            }
        )
        return Candidate(
            order=order,
            task=task,
            proposal=Proposal(
                genome=genome,
                operator=operator,
                parents=tuple(Parent(p, "parent" if i == 0 else "mate") for i, p in enumerate(sorted(parents))),
            ),
        )

    def _evaluation(self, order: int, task: int) -> Evaluation:
        rng, luck = self.rng, self.rng.random()
        if luck < 0.06:
            log = f"candidate.cu({order % 400}): error: too many resources requested for launch\n" + "1 error\n"
            return Evaluation(
                status=Status.COMPILE_ERROR, build=self._build(order, Status.COMPILE_ERROR, log), seconds=0.4
            )
        build = self._build(order, Status.OK, "")
        if luck < 0.08:
            return Evaluation(status=Status.TIMEOUT, build=build, log="the gate took longer than 0.3 s", seconds=0.4)
        wrong = luck < 0.15
        checks = self._checks(wrong)
        if wrong:
            return Evaluation(status=Status.WRONG, build=build, checks=checks, seconds=0.01, gate_seconds=0.01)
        ratio = 0.6 + 40 / (order + 60) + abs(rng.gauss(0, 0.15))
        self._remember(ratio, order, task)
        timings = tuple(self._timing(task, name, value) for name, value in (("candidate", ratio), ("torch", 1.0)))
        same = self.passed[task][-2] if luck > 0.97 and len(self.passed[task]) > 1 else None
        return Evaluation(
            status=Status.OK if same is None else Status.SAME_CODE,
            build=build,
            checks=checks,
            timings=timings,
            same_code_as=same,
            seconds=0.12,
            gate_seconds=0.01,
            timing_seconds=0.1,
        )

    def _checks(self, wrong: bool = False) -> tuple[Check, ...]:
        return tuple(
            Check(
                case=f"normal {67 + i}x8192 weight=False",
                passed=not (wrong and i == _CHECKS - 1),
                error=self.rng.random() * 1e-6,
                allowed=2.5e-6,
                torch_error=1.25e-6,
                reason="error 3.1e-05 is above the 2.5e-06 allowed" if wrong and i == _CHECKS - 1 else "",
                seed=self.run.spec.seed,
            )
            for i in range(_CHECKS)
        )

    def _remember(self, ratio: float, order: int, task: int) -> None:
        self.passed[task].append(order)
        self.elite[task] = sorted([*self.elite[task], (ratio, order)])[:24]

    def _build(self, order: int, status: Status, log: str) -> Build:
        rng = self.rng
        digest = f"{rng.getrandbits(256):064x}"
        return Build(
            status=status,
            arch=self.run.spec.arch,
            compiler="nvrtc 13.0",
            source_digest=digest,
            source=f"// {digest}\n#define SERIAL {order}\n{self.source}" if self.plan.sources else "",
            seconds=0.25,
            log=log,
            binary=None
            if status is not Status.OK
            else Binary(
                code=b"",
                code_hash=f"{rng.getrandbits(256):064x}",
                log="ptxas info    : Used 40 registers, 64 bytes smem, 400 bytes cmem[0]",
                registers=rng.randrange(16, 128),
                spill_bytes=0,
                smem_static_bytes=64,
                stack_bytes=0,
            ),
            smem_dynamic_bytes=0,
            occupancy=0.75,
        )

    def _timing(self, task: int, contender: str, ratio: float, protocol: str = "cold") -> Timing:
        base = 36.0 * ratio
        samples = tuple(round(base * (1 + self.rng.random() / 50), 4) for _ in range(_SAMPLES))
        return Timing(
            workload=self.run.spec.workloads[task].key,
            contender=contender,
            protocol=protocol,
            median_us=base * 1.01,
            low_us=base,
            high_us=base * 1.02,
            samples_us=samples,
            ratio=ratio,
            ratio_low=ratio * 0.995,
            ratio_high=ratio * 1.005,
            calls_per_sample=12,
            sets=24,
            clocks={"sm_mhz": 1980.0, "power_w": 412.5, "discarded": 0.0, "disturbed": 0.0},
        )

    def finals(self) -> Iterator[tuple[int, int, Evaluation]]:
        """(task, order, measurement), the winner of a task first."""
        for task, elite in enumerate(self.elite):
            for ratio, order in elite[:8]:
                raced = (("candidate", ratio * 1.01), ("torch", 1.0))
                timings = tuple(self._timing(task, name, value, "final") for name, value in raced)
                yield task, order, Evaluation(status=Status.OK, checks=self._checks(), timings=timings, seconds=2.0)
