"""LayerNorm and RMSNorm are one family: RMSNorm's templates are right with every option, and neither pays for the other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evo.errors import UsageError
from evo.measure.gate import Gate
from evo.problem.genome import Genome
from evo.problem.kernel import Workload, load_kernel
from evo.problem.render import render
from evo.problem.space import Point
from evo.targets import find_target

KERNEL = load_kernel("rmsnorm")
TARGET, CUDA = find_target("cpu"), find_target("cuda")
SESSION = TARGET.open()

OPTIONS = ["", ",rstd=true", ",residual=true", ",residual=true,sum=true,rstd=true"]


def test_the_reference_is_pytorchs_rms_norm_of_the_rounded_sum() -> None:
    problem = KERNEL.workload("cpu", "rows=5,cols=33,dtype=bfloat16,residual=true,sum=true,rstd=true,eps=0.1")
    inputs = KERNEL.inputs(problem, "normal", torch.Generator().manual_seed(5))
    x, residual, weight = (t for t in inputs.values() if t is not None)
    found = KERNEL.reference({n: t.double() if t is not None else None for n, t in inputs.items()}, problem)
    added = (x + residual).double()
    torch.testing.assert_close(found["sum"], added, atol=0, rtol=0)
    torch.testing.assert_close(found["y"], torch.nn.functional.rms_norm(added, (33,), weight.double(), 0.1))
    torch.testing.assert_close(found["rstd"], 1 / (added.square().mean(1) + 0.1).sqrt())


def test_a_sum_without_a_residual_is_refused() -> None:
    with pytest.raises(UsageError, match="sum needs residual"):
        KERNEL.workload("cpu", "rows=5,cols=33,dtype=float32,sum=true")


def refused(point: Point, problem: Workload, folder: Path, mistake: tuple[str, str] = ("", "")) -> list[str]:
    """What the gate says against a point. mistake: a part of the source, and what stands for it."""
    sequence = KERNEL.sequence("cpu", point, problem, SESSION.limits)
    source = render(KERNEL, "cpu", Genome.of(point), problem, "native")
    assert mistake[0] in source.text
    source = replace(source, text=source.text.replace(*mistake, 1))
    folder.mkdir(parents=True, exist_ok=True)
    loaded = SESSION.load(TARGET.compile(source, "native", folder), KERNEL.entry)
    try:
        checks = gate_for(problem.dtype).run(loaded, [(case, sequence) for case in KERNEL.cases("cpu", problem)])
    finally:
        loaded.close()
    return [f"{check.case}: {check.reason}" for check in checks if not check.passed]


_gates: dict[str, Gate] = {}


def gate_for(dtype: str) -> Gate:
    return _gates.setdefault(dtype, Gate(KERNEL, "cpu", SESSION, seed=11))


@pytest.mark.parametrize("dtype", KERNEL.dtypes["cpu"])
def test_every_branch_passes_the_gate_on_a_cpu_with_all_options(dtype: str, tmp_path: Path) -> None:
    problem = KERNEL.workload("cpu", f"rows=67,cols=200,dtype={dtype}{OPTIONS[-1]}")
    for number, point in enumerate(KERNEL.space("cpu", problem, SESSION.limits).branches()):
        assert not refused(point, problem, tmp_path / str(number)), point


@pytest.mark.parametrize("options", OPTIONS[:-1])
@pytest.mark.parametrize("dtype", KERNEL.dtypes["cpu"])
def test_each_option_alone_passes_the_gate_on_a_cpu(dtype: str, options: str, tmp_path: Path) -> None:
    problem = KERNEL.workload("cpu", f"rows=67,cols=200,dtype={dtype}{options}")
    space = KERNEL.space("cpu", problem, SESSION.limits)
    chosen = {"rows_in_flight": 4, "stores": "non_temporal", "prefetch_bytes": 512, "prefetch_next": True}
    assert not refused(space.complete({**space.default, **chosen}), problem, tmp_path)


@pytest.mark.parametrize(
    "mistake",
    [
        ("sum.part[k] += residual.part[k]", ""),
        ("saved_rstd[r] = rstd[r][0]", "saved_rstd[r] = 1"),
        ("keep(sum + r * cols + j, z)", ""),
        (" + eps;\n        safe", ";\n        safe"),
        ("splat((float)(1 / __builtin_sqrt(variance)))", "splat((float)(1 / __builtin_sqrt(variance)) * 1.01f)"),
    ],
    ids=str,
)
def test_a_mistake_is_refused(mistake: tuple[str, str], tmp_path: Path) -> None:
    problem = KERNEL.workload("cpu", f"rows=67,cols=200,dtype=float32{OPTIONS[-1]}")
    assert refused(KERNEL.space("cpu", problem, SESSION.limits).default, problem, tmp_path, mistake)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_genome_is_also_gated_with_each_compiled_in_option_the_other_way(target: str) -> None:
    problem = KERNEL.example(target)
    near = {n: sum(bool(w.option(n)) for w in KERNEL.neighbours(target, problem)) for n in ("residual", "sum", "rstd")}
    assert near == {"residual": 2, "sum": 1, "rstd": 2}
    assert not any(KERNEL.validate(w) for w in KERNEL.neighbours(target, problem))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
@pytest.mark.parametrize("options", OPTIONS)
def test_points_drawn_at_random_compile_for_gpus(options: str, arch: str) -> None:
    rng = random.Random(4)
    for cols in (64, 769, 1022, 4096):
        for dtype in KERNEL.dtypes["cuda"]:
            problem = KERNEL.workload("cuda", f"rows=64,cols={cols},dtype={dtype}{options}")
            point = KERNEL.space("cuda", problem, CUDA.limits(arch)).sample(rng)
            CUDA.compile(render(KERNEL, "cuda", Genome.of(point), problem, arch), arch, Path())


def test_layernorm_has_no_trace_of_rmsnorms_options() -> None:
    layernorm = load_kernel("layernorm")
    for target, arch in (("cpu", "native"), ("cuda", "sm_89")):
        problem = layernorm.example(target)
        point = layernorm.space(target, problem, find_target(target).limits(arch)).default
        text = render(layernorm, target, Genome.of(point), problem, arch).text
        assert "residual" not in text
        assert "saved" not in text
