"""CPU candidates are compiled by the system's compiler, loaded into this process and run."""

from __future__ import annotations

import gc
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evo.errors import DeviceError, LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch
from evo.problem.render import Source
from evo.runtime.cpu import share_openmp_runtime
from evo.targets import compile_source, cpu, find_target
from evo.targets.languages.cpp import Cpp

CPU = find_target("cpu")
NOWHERE = Launch(grid=(1, 1, 1), block=(1, 1, 1))

SCALE = """
extern "C" void scale(const float* x, const float* bias, float* y, long long n, float by) {
    #pragma omp parallel for
    for (long long i = 0; i < n; ++i) y[i] = x[i] * by + (bias ? bias[i] : 0.0f);
}
"""

Compile = Callable[..., Binary]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    def compile_text(text: str, entry: str = "scale", arch: str = "native", flags: tuple[str, ...] = ()) -> Binary:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        source = Source(text=text, target="cpu", language="cpp", entry=entry, flags=flags)
        return compile_source(source, arch, folder)

    return compile_text


def test_a_candidate_is_loaded_beside_one_of_the_same_name_and_computes_what_it_says(compiled: Compile) -> None:
    session, before = CPU.open(), mapped()
    twice = session.load(compiled(SCALE), "scale")
    minus = session.load(compiled(SCALE.replace("x[i] * by", "x[i] - by")), "scale")
    x, bias, y = torch.randn(1000), torch.randn(1000), torch.empty(1000)
    twice((x, bias, y, 1000, 3.0), NOWHERE)
    torch.testing.assert_close(y, x * 3 + bias)
    last = y[999].item()
    minus((x, None, y, 999, 2.0), NOWHERE)
    torch.testing.assert_close(y[:999], x[:999] - 2)
    assert y[999].item() == last
    assert mapped() > before
    for loaded in (twice, twice, minus):
        loaded.close()
    assert mapped() == before


def mapped() -> int:
    return sum("evo-" in line and ".so" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_integers_are_64_bits_wide_and_floats_32(compiled: Compile) -> None:
    text = 'extern "C" void keep(long long n, float f, long long* a, float* b) { *a = n; *b = f; }'
    loaded = CPU.open().load(compiled(text, "keep"), "keep")
    a, b = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    loaded((2**40 + 1, 0.1, a, b), NOWHERE)
    assert a.item() == 2**40 + 1
    assert b.item() == torch.tensor(0.1).item()


def test_candidates_run_on_the_threads_of_torch(compiled: Compile) -> None:
    text = """
    extern "C" int omp_get_max_threads();
    extern "C" int omp_get_thread_num();
    extern "C" void count(long long* most, long long* seen) {
        *most = omp_get_max_threads();
        #pragma omp parallel
        { seen[omp_get_thread_num()] = 1; }
    }
    """
    loaded = CPU.open().load(compiled(text, "count"), "count")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            most, seen = torch.zeros(1, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
            loaded((most, seen), NOWHERE)
            assert (most.item(), seen.sum().item()) == (threads, threads)
    finally:
        torch.set_num_threads(before)
    runtimes = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libomp" in line or "libiomp" in line
    }
    assert runtimes == {str(Path(share_openmp_runtime()).resolve())}


def test_mathematical_functions_and_the_standard_library_are_there(compiled: Compile) -> None:
    text = """
    #include <cmath>
    #include <vector>
    extern "C" void scale(const float* x, float* y, long long n) {
        std::vector<double> sums(n);
        for (long long i = 0; i < n; ++i) y[i] = std::exp(x[i]) + std::erf(x[i]) + sums[i];
    }
    """
    loaded = CPU.open().load(compiled(text), "scale")
    x, y = torch.randn(100), torch.empty(100)
    loaded((x, y, 100), NOWHERE)
    torch.testing.assert_close(y, x.exp() + x.erf())


def test_a_replay_makes_the_calls_in_order_and_keeps_what_they_return() -> None:
    seen: list[int] = []
    alive: list[torch.Tensor] = []

    def call(i: int) -> Callable[[], object]:
        def run() -> torch.Tensor:
            seen.append(i)
            made = torch.full((4,), float(i))
            alive.append(made)
            return made

        return run

    replay = CPU.open().record([call(i) for i in range(5)])
    assert replay.calls == 5
    assert replay.run_us() > 0
    assert seen == [0, 1, 2, 3, 4]
    addresses = [made.data_ptr() for made in alive]
    alive.clear()
    gc.collect()
    assert len({torch.empty(4).data_ptr() for _ in range(20)} & set(addresses)) == 0
    replay.close()


def test_one_call_that_is_repeated_finds_the_memory_of_its_result_again() -> None:
    places = set()

    def call() -> torch.Tensor:
        made = torch.full((1 << 12,), 1.0)
        places.add(made.data_ptr())
        return made

    CPU.open().record([call] * 40).run_us()
    assert len(places) <= 2


def test_flags_of_a_candidate_come_after_the_defaults(compiled: Compile) -> None:
    text = SCALE + "\n#ifdef __OPTIMIZE__\n#error optimised\n#endif\n#if WIDTH != 4\n#error no width\n#endif\n"
    assert compiled(text, flags=("-O0", "-DWIDTH=4", "-fno-tree-vectorize", "--param=max-unroll-times=4")).code


def test_what_does_not_load_is_the_candidates_fault_and_says_why(compiled: Compile) -> None:
    text = 'extern "C" float elsewhere(float);\n' + SCALE.replace("x[i] * by", "elsewhere(x[i])")
    with pytest.raises(LaunchError, match="undefined symbol: elsewhere"):
        CPU.open().load(compiled(text), "scale")
    with pytest.raises(LaunchError, match="no symbol 'other': declare extern \"C\" void other"):
        CPU.open().load(compiled(SCALE), "other")
    with pytest.raises(LaunchError, match="'scale' does not load"):
        CPU.open().load(Binary(code=b"not a library", code_hash=""), "scale")


@pytest.mark.parametrize("arch", ["sm_89", "native; true", ""])
def test_an_unknown_architecture_is_refused(compiled: Compile, arch: str) -> None:
    with pytest.raises(DeviceError, match="knows no CPU architecture"):
        CPU.limits(arch)
    with pytest.raises(DeviceError, match="knows no CPU architecture"):
        compiled(SCALE, arch=arch)


def test_a_machine_without_a_compiler_says_how_to_get_one() -> None:
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler found.*looked for no-such-compiler.*apt install g\+\+"):
        Cpp(compiler="no-such-compiler").compiler()


def test_a_virtual_machine_is_not_taken_to_own_its_hosts_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_reported_cache_bytes", lambda cores: 480 << 20)
    for virtual, owned in ((True, 32 << 20), (False, 480 << 20)):
        monkeypatch.setattr(cpu, "_is_virtual", lambda virtual=virtual: virtual)
        assert cpu._cache_bytes(frozenset({0, 1})) == owned


def test_warnings_are_kept_as_the_log(compiled: Compile) -> None:
    binary = compiled(SCALE.replace("{\n", "{ int unused;\n", 1), flags=("-Wunused",))
    assert "unused variable" in binary.log
    assert compiled(SCALE).log == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64")
@pytest.mark.parametrize(("arch", "flag"), [("x86-64", ""), ("x86-64-v4", "avx512bw"), ("sapphirerapids", "amx_tile")])
def test_code_with_instructions_that_this_cpu_lacks_does_not_run_here(arch: str, flag: str) -> None:
    """`flag`: as Linux spells it; empty where there is nothing to lack."""
    has = not flag or flag in Path("/proc/cpuinfo").read_text().split()
    reason = CPU.runs(arch)
    if has:
        assert not flag or flag.upper() not in reason
        assert flag or reason == ""
    else:
        assert flag.upper() in reason
        assert reason.endswith(f"; code for {arch} does not run here")


def test_a_disk_that_is_full_is_no_fault_of_the_candidate(compiled: Compile) -> None:
    binary, session = compiled(SCALE), CPU.open()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # no file may grow further; Python ignores the signal
    try:
        with pytest.raises(DeviceError) as caught:
            session.load(binary, "scale")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value).startswith("cannot write a temporary file in ")
    assert str(caught.value).endswith(": free space or set TMPDIR")
