"""evo new: what it writes can be checked and searched, or `evo check` says what only its user knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
    "raise NotImplementedError": 'return inputs["in"].T.contiguous()',
    'name="in", kind="input", shape=()': 'name="in", kind="input", shape=("rows", "cols")',
    'name="out", kind="output", shape=()': 'name="out", kind="output", shape=("cols", "rows")',
    'threads=256, tiles=(("rows", 256), ("cols", 256),)': (
        'threads=point["TILE"] ** 2, tiles=(("cols", point["TILE"]), ("rows", point["TILE"]))'
    ),
}


def test_what_it_writes_compiles_for_a_gpu_and_is_searched_on_the_cpu(here: Any, tmp_path: Path) -> None:
    ended = here("new", "mine", "--json")
    assert (ended.code, ended.document["to_fill_in"]) == (0, [])
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ended.document["files"]
    assert "1 of 1 branches compiled" in here("check", "mine", "--arch", "sm_89", "--compile-only").out
    small = "n=100003,dtype=float32"
    checked = here("check", "mine", "--target", "cpu", "--workload", small)
    assert "1 of 1 passed the gate, 1 of 1 at the size that is timed" in checked.out, checked.out
    (tmp_path / "mine" / "note").write_text("kept")
    told = here("new", "other").out
    assert re.search(r"\nto be searched: on a GPU block_size_x in .*; per_thread in .*; on a CPU threads, chunk\n", told)
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


def test_a_source_of_ones_own_needs_what_only_its_user_knows(here: Any, tmp_path: Path) -> None:
    (tmp_path / "t.cu").write_text(TRANSPOSE)
    (tmp_path / "edge.cuh").write_text("#pragma once\n")
    made = here("new", "t", "--cu", "t.cu")
    assert made.code == 0, made.err
    assert "wrote t/cuda.cu, t/edge.cuh, t/kernel.py\nto be searched: TILE in 4, 8, 16, 32, 64; PAD in 1, 2, 4\n" in made.out
    unfilled = here("check", "t", "--arch", "sm_89")
    assert unfilled.code == 2
    for said in ("kernel.py is not complete: line 10, what transpose computes", "the grid", "the shapes of in, out"):
        assert said in unfilled.sentence
    path = tmp_path / "t" / "kernel.py"
    text = re.sub(r"\n *# FILL IN: .*", "", path.read_text())
    for place, answer in FILLED.items():
        assert place in text
        text = text.replace(place, answer)
    path.write_text(text)
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
    assert [place["what"].partition(",")[0] for place in made["to_fill_in"]] == ["what vector_add computes", "the grid"]
    made = here("new", "g", "--cu", "gemm.cu", "--entry", "gemm", "--json").document
    assert made["parameters"] == {"TILE": [4, 8, 16, 32, 64]}
    path = tmp_path / "g" / "kernel.py"
    path.write_text(path.read_text().replace("# FILL IN", "# Filled in").replace("shape=()", 'shape=("M", "N")'))
    kernel = load_kernel("g")
    found = {a.name: (a.kind, a.dtype) for a in kernel.arguments}
    assert (list(found), found["A"], found["B"]) == (["A", "B", "C", "alpha", "M", "N"], *[("input", "problem")] * 2)
    assert [found[name][1] for name in ("C", "alpha", "M", "N")] == ["problem", "float32", "int32", "int64"]
    assert [name for name, (kind, _) in found.items() if kind == "output"] == ["C"]
    assert [w.key for w in kernel.workloads["cuda"]] == ["M=1024,N=1024,K=512,dtype=float16,alpha=1.0"]
    assert kernel.compile_time_dims == {"cuda": ("K",)}
    integers = "const float* x, long long* at, bool* is, unsigned char* q, int n"
    (tmp_path / "top.cu").write_text(f"__global__ void top({integers}) {{}}")
    assert here("new", "top", "--cu", "top.cu").code == 0
    text = (tmp_path / "top" / "kernel.py").read_text()
    for name, dtype in (("at", "int64"), ("is", "bool"), ("q", "uint8")):
        assert f'Argument(name="{name}", kind="output", dtype="{dtype}", shape=("n",))' in text


BAD = {
    "no identifier": ("my-kernel", (), "", "'my-kernel' cannot be a kernel's name: use letters"),
    "entry alone": ("k", ("--entry", "f"), "", "--entry names a function of the file given with --cu"),
    "no file": ("k", ("--cu", "none.cu"), "", "--cu none.cu cannot be read (No such file or directory)"),
    "no kernel": ("k", ("--cu", "k.cu"), "// __global__ void f()", "has no entry point: a kernel is a function declared"),
    "several": ("k", ("--cu", "k.cu"), GEMM, "several entry points: choose one with --entry, of scale, gemm"),
    "unknown": ("k", ("--cu", "k.cu", "--entry", "gem"), GEMM, "entry point of k.cu 'gem'; did you mean gemm?"),
    "code": ("k", ("--cu", "k.cu"), "\n__global__ void f() { x y; }", "sm_89 with x=4: k.cu(2): error: expected a"),
    "host code": ("k", ("--cu", "k.cu"), "#include <map>\n__global__ void f() {}", "leave out host code and its headers"),
    "by value": ("k", ("--cu", "k.cu"), "__global__ void f(double d) {}", "parameter 'd' of f is neither a pointer nor"),
    "axes": ("k", ("--cu", "k.cu"), ADD.replace("threadIdx.x", "threadIdx.y"), "k.cu, line 3: threadIdx.y is always 0"),
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
