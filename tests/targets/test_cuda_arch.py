"""What architectures offer and how many blocks fit, against NVIDIA's own header and the programming guide."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cuda.pathfinder import find_nvidia_header_directory

from evo.errors import DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Launch
from evo.problem.render import Source
from evo.targets import compile_source, find_language, find_target
from evo.targets.cuda import arch_limits, resident_blocks

CUDA, CUDA_CPP = find_target("cuda"), find_language("cuda_cpp")
KNOWN = ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"]

# NVIDIA's calculator, which ships as a header for the host: one block count for every row of numbers.
ORACLE = """
#include <cuda_occupancy.h>
extern "C" void oracle(const long long* rows, long long* blocks, long long n) {
    for (long long i = 0; i < n; ++i) {
        const long long* r = rows + 13 * i;
        cudaOccDeviceProp p = {};
        p.computeMajor = r[0]; p.computeMinor = r[1]; p.maxThreadsPerBlock = r[2];
        p.maxThreadsPerMultiprocessor = r[3]; p.regsPerBlock = r[4]; p.regsPerMultiprocessor = r[4];
        p.warpSize = 32; p.sharedMemPerBlock = 48 * 1024; p.sharedMemPerMultiprocessor = r[5]; p.numSms = 1;
        p.sharedMemPerBlockOptin = r[6]; p.reservedSharedMemPerBlock = r[7];
        cudaOccFuncAttributes a = {};
        a.maxThreadsPerBlock = 1024; a.numRegs = r[8]; a.sharedSizeBytes = r[9];
        a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        a.maxDynamicSharedSizeBytes = r[6]; a.numBlockBarriers = r[12];
        cudaOccDeviceState s = {}; s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult out = {};
        cudaOccError e = cudaOccMaxActiveBlocksPerMultiprocessor(&out, &p, &a, &s, r[11], r[10]);
        blocks[i] = e == CUDA_OCC_SUCCESS ? out.activeBlocksPerMultiprocessor : -1 - e;
    }
}
"""


def launch(threads: int, smem_bytes: int = 0) -> Launch:
    return Launch(grid=(1, 1, 1), block=(threads, 1, 1), smem_bytes=smem_bytes)


def test_blocks_agree_with_nvidias_own_calculator_on_random_kernels(tmp_path: Path) -> None:
    cpu = find_target("cpu")
    source = Source(
        text=ORACLE,
        target="cpu",
        language="cpp",
        entry="oracle",
        flags=("-Wno-unused-function",),
        include_dirs=(str(find_nvidia_header_directory("cudart")),),
    )
    oracle = cpu.open().load(compile_source(source, "native", tmp_path), "oracle")
    rng = random.Random(0)
    rows, mine = [], []
    for arch in KNOWN:
        limits = arch_limits(arch)
        for _ in range(400):
            threads = rng.choice([32, 64, 96, 100, 128, 160, 192, 256, 384, 512, 640, 768, 1024, rng.randint(1, 1024)])
            registers = rng.choice([rng.randint(1, 255), 16, 32, 40, 64, 80, 96, 128, 168, 255])
            static = rng.choice([0, 0, 256, 4096, rng.randint(0, 48 * 1024)])
            barriers = rng.choice([0, 1, 1, 2, 3, 4, 8, 16])
            room = limits.smem_bytes_per_block - static
            dynamic = rng.choice([0, rng.randint(0, room), room])
            rows.append(
                [
                    limits.capability // 10,
                    limits.capability % 10,
                    limits.threads_per_block,
                    limits.threads_per_multiprocessor,
                    limits.registers_per_multiprocessor,
                    limits.smem_bytes_per_multiprocessor,
                    limits.smem_bytes_per_block,
                    limits.smem_bytes_reserved_per_block,
                    registers,
                    static,
                    dynamic,
                    threads,
                    barriers,
                ]
            )
            mine.append(resident_blocks(registers, static, launch(threads, dynamic), limits, barriers))
    table, blocks = torch.tensor(rows, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
    oracle((table, blocks, len(rows)), launch(1))
    wrong = [(r, int(b), m) for r, b, m in zip(rows, blocks.tolist(), mine, strict=True) if b != m]
    assert not wrong, wrong[:5]
    assert len(set(mine)) > 10


def test_occupancy_is_a_share_of_the_threads_and_unknown_for_ptx() -> None:
    limits = arch_limits("sm_89")
    binary = Binary(code=b"", code_hash="", registers=48, smem_static_bytes=0)
    assert CUDA_CPP.occupancy(binary, launch(256), limits) == pytest.approx(5 * 256 / 1536)
    assert CUDA_CPP.occupancy(Binary(code=b"", code_hash=""), launch(256), limits) is None


def test_named_barriers_limit_the_blocks_of_hopper() -> None:
    text = """
    extern "C" __global__ void pairs(float* y) {
        asm volatile("bar.sync %0, 64;" :: "r"(threadIdx.x / 64 + BASE));
        y[threadIdx.x] = 1.0f;
    }
    """
    shares = {}
    for arch in ("sm_89", "sm_90"):
        source = Source(text=text, target="cuda", language="cuda_cpp", entry="pairs", flags=("-DBASE=1",))
        shares[arch] = CUDA_CPP.occupancy(compile_source(source, arch, Path()), launch(128), arch_limits(arch))
    assert shares == {"sm_89": 1.0, "sm_90": 4 * 128 / 2048}


@pytest.mark.parametrize(
    ("arch", "threads", "blocks", "smem_kb"), [("compute_89", 1536, 24, 100), ("sm_90a", 2048, 32, 228)]
)
def test_limits_are_those_of_the_programming_guide(arch: str, threads: int, blocks: int, smem_kb: int) -> None:
    limits = arch_limits(arch)
    assert (limits.threads_per_multiprocessor, limits.blocks_per_multiprocessor) == (threads, blocks)
    assert limits.smem_bytes_per_multiprocessor == smem_kb * 1024
    assert limits.smem_bytes_per_block == (smem_kb - 1) * 1024
    assert limits.cache_bytes > 1 << 20


@pytest.mark.parametrize(("arch", "said"), [("sm_61", r"sm_89 \(L4\)"), ("rdna3", "write sm_89"), ("", "write sm_89")])
def test_an_architecture_without_known_limits_is_refused_with_those_there_are(arch: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        arch_limits(arch)
