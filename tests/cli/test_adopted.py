"""Sources as people have them, from `evo new --cu` to an exported function that PyTorch code calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evo.problem.genome import Genome
from evo.problem.loading import load_function, load_kernel
from evo.problem.render import render
from evo.runtime.statement import Bound
from tests.cli.test_new import fill_in
from tests.ended import run_python


class Own(NamedTuple):
    """A kernel of somebody's. answers: what its kernel.py is given, by what stood there; places: the
    sizes and results that follow from its shapes; call: makes its arguments."""

    source: str
    returns: str
    answers: Mapping[str, str]
    places: tuple[Mapping[str, str], Mapping[str, str]]
    call: str
    cpu: str = ""


PRODUCT = Own(
    """
#include <cstdio>
#define BX 32
#define BY 8
__global__ void product(const float* a, const float* b, float* c, int m, int n, int k) {
    int col = blockIdx.x * BX + threadIdx.x, row = blockIdx.y * BY + threadIdx.y;
    if (row >= m || col >= n) return;
    float sum = 0;
    for (int i = 0; i < k; ++i) sum += a[(long long)row * k + i] * b[(long long)i * n + col];
    c[(long long)row * n + col] = sum;
}
int main() { product<<<dim3(4, 4), dim3(BX, BY)>>>(nullptr, nullptr, nullptr, 1, 1, 1); printf("done"); }
""",
    "a @ b",
    {
        'name="a", kind="input", shape=()': 'name="a", kind="input", shape=("m", "k")',
        'name="b", kind="input", shape=()': 'name="b", kind="input", shape=("k", "n")',
        'name="c", kind="output", shape=()': 'name="c", kind="output", shape=("m", "n")',
        "m=64,n=128,k=128": "m=300,n=200,k=70",
        'Dimension(name="k", low=1, high=2**31 - 1)': 'Dimension(name="k", low=1, high=256)',  # longer sums lose digits
    },
    ({"m": "a.shape[0]", "k": "a.shape[1]", "n": "b.shape[1]"}, {"c": "(a.shape[0], b.shape[1], )"}),
    "a, b = torch.randn(300, 70), torch.randn(70, 200)",
)
HISTOGRAM = Own(
    """
__global__ void histogram(const unsigned char* data, int* bins, int n) {
    __shared__ int own[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) own[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&own[data[i]], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], own[i]);
}
""",
    "torch.zeros(256, dtype=torch.int32, device=data.device).index_add_(0, data.int(), torch.ones_like(data).int())",
    {
        'kind="output", dtype="int32", shape=("n",)': 'kind="output", dtype="int32", shape=("kinds",)',
        "    ),\n    # In the": '        Dimension(name="kinds", low=256, high=256),\n    ),\n    # In the',
        "n=1048576,": "n=100003,kinds=256,",
    },
    ({"kinds": "256", "n": "data.shape[0]"}, {"bins": "(256, )"}),
    "data = torch.randint(0, 256, (100003,), dtype=torch.uint8)",
    """
extern "C" void histogram(const unsigned char* data, int* bins, int n) {
    if (threads * chunk > 0) for (int i = 0; i < n; ++i) ++bins[data[i]];
}
""",
)
ARGMAX = Own(
    """
template <typename T, int THREADS>
__global__ void argmax(const T* x, long long* at, int rows, int cols) {
    __shared__ T values[THREADS];
    __shared__ int places[THREADS];
    const T* row = x + (long long)blockIdx.x * cols;
    T best = row[0];
    int place = 0;
    for (int i = threadIdx.x; i < cols; i += THREADS)
        if (row[i] > best || (row[i] != row[i] && best == best)) best = row[i], place = i;
    values[threadIdx.x] = best, places[threadIdx.x] = place;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) {
            T other = values[threadIdx.x + half], mine = values[threadIdx.x];
            if (other > mine || (other != other && mine == mine)) {
                values[threadIdx.x] = other;
                places[threadIdx.x] = places[threadIdx.x + half];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) at[blockIdx.x] = places[0];
}
void run(const float* x, long long* at, int rows, int cols) { argmax<float, 128><<<rows, 128>>>(x, at, rows, cols); }
""",
    "x.argmax(1)",
    {
        'name="x", kind="input", shape=()': 'name="x", kind="input", shape=("rows", "cols")',
        'kind="output", dtype="int64", shape=()': 'kind="output", dtype="int64", shape=("rows",), ties=("x", 1)',
        "rows=1024,cols=1024": "rows=300,cols=200",
        "threads=128,": 'threads=point["THREADS"],',
    },
    ({"rows": "x.shape[0]", "cols": "x.shape[1]"}, {"at": "(x.shape[0], )"}),
    "x = torch.randn(300, 200)",
)
STENCIL = Own(
    """
#define width 640
#define height 480
__global__ void stencil(float *y, const float *x) {
    int c = blockIdx.x * block_size_x + threadIdx.x, r = blockIdx.y * block_size_y + threadIdx.y;
    if (c < width && r < height) {
        float up = r > 0 ? x[(r - 1) * width + c] : 0.0f, down = r < height - 1 ? x[(r + 1) * width + c] : 0.0f;
        y[r * width + c] = (up + down + x[r * width + c]) / 3.0f;
    }
}
""",
    "(torch.nn.functional.pad(x, (0, 0, 1, 1))[2:] + torch.nn.functional.pad(x, (0, 0, 1, 1))[:-2] + x) / 3",
    {
        'name="y", kind="output", shape=()': 'name="y", kind="output", shape=("height", "width")',
        'name="x", kind="input", shape=()': 'name="x", kind="input", shape=("height", "width")',
    },
    ({"height": "x.shape[0]", "width": "x.shape[1]"}, {"y": "x"}),
    "x = torch.randn(480, 640)",
)
CONVOLUTION = Own(
    """
#include <cstdio>
#define KW 5
#define KH 3
#define BX 32
#define BY 8
__constant__ float d_filter[KH][KW];
__device__ float tap(int i, int j) { return d_filter[i][j]; }
__global__ void convolution(float* out, const float* in, int rows, int cols) {
    int c = blockIdx.x * BX + threadIdx.x, r = blockIdx.y * BY + threadIdx.y;
    if (r >= rows || c >= cols) return;
    float sum = 0;
    for (int i = 0; i < KH; ++i)
        for (int j = 0; j < KW; ++j) {
            int y = r + i - KH / 2, x = c + j - KW / 2;
            sum += (y >= 0 && y < rows && x >= 0 && x < cols ? in[(long long)y * cols + x] : 0.0f) * tap(i, j);
        }
    out[(long long)r * cols + c] = sum;
}
void run(const float* h, float* out, const float* in, int m, int n) {
    cudaMemcpyToSymbol(d_filter, h, sizeof(float) * KW * KH);
    convolution<<<dim3((n + BX - 1) / BX, (m + BY - 1) / BY), dim3(BX, BY)>>>(out, in, m, n);
}
""",
    "sum(torch.nn.functional.pad(in_, (d_filter.shape[1] // 2, d_filter.shape[1], d_filter.shape[0] // 2,"
    " d_filter.shape[0]))[i : i + in_.shape[0], j : j + in_.shape[1]] * d_filter[i, j]"
    " for i in range(d_filter.shape[0]) for j in range(d_filter.shape[1]))",
    {
        'name="out", kind="output", shape=()': 'name="out", kind="output", shape=("rows", "cols")',
        'name="in", kind="input", shape=()': 'name="in", kind="input", shape=("rows", "cols")',
        'Dimension(name="KW", low=1, high=2**31 - 1)': 'Dimension(name="KW", low=1, high=9)',
        'Dimension(name="KH", low=1, high=2**31 - 1)': 'Dimension(name="KH", low=1, high=9)',
        "rows=256,cols=512": "rows=300,cols=200",
    },
    (
        {"rows": "in_.shape[0]", "cols": "in_.shape[1]", "KH": "d_filter.shape[0]", "KW": "d_filter.shape[1]"},
        {"out": "in_"},
    ),
    "in_, d_filter = torch.randn(300, 200), torch.randn(3, 5)",
)
OWN = {"convolution": CONVOLUTION, "product": PRODUCT, "histogram": HISTOGRAM, "argmax": ARGMAX, "stencil": STENCIL}
CALL = """
import sys, torch, exported
{call}
given = [t.to({device!r}) for t in ({names},)]
torch.testing.assert_close(exported.{name}(*given).cpu(), {equals})
print(exported.explain(*given), "|", type(exported.frontend._call))
"""


def test_a_constant_that_host_code_fills_is_an_argument(here: Any, tmp_path: Path) -> None:
    own = OWN["convolution"]
    (tmp_path / "own.cu").write_text(own.source)
    made = here("new", "convolution", "--cu", "own.cu", "--json").document
    assert made["parameters"] == {"BX": [8, 16, 32, 64, 128], "BY": [2, 4, 8, 16, 32]}, "its sizes are no choices"
    assert made["to_fill_in"][0]["what"].startswith("the shapes of out, in in the dimensions rows, cols, KW, KH (")
    fill_in(tmp_path / "convolution", own.returns, own.answers)
    kernel = load_kernel("convolution")
    found = [(a.name, a.kind, a.shape) for a in kernel.parameters]
    assert (found[-1], kernel.compile_time_dims) == (("d_filter", "input", ("KH", "KW")), {"cuda": ("KW", "KH")})
    checked = here("check", "convolution", "--arch", "sm_89", "--compile-only")
    assert checked.code == 0, checked.out
    source = render(kernel, "cuda", Genome.of({"BX": 8, "BY": 4}), kernel.example("cuda"), "sm_89")
    assert "int cols, const float (* __restrict__ d_filter)[KW]) {" in source.text
    (tmp_path / "j.cu").write_text("__constant__ float w[3];\n__global__ void f(float* y) { y[0] = w[{{ place }}]; }")
    refused = here("new", "j", "--cu", "j.cu")
    assert "j.cu: nothing fills __constant__ w of a Jinja template: make it a parameter of f" in refused.sentence


@pytest.mark.parametrize("name", OWN)
def test_sizes_and_results_follow_from_the_shapes_that_the_author_fills_in(here: Any, tmp_path: Path, name: str) -> None:
    own = OWN[name]
    (tmp_path / "own.cu").write_text(own.source)
    assert here("new", name, "--cu", "own.cu").code == 0
    fill_in(tmp_path / name, own.returns, own.answers)
    kernel = load_kernel(name)
    function = load_function(kernel)
    assert function is not None
    bound = Bound(function, kernel)
    assert (bound.sizes, bound.results) == own.places
    assert not any("elements" in why for why in bound.fits(of_tensors=True)), "all is told by axes"


def _on(target: str, name: str) -> Any:
    return pytest.param(name, target, id=f"{name}-{target}", marks=pytest.mark.gpu if target == "cuda" else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "target"), [*(_on("cuda", name) for name in OWN), *(_on("cpu", name) for name, own in OWN.items() if own.cpu)]
)
def test_a_source_is_adopted_searched_exported_and_called(here: Any, tmp_path: Path, name: str, target: str) -> None:
    own = OWN[name]
    (tmp_path / "own.cu").write_text(own.source)
    made = here("new", name, "--cu", "own.cu", "--json")
    assert made.code == 0, made.err
    fill_in(tmp_path / name, own.returns, own.answers)
    statement, function = tmp_path / name / "kernel.py", tmp_path / name / "function.py"
    text = "import torch\n" + function.read_text()
    function.write_text(text)
    if target == "cpu":
        (tmp_path / name / "cpu.cpp").write_text(own.cpu)
        text = statement.read_text()
        cuda = re.search(r'workloads=\{"cuda": (\(".*?",\))', text)
        assert cuda
        text = text.replace('dtypes={"cuda": (', 'dtypes={"cpu": ("float32",), "cuda": (')
        text = text.replace('workloads={"cuda": ', f'workloads={{"cpu": {cuda[1]}, "cuda": ')
        if fixed := re.search(r'compile_time_dims=\{"cuda": (\(.*?\))', text):
            text = text.replace('compile_time_dims={"cuda": ', f'compile_time_dims={{"cpu": {fixed[1]}, "cuda": ')
        statement.write_text(text)
    checked = here("check", name, "--target", target)
    assert checked.code == 0, checked
    searched = here("search", name, "--target", target, "--evaluations", "4")
    assert searched.code == 0, searched
    exported = here("export", "latest", "--out", "exported")
    assert exported.code == 0, exported
    names = own.call.partition(" =")[0]
    call = CALL.format(call=own.call, device=target, names=names, name=name, equals=own.returns)
    for launcher in ("Python", "native")[: 2 if target == "cuda" else 1]:
        called = run_python(tmp_path, "-c", call)
        assert called.returncode == 0, (launcher, called)
        if launcher == "Python" and target == "cuda":
            built = run_python(tmp_path, "-m", "exported", "build")
            assert built.returncode == 0, built
