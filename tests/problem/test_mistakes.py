"""A mistake in a kernel.py is one sentence with its place, and the author's own frames; nowhere a traceback of evo's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import evo
from evo.errors import KernelError
from evo.measure.reference import expected_outputs
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.testing.toy_kernel import write_kernel

_ANCHOR = "KERNEL = Kernel(\n"


def kernel_with(folder: Path, field: str, signature: str, body: str) -> Path:
    """The toy kernel with a function of its author's in a field; whose line 39 is the function's first."""
    write_kernel(folder)
    text = (folder / "kernel.py").read_text()
    given = (f"    {field}=lambda", f"    {field}={field},")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(given)]
    stated = f"def mine({signature}):\n    {body}\n\n\n"
    value = "(Baseline(name='torch', role='reference', call=mine),)" if field == "baselines" else "mine"
    text = "".join(lines).replace("import Argument,", "import Argument, Baseline, Cost,")
    text = text.replace(_ANCHOR, f"{stated}{_ANCHOR}    {field}={value},\n")
    (folder / "kernel.py").write_text(text)
    return folder


def expect(kernel: Kernel) -> object:
    workload = kernel.example("cpu")
    return expected_outputs(kernel, {"x": torch.ones(workload.dim("n"))}, workload)


CALLS: dict[str, tuple[str, Callable[[Kernel], Any]]] = {
    "cases": ("target, workload", lambda k: k.cases("cpu", k.example("cpu"))),
    "neighbours": ("target, workload", lambda k: k.neighbours("cpu", k.example("cpu"))),
    "inputs": ("workload, data, generator", lambda k: k.inputs(k.example("cpu"), "normal", torch.Generator())),
    "reference": ("inputs, workload", expect),
    "baselines": ("inputs, workload", expect),
    "cost": ("workload", lambda k: k.cost(k.example("cpu"))),
    "plan": ("target, point, workload", lambda k: k.plans("cpu", {}, k.example("cpu"))),
    "compile_flags": ("target, point", lambda k: k.compile_flags("cpu", {})),
    "own_tolerance": ("workload, output", lambda k: k.own_tolerance(k.example("cpu"), "y")),
}

RETURNS = [
    ("cases", "None", "`cases` must return a sequence of Cases, and returns None"),
    ("cases", "[]", "`cases` returns no Case"),
    ("cases", "['n=5']", "`cases` must return a sequence of Cases, and returns ['n=5']"),
    ("neighbours", "None", "`neighbours` must return a sequence of Workloads, and returns None"),
    ("inputs", "None", "`inputs` must return a mapping of input tensors by name, and returns None"),
    ("inputs", "{}", "`inputs` returns no tensor for 'x', but None"),
    ("inputs", "{'x': [1.0]}", "`inputs` returns no tensor for 'x', but [1.0]"),
    ("reference", "None", "`reference` returns no tensor for 'y', but None"),
    ("reference", "{}", "`reference` returns no tensor for 'y', but None"),
    ("reference", "{'out': inputs['x']}", "`reference` returns 'out', and no 'y'"),
    ("reference", "inputs['x'][:1]", "`reference` returns 'y' of shape [1] for n=4096,dtype=float32, where [4096]"),
    ("reference", "inputs['x'] > 0", "'y' as bool for n=4096,dtype=float32, where float32 is stated: state dtype='bool'"),
    ("reference", "inputs['x'].long()", "'y' as int64 for n=4096,dtype=float32, where float32 is stated: state"),
    ("reference", "inputs['x'] * 1j", "'y' as complex128 for n=4096,dtype=float32, where float32 is stated"),
    ("baselines", "inputs['x'].int()", "the reference baseline 'torch' returns 'y' as int32 for n=4096,dtype=float32"),
    ("baselines", "None", "the reference baseline 'torch' returns no tensor for 'y', but None"),
    ("cost", "None", "`cost` must return a Cost, and returns None"),
    ("cost", "Cost(bytes=0, flops=0)", "what moves no byte takes no time"),
    ("cost", "Cost(bytes='x', flops=0)", "returns a Cost for n=4096,dtype=float32 whose bytes is 'x', which is no number"),
    ("cost", "Cost(bytes=4, flops=float('nan'))", "whose flops is nan, which is no number of 0 or more"),
    ("cost", "Cost(bytes=None, flops=4)", "whose bytes is None, which is no number of 0 or more"),
    ("cost", "Cost(bytes=True, flops=4)", "whose bytes is True, which is no number of 0 or more"),
    ("cost", "Cost(bytes=float('inf'), flops=4)", "whose bytes is inf, which is no number of 0 or more"),
    ("cost", "Cost(bytes=10**400, flops=4)", "whose bytes is 1000"),
    ("cost", "Cost(bytes=-1, flops=4)", "whose bytes is -1, which is no number of 0 or more"),
    ("cost", "Cost(bytes=__import__('torch').ones(1), flops=4)", "whose bytes is tensor([1.]), which is no number"),
    ("cost", "Cost(bytes=4, flops=4, rate='x')", "whose rate is 'x', which is no number of 0 or more"),
    ("cost", "Cost(bytes=4, flops=4, rate=0)", "at a rate of 0 it never ends"),
    ("plan", "None", "`plan` must return a LaunchPlan or a tuple of them, and returns None"),
    ("plan", "(3,)", "`plan` must return a LaunchPlan or a tuple of them, and returns (3,)"),
    ("compile_flags", "'-O3'", "`compile_flags` must return a sequence of strs, and returns '-O3'"),
    ("compile_flags", "[3]", "`compile_flags` must return a sequence of strs, and returns [3]"),
    ("own_tolerance", "0.1", "`own_tolerance` must return a Tolerance or None, and returns 0.1"),
]


@pytest.mark.parametrize(("field", "returned", "said"), RETURNS, ids=lambda text: str(text)[:20])
def test_what_a_function_must_not_return(tmp_path: Path, field: str, returned: str, said: str) -> None:
    signature, call = CALLS[field]
    kernel = load_kernel(str(kernel_with(tmp_path / "toy", field, signature, f"return {returned}")))
    with pytest.raises(KernelError) as caught:
        call(kernel)
    where, _, told = str(caught.value).partition(", in mine: ")
    assert said in told
    path, _, line = where.rpartition(":")
    assert Path(path).read_text().splitlines()[int(line) - 1] == f"def mine({signature}):"


@pytest.mark.parametrize("field", CALLS)
@pytest.mark.parametrize("error", ["1 // 0", "exit(0)"])
def test_what_a_function_raises(tmp_path: Path, field: str, error: str) -> None:
    signature, call = CALLS[field]
    kernel = load_kernel(str(kernel_with(tmp_path / "toy", field, signature, f"return {error}")))
    with pytest.raises(KernelError) as caught:
        call(kernel)
    first, *frames = str(caught.value).splitlines()
    assert ", in mine: " in first
    assert first.endswith((" raises ZeroDivisionError: integer division or modulo by zero", " raises SystemExit: 0"))
    assert [line for line in frames if " line " in line] == [line for line in frames if str(kernel.folder) in line]
    assert any(f"return {error}" in line for line in frames)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("raise SystemExit", "in <module>: fails on import: SystemExit"),
        ("KERNEL = (", "kernel.py: fails on import: SyntaxError"),
        ("KERNEL = 3", "must define KERNEL"),
    ],
)
def test_what_a_statement_raises_on_import(tmp_path: Path, added: str, said: str) -> None:
    folder = write_kernel(tmp_path / "toy")
    with (folder / "kernel.py").open("a") as file:
        file.write(f"\n{added}\n")
    with pytest.raises(KernelError, match=said):
        load_kernel(str(folder))


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ('shape=("n",)', 'shape="n"', r"the shape of argument '.' is a text; write \('n',\)"),
        ('shape=("n",)', 'shape=("n", -3)', "shape of argument '.' has -3, which is neither a dimension nor"),
        ('shape=("n",)', 'shape=("n * 3",)', "unknown dimension 'n .* 3': .* write a product as several"),
        ('name="y"', 'name="x"', "two arguments are called 'x'; give each a name of its own"),
        ('kind="output"', 'kind="input"', "no argument is an output; give what it computes"),
        ('kind="output"', 'kind="ouptut"', "is of kind 'ouptut'; there are input, output, scalar, workspace, structure"),
        ("1 << 20),)", "9999), Dimension(name='row', low=1, high=9))", r"`workloads`: .* lacks row \(its dim.*: n, row\)"),
        ("n=4096", "m=4096", r"`workloads`: unknown workload part .* 'm'; known: dtype, n \("),
        ("KERNEL = Kernel(", "KERNEL = Kernel(compile_time_dims={'cpu': ('m',)},", "names 'm', which is neither a"),
        ('kind="output"', 'kind="output", dtype="int31"', "output 'y' is of dtype 'int31', which is none of problem"),
        ('kind="output"', 'kind="output", ties=("x", 0)', "`ties` of argument 'y' is for outputs of integers alone"),
        ('kind="output"', 'kind="output", dtype="int8", ties=("y", 0)', r"is \('y', 0\): name an input that is"),
        ('kind="output"', 'kind="output", dtype="int8", ties=("x", 1)', r"is \('x', 1\): name an input .* and an axis"),
        ('kind="output", shape=("n",)', 'kind="output", dtype="int8", ties=("x", 0), shape=("n", "n")', r"does not fit its"),
        ('("float32",)', '("float31",)', "dtype 'float31' of target 'cpu' is none of float16, bfloat16, float32, float64"),
    ],
    ids=lambda text: text[:12],
)
def test_a_statement_that_does_not_fit_itself(tmp_path: Path, was: str, becomes: str, said: str) -> None:
    file = write_kernel(tmp_path / "toy") / "kernel.py"
    assert was in file.read_text()
    file.write_text(file.read_text().replace(was, becomes))
    with pytest.raises(KernelError, match=said) as caught:
        load_kernel(str(file.parent))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "returned", "said"),
    [
        ("uint8", "inputs['x'].round()", "'y' as float64 for n=4096,dtype=float32, where uint8 is stated: state"),
        ("uint8", "256 * inputs['x'].long()", "returns 256 in 'y' for n=4096,dtype=float32, which no uint8 is"),
        ("int8", "-129 * inputs['x'].long()", "returns -129 in 'y' for n=4096,dtype=float32, which no int8 is"),
        ("bool", "2 * inputs['x'].long()", "returns 2 in 'y' for n=4096,dtype=float32, which no bool is, as is stated"),
        ("int64", "inputs['x'] > 0", ""),
        ("bool", "inputs['x'].long()", ""),
        ("int16", "inputs['x'].int() * 32767", ""),
    ],
)
def test_integers_may_be_of_another_size_than_is_stated_if_they_fit(
    tmp_path: Path, dtype: str, returned: str, said: str
) -> None:
    folder = kernel_with(tmp_path / "toy", "reference", "inputs, workload", f"return {returned}")
    text = (folder / "kernel.py").read_text()
    (folder / "kernel.py").write_text(text.replace('kind="output"', f'kind="output", dtype="{dtype}"'))
    kernel = load_kernel(str(folder))
    if not said:
        assert expect(kernel)
        return
    with pytest.raises(KernelError) as caught:
        expect(kernel)
    assert f"in mine: `reference` returns {said.removeprefix('returns ')}" in str(caught.value)


def test_a_mistake_that_a_worker_process_meets_stops_the_search_with_its_sentence(tmp_path: Path) -> None:
    folder = kernel_with(tmp_path / "toy", "reference", "inputs, workload", "return {'y': inputs['z']}")
    with pytest.raises(KernelError, match="in mine: `reference` raises KeyError: 'z'"):
        evo.search(folder, target="cpu", evaluations=2, db=tmp_path / "l.db", builders=1, progress=False)
