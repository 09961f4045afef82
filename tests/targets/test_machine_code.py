"""Equal machine code has an equal hash; different code has not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from evo.problem.render import Source
from evo.targets import compile_source
from evo.targets._machine_code import has_fence

GPU_TEXT = """
__constant__ float table[4] = {1, 2, 3, 4};
extern "C" __global__ void scale(const float* x, float* y, long long n) {
    __shared__ float part[64];
    part[threadIdx.x % 64] = table[threadIdx.x % 4];
    __syncthreads();
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) y[i] = x[i] * part[(threadIdx.x + 1) % 64];
}
"""

CPU_TEXT = """
static const float table[4] = {1.5f, 2.5f, 3.5f, 4.5f};
extern "C" void scale(const float* x, float* y, long long n) {
    for (long long i = 0; i < n; ++i) y[i] = x[i] * table[i % 4];
}
"""


@cache
def gpu_hash(text: str = GPU_TEXT, arch: str = "sm_89", *flags: str) -> str:
    source = Source(text=text, target="cuda", language="cuda_cpp", entry="scale", flags=flags)
    return compile_source(source, arch, Path()).code_hash


def cpu_hash(folder: Path, text: str = CPU_TEXT, *flags: str) -> str:
    folder.mkdir()
    source = Source(text=text, target="cpu", language="cpp", entry="scale", flags=flags)
    return compile_source(source, "native", folder).code_hash


@pytest.mark.parametrize("arch", ["sm_89", "sm_120", "compute_89"])
def test_comments_and_spacing_leave_the_hash_of_gpu_code(arch: str) -> None:
    commented = "// another candidate\n" + GPU_TEXT.replace("    ", "\t /* again */ ")
    assert gpu_hash(commented, arch) == gpu_hash(GPU_TEXT, arch)


def test_line_tables_names_and_launch_bounds_leave_the_hash_of_gpu_code() -> None:
    assert gpu_hash(GPU_TEXT, "sm_89", "-lineinfo") == gpu_hash()
    assert gpu_hash(GPU_TEXT.replace("table", "lut")) == gpu_hash()
    assert gpu_hash(GPU_TEXT.replace("__global__", "__global__ __launch_bounds__(256)")) == gpu_hash()
    assert gpu_hash(GPU_TEXT, "compute_89", "-lineinfo") == gpu_hash(GPU_TEXT, "compute_89")


@pytest.mark.parametrize(
    ("found", "changed"),
    [
        ("y[i] = x[i] *", "y[i] = x[i] +"),  # instructions
        ("{1, 2, 3, 4}", "{1, 2, 3, 5}"),  # constant data
        ("part[64]", "part[128]"),  # static shared memory
    ],
)
@pytest.mark.parametrize("arch", ["sm_89", "compute_89"])
def test_other_code_data_or_shared_memory_changes_the_hash_of_gpu_code(found: str, changed: str, arch: str) -> None:
    assert found in GPU_TEXT
    assert gpu_hash(GPU_TEXT.replace(found, changed), arch) != gpu_hash(GPU_TEXT, arch)


def test_a_cluster_shape_changes_the_hash_though_the_instructions_are_equal() -> None:
    clustered = GPU_TEXT.replace("__global__", "__global__ __cluster_dims__(2)")
    larger = GPU_TEXT.replace("__global__", "__global__ __cluster_dims__(4)")
    assert len({gpu_hash(t, "sm_90a") for t in (GPU_TEXT, clustered, larger)}) == 3


def test_calls_of_different_functions_differ_though_their_instructions_have_no_addresses_yet() -> None:
    text = """
    __device__ float pi = {0}, tau = {1};
    extern "C" __global__ void scale(float* y) {{ y[threadIdx.x] = {2}; {3} = 1.0f; }}
    """
    one = gpu_hash(text.format("3.0f", "6.0f", "pi", "tau"))
    other = gpu_hash(text.format("3.0f", "6.0f", "tau", "pi"))
    assert one != other


def test_a_shared_librarys_hash_is_of_its_code_data_and_flags_and_not_of_comments(tmp_path: Path) -> None:
    hashes = [
        cpu_hash(tmp_path / "plain"),
        cpu_hash(tmp_path / "comment", "// another candidate\n" + CPU_TEXT.replace("    ", "  /* again */  ")),
        cpu_hash(tmp_path / "code", CPU_TEXT.replace("x[i] *", "x[i] +")),
        cpu_hash(tmp_path / "data", CPU_TEXT.replace("4.5f", "5.5f")),
        cpu_hash(tmp_path / "flags", CPU_TEXT, "-O0"),
    ]
    assert hashes[0] == hashes[1]
    assert len({*hashes}) == 4


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "compute_90"])
@pytest.mark.parametrize(("fence", "has"), [("", False), ("__threadfence_block();", False), ("__threadfence();", True)])
def test_a_fence_for_other_blocks_is_seen_in_the_code(arch: str, fence: str, has: bool) -> None:
    text = f'extern "C" __global__ void twice(float* p, int* n) {{ *p = 1; {fence} atomicAdd(n, 1); }}'
    source = Source(text=text, target="cuda", language="cuda_cpp", entry="twice")
    assert has_fence(compile_source(source, arch, Path()).code) == has
