"""Plain sources with values: which names become macros, and variables with __constant__ that become parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evo.errors import TemplateError
from evo.problem.fill import fill_plain
from evo.problem.render import Source
from evo.targets import compile_source

CONVOLUTION = """#include <cstdio>
#define KW 5
#define KH 3
#define TAP(i, j) d_filter[(i) * KW + (j)]
namespace own {
static __constant__ float offsets[2],
    unit[1] = {1.0f};
}
__constant__ float d_filter[KW * KH], table[KH][KW];
__constant__ float gain;
struct Pair { float x, y; };
__device__ float tap(int i, int j);
template <typename T> __device__ T term(T x, int i, int j) { return x * tap(i, j) + table[i][j] * own::offsets[1]; }
__device__ float tap(int i, int j) { return TAP(i, j) * own::unit[0] * (sizeof(d_filter) / sizeof(float) == KW * KH); }
__device__ float edge(void) { return *reinterpret_cast<const float*>(&d_filter); }
__global__ void conv(float* out, const float* in, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (r >= rows || c >= cols) return;
    float sum = edge();
    for (int i = 0; i < KH; ++i)
        for (int j = 0; j < KW; ++j) sum += term(in[r * cols + c], i, j);
    out[r * cols + c] = gain * sum;
}
int main() { float h[15]; cudaMemcpyToSymbol(d_filter, h, sizeof(h)); conv<<<1, 1>>>(nullptr, nullptr, 1, 1); }
"""
ARGUMENTS = ("out", "in", "d_filter", "rows", "cols", "offsets", "table", "gain")


def filled(
    text: str,
    arguments: tuple[str, ...] = ARGUMENTS,
    entry: str = "conv",
    tensors: tuple[str, ...] = (),
    **values: int | str,
) -> str:
    return fill_plain(Path("own.cu"), entry, values, {}, (), True, text, arguments, tensors)


def ptx_parameters(text: str, tmp_path: Path, entry: str = "conv") -> list[str]:
    """The types of the parameters of compiled code. Machine code is made, too."""
    source = Source(text=text, target="cuda", language="cuda_cpp", entry=entry)
    compile_source(source, "sm_89", tmp_path)
    code = compile_source(source, "compute_89", tmp_path).code.decode()
    head = re.search(rf"\.entry {entry}\((.*?)\)", code, re.DOTALL)
    assert head
    return re.findall(r"\.param \.(?:align \d+ )?\.?(\w+)", head[1])


def test_a_constant_that_host_code_fills_is_a_parameter_of_all_that_use_it(tmp_path: Path) -> None:
    text = filled(CONVOLUTION, KW=7)
    assert ptx_parameters(text, tmp_path) == ["u64", "u64", "u64", "u32", "u32", "u64", "u64", "f32"], "in their order"
    assert re.findall(r"__constant__ .*", text) == ["__constant__ float unit[1] = {1.0f};"], "what has a value stays"
    assert "conv(float* out, const float* in, const float* __restrict__ d_filter, int rows, int cols, const" in text
    assert "float edge(const float* __restrict__ d_filter)" in text
    assert "edge(d_filter);" in text
    assert "sizeof(float[KW * KH])" in text, "of an array, not of a pointer"
    given, own = text.splitlines(), CONVOLUTION.splitlines()
    begin = given.index('#line 1 "own.cu"') + 1
    assert {own.index(line) - given.index(line) + begin for line in own if "int i = 0" in line} == {0}, "lines keep numbers"
    of_type = "__constant__ float w[9];\ntemplate <typename T> __global__ void conv(T* out, int n) { out[n] = w[n]; }\n"
    one = fill_plain(Path("own.cu"), "conv", {}, {"out": "float"}, (), True, of_type, ("out", "n", "w"))
    assert ptx_parameters(one, tmp_path) == ["u64", "u32", "u64"], "of a template, too"


def test_a_constant_of_a_namespace_is_asked_for_its_address_and_size(tmp_path: Path) -> None:
    text = filled(
        "namespace ns { __constant__ float w[9]; __device__ float at(int i) { return w[i]; } }\n"
        "__device__ float first(const void* p) { return *(const float*)p; }\n"
        "__global__ void conv(float* y) { y[0] = first(&ns::w) + ns::w[1] + sizeof(ns::w) + ns::at(2); }\n"
        "void run(float* h) { cudaMemcpyToSymbol(&ns::w, h, 36); }",
        ("y", "w"),
        tensors=("y", "w"),
    )
    assert "y[0] = first(w) + w[1] + sizeof(float[9]) + ns::at(w, 2);" in text, text
    assert ptx_parameters(text, tmp_path) == ["u64", "u64"]


def test_a_constant_that_is_one_number_is_no_tensor() -> None:
    text = "__constant__ float gain;\n__global__ void conv(float* y) { y[0] = gain; }\n"
    assert "conv(float* y, const float gain)" in filled(text, ("y", "gain"), tensors=("y",))
    with pytest.raises(TemplateError, match=r"__constant__ gain is one number, and kernel\.py has a tensor"):
        filled(text, ("y", "gain"), tensors=("y", "gain"))


USE = "__constant__ float w[9];\n{}__global__ void conv(float* y) {{ y[0] = {}; }}\n"
REFUSED = {
    "no argument": (USE.format("", "w[0]"), ("y",), "to fill __constant__ w: give kernel.py an input of that name"),
    "member": (USE.format("struct S { __device__ float of() { return w[1]; } };\n", "S().of()"), ("y", "w"),
               "cannot become a parameter of conv, as the member function of uses it: hand it over"),
    "macro": (USE.format("__device__ float f(int i) { return w[i]; }\n#define G(i) f(i)\n", "G(1)"), ("y", "w"),
              "__constant__ w cannot become a parameter of conv, as the macro G uses it"),
    "size": (USE.format("#define LENGTH(a) (sizeof(a) / sizeof(a[0]))\n", "LENGTH(w)"), ("y", "w"),
             "as the macro LENGTH, which asks for its address or size, uses it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_constant_that_cannot_be_handed_on_is_refused(name: str) -> None:
    text, arguments, words = REFUSED[name]
    with pytest.raises(TemplateError) as refused:
        filled(text, arguments)
    assert words in str(refused.value), refused.value


SUMS = """#include <cuda_fp16.h>
#define STEP 2
template <int N> __device__ int same(int n) { return N + n; }
struct Places { int at, n; };
__global__ void conv(float* y, const float* x, int rows) {
    Places place = {0, 1};
    float sum = 1.f, e = 0, q = 1;
    for (int k = 0, w = 0; k < K; k += STEP, ++w) sum += x[k] + same<1>(place.n);
    y[threadIdx.x] = sum + e + q + rows;
}
"""


def test_only_what_the_source_does_not_declare_is_a_macro(tmp_path: Path) -> None:
    names = "k K x X f F e E w W q Q n N h H at AT rows ROWS step y Y same"
    for name in names.split():
        found = re.findall(r"#define (\w+) 3\n", filled(SUMS, K=8, **{name: 3} if name != "K" else {}))
        assert found == (["STEP"] if name == "step" else []) or (name == "k" and found == ["K"]), name
        ptx_parameters(filled(SUMS, **{"K": 8, name: 3}), tmp_path)
    with pytest.raises(TemplateError, match=r"parameter 'w' of the space is no macro of own\.cu"):
        fill_plain(Path("own.cu"), "conv", {"K": 8, "w": 3}, {}, ("w",), True, SUMS)
