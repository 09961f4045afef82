"""The CUDA target on a GPU: loading, launching, replaying, and what is said when a candidate goes wrong."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from evo.errors import DeviceError, LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch
from evo.problem.render import Source
from evo.targets import compile_source, find_target
from evo.targets._cuda_loaded import CudaLoaded
from evo.targets._cuda_session import CudaSession
from evo.targets.cuda import arch_limits
from tests.ended import run_python

pytestmark = pytest.mark.gpu

CUDA = find_target("cuda")

SCALE = """
extern "C" __global__ void scale(const float* x, const float* bias, float* y, long long n, float by) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * by + (bias ? bias[i] : 0.0f);
}
"""

REVERSE = """
extern "C" __global__ void reverse(const float* x, float* y, long long n) {
    extern __shared__ float held[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}
"""

CLUSTER = """
extern "C" __global__ void ranks(long long* y) {
    unsigned size, rank;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) y[blockIdx.x] = 100ll * size + rank;
}
"""


ALIGNED = """
extern "C" __global__ void scale4(const float4* x, float4* y, long long n) {
    if (threadIdx.x < n / 4) { float4 v = x[threadIdx.x]; y[threadIdx.x] = {2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w}; }
}
extern "C" __global__ void scale4_unaligned(const float* x, float* y, long long n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = 3 * x[i];
}
"""

LATE = """
extern "C" __global__ void late(float* x, float value) {
    asm volatile("griddepcontrol.launch_dependents;");
    for (long long begin = clock64(); clock64() < begin + 20000000;) {}
    x[threadIdx.x] = value;
}
"""

READER = """
extern "C" __global__ void reader(const float* x, float* y) {
    WAIT
    y[threadIdx.x] = *(const volatile float*)(x + threadIdx.x);
}
"""


@pytest.fixture(scope="module")
def session() -> CudaSession:
    opened = CUDA.open()
    assert isinstance(opened, CudaSession)
    return opened


def build(text: str, entry: str, arch: str | None = None) -> Binary:
    source = Source(text=text, target="cuda", language="cuda_cpp", entry=entry)
    return compile_source(source, arch or CUDA.device().arch, Path())


def load(session: CudaSession, text: str, entry: str, arch: str | None = None) -> CudaLoaded:
    return session.load(build(text, entry, arch), entry)


def blocks(count: int, threads: int = 256, smem_bytes: int = 0, cluster: int = 1) -> Launch:
    return Launch(grid=(count, 1, 1), block=(threads, 1, 1), smem_bytes=smem_bytes, cluster=cluster)


def test_the_device_is_described_with_its_own_limits(session: CudaSession) -> None:
    info, props = CUDA.device(), torch.cuda.get_device_properties(0)
    assert info == session.info
    assert (info.name, info.arch) == (props.name, f"sm_{props.major}{props.minor}")
    limits = CUDA.limits(info.arch)
    assert (limits.multiprocessors, limits.cache_bytes) == (props.multi_processor_count, props.L2_cache_size)
    with suppress(DeviceError):  # not listed
        listed = arch_limits(info.arch)
        assert limits == replace(listed, multiprocessors=limits.multiprocessors, cache_bytes=limits.cache_bytes)


def test_ptx_of_an_older_architecture_has_this_gpus_size_and_only_the_memory_it_was_promised() -> None:
    limits = CUDA.limits("compute_80")
    own = CUDA.limits(CUDA.device().arch)
    assert limits.multiprocessors == own.multiprocessors
    assert limits.smem_bytes_per_block == min(own.smem_bytes_per_block, 163 * 1024)


def test_a_candidate_is_launched_with_tensors_numbers_and_nothing(session: CudaSession) -> None:
    loaded = load(session, SCALE, "scale")
    n = 100_003
    x, bias, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
    loaded((x, bias, y, n, 3.0), blocks(-(-n // 256)))
    session.synchronize()
    torch.testing.assert_close(y, x * 3 + bias)
    last = y[-1].item()
    loaded((x, None, y, n - 1, 2.0), blocks(-(-n // 256)))
    session.synchronize()
    torch.testing.assert_close(y[:-1], x[:-1] * 2)
    assert y[-1].item() == last
    loaded.close()
    loaded.close()


def test_ptx_is_compiled_by_the_driver_and_gives_the_same_results(session: CudaSession) -> None:
    loaded = load(session, SCALE, "scale", "compute_80")
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    loaded((x, None, y, 1000, 2.0), blocks(4))
    session.synchronize()
    torch.testing.assert_close(y, x * 2)


def test_shared_memory_beyond_48_kb_is_opted_into_up_to_what_the_gpu_has(session: CudaSession) -> None:
    loaded = load(session, REVERSE, "reverse")
    for size in (1_000, 99 * 256, 20_000):  # elements of 4 bytes: 99 KB is what every GPU here has
        x, y = torch.randn(size, device="cuda"), torch.zeros(size, device="cuda")
        loaded((x, y, size), blocks(1, 1024, 4 * size))
        session.synchronize()
        assert torch.equal(y, x.flip(0))
    most = session.limits.smem_bytes_per_block
    with pytest.raises(LaunchError, match=f"asks for {most + 4:,} bytes of shared memory.*at most {most:,}"):
        loaded((x, y, 8), blocks(1, 32, most + 4))
    loaded((x, y, 8), blocks(1, 32, most))
    session.synchronize()


@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_clusters_are_launched(session: CudaSession, cluster: int) -> None:
    if session.limits.capability < 90:
        pytest.skip("clusters need compute capability 9.0")
    loaded = load(session, CLUSTER, "ranks")
    y = torch.zeros(32, dtype=torch.int64, device="cuda")
    for _ in range(2):
        loaded((y,), blocks(32, 32, 0, cluster))
    session.synchronize()
    assert y.tolist() == [100 * cluster + i % cluster for i in range(32)]


def test_addresses_that_are_not_aligned_go_to_the_entry_point_for_them(session: CudaSession) -> None:
    loaded = load(session, ALIGNED, "scale4")
    launch = replace(blocks(1), alignment=16)
    x, y = torch.randn(68, device="cuda"), torch.zeros(68, device="cuda")
    loaded((x, y, 64), launch)
    session.synchronize()
    assert torch.equal(y[:64], 2 * x[:64])
    for source, result in ((x[1:], y), (x, y[3:]), (x[2:], y[2:])):
        y.zero_()
        loaded((source, result, 64), launch)
        session.synchronize()
        assert torch.equal(result[:64], 3 * source[:64])
    without = load(session, ALIGNED.replace("_unaligned", "_other"), "scale4")
    with pytest.raises(LaunchError, match=r"not a multiple of 16 bytes.*no entry point 'scale4_unaligned'"):
        without((x[1:], x, 64), launch)


@pytest.mark.parametrize("captured", [False, True])
def test_a_programmatic_launch_starts_early_and_can_wait(session: CudaSession, captured: bool) -> None:
    if session.limits.capability < 90:
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    late = load(session, LATE, "late")
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    early, patient = (load(session, READER.replace("WAIT", w), "reader") for w in ("", wait))
    x = torch.zeros(32, device="cuda")

    def seen_by(reader: CudaLoaded, programmatic: bool) -> float:
        y = torch.full_like(x, -1.0)

        def produce() -> None:
            late((x, 7.0), blocks(1, 32))

        def read() -> None:
            reader((x, y), replace(blocks(1, 32), programmatic=programmatic))

        x.zero_()
        session.synchronize()
        if captured:
            replay = session.record([produce, read])
            x.zero_()
            replay.run_us()
            replay.close()
        else:
            produce()
            read()
        session.synchronize()
        assert len(y.unique()) == 1
        return float(y[0])

    assert seen_by(early, programmatic=False) == 7.0
    assert seen_by(patient, programmatic=True) == 7.0
    assert seen_by(early, programmatic=True) == 0.0  # which is what waiting is for


def test_a_replay_repeats_calls_of_candidates_and_of_torch_in_order(session: CudaSession) -> None:
    loaded = load(session, SCALE, "scale")
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")

    def double() -> None:
        loaded((x, None, x, 1000, 2.0), blocks(4))

    replay = session.record([double, lambda: y.add_(x), double])
    x.fill_(1.0)
    y.zero_()
    assert replay.run_us() > 0
    session.synchronize()
    assert replay.calls == 3
    assert (x[0].item(), y[0].item()) == (4.0, 2.0)
    replay.run_us()
    assert (x[0].item(), y[0].item()) == (16.0, 10.0)
    replay.close()


def test_what_replayed_calls_return_is_kept_until_the_replay_is_closed(session: CudaSession) -> None:
    x = torch.randn(1 << 20, device="cuda")
    made: list[int] = []

    def call(by: int) -> torch.Tensor:
        out = x * by
        made.append(out.data_ptr())
        return out

    replay = session.record([partial(call, by) for by in range(4)])
    assert len(set(made[-4:])) == 4  # each output has memory of its own
    held = torch.cuda.memory_allocated()
    gc.collect()
    assert torch.cuda.memory_allocated() == held
    replay.run_us()
    replay.close()
    assert torch.cuda.memory_allocated() <= held - 4 * x.nbytes


@pytest.mark.alone
def test_a_replay_finds_the_memory_that_the_allocator_has_kept(session: CudaSession) -> None:
    """Which a recording cannot draw on: a process that has timed much else keeps most of the GPU."""
    torch.cuda.empty_cache()
    source = torch.ones(512 << 20, dtype=torch.uint8, device="cuda")
    kept = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda")
    assert not CUDA.has_room(2 * source.nbytes)
    del kept
    assert CUDA.has_room(2 * source.nbytes)
    session.record([source.neg, source.neg]).close()
    torch.cuda.empty_cache()


def test_one_call_that_is_repeated_finds_the_memory_of_its_result_again(session: CudaSession) -> None:
    x = torch.randn(1 << 20, device="cuda")
    made: list[int] = []

    def call() -> torch.Tensor:
        out = x * 2
        made.append(out.data_ptr())
        return out

    before = torch.cuda.memory_allocated()
    replay = session.record([call] * 4)
    assert len(set(made[-4:])) == 1
    assert torch.cuda.memory_allocated() >= before + x.nbytes  # nobody else is given what the graph writes to
    replay.run_us()
    replay.close()
    assert torch.cuda.memory_allocated() < before + x.nbytes


@pytest.mark.alone
def test_a_replay_is_timed_on_the_gpu_from_node_to_node(session: CudaSession) -> None:
    x = torch.randn(1 << 26, device="cuda")
    y = torch.empty_like(x)
    few, many = session.record([lambda: y.copy_(x)] * 2), session.record([lambda: y.copy_(x)] * 20)
    copied = min(many.run_us() for _ in range(5))
    bytes_per_s = 2 * x.nbytes / (copied * 1e-6)
    assert 1e11 < bytes_per_s < 2e13  # 0.1 to 20 TB/s: microseconds a call, and neither of a run nor of nothing
    assert min(few.run_us() for _ in range(5)) == pytest.approx(copied, rel=0.3)
    few.close()
    many.close()


@pytest.mark.alone
@pytest.mark.parametrize("elements", [1 << 12, 1 << 26])
def test_an_estimate_is_of_the_gpus_time_also_where_the_host_takes_longer(session: CudaSession, elements: int) -> None:
    x = torch.randn(elements, device="cuda")
    y = torch.empty_like(x)
    replay = session.record([lambda: y.copy_(x)] * 20)
    replayed = min(replay.run_us() for _ in range(5))
    replay.close()
    estimated = min(session.estimate_us(lambda: y.copy_(x)) for _ in range(5))
    assert 0.5 * replayed < estimated < 2 * replayed + 3.0


def test_a_launch_that_fails_in_a_recording_is_reported_and_leaves_the_session_usable(session: CudaSession) -> None:
    loaded = load(session, SCALE, "scale")
    x, y = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    good, bad = blocks(1), blocks(1, 2048)
    values = (x, None, y, 256, 2.0)
    for calls in ([bad], [good, bad]):
        with pytest.raises(LaunchError, match=r"block \(2048, 1, 1\).*CUDA_ERROR_INVALID_VALUE"):
            session.record([lambda launch=launch: loaded(values, launch) for launch in calls])  # type: ignore[misc]
    with pytest.raises(LaunchError, match="preparing a replay"):
        session.record([lambda: x.sum().item()])  # which synchronises
    replay = session.record([lambda: loaded(values, good)])
    replay.run_us()
    assert y.eq(2.0).all()
    replay.close()


def test_arguments_of_a_wrong_number_width_or_place_are_refused_before_the_driver_reads_them(session: CudaSession) -> None:
    loaded = load(session, SCALE, "scale")
    x = torch.ones(256, device="cuda")
    for count in (0, 4):
        with pytest.raises(LaunchError, match=f"takes 5 arguments, got {count}"):
            loaded((x, None, x, 256, 2.0)[:count], blocks(1))
    with pytest.raises(LaunchError, match="parameter 4 of 'scale' has 4 bytes; an integer is passed as 8"):
        loaded((x, None, x, 256, 2), blocks(1))
    with pytest.raises(LaunchError, match="argument 1 of 'scale' is on cpu, not on the GPU"):
        loaded((x, torch.ones(256), x, 256, 2.0), blocks(1))


def test_code_that_does_not_load_says_why(session: CudaSession) -> None:
    with pytest.raises(LaunchError, match="'k' does not load: CUDA_ERROR"):
        session.load(Binary(code=b"\x7fELF" + bytes(100), code_hash=""), "k")
    with pytest.raises(LaunchError, match="'k' does not load: CUDA_ERROR"):
        session.load(Binary(code=b".version 99.0\n.target sm_80\n.address_size 64\n", code_hash=""), "k")
    with pytest.raises(LaunchError, match=r"'other'.*CUDA_ERROR_NOT_FOUND"):
        session.load(build(SCALE, "scale"), "other")


BROKEN = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "y[1ll << 40] = 1.0f;",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "*(volatile double*)((char*)y + 4) = 1.0;",
}


@pytest.mark.parametrize("way", ["direct", "replay"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_candidate_that_breaks_the_context_is_reported_by_the_name_cuda_gives_it(name: str, way: str) -> None:
    # In a process of its own: the context does not survive.
    program = f"""
import torch
from pathlib import Path
from evo.errors import LaunchError
from evo.problem.kernel import Launch
from evo.problem.render import Source
from evo.targets import find_target
from evo.targets import compile_source
cuda = find_target("cuda")
text = 'extern "C" __global__ void k(float* y) {{ {BROKEN[name]} }}'
session = cuda.open()
binary = compile_source(Source(text=text, target="cuda", language="cuda_cpp", entry="k"), session.info.arch, Path())
loaded = session.load(binary, "k")
y = torch.zeros(16, device="cuda")
launch = Launch(grid=(1, 1, 1), block=(1, 1, 1))
for attempt in range(2):
    try:
        if {way!r} == "direct":
            loaded((y,), launch)
            session.synchronize()
        else:
            session.record([lambda: loaded((y,), launch)]).run_us()
    except LaunchError as error:
        print(error)
"""
    done = run_python(Path(), "-c", program, timeout_s=120)
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all(f"{name} (7" in line for line in said), said


def test_work_is_repeatable_after_all_that_was_is_gone() -> None:
    session = CUDA.open()
    for _ in range(3):
        found = session.repeatable(lambda: torch.full((3,), 7.0, device="cuda"))()
        assert found.tolist() == [7.0, 7.0, 7.0]
        del found
        gc.collect()
