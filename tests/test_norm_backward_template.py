"""The backward kernels of LayerNorm and RMSNorm: the gradients of the definition, sums that repeat to the last bit, and CUDA
sources that compile."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from evo.measure.gate import Gate
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.problem.space import Point
from evo.targets import Loaded, compile_source, find_target

KERNELS = [load_kernel("layernorm_backward"), load_kernel("rmsnorm_backward")]
TARGET, CUDA = find_target("cpu"), find_target("cuda")
SESSION = TARGET.open()

of_both = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)


def problem(kernel: Kernel, target: str = "cpu", **parts: object) -> Workload:
    given = {"rows": 67, "cols": 96, "dtype": "float32", **parts}
    return kernel.workload(target, ",".join(f"{n}={str(v).lower()}" for n, v in given.items()))


def build(kernel: Kernel, point: Point, workload: Workload, tmp_path: Path) -> Loaded:
    source = render(kernel, "cpu", Genome.of(point), workload, SESSION.info.arch)
    return SESSION.load(compile_source(source, SESSION.info.arch, tmp_path), kernel.entry)


def forward(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    functional = torch.nn.functional
    if kernel.name == "layernorm_backward":
        return functional.layer_norm(x, x.shape[1:], weight, bias, 1e-5)
    return functional.rms_norm(x, x.shape[1:], weight, 1e-5) + bias


@of_both
def test_the_reference_is_what_autograd_says_of_the_forward(kernel: Kernel) -> None:
    workload = problem(kernel, dresidual=True)
    drawn = kernel.inputs(workload, "normal", torch.Generator().manual_seed(5))
    inputs = {n: t.double() for n, t in drawn.items() if t is not None}
    x, dy = inputs["x"].requires_grad_(), inputs["dy"]
    weight, bias = inputs["weight"].requires_grad_(), torch.zeros(96, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(forward(kernel, x, weight, bias), (x, weight, bias), dy)
    with torch.no_grad():
        found = kernel.reference(inputs, workload)
    rounded = {"rtol": 1e-5, "atol": 1e-4}  # as the saved statistics are
    torch.testing.assert_close(found["dx"], expected[0] + inputs["dresidual"], **rounded)
    torch.testing.assert_close(found["dweight"], expected[1], **rounded)
    torch.testing.assert_close(found["dbias"], expected[2])


@of_both
def test_a_gradient_of_no_weight_is_refused(kernel: Kernel) -> None:
    assert kernel.validate(problem(kernel, weight=False, dweight=False)) == ""
    parts = dict(problem(kernel).options) | {"weight": False}
    assert kernel.validate(Workload.of({"rows": 2, "cols": 2}, "float32", parts)) == "dweight=true needs weight=true"


def gate_passes(kernel: Kernel, points: Iterable[Point], tmp_path: Path, dtype: str = "float32") -> None:
    workload = problem(kernel, dtype=dtype)
    gate, cases = Gate(kernel, "cpu", SESSION, seed=3), kernel.cases("cpu", workload)
    for point in points:
        loaded = build(kernel, point, workload, tmp_path)
        checks = gate.run(loaded, point, cases)
        assert [(point, c.case, c.reason) for c in checks if not c.passed] == []
        assert len(checks) == len(cases)
        loaded.close()


@of_both
@pytest.mark.parametrize("dtype", KERNELS[0].dtypes["cpu"])
def test_every_structural_branch_on_a_cpu_passes_the_gate(kernel: Kernel, dtype: str, tmp_path: Path) -> None:
    gate_passes(kernel, kernel.space("cpu", problem(kernel, dtype=dtype), SESSION.limits).branches(), tmp_path, dtype)


@pytest.mark.slow
@of_both
def test_every_value_of_a_knob_passes_the_gate_on_a_cpu(kernel: Kernel, tmp_path: Path) -> None:
    space = kernel.space("cpu", problem(kernel), SESSION.limits)
    near = ({**space.default, p.name: v} for p in space.parameters for v in p.values if v != space.default[p.name])
    gate_passes(kernel, filter(space.is_legal, near), tmp_path)


@of_both
@pytest.mark.parametrize("chunks", [1, SESSION.limits.multiprocessors, 4 * SESSION.limits.multiprocessors])
def test_sums_repeat_to_the_last_bit(kernel: Kernel, chunks: int, tmp_path: Path) -> None:
    workload = problem(kernel, rows=301)
    space = kernel.space("cpu", workload, SESSION.limits)
    point = {**space.default, "chunks": chunks}
    loaded = build(kernel, point, workload, tmp_path)
    inputs = kernel.inputs(workload, "normal", torch.Generator().manual_seed(5))
    sequence = kernel.sequence("cpu", point, workload, SESSION.limits)

    def call() -> list[torch.Tensor]:
        outputs = {a.name: torch.full([workload.dim(n) for n in a.shape], torch.nan) for a in kernel.outputs(workload)}
        scratch = {"partial": torch.full((dict(sequence.workspace)["partial"],), torch.nan), "arrivals": None}
        tensors = {**inputs, **outputs, **scratch}
        values = [tensors[a.name] if a.kind != "scalar" else workload.dim(a.name) for a in kernel.arguments]
        for launch in sequence.launches:
            loaded(values, launch)
        return list(outputs.values())

    first = call()
    assert not any(t.isnan().any() for t in first)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))
    loaded.close()


@of_both
@pytest.mark.parametrize("cols", [1, 31, 769, 1024, 8192, 8193, 12_288, 16_383, 16_384])
@pytest.mark.parametrize("options", [{}, {"dresidual": True}, {"weight": False, "dweight": False}], ids=str)
def test_the_default_for_cuda_is_legal_for_every_number_of_columns(
    kernel: Kernel, cols: int, options: dict[str, object]
) -> None:
    for arch in ("sm_80", "sm_89", "sm_90"):
        for dtype in kernel.dtypes["cuda"]:
            workload = problem(kernel, "cuda", cols=cols, dtype=dtype, **options)
            space = kernel.space("cuda", workload, CUDA.limits(arch))
            assert space.is_legal(space.default), space.violations(space.default)


@of_both
def test_the_workspace_has_a_slice_for_each_block_of_the_first_launch(kernel: Kernel) -> None:
    space = kernel.space("cuda", problem(kernel, "cuda"), CUDA.limits("sm_89"))
    for rows in (1, 2, 67, 4096):
        workload = problem(kernel, "cuda", rows=rows)
        sequence = kernel.sequence("cuda", space.default, workload, CUDA.limits("sm_89"))
        blocks, sums = int(space.default["blocks"]), len(kernel.outputs(workload)) - 1
        assert dict(sequence.workspace) == {"partial": blocks * sums * 96, "arrivals": 0}
        assert 1 <= sequence.launches[0].grid[0] <= min(blocks, rows)


@pytest.mark.slow
@of_both
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("sm_89", {"dresidual": True, "dweight": False}),
        ("sm_90", {"dtype": "float32", "dresidual": True}),
        ("sm_89", {"weight": False, "dweight": False}),
        ("sm_90", {"weight": False, "dweight": False, "dbias": False}),
    ],
    ids=str,
)
def test_cuda_compiles_with_and_without_what_is_optional(
    kernel: Kernel, arch: str, options: dict[str, object], tmp_path: Path
) -> None:
    known = {n: v for n, v in options.items() if n in kernel.options or n == "dtype"}
    workload = problem(kernel, "cuda", **{"dtype": "float16", "cols": 768, **known})
    for point in kernel.space("cuda", workload, CUDA.limits(arch)).branches():
        compile_source(render(kernel, "cuda", Genome.of(point), workload, arch), arch, tmp_path)


@of_both
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_the_default_compiles_for_cuda(kernel: Kernel, arch: str, tmp_path: Path) -> None:
    workload = problem(kernel, "cuda", dtype="float16", cols=768)
    for finish in ("launch", "last_block"):
        point = kernel.space("cuda", workload, CUDA.limits(arch)).default | {"finish": finish}
        point = kernel.space("cuda", workload, CUDA.limits(arch)).complete(point)
        built = compile_source(render(kernel, "cuda", Genome.of(point), workload, arch), arch, tmp_path)
        assert built.spill_bytes == 0
