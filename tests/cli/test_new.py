"""evo new: what it writes can be checked and searched, or `evo check` says what only its user knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evo.adoption import usual_sizes
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.targets import compile_source, find_target
from tests.ended import run_python

ADD = """
__global__ void vector_add(float *c, const float *a, float const * __restrict__ b, int n) {
    int i = blockIdx.x * block_size_x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""
TRANSPOSE = """#include "edge.cuh"
#ifndef TILE
#define TILE 16  /* edge of a
                    tile */
#endif
constexpr int PAD = 1;
extern "C" __global__ __launch_bounds__(TILE * (TILE)) void transpose(const float* in, float* out, int rows, int cols) {
    __shared__ float tile[TILE][TILE + PAD];
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    int col = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    if (row < rows && col < cols) tile[y][x] = in[row * cols + col];
    __syncthreads();
    row = blockIdx.y * TILE + x, col = blockIdx.x * TILE + y;
    if (row < rows && col < cols) out[col * rows + row] = tile[x][y];
}
"""
GEMM = """#include <cuda_fp16.h>
#define TILE 16
#define K 512
__global__ void scale(half* x) {}
template <typename T> __device__ T same(T x) { return x; }
__global__ void gemm(const half *A, half const*B, half *C, float alpha, int M, long long N) {
    const int c = blockIdx.x * TILE + threadIdx.x % TILE, r = blockIdx.y * TILE + threadIdx.x / TILE;
    float sum = 0;
    if (r < M && c < N) for (int k = 0; k < K; ++k) sum += same(__half2float(A[r * K + k]) * __half2float(B[k * N + c]));
    if (r < M && c < N) C[r * N + c] = __float2half(alpha * sum);
}
"""
FILLED = {
    'name="in", kind="input", shape=()': 'name="in", kind="input", shape=("rows", "cols")',
    'name="out", kind="output", shape=()': 'name="out", kind="output", shape=("cols", "rows")',
    "threads=256, tiles=": 'threads=point["TILE"] ** 2, tiles=',
}


def test_what_it_writes_compiles_for_a_gpu_and_is_searched_on_the_cpu(here: Any, tmp_path: Path) -> None:
    ended = here("new", "mine", "--json")
    assert (ended.code, ended.document["to_fill_in"]) == (0, [])
    assert ended.document["links"] == {}
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ended.document["files"]
    assert "1 of 1 branches compiled" in here("check", "mine", "--arch", "sm_89", "--compile-only").out
    small = "n=100003,dtype=float32"
    checked = here("check", "mine", "--target", "cpu", "--workload", small)
    assert "1 of 1 passed the gate, 1 of 1 at the size that is timed" in checked.out, checked.out
    (tmp_path / "mine" / "note").write_text("kept")
    told = here("new", "other").out
    assert re.search(r"\nto be searched: on a GPU block_size_x, per_thread; on a CPU threads, chunk\n", told)
    again = here("new", "mine")
    assert (again.code, again.sentence) == (2, "evo: mine exists: choose another name, or remove it; nothing was written")
    taken = here("new", "layernorm")
    assert (taken.code, (tmp_path / "layernorm").exists()) == (2, False)
    assert "'layernorm' is the name of a kernel that comes with evo" in taken.sentence
    searched = here("search", "mine", "--target", "cpu", "--workload", small, "--evaluations", "1")
    assert searched.code == 0, searched.out
    assert here("export", "latest", "--out", "exported").code == 0
    checked = run_python(tmp_path, "-m", "exported", "check")
    assert "right: 16 cases on it, 2 left to PyTorch" in checked.stdout, checked
    name = here("best", "--json").document[0]["candidate"]
    source = here("show", name, "--source").out
    assert re.match(r'#define chunk \d+\n#define threads \d+\n#line 1 "cpu.cpp"\n', source), "the rendered source is stored"


def fill_in(folder: Path, result: str, answers: Mapping[str, str]) -> None:
    """Writes what `evo new` leaves to an author. result: the expression that the function returns."""
    for name, instead in (("kernel.py", answers), ("function.py", {"raise NotImplementedError": f"return {result}"})):
        text = re.sub(r"\n *# FILL IN: .*", "", (folder / name).read_text())
        for place, answer in instead.items():
            assert place in text, text
            text = text.replace(place, answer)
        (folder / name).write_text(text)


def test_a_source_of_ones_own_needs_what_only_its_user_knows(here: Any, tmp_path: Path) -> None:
    (tmp_path / "t.cu").write_text(TRANSPOSE)
    (tmp_path / "edge.cuh").write_text("#pragma once\n")
    made = here("new", "t", "--cu", "t.cu")
    assert made.code == 0, made.err
    assert "linked t/cuda.cu to t.cu, which is searched as it is (--copy copies it)\n" in made.out
    assert "linked t/edge.cuh to edge.cuh" in made.out
    assert "to be searched: TILE in 4, 8, 16, 32, 64; PAD in 1, 2, 4\n" in made.out
    unfilled = here("check", "t", "--arch", "sm_89")
    assert unfilled.code == 2
    for said in ("the grid", "the shapes of in, out", "function.py, line 8, what transpose computes"):
        assert said in unfilled.sentence
    fill_in(tmp_path / "t", "x.T.contiguous()", FILLED)
    assert "1 of 1 branches compiled" in here("check", "t", "--arch", "sm_89", "--compile-only").out
    kernel, target = load_kernel("t"), find_target("cuda")
    limits, workload = target.limits("sm_89"), kernel.workload("cuda", "rows=100,cols=33,dtype=float32")
    (launch,) = kernel.sequence("cuda", {"TILE": 8, "PAD": 2}, workload, limits).launches
    assert (launch.grid, launch.block) == ((5, 13, 1), (64, 1, 1))
    source = render(kernel, "cuda", Genome.of({"TILE": 8, "PAD": 4}), workload, "sm_89")
    assert compile_source(source, "sm_89", tmp_path).smem_static_bytes == 8 * 12 * 4


def test_the_entry_point_its_parameters_and_macros_that_nothing_defines_are_found(here: Any, tmp_path: Path) -> None:
    (tmp_path / "add.cu").write_text(ADD)
    no_choices = "constexpr int WARP_SIZE = 32;\n#ifndef UNUSED\n#define UNUSED 8\n#endif\n"
    (tmp_path / "gemm.cu").write_text(no_choices + GEMM.replace("blockIdx.y * TILE", "blockIdx.y / WARP_SIZE * TILE"))
    made = here("new", "add", "--cu", "add.cu", "--json").document
    assert made["parameters"] == {"block_size_x": [32, 64, 128, 256, 512, 1024]}
    assert [place["what"].partition(",")[0] for place in made["to_fill_in"]] == ["what vector_add computes"]
    made = here("new", "g", "--cu", "gemm.cu", "--entry", "gemm", "--json").document
    assert made["parameters"] == {"TILE": [4, 8, 16, 32, 64]}
    fill_in(tmp_path / "g", "alpha * A @ B", {"shape=()": 'shape=("M", "N")'})
    kernel = load_kernel("g")
    found = {a.name: (a.kind, a.dtype) for a in kernel.arguments}
    assert (list(found), found["A"], found["B"]) == (["A", "B", "C", "alpha", "M", "N"], *[("input", "problem")] * 2)
    assert [found[name][1] for name in ("C", "alpha", "M", "N")] == ["problem", "float32", "int32", "int64"]
    assert [name for name, (kind, _) in found.items() if kind == "output"] == ["C"]
    assert [w.key for w in kernel.workloads["cuda"]] == ["M=32,N=64,K=512,dtype=float16,alpha=1.0"]
    assert kernel.compile_time_dims == {"cuda": ("K",)}
    integers = "const float* x, long long* at, bool* is, unsigned char* q, int n"
    (tmp_path / "top.cu").write_text(f"__global__ void top({integers}) {{}}")
    assert here("new", "top", "--cu", "top.cu").code == 0
    text = (tmp_path / "top" / "kernel.py").read_text()
    for name, dtype in (("at", "int64"), ("is", "bool"), ("q", "uint8")):
        assert f'Argument(name="{name}", kind="output", dtype="{dtype}", shape=("n",))' in text


@pytest.mark.parametrize(
    ("dimensions", "known", "sizes"),
    [
        ("n", {}, [1 << 20]), ("mn", {}, [1024, 1024]), ("mnk", {}, [64, 128, 128]), ("bhnd", {}, [32] * 4),
        ("mnk", {"k": 512}, [32, 64, 512]), ("bwh", {"w": 640, "h": 480}, [16, 640, 480]),
    ],
)  # fmt: skip
def test_the_first_workload_has_some_million_elements(dimensions: str, known: Mapping[str, int], sizes: list[int]) -> None:
    assert [*usual_sizes([*dimensions], known).values()] == sizes


KINDS = """\ufeff// Nothing of this is for a compiler of device code but the kernels.
#include <torch/extension.h>
#include <cstdint>
#include "local.cuh"
using namespace std;
#define CEIL(a, b) (((a) + (b) - 1) / (b))
#ifndef BLOCK_X
#define BLOCK_X 32
#endif
#if MODE == 1
#define SHIFT 3
#else
#define SHIFT 0
#endif
#define FLOAT4(p) (reinterpret_cast<float4*>(&(p))[0])
__global__ void gather(float* y, float* x, int* index, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[index[i]] + SHIFT;
}
void __global__ grow(float* at, const float* by, int rows, int cols) {
    int c = blockIdx.x * BLOCK_X + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
    if (c < cols && r < rows) at[r * cols + c] = at[r * cols + c] * by[c];
}
template <typename T, int PER>
__global__ void __launch_bounds__(256) count(T* data, int32_t* bins, int n) {
    for (int i = blockIdx.x * 256 * PER + threadIdx.x; i < n; i += 256) atomicAdd(&bins[data[i] > T(0)], 1);
}
__device__ __forceinline__ void put(float4* to, float4 what) { *to = what; }
__global__ void copy(float* to, float* from, int n) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (4 * i < n) put(reinterpret_cast<float4*>(to) + i, FLOAT4(from[4 * i]));
}
__global__ void blur(float* out, const float* in, int n) {
    extern __shared__ float row[];
    int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
    row[threadIdx.x] = in[r * n + c];
    if (r < n && c < n) out[r * n + c] = row[threadIdx.x];
}
__global__ void square(int* c, const int* a) { c[threadIdx.y] = a[threadIdx.x + blockIdx.y * blockDim.y + blockIdx.x]; }
__global__ void largest(float* out, const float* in, float* spare, int n) {
    float most = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) most = fmaxf(most, in[i]);
    out[blockIdx.x] = most;
}
torch::Tensor run(torch::Tensor data, float* at, float* by, int m, int k) {
    int side = 16, blocks = (m + side - 1) / side, bytes = rand();
    blur<<<dim3(blocks, blocks), dim3(side, side), bytes>>>(at, by, m);
    square<<<dim3(RUNTIME, RUNTIME), dim3(side, side)>>>(nullptr, nullptr);
    dim3 block(BLOCK_X, 8), grid(CEIL(k, BLOCK_X), CEIL(m, 8));
    grow<<<grid, block>>>(at, by, m, k);
    count<float, 4><<<CEIL(data.numel(), 1024), 256>>>(data.data_ptr<float>(), nullptr, data.numel());
    count<float, 8><<<CEIL(data.numel(), 2048), 256>>>(data.data_ptr<float>(), nullptr, data.numel());
    return data;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""
FOUND = {
    "gather": (
        "y output, x input, index input int32, n scalar int32",
        {"BLOCK_X": None, "MODE": (0, 1), "threads": (32, 64, 128, 256, 512, 1024)},
        'threads=point["threads"], tiles=(("n", point["threads"]),))',
    ),
    "grow": (
        "at output from at_before, by input, rows scalar int32, cols scalar int32, at_before input",
        {"BLOCK_X": (8, 16, 32, 64, 128), "threads_y": (1, 2, 4, 8, 16, 32, 64)},
        'threads=(point["BLOCK_X"], point["threads_y"]),'
        ' tiles=(("cols", point["BLOCK_X"]), ("rows", point["threads_y"]),), axes=True)',
    ),
    "count": (
        "data input, bins output int32 from zeros, n scalar int32",
        {"PER": (4, 8)},
        'threads=256, tiles=(("n", 256 * point["PER"]),))',
    ),
    "copy": (
        "to output, from input, n scalar int32",
        {"threads": (32, 64, 128, 256, 512, 1024)},
        None,
    ),
    "blur": (
        "out output, in input, n scalar int32",
        {"threads_x": (1, 2, 4, 8, 16, 32, 64)},
        'threads=(point["threads_x"], point["threads_x"]), tiles=(("n", 256),), axes=True, smem_bytes=0)',
    ),
    "square": (
        "c output int32, a input int32",
        {"threads_x": (1, 2, 4, 8, 16, 32, 64)},
        'threads=(point["threads_x"], point["threads_x"]), tiles=(("n", 256),))',
    ),
    "largest": (
        "out output, in input, spare output, n scalar int32",
        {"threads": (32, 64, 128, 256, 512, 1024)},
        'threads=point["threads"], tiles=(("n", point["threads"]),))',
    ),
}
ASKED = {
    "gather": (),
    "count": ("the shapes of bins in the dimensions n", "what bins holds before a call"),
    "blur": ("computes, and smem_bytes, of its extern __shared__ arrays", "the shapes of out, in in the dimensions n"),
    "largest": ("the shapes of out in the dimensions n", "whether spare is an input or an output"),
}
"""What is asked of a kernel, besides what it computes."""


@pytest.mark.parametrize("entry", FOUND)
def test_roles_choices_and_the_launch_are_read_from_the_source(here: Any, tmp_path: Path, entry: str) -> None:
    arguments, parameters, launch = FOUND[entry]
    (tmp_path / "kinds.cu").write_text(KINDS)
    (tmp_path / "local.cuh").write_text("#pragma once\n")
    made = here("new", "k", "--cu", "kinds.cu", "--entry", entry, "--json")
    assert made.code == 0, made.err
    assert (tmp_path / "k" / "cuda.cu").resolve() == tmp_path / "kinds.cu"
    assert {"#include <torch/extension.h>", "run", *(FOUND.keys() - {entry})} <= {*made.document["left_out"]}
    text = (tmp_path / "k" / "kernel.py").read_text()
    pattern = r'Argument\(name="(\w+)", kind="(\w+)"(?:, dtype="(\w+)")?(?:, shape=\S+?\))?(?:, initial="(\w+)")?\)'
    told = [" ".join(filter(None, (*row[:3], row[3] and f"from {row[3]}"))) for row in re.findall(pattern, text)]
    assert ", ".join(told) == arguments
    assert made.document["parameters"] == {n: list(v) for n, v in parameters.items() if v is not None}
    assert launch is None or launch in text, text
    asked = [place["what"] for place in made.document["to_fill_in"] if place["file"] == "kernel.py"]
    for said, what in zip(ASKED.get(entry, asked), asked, strict=True):
        assert said in what


def test_a_source_for_the_cpu_is_made_a_kernel(here: Any, tmp_path: Path) -> None:
    (tmp_path / "own.h").write_text("static inline float twice(float x) { return 2 * x; }\n")
    (tmp_path / "d.cpp").write_text(
        '#include <cmath>\n#include "own.h"\n#define CHUNK 4096\nextern "C" void d(const float* x, float* y, int n) {\n'
        "#pragma omp parallel for num_threads(threads) schedule(static, CHUNK)\n"
        "    for (int i = 0; i < n; ++i) y[i] = twice(x[i]);\n}\n"
    )
    made = here("new", "d", "--cu", "d.cpp", "--json")
    assert made.code == 0, made.err
    assert made.document["links"] == {"cpu.cpp": "d.cpp", "own.h": "own.h"}
    assert made.document["parameters"] == {"threads": [], "CHUNK": [1024, 4096, 8192, 65536]}
    assert made.document["next"] == ["evo check d --target cpu"]
    assert [place["what"] for place in made.document["to_fill_in"]] == ["what d computes, in PyTorch: return y"]
    fill_in(tmp_path / "d", "2 * x", {})
    checked = here("check", "d", "--target", "cpu", "--workload", "n=10007,dtype=float32")
    assert "1 of 1 passed the gate, 1 of 1 at the size that is timed" in checked.out, checked.out


NUMBERS = """
const int N = 1 << 20;
static const int ROWS = N / 4;
#define PER (2 * 2)
#define GAIN 2.0f
constexpr unsigned BLOCK = 64 << 1, COLS = 4;
__global__ void scale(float* y, const float* x) {
    int i = (blockIdx.x * BLOCK + threadIdx.x) * PER;
    for (int j = i; j < i + PER; ++j) if (j < ROWS * COLS) y[j] = GAIN * x[j];
}
void run(float* y, const float* x) { scale<<<(N / PER + BLOCK - 1) / BLOCK, BLOCK>>>(y, x); }
"""


def test_numbers_that_are_written_as_expressions_are_known(here: Any, tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(NUMBERS)
    made = here("new", "scale", "--cu", "scale.cu", "--json")
    assert made.code == 0, made.err
    assert made.document["parameters"] == {
        "PER": [1, 2, 4, 8, 16], "BLOCK": [32, 64, 128, 256, 512, 1024], "COLS": [1, 2, 4, 8, 16]
    }  # fmt: skip
    text = (tmp_path / "scale" / "kernel.py").read_text()
    assert 'threads=point["BLOCK"], tiles=(("N", point["BLOCK"] * point["PER"]),)' in text, text
    assert 'workloads={"cuda": ("N=1048576,dtype=float32",)}' in text
    fill_in(tmp_path / "scale", "2 * x", {})
    kernel = load_kernel("scale")
    source = render(kernel, "cuda", Genome.of({"PER": 1, "BLOCK": 32, "COLS": 2}), kernel.example("cuda"), "sm_89").text
    assert {"#define BLOCK 32", "#define COLS 2", "#define N 1048576", "#define PER 1"} <= {*source.splitlines()}
    assert "static const int ROWS = N / 4;\n" in source
    assert 'extern "C" __global__ void scale(' in source, "constants of one declaration are taken out once"


ROWS = """#include <cfloat>
#define THREADS 128
__global__ void top(const float* x, float* y, int cols) {
    float most = -FLT_MAX;
    for (int c = threadIdx.x; c < cols; c += THREADS) most = fmaxf(most, x[blockIdx.x * cols + c]);
    if (threadIdx.x == 0) y[blockIdx.x] = most;
}
int main() { int ROWS = 512; top<<<ROWS, THREADS>>>(0, 0, 8); }
"""


@pytest.mark.parametrize(
    ("grid", "dimensions", "tiles"),
    [
        ("int rows = 512; top<<<rows, THREADS>>>", ["rows", "cols"], '(("rows", 1),)'),
        ("int a = 5, b = 6; dim3 blocks(a, b); top<<<blocks, THREADS>>>", ["a", "b", "cols"], '(("a", 1), ("b", 1),)'),
        ("int num_rows = 512; top<<<num_rows, THREADS>>>", ["num_rows", "cols"], '(("num_rows", 1),)'),
        ("int blocks = 512; top<<<blocks, THREADS>>>", ["cols"], '(("cols", 256),)'),
        ("int cols = 512; top<<<cols, THREADS>>>", ["cols"], '(("cols", 1),)'),
    ],
)
def test_a_grid_that_is_a_variable_of_the_host_is_a_dimension_of_its_own(
    here: Any, tmp_path: Path, grid: str, dimensions: list[str], tiles: str
) -> None:
    (tmp_path / "top.cu").write_text(ROWS.replace("int ROWS = 512; top<<<ROWS, THREADS>>>", grid).replace(", 8)", ", cols)"))
    made = here("new", "top", "--cu", "top.cu")
    assert made.code == 0, made.err
    text = (tmp_path / "top" / "kernel.py").read_text()
    assert re.findall(r'Dimension\(name="(\w+)"', text) == dimensions
    assert f"tiles={tiles}" in text
    assert "add others to `dimensions` and `workloads`" in made.out or len(dimensions) == 1


def test_a_reference_that_is_wrong_is_found_where_nothing_runs_the_gate(here: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the gate runs here, and finds it")
    (tmp_path / "b.cu").write_text(
        "__global__ void b(float* y, const float* x, const float* bias, int rows, int cols) {\n"
        "    int i = blockIdx.x * 256 + threadIdx.x;\n    if (i < rows * cols) y[i] = x[i] + bias[i % cols];\n}\n"
    )
    assert here("new", "b", "--cu", "b.cu").code == 0
    text = re.sub(r"\n *# FILL IN: .*", "", (tmp_path / "b" / "kernel.py").read_text())
    (tmp_path / "b" / "kernel.py").write_text(re.sub(r'(name="[yx]"[^\n]*shape=)\([^)]*\)', r'\1("rows", "cols")', text))
    own = (tmp_path / "b" / "function.py").read_text()
    for body, dimension, said in (
        ("x + bias", "cols", ""),
        ("x + bias", "rows", "RuntimeError: The size of tensor a"),
        ("(x + bias)[:, ::2]", "cols", "'y'"),
    ):
        stated = (tmp_path / "b" / "kernel.py").read_text()
        stated = re.sub(r'(name="bias"[^\n]*shape=)\([^)]*\)', rf'\1("{dimension}",)', stated)
        (tmp_path / "b" / "kernel.py").write_text(stated)
        filled = re.sub(r"\n *# FILL IN: .*", "", own).replace("raise NotImplementedError", f"return {body}")
        (tmp_path / "b" / "function.py").write_text(filled)
        checked = here("check", "b", "--arch", "sm_89", "--samples", "0")
        assert checked.code == (1 if said else 0), checked.out
        assert said in " ".join(checked.out.split())
        assert "run with --target cpu" not in checked.out


def test_a_double_beside_doubles_is_an_option(here: Any, tmp_path: Path) -> None:
    (tmp_path / "s.cu").write_text(
        "__global__ void s(double* y, const double* x, double a, int n) {\n"
        "    int i = blockIdx.x * 256 + threadIdx.x;\n    if (i < n) y[i] = a * x[i];\n}\n"
    )
    assert here("new", "s", "--cu", "s.cu").code == 0
    fill_in(tmp_path / "s", "a * x", {})
    kernel = load_kernel("s")
    assert [w.key for w in kernel.workloads["cuda"]] == ["n=1048576,dtype=float64,a=1.0"]
    (scalar,) = (a for a in kernel.arguments if a.name == "a")
    assert (scalar.kind, scalar.dtype_of(kernel.example("cuda"))) == ("scalar", "float64")
    assert "1 of 1 branches compiled" in here("check", "s", "--arch", "sm_89", "--compile-only").out


def test_inline_ptx_and_nested_lists_are_no_jinja(here: Any, tmp_path: Path) -> None:
    (tmp_path / "p.cu").write_text(
        "__device__ const float table[2][2] = {{1.f, 2.f}, {3.f, 4.f}};\n"
        "__global__ void p(float* y, const float* x, int n) {\n"
        "    int i = blockIdx.x * 256 + threadIdx.x;\n    float a = 0.f, b = 0.f;\n"
        '    if (i < n) asm volatile("mov.b32 %0, {%2, %3};\\n mov.f32 %1, %4;"\n'
        '        : "=f"(a), "=f"(b) : "h"((short)1), "h"((short)2), "f"(x[i]));\n'
        "    if (i < n) y[i] = a + b + table[1][0];\n}\n"
    )
    made = here("new", "p", "--cu", "p.cu")
    assert made.code == 0, made.err
    assert (tmp_path / "p" / "cuda.cu").is_symlink()


def test_a_jinja_source_is_made_a_template_of_ours(here: Any, tmp_path: Path) -> None:
    (tmp_path / "j.cu").write_text(
        "__global__ void twice({{ real_type }} *y, const {{ real_type }} *x, int n) {\n"
        "    int i = blockIdx.x * {{ block_size }} + threadIdx.x;\n"
        "    {% for k in range(per) %}if (i < n) y[i] = 2 * x[i];\n    {% endfor %}\n}\n"
    )
    made = here("new", "j", "--cu", "j.cu", "--json").document
    assert made["parameters"] == {"block_size": [32, 64, 128, 256, 512, 1024], "per": [1, 2, 4, 8, 16]}
    fill_in(tmp_path / "j", "2 * x", {})
    assert "1 of 1 branches compiled" in here("check", "j", "--arch", "sm_89", "--compile-only").out


BAD = {
    "no identifier": ("my-kernel", (), "", "'my-kernel' cannot be a kernel's name: use letters"),
    "entry alone": ("k", ("--entry", "f"), "", "--entry names a function of the file given with --cu"),
    "no file": ("k", ("--cu", "none.cu"), "", "--cu none.cu cannot be read (No such file or directory)"),
    "no kernel": ("k", ("--cu", "k.cu"), "// __global__ void f()", "has no entry point: a kernel is a function declared"),
    "no C": ("k", ("--cu", "k.cu"), "void f(float* x) {}", 'or, in C++ for the CPU, declared extern "C" void NAME(...)'),
    "several": ("k", ("--cu", "k.cu"), GEMM, "several entry points: choose one with --entry, of scale, gemm"),
    "unknown": ("k", ("--cu", "k.cu", "--entry", "gem"), GEMM, "entry point of k.cu 'gem'; did you mean gemm?"),
    "code": ("k", ("--cu", "k.cu"), "\n__global__ void f(int* x) { *x = 1; int y z; }", "sm_89: k.cu(2): error: expected a"),
    "no header": ("k", ("--cu", "k.cu"), "#include <cuda/a>\n__global__ void f(int* x) { *x = 1; }", "\"cuda/a\" (NVRTC"),
    "by value": ("k", ("--cu", "k.cu"), "__global__ void f(short d) {}", "parameter 'd' of f is neither a pointer nor"),
    "double": ("k", ("--cu", "k.cu"), "__global__ void f(float* x, double d, int n) { x[0] = d; }",
               "parameter 'd' of f is a double beside elements of float32: make it a float"),
    "no result": ("k", ("--cu", "k.cu"), "__global__ void f(const int* x) {}", "f writes to none of its arguments"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_take_is_one_sentence_and_nothing_is_written(here: Any, tmp_path: Path, name: str) -> None:
    kernel, options, text, sentence = BAD[name]
    if text:
        (tmp_path / "k.cu").write_text(text)
    ended = here("new", kernel, *options)
    assert ended.code == 2
    assert sentence in ended.sentence
    assert not (tmp_path / kernel).exists()
