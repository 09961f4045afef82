"""The kernel that docs/writing-a-kernel.md builds is a working one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from evo.measure.gate import Gate
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.targets import compile_source, find_target

PAGE = Path(__file__).parent.parent / "docs" / "writing-a-kernel.md"
ARCH = "sm_89"


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    folder = tmp_path / "rmsnorm"
    folder.mkdir()
    (folder / "kernel.py").write_text(blocks["python"])
    (folder / "cuda.cu.j2").write_text(blocks["cuda"])
    return load_kernel(str(folder))


def test_the_reference_of_the_example_is_what_its_baseline_computes(kernel: Kernel) -> None:
    workload = kernel.workload("cuda", "rows=5,cols=33,dtype=float16")
    for data in kernel.data:
        drawn = kernel.inputs(workload, data, torch.Generator().manual_seed(1))
        wide = {name: tensor.double() for name, tensor in drawn.items()}
        expected = kernel.reference(wide, workload)
        assert torch.allclose(kernel.baseline("torch").call(wide, workload), expected, equal_nan=True)
        assert data in ("tiny", "non_finite") or expected.std() > 0.1


def test_every_point_of_the_example_compiles(kernel: Kernel, tmp_path: Path) -> None:
    target, workload = find_target("cuda"), kernel.workload("cuda", "rows=64,cols=100,dtype=float16")
    space = kernel.space("cuda", workload, target.limits(ARCH))
    for point in space.points():
        source = render(kernel, "cuda", Genome.of(point), workload, ARCH)
        assert f"THREADS = {point['threads']}" in source.text
        assert compile_source(source, ARCH, tmp_path).code


@pytest.mark.gpu
def test_every_point_of_the_example_passes_its_gate(kernel: Kernel, tmp_path: Path) -> None:
    target, workload = find_target("cuda"), kernel.workload("cuda", "rows=64,cols=1000,dtype=float16")
    session = target.open()
    arch = session.info.arch
    gate = Gate(kernel, "cuda", session, seed=1)
    for point in kernel.space("cuda", workload, session.limits).points():
        source = render(kernel, "cuda", Genome.of(point), workload, arch)
        loaded = session.load(compile_source(source, arch, tmp_path), kernel.entry)
        cases = kernel.cases("cuda", workload)
        checks = gate.run(loaded, point, cases)
        loaded.close()
        assert len(checks) == len(cases)
        assert all(check.passed for check in checks), checks[-1].reason
