"""What every target promises, as far as it can be seen without its device. A new target file is picked up here;
its source for a kernel that doubles numbers goes into SOURCES."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from evo.errors import CompileError, DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Launch
from evo.problem.loading import kernel_names, load_kernel
from evo.problem.render import Source
from evo.targets import Target, cached_build, find_target, target_names

SOURCES = {
    "cuda": 'extern "C" __global__ void twice(float* y, long long n) { if (threadIdx.x < n) y[threadIdx.x] *= 2; }',
    "cpu": 'extern "C" void twice(float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] *= 2; }',
}
ARCHES = {"cuda": "sm_89", "cpu": "native"}
LAUNCH = Launch(grid=(1, 1, 1), block=(64, 1, 1))


@pytest.fixture(params=target_names())
def target(request: pytest.FixtureRequest) -> Target:
    return find_target(request.param)


def source_of(target: Target, text: str | None = None) -> Source:
    return Source(text=SOURCES[target.name] if text is None else text, target=target.name, entry="twice")


def built(target: Target, folder: Path, text: str | None = None) -> Binary:
    folder.mkdir(exist_ok=True)
    return target.compile(source_of(target, text), ARCHES[target.name], folder)


def test_a_target_is_found_by_its_file_and_templates_are_named_after_it_and_its_language(target: Target) -> None:
    assert target is find_target(target.name)
    kernels = [k for k in map(load_kernel, kernel_names()) if target.name in k.dtypes]
    assert kernels
    for kernel in kernels:
        assert [p.name for p in kernel.folder.glob(f"{target.name}.*")] == [f"{target.name}.{target.language}.j2"]


def test_a_device_is_described_or_its_absence_explained_with_a_remedy(target: Target) -> None:
    try:
        info = target.device()
    except DeviceError:
        with pytest.raises(DeviceError, match=r"no CUDA GPU answers.*--target cpu,.* evo check KERNEL --arch|install "):
            target.device()
    else:
        assert next(iter(target.devices().values())) == info.name
        assert target.limits(info.arch).arch == info.arch


def test_an_unknown_architecture_has_no_limits_and_nobody_says_that_its_code_runs(target: Target) -> None:
    for ask in (target.limits, target.runs):
        with pytest.raises(DeviceError, match="z80000"):
            ask("z80000")


def test_code_for_the_device_present_runs_here(target: Target) -> None:
    try:
        arch = target.device().arch
    except DeviceError:
        with pytest.raises(DeviceError):
            target.runs(ARCHES[target.name])
    else:
        assert target.runs(arch) == ""


def test_limits_are_known_without_the_device(target: Target) -> None:
    limits = target.limits(ARCHES[target.name])
    assert limits.arch == ARCHES[target.name]
    assert limits.multiprocessors >= 1
    assert limits.cache_bytes > 0


def test_a_compiler_has_a_name_with_a_version_that_stays(target: Target) -> None:
    assert any(c.isdigit() for c in target.compiler())
    assert target.compiler() == target.compiler()


def test_machine_code_is_equal_for_equal_code_and_not_for_another_operator(target: Target, tmp_path: Path) -> None:
    text = SOURCES[target.name]
    plain = built(target, tmp_path / "plain")
    commented = built(target, tmp_path / "commented", f"// a comment\n{text}")
    thrice = built(target, tmp_path / "thrice", text.replace("*= 2", "*= 3"))
    assert len(plain.code_hash) == 64
    assert commented.code_hash == plain.code_hash
    assert thrice.code_hash != plain.code_hash


def test_compiling_loads_no_torch(target: Target, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from evo.problem.render import Source
from evo.targets import find_target
source = Source(text={SOURCES[target.name]!r}, target={target.name!r}, entry="twice")
assert find_target({target.name!r}).compile(source, {ARCHES[target.name]!r}, Path({str(tmp_path)!r})).code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_source_that_does_not_compile_is_an_error_with_the_line(target: Target, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"candidate\.\w+[(:]2\b") as caught:
        built(target, tmp_path, "\nint broken(;\n" + SOURCES[target.name])
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), CompileError)


def test_an_unknown_flag_is_a_compile_error_that_names_it(target: Target, tmp_path: Path) -> None:
    source = Source(text=SOURCES[target.name], target=target.name, entry="twice", flags=("--no-such-flag",))
    with pytest.raises(CompileError, match="--no-such-flag"):
        target.compile(source, ARCHES[target.name], tmp_path)


def test_a_binary_crosses_processes_and_the_cache_unchanged(target: Target, tmp_path: Path) -> None:
    binary, _, _ = cached_build(tmp_path, target, source_of(target), ARCHES[target.name])
    assert pickle.loads(pickle.dumps(binary)) == binary
    assert cached_build(tmp_path, target, source_of(target), ARCHES[target.name]).binary == binary


def test_occupancy_is_a_share_or_nothing(target: Target, tmp_path: Path) -> None:
    share = target.occupancy(built(target, tmp_path), LAUNCH, target.limits(ARCHES[target.name]))
    assert share is None or 0 < share <= 1


def test_an_open_device_runs_what_was_compiled_and_replays_it(target: Target, tmp_path: Path) -> None:
    import torch

    try:
        arch = target.device().arch
        session = target.open()
    except DeviceError as error:
        pytest.skip(str(error))
    loaded = session.load(target.compile(source_of(target), arch, tmp_path), "twice")
    y = torch.ones(64, device=session.device)
    loaded((y, 63), LAUNCH)
    session.synchronize()
    assert y.tolist() == [2.0] * 63 + [1.0]

    z = torch.ones(64, device=session.device)
    replay = session.record([lambda: loaded((z, 64), LAUNCH)] * 3)
    z.fill_(1.0)
    assert replay.run_us() > 0
    session.synchronize()
    assert replay.calls == 3
    assert z.tolist() == [8.0] * 64
    assert all(isinstance(v, float) for v in session.clocks().values())
    replay.close()
    loaded.close()
