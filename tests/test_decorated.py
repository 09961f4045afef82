"""`evo.kernel`: a function with its source as its docstring is searched, called and exported as other kernels are."""

# ruff: noqa: F722, F821, UP037
from __future__ import annotations

import inspect
import itertools
import linecache
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import evo
from evo.adoption.own import Given, Own
from evo.errors import UsageError
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.targets import compile_source, find_target
from tests.ended import run_python

_cells = itertools.count()


@evo.kernel
def add(a, b):
    """
    __global__ void add(const float* a, const float* b, float* c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) c[i] = a[i] + b[i];
    }
    """
    return a + b


@evo.kernel
def bias_gelu(x: "rows cols", bias: "cols") -> "rows cols":
    """
    #define PER 4
    __global__ void bias_gelu(const float* x, const float* bias, float* y, int rows, int cols) {
        int first = (blockIdx.x * blockDim.x + threadIdx.x) * PER;
        for (int i = first; i < first + PER && i < rows * cols; ++i) {
            float v = x[i] + bias[i % cols];
            y[i] = 0.5f * v * (1.f + erff(v * 0.70710678f));
        }
    }
    """
    return F.gelu(x + bias)


@evo.kernel(
    space={"PER": (1, 2, 4), "BLOCK": (64, 128, 256)}, threads="BLOCK", tiles=(("rows", 1),),
    workloads=("rows=4096,cols=4096,dtype=float32",),
)  # fmt: skip
def rmsnorm(x: "rows cols", weight: "cols", eps: float = 1e-6) -> "rows cols":
    """
    __global__ void rmsnorm(const float* x, const float* weight, float* y, int rows, int cols, float eps) {
        __shared__ float sums[BLOCK / 32];
        const float* row = x + (long long)blockIdx.x * cols;
        float sum = 0.f;
        for (int c = threadIdx.x * PER; c < cols; c += BLOCK * PER)
            for (int k = c; k < c + PER && k < cols; ++k) sum += row[k] * row[k];
        for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.f;
        for (int w = 0; w < BLOCK / 32; ++w) sum += sums[w];
        const float scale = rsqrtf(sum / cols + eps);
        for (int c = threadIdx.x; c < cols; c += BLOCK)
            y[(long long)blockIdx.x * cols + c] = row[c] * scale * weight[c];
    }
    """
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def lines_of(function: Any) -> int:
    return len(inspect.getsource(inspect.unwrap(function)).rstrip().splitlines())


@pytest.mark.parametrize(
    ("function", "most", "parameters", "grid"),
    [
        (add, 12, {"threads"}, (4, 1, 1)),
        (bias_gelu, 20, {"PER", "threads"}, (33, 1, 1)),
        (rmsnorm, 35, {"PER", "BLOCK"}, (1000, 1, 1)),
    ],
)
def test_short_functions_become_kernels_that_compile_for_a_gpu(
    function: Any, most: int, parameters: set[str], grid: tuple[int, ...], tmp_path: Path
) -> None:
    assert lines_of(function) <= most
    kernel, target = load_kernel(str(function.folder())), find_target("cuda")
    dims = ",".join(f"{d.name}={33 if d.name == 'cols' else 1000}" for d in kernel.dimensions)
    workload, limits = kernel.workload("cuda", f"{dims},dtype=float32"), target.limits("sm_89")
    space = kernel.space("cuda", workload, limits)
    assert {p.name for p in space.parameters} == parameters
    point = space.complete(space.default)
    assert kernel.sequence("cuda", point, workload, limits).launches[0].grid == grid
    source = render(kernel, "cuda", Genome.of(point), workload, "sm_89")
    assert compile_source(source, "sm_89", tmp_path).code


def test_a_body_serves_what_no_device_here_is_for_and_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    x = torch.randn(5, 7)
    for _ in range(2):
        assert torch.equal(bias_gelu(x, x[0]), F.gelu(x + x[0]))
    told = capfd.readouterr().err
    assert told.count("evo: bias_gelu is left to its body in PyTorch: no device here is for bias_gelu") == 1
    assert bias_gelu.explain(x, x[0]).startswith("PyTorch")


@pytest.mark.gpu
@pytest.mark.parametrize("function", [add, bias_gelu, rmsnorm], ids=lambda f: f.__name__)
def test_short_functions_are_searched_called_by_both_launchers_and_exported(function: Any, tmp_path: Path) -> None:
    x = torch.randn(257, 1024, device="cuda")
    args, body = {add: (x, x[:1] * x)}.get(function, (x, x[0].clone())), inspect.unwrap(function)
    function.also_serve(slower=True, wait=True)
    torch.testing.assert_close(function(*args), body(*args))  # the default, compiled here
    assert function.explain(*args).startswith("variant")
    run = function.search(evaluations=6, finalists=1, progress=False, name=function.__name__)
    assert len(run.best()) == 1
    for launcher in ("Python launcher", "native launcher"):
        torch.testing.assert_close(function(*args), body(*args))
        way = function.explain(*args)
        assert way.startswith("variant"), way
        assert way.endswith(launcher)
        function.build()
    function.export("alone")
    checked = run_python(tmp_path, "-m", "alone", "check")
    assert re.search(r"right: \d+ cases on it", checked.stdout), checked


def defined(text: str, name: str = "f") -> Callable[..., Any]:
    """A function of a notebook's cell."""
    file = f"<cell {next(_cells)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"evo": evo, "torch": torch, "F": F, "__name__": "__main__"}
    exec(compile(text, file, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


SCALE = '''
FACTOR = 2.5
@evo.kernel(workloads="n=20011,dtype=float32")
def scale(x, *, by: float = 1.0):
    """
    extern "C" void scale(const float* x, float* y, int n, float by) {
    #pragma omp parallel for num_threads(threads)
        for (int i = 0; i < n; ++i) y[i] = x[i] * (by * 2.5f);
    }
    """
    return torch.mul(x, by * FACTOR)
'''


@pytest.mark.slow
def test_a_cell_is_searched_called_from_threads_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scale = defined(SCALE, "scale")
    assert list(inspect.signature(scale).parameters) == ["x", "by"]
    x, found = torch.randn(3, 20011), list[Any]()
    with pytest.raises(TypeError, match="slow"):
        scale.also_serve(slow=True)
    scale.also_serve(measure=False, slower=True)
    assert scale.explain(x).startswith("variant")
    callers = [threading.Thread(target=lambda: found.append(scale(x, by=3.0))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [torch.allclose(y, x * 7.5) for y in found] == [True] * 4
    assert len(list(scale.folder().glob("packages/*/*"))) == 1
    assert "left to its body" not in capfd.readouterr().err
    run = scale.search(evaluations=2, finalists=1, builders=1, progress=False, name="mine")
    assert (run.name, run.db) == ("mine", "runs/lineage.db")
    assert torch.allclose(scale(x, by=3.0), x * 7.5)
    scale.export("alone")
    checked = run_python(tmp_path, "-m", "alone", "check")
    assert re.search(r"right: \d+ cases on it", checked.stdout), checked
    (best,) = run.best()
    tuned = "scale.tuned.toml"
    for words in (["check", best.id, "--compile-only"], ["export", best.id, "--tuned", tuned], ["rebuild", tuned]):
        done = run_python(tmp_path, "-m", "evo", *words)
        assert done.returncode == 0, done
        assert "--trust" not in done.stderr
    assert 'kernel = "./scale"' in (tmp_path / tuned).read_text()
    assert {p.name for p in (tmp_path / "scale").iterdir()} == {"kernel.py", "function.py", "cpu.cpp"}
    assert best.unconfirmed is not (best.id in (tmp_path / "alone" / "manifest.json").read_text())
    assert (tmp_path / "alone" / "function.py").read_text().count("FACTOR = 2.5") == 1
    monkeypatch.chdir(tmp_path / "alone")  # where there is no database
    again = defined(SCALE, "scale")
    assert again.folder() == scale.folder()
    assert torch.allclose(again(x), x * 2.5)
    known = len(list(scale.folder().glob("packages/*/*")))
    assert known == (1 if best.unconfirmed else 2), "what was known before is used, and nothing written anew"


MACROS = """
#define THREADS 2
#define CHUNK 4096
extern "C" void f(const float* x, float* y, int n) {
#pragma omp parallel for num_threads(THREADS) schedule(static, CHUNK)
    for (int i = 0; i < n; ++i) y[i] = x[i];
}
"""
CHUNKS = (1024, 4096, 16384, 65536)


@pytest.mark.parametrize(
    ("space", "cores", "parameters", "default"),
    [
        ({}, 4, {"THREADS": (1, 2, 4), "CHUNK": (1024, 4096, 8192, 65536)}, {"THREADS": 2, "CHUNK": 4096}),
        ({}, 1, {"THREADS": (1,), "CHUNK": (1024, 4096, 8192, 65536)}, {"THREADS": 1, "CHUNK": 4096}),
        ({"THREADS": (1, 2), "CHUNK": CHUNKS}, 4, {"THREADS": (1, 2), "CHUNK": CHUNKS}, {"THREADS": 2, "CHUNK": 4096}),
        ({"chunk": (64, 128)}, 1, {"THREADS": (1,), "chunk": (64, 128)}, {"THREADS": 1, "chunk": 128}),
    ],
)
def test_a_macro_of_a_source_for_the_cpu_is_one_parameter_with_its_value_as_default(
    space: dict[str, tuple[int, ...]], cores: int, parameters: dict[str, tuple[int, ...]], default: dict[str, int]
) -> None:
    decorated = evo.kernel(space=space)(defined(f"def f(x):\n    '''{MACROS}'''\n    return x.clone()"))
    kernel = load_kernel(str(decorated.folder()))
    limits = replace(find_target("cpu").limits("native"), multiprocessors=cores)
    found = kernel.space("cpu", kernel.example("cpu"), limits)
    assert {p.name: p.values for p in found.parameters} == parameters
    assert (found.default, kernel.compile_time_dims) == (default, {"cpu": ()})


def test_two_axes_are_served_only_where_the_body_computes_each_element_for_itself() -> None:
    source = '"""__global__ void f(const float* x, float* y, int n) { int i = threadIdx.x; if (i < n) y[i] = x[i]; }"""'
    along = defined(f"def f(x):\n    {source}\n    return torch.softmax(x, -1)\n")
    for body, is_any in ((along, False), (defined(f"def f(x):\n    {source}\n    return x.relu()\n"), True)):
        own = evo.kernel(tiles=(("n", 256),))(body)
        assert ("x.numel()" in (own.folder() / "function.py").read_text()) is is_any


PLACE = "int i = blockIdx.x * blockDim.x + threadIdx.x;"
ONE = f"__global__ void f(const float* x, float* y, int n) {{ {PLACE} if (i < n) y[i] = x[i]; }}"
TWO = ONE.replace("int n", "int rows, int cols").replace("i < n", "i < rows")
WRONG = {
    "no source": ("def f(x):\n    return x", "it has no source: write it as the docstring"),
    "no body": (f"def f(x):\n    '''{ONE}'''", "it has no body: write what the kernel computes"),
    "names": (f"def f(z):\n    '''{ONE}'''\n    return z", "its tensors are z, and the source reads x: give both"),
    "options": (f"def f(x, eps=1.0):\n    '''{ONE}'''\n    return x", "default are eps, and the source's floats none"),
    "default": (f"def f(x, eps=1):\n    '''{ONE}'''\n    return x", "the default of eps is no float"),
    "shapes": (f"def f(x):\n    '''{TWO}'''\n    return x", 'the shape of x is not known: .*, as in x: "rows cols"'),
    "grid": (
        "def f(x):\n    '''__global__ void f(const float* x, float* y, int n) { y[0] = x[n - 1]; }'''\n    return x",
        r'does not show the grid: .* tiles=\(\("n", 1\),\)',
    ),
    "no C": ("def f(x):\n    '''void f(const float* x, float* y) {}'''\n    return x", 'declared extern "C" void NAME'),
    "code": (
        f"def f(x):\n    '''{ONE.replace('= x[i]', '= x[i] x')}'''\n    return x",
        r"cuda.cu does not compile for sm_89: cuda.cu\(1\): error",
    ),
    "helper": (
        f"def g(x):\n    return x\ndef f(x):\n    '''{ONE}'''\n    return g(x)", "its body uses g of .*: write g into the",
    ),
    "closure": (
        f"def make(k):\n    def f(x):\n        '''{ONE}'''\n        return x * k\n    return f\nf = make(2)",
        "its body uses k of the function around it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_kernel_is_one_sentence(name: str) -> None:
    text, sentence = WRONG[name]
    with pytest.raises(UsageError, match=sentence) as caught:
        evo.kernel(defined(text)).folder()
    assert str(caught.value).startswith("@evo.kernel on f: ")
    assert "\n" not in str(caught.value)


GIVEN = {
    "space": ({"space": {"BLOK": (64, 128)}}, "BLOK of its space is used by no source"),
    "workloads": ({"workloads": {"gpu": ("n=64,dtype=float32",)}}, "workloads= is for 'gpu', and its sources are for cuda"),
    "dtypes": ({"dtypes": {"cpu": ("float32",)}}, "dtypes= is for 'cpu', and its sources are for cuda: name one of these"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_and_used_by_nothing_is_one_sentence(name: str) -> None:
    given, sentence = GIVEN[name]
    with pytest.raises(UsageError, match=f"@evo.kernel on f: {sentence}"):
        evo.kernel(**given)(defined(f"def f(x):\n    '''{ONE}'''\n    return x")).folder()


def test_the_threads_of_a_block_that_a_source_leaves_open_are_a_space() -> None:
    text = ONE.replace(PLACE, "int i = blockIdx.x * blockDim.x + threadIdx.x;")
    own = evo.kernel(space={"threads": (64, 128)})(defined(f"def f(x):\n    '''{text}'''\n    return x"))
    assert 'Ordinal(name="threads", values=(64, 128))' in (own.folder() / "kernel.py").read_text()


def test_constants_that_are_no_finite_numbers_are_written_as_such() -> None:
    body = f"LOW, HIGH = float('-inf'), float('nan')\ndef f(x):\n    '''{ONE}'''\n    return x.clamp(LOW, HIGH)"
    text = (evo.kernel(defined(body)).folder() / "function.py").read_text()
    assert 'LOW = float("-inf")\nHIGH = float("nan")\n' in text


def test_annotations_of_types_may_name_dimensions() -> None:
    text = f"from typing import Annotated\ndef f(x: Annotated[torch.Tensor, 'rows cols']):\n    '''{TWO}'''\n    return x"
    assert Own(defined(text), Given()).tensors == {"x": ("rows", "cols")}


def test_the_documented_example_is_defined_and_computes() -> None:
    page = (Path(__file__).parent.parent / "docs" / "writing-a-kernel.md").read_text()
    (example,) = re.findall(r"^```python\n(import evo\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    documented = defined(example, "add")
    assert lines_of(documented) <= 12
    assert "cuda.cu" in {path.name for path in documented.folder().iterdir()}  # type: ignore[attr-defined]
    x = torch.randn(2, 3)
    assert torch.equal(documented(x, x), x + x)
