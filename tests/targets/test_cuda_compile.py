"""CUDA candidates are compiled here and now, on a machine that may have neither a GPU nor a toolkit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evo.errors import CompileError, DeviceError
from evo.evaluation import Binary
from evo.problem.genome import Genome
from evo.problem.kernel import ELEMENT_BYTES
from evo.problem.loading import load_kernel
from evo.problem.render import Source, render, types_of
from evo.targets import compile_source, find_language, find_target
from evo.targets.languages.cuda_cpp import ptxas_figures

CUDA = find_target("cuda")

PLAIN = """
#include <cuda_fp16.h>
extern "C" __global__ void scale(const __half* x, __half* y, long long n, float by) {
    __shared__ float part[64];
    if (threadIdx.x < 64) part[threadIdx.x] = by;
    __syncthreads();
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) y[i] = __float2half(__half2float(x[i]) * part[i % 64]);
}
"""

HUNGRY = """
extern "C" __global__ void __launch_bounds__(1024) sums(const float* x, float* y, int rounds) {
    float v[160];
    #pragma unroll
    for (int i = 0; i < 160; ++i) v[i] = x[threadIdx.x + 1024 * i];
    for (int r = 0; r < rounds; ++r) {
        #pragma unroll
        for (int i = 0; i < 160; ++i) v[i] = v[i] * v[(i + 7) % 160] + 1.0f;
    }
    #pragma unroll
    for (int i = 0; i < 160; ++i) y[threadIdx.x + 1024 * i] = v[i];
}
"""


def compiled(text: str, entry: str = "scale", arch: str = "sm_89", flags: tuple[str, ...] = ()) -> Binary:
    return compile_source(Source(text=text, target="cuda", language="cuda_cpp", entry=entry, flags=flags), arch, Path())


def test_a_kernel_compiles_to_a_cubin_with_the_figures_of_ptxas_also_a_second_time() -> None:
    # A compiler that remembers its results reports on the first compilation only.
    binary, again = compiled(PLAIN), compiled(PLAIN)
    assert binary == again
    assert binary.code.startswith(b"\x7fELF")
    assert 8 <= binary.registers <= 32
    assert binary.smem_static_bytes == 64 * 4
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)


@pytest.mark.parametrize("arch", ["sm_90", "compute_90", "sm_120"])
def test_that_code_lets_the_next_kernel_start_early_is_known(arch: str) -> None:
    waits = PLAIN.replace("{", '{ asm volatile("griddepcontrol.wait;" ::: "memory");', 1)
    releases = PLAIN.replace("{", '{ asm volatile("griddepcontrol.launch_dependents;");', 1)
    assert [compiled(text, arch=arch).triggers_dependents for text in (PLAIN, waits, releases)] == [False, False, True]


def test_spilled_registers_are_counted_and_a_flag_reaches_the_compiler() -> None:
    bounded = compiled(HUNGRY, "sums")
    assert bounded.registers == 64  # 64 K registers over 1,024 threads
    assert (bounded.spill_bytes or 0) > 160
    assert (bounded.stack_bytes or 0) > 0
    limited = compiled(HUNGRY.replace("__launch_bounds__(1024)", ""), "sums", flags=("--maxrregcount=80",))
    assert limited.registers == 80


def test_an_error_may_be_in_the_words_of_ptxas() -> None:
    with pytest.raises(CompileError, match="too much shared data"):
        compiled(PLAIN.replace("part[64]", "part[64000]"))


@pytest.mark.parametrize("arch", ["sm_89", "compute_89"])
def test_a_source_without_its_entry_point_is_refused(arch: str) -> None:
    with pytest.raises(CompileError, match=r"no entry point 'other'.*extern .C."):
        compiled(PLAIN, "other", arch)


@pytest.mark.parametrize("arch", ["gfx942", "sm_33", "native", "sm_89; true"])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(arch: str) -> None:
    with pytest.raises(DeviceError, match=r"sm_89|one of .*\b89\b"):
        compiled(PLAIN, arch=arch)


def test_ptx_carries_no_figures_and_no_machine_code() -> None:
    binary = compiled(PLAIN, arch="compute_89")
    assert b".target sm_89" in binary.code
    assert not binary.code.endswith(b"\0")
    assert (binary.registers, binary.spill_bytes, binary.smem_static_bytes) == (None, None, None)


def test_instructions_of_hopper_need_the_a_of_sm_90a() -> None:
    text = 'extern "C" __global__ void scale() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }'
    with pytest.raises(CompileError, match="setmaxnreg"):
        compiled(text, arch="sm_90")
    assert compiled(text, arch="sm_90a").registers is not None


def test_local_headers_are_found_and_change_the_digest(tmp_path: Path) -> None:
    header = tmp_path / "by.cuh"
    text = '#include "by.cuh"\nextern "C" __global__ void scale(float* y) { y[threadIdx.x] *= BY; }'

    def build(value: str) -> tuple[str, str]:
        header.write_text(f"#define BY {value}\n")
        source = Source(text=text, target="cuda", language="cuda_cpp", entry="scale", include_dirs=(str(tmp_path),))
        return source.digest, compile_source(source, "sm_89", Path()).code_hash

    first, second = build("2.0f"), build("3.0f")
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_the_figures_are_those_of_the_entry_asked_for_among_several() -> None:
    text = """
    __noinline__ __device__ float deep(const float* x, int n) {
        float v[32]; for (int i = 0; i < n; ++i) v[i % 32] = x[i]; return v[n % 32];
    }
    extern "C" __global__ void first(float* y) { __shared__ float a[16]; a[threadIdx.x] = 1; y[0] = a[3]; }
    extern "C" __global__ void second(float* y, int n) {
        __shared__ float a[32]; a[threadIdx.x] = deep(y, n); y[0] = a[3];
    }
    """
    assert compiled(text, "first").smem_static_bytes == 16 * 4
    assert compiled(text, "second").smem_static_bytes == 32 * 4
    assert ptxas_figures(compiled(text, "first").log, "third") is None


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize(
    ("name", "dtype", "option"), [("picked", "float32", "weight_dtype"), ("quantised", "bfloat16", "y_dtype")]
)
def test_arguments_of_three_dtypes_and_a_structure_by_value_compile(name: str, dtype: str, option: str, arch: str) -> None:
    kernel = load_kernel(str(Path(__file__).parents[1] / name))
    for text in kernel.choices[option]:
        workload = kernel.workload("cuda", f"rows=64,cols=96,dtype={dtype},{option}={text}")
        source = render(kernel, "cuda", Genome.of({"unroll": 2}), workload, arch)
        assert compile_source(source, arch, Path()).registers is not None


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_each_dtype_has_a_type_in_cuda(arch: str, tmp_path: Path) -> None:
    kernel = load_kernel(str(Path(__file__).parents[1] / "picked"))
    headers = "".join(f"#include <cuda_{name}.h>\n" for name in ("fp16", "bf16", "fp8"))
    for dtype, size in ELEMENT_BYTES.items():
        told = (replace(a, dtype=dtype) if a.name == "weight" else a for a in kernel.arguments)
        types = types_of(replace(kernel, arguments=tuple(told)), find_language("cuda_cpp"), kernel.example("cuda"))
        text = f"{headers}static_assert(sizeof({types['weight']}) == {size});\n{PLAIN}"
        assert compiled(text, arch=arch).registers is not None
