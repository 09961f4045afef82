"""Arguments of their own dtypes and structures on a GPU: in the gate, and in packages with either launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evo.measure.gate import Gate
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.targets import compile_source, find_target
from tests.gpu.conftest import Launched, export

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["picked", "quantised"])
def test_kernels_with_three_dtypes_pass_the_gate(name: str, tmp_path: Path) -> None:
    target, kernel = find_target("cuda"), load_kernel(str(FOLDER / name))
    session = target.open()
    (option,) = kernel.choices
    for text in kernel.choices[option]:
        (first, *_) = kernel.workloads["cuda"]
        workload = kernel.workload("cuda", first.key.replace(str(first.option(option)), text))
        genome = Genome.of({"unroll": 2})
        source = render(kernel, "cuda", genome, workload, session.info.arch)
        loaded = session.load(compile_source(source, session.info.arch, tmp_path), kernel.entry)
        checks = Gate(kernel, "cuda", session, 0).run(loaded, genome.parameters, kernel.cases("cuda", workload))
        assert [c for c in checks if not c.passed] == []
        loaded.close()


@pytest.mark.parametrize("launcher", ["Python", "native"])
def test_both_launchers_hand_over_a_structure_and_choose_by_the_dtype_of_an_argument(
    launcher: str, launched: Launched, tmp_path: Path
) -> None:
    workloads = [f"rows=64,cols=96,dtype=float32,weight_dtype={dtype}" for dtype in ("float64", "int8")]
    out = export(str(FOLDER / "picked"), tmp_path / f"picked_{launcher.lower()}", [(text, {}) for text in workloads])
    module = launched(out, launcher)
    module.also_serve(measure=False)
    x, index = torch.randn(70, 33, device="cuda"), torch.randint(0, 70, (70,), device="cuda")
    for number, dtype in enumerate((torch.float64, torch.int8)):
        args = x, index, (3 * torch.randn(33, device="cuda")).to(dtype), 2.5
        assert module.explain(*args).startswith(f"variant {number} ")
        for own, right in zip(module.picked(*args), module.frontend.ORIGINAL(*args), strict=True):
            torch.testing.assert_close(own, right, rtol=1e-6, atol=1e-6)
    assert module.explain(x, index, x[0].half()).startswith("PyTorch: weight_dtype is none of")
