"""A kernel that gives positions beside values, bool and bytes, on the whole way from `evo check` to an exported function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evo.export import find_exporter
from evo.runtime.manifest import LaunchPlan
from tests.ended import run_python
from tests.export.exports import request_for

STATEMENT = """
from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Ordinal, Space

KERNEL = Kernel(
    name="largest",
    dtypes={"cpu": ("float32",)},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="values", kind="output", shape=("rows",)),
        Argument(name="indices", kind="output", dtype="int64", shape=("rows",), ties=("x", 1)),
    ),
    reference=lambda inputs, workload: inputs["x"].max(dim=1),
    workloads={"cpu": ("rows=300,cols=200,dtype=float32",)},
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2, 4)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
"""
TIES = ', ties=("x", 1)'
SOURCE = """
extern "C" void largest(const float* x, float* values, long long* indices, long long rows, long long cols) {
    for (long long r = 0; r < rows; ++r, x += cols) {
        long long at = 0;
        #pragma GCC unroll {{ p.unroll }}
        for (long long c = 1; c < cols; ++c)
            if (x[at] == x[at] && (x[c] >= x[at] || x[c] != x[c])) at = c;
        values[r] = x[at];
        indices[r] = at;
    }
}
"""
FUNCTION = """
from evo.problem.function import Function

FUNCTION = Function(
    signature="largest(Tensor x, int dim=-1) -> (Tensor, Tensor)",
    original="torch.max",
    tensors={"x": "x"},
    results={"values": "x.shape[:-1]", "indices": "x.shape[:-1]"},
    sizes={"rows": "x.numel() // x.shape[-1]", "cols": "x.shape[-1]"},
    fits={"dim is not the last": "x.ndim > 0 and dim in (-1, x.ndim - 1)"},
)
"""
FORMATS = """
[flashinfer-bench]
name = "largest_c{{ cols }}"
op_type = "largest"
axes = { rows = "rows", cols = "cols" }
inputs = { x = ["rows", "cols"] }
outputs = { values = ["rows"], indices = ["rows"] }
reference = "def run(x): return x.max(-1)"
run = "def run(x): return largest(x)"

[kernelbench]
problem = "none"
model = ""
model_new = ""
"""
CUDA = """
extern "C" __global__ void largest(const float* x, float* values, long long* indices, long long rows, long long cols) {
    if (unroll > 4) values[0] = x[0];
}
"""
SEARCH = ("search", "largest", "--target", "cpu", "--finalists", "1", "--evaluations")


def write(folder: Path, statement: str = STATEMENT, source: str = SOURCE) -> None:
    folder.mkdir()
    (folder / "kernel.py").write_text(statement)
    (folder / "cpu.cpp.j2").write_text(source)
    (folder / "function.py").write_text(FUNCTION)
    (folder / "formats.toml").write_text(FORMATS)


@pytest.mark.slow
def test_positions_go_through_check_search_finals_and_export(here: Any, tmp_path: Path) -> None:
    write(tmp_path / "largest")
    checked = here("check", "largest", "--target", "cpu", "--cases", "32")
    assert checked.code == 0, checked  # stderr may say how far it is, where other programs run
    assert "1 of 1 passed the gate and 32 random cases, 1 of 1 at the size that is timed" in checked.out
    searched = here(*SEARCH, "2")
    assert searched.code == 0, searched
    assert any(line.startswith("winner ") for line in searched.out.splitlines()), searched
    name = here("best", "--json").document[0]["candidate"]
    cases = here("check", name, "--json").document["workloads"][0]["cases"]
    assert all(c["passed"] and c["error"] == 0.0 for c in cases), "the figures are of the values"
    assert here("show", name).code == 0
    assert here("bench", "largest", "--target", "cpu").code == 0
    assert here("report", "latest", "--out", "report.html").code == 0
    assert here("export", "latest", "--out", "exported").code == 0
    right = run_python(tmp_path, "-m", "exported", "check", "--cases", "20", "--json")
    assert right.returncode == 0, right
    assert run_python(tmp_path, "-m", "exported", "bench", "--rounds", "2").returncode == 0
    assert here("export", "latest", "--format", "flashinfer-bench", "--out", "dataset").code == 0
    (definition,) = (tmp_path / "dataset").glob("definitions/*/*.json")
    outputs = json.loads(definition.read_text())["outputs"]
    assert {name: output["dtype"] for name, output in outputs.items()} == {"values": "float32", "indices": "int64"}
    (tmp_path / "exported" / "kernel.py").write_text(STATEMENT.replace(TIES, "").replace("evo.problem", ".problem"))
    strict = run_python(tmp_path, "-m", "exported", "check")
    assert strict.returncode == 1
    assert "WRONG  constant: " in strict.stdout, strict
    assert " elements are wrong or were never written: 199 at [0] instead of 0" in strict.stdout


def test_kernelbench_is_given_tensors_each_of_its_own_dtype(tmp_path: Path) -> None:
    write(tmp_path / "largest", STATEMENT.replace('"cpu"', '"cuda"'))
    (tmp_path / "largest" / "cuda.cu").write_text(CUDA)
    workload, kernel = "rows=4,cols=8,dtype=float32", str(tmp_path / "largest")
    _, files = find_exporter("kernelbench").contents(request_for("cuda", "sm_89", tmp_path, workload, kernel=kernel))
    (new,) = (data.decode() for name, data in files.items() if name.endswith("_new.py"))
    assert "\nDTYPES = ['float32', 'float32', 'int64', '', '']" in new
    launch = new[new.index("def launch(") : new.index("key = (device")].replace("v.is_cuda", "True") + "return plain"
    given = {"torch": torch, "PLAN": LaunchPlan(threads=1), "DTYPES": ["float32", "float32", "int64", "", ""]}
    exec(launch, given)
    x, values, indices = torch.zeros(4, 8), torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    assert given["launch"]({}, x, values, indices, 4, 8)[2] == indices.data_ptr()
    with pytest.raises(RuntimeError, match=r"takes an aligned int64 tensor on one GPU, got torch.float32"):
        given["launch"]({}, x, values, values, 4, 8)


def test_the_first_of_equal_elements_is_right_alone_where_nothing_else_is_stated(here: Any, tmp_path: Path) -> None:
    write(tmp_path / "largest", STATEMENT.replace(TIES, ""))
    refused = here("check", "largest", "--target", "cpu", "--json")
    assert refused.code == 1
    (branch,) = refused.document["branches"]
    wrong = "indices: 1 of 1 elements are wrong or were never written: 1 at [0] instead of 0"
    assert f"cols=2,dtype=float32,data=constant: {wrong}" in str(branch)


def test_integers_where_floating_point_is_stated_are_one_sentence_before_a_search(here: Any, tmp_path: Path) -> None:
    write(tmp_path / "largest", STATEMENT.replace('dtype="int64", ', "").replace(TIES, ""))
    for command in (("check", "largest", "--target", "cpu"), (*SEARCH, "1"), ("bench", "largest", "--target", "cpu")):
        ended = here(*command)
        assert ended.code == 2, ended
        assert "`reference` returns 'indices' as int64 for rows=" in ended.err, ended
        assert "where float32 is stated: state dtype='int64' for it, or convert it, as by .to(torch.float32)" in ended.err
