"""The build cache hands out what was built once, and nothing else."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evo.errors import CompileError, UsageError
from evo.problem.render import Source
from evo.targets import find_target
from evo.targets._cache import BuildCache
from evo.targets.cpu import CpuTarget

CPU, CUDA = find_target("cpu"), find_target("cuda")
SOURCE = Source(text='extern "C" void k(float* y) { *y = 1; }', target="cpu", entry="k")
GPU_SOURCE = Source(text='extern "C" __global__ void k(float* y) { *y = 1; }', target="cuda", entry="k")


def entries(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_what_was_built_once_comes_from_the_cache_with_its_seconds(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    first = cache.get_or_build(CUDA, GPU_SOURCE, "sm_89")
    second = BuildCache(tmp_path / "cache").get_or_build(CUDA, GPU_SOURCE, "sm_89")
    assert (first.cached, second.cached) == (False, True)
    assert first.binary == second.binary
    assert first.seconds == second.seconds > 0


def test_the_compiler_works_in_the_folder_it_is_given(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    workdir.mkdir()
    BuildCache(tmp_path / "cache").get_or_build(CPU, SOURCE, "native", workdir)
    assert "candidate.cpp" in {p.name for p in workdir.iterdir()}
    assert len(entries(tmp_path / "cache")) == 1


def test_everything_that_the_code_depends_on_is_part_of_the_key(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)
    assert not cache.get_or_build(CUDA, GPU_SOURCE, "sm_89").cached
    for source, arch in (
        (GPU_SOURCE, "sm_80"),
        (replace(GPU_SOURCE, text=GPU_SOURCE.text + " "), "sm_89"),
        (replace(GPU_SOURCE, flags=("--ftz=true",)), "sm_89"),
        (replace(GPU_SOURCE, flags=("--maxrregcount=32",)), "sm_89"),
    ):
        assert not cache.get_or_build(CUDA, source, arch).cached
    assert cache.get_or_build(CUDA, GPU_SOURCE, "sm_89").cached


def test_another_compiler_is_another_key(tmp_path: Path) -> None:
    other = tmp_path / "g++-other"
    other.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ other 99" && exit\nexec g++ "$@"\n')
    other.chmod(0o755)
    cache = BuildCache(tmp_path / "cache")
    assert not cache.get_or_build(CPU, SOURCE, "native").cached
    assert not cache.get_or_build(CpuTarget(compiler=str(other)), SOURCE, "native").cached
    assert cache.get_or_build(CpuTarget(compiler=str(other)), SOURCE, "native").cached


def test_a_failure_is_never_cached(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    broken = replace(GPU_SOURCE, text="nonsense")
    for _ in range(2):
        with pytest.raises(CompileError, match="nonsense"):
            cache.get_or_build(CUDA, broken, "sm_89")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_entry_is_built_again_and_repaired(tmp_path: Path, damage: str) -> None:
    cache = BuildCache(tmp_path)
    whole = cache.get_or_build(CUDA, GPU_SOURCE, "sm_89").binary
    (entry,) = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-100] ^= 1
    else:
        content = bytearray(b"" if damage == "emptied" else b"some other file\n")
    entry.write_bytes(content)
    again = cache.get_or_build(CUDA, GPU_SOURCE, "sm_89")
    assert not again.cached
    assert again.binary == whole
    assert cache.get_or_build(CUDA, GPU_SOURCE, "sm_89").cached


def test_processes_that_race_for_one_key_all_get_the_binary_and_leave_one_entry(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from evo.problem.render import Source
from evo.targets import find_target
from evo.targets._cache import BuildCache
source = Source(text={GPU_SOURCE.text!r}, target="cuda", entry="k")
cache, cuda = BuildCache(Path({str(tmp_path)!r})), find_target("cuda")
cuda.compiler()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    print(cache.get_or_build(cuda, source, "sm_89").binary.code_hash)
    if sys.argv[1] == "vandal":
        for entry in Path({str(tmp_path)!r}).rglob("*.build"):
            entry.write_bytes(b"damaged")
"""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for role in ("builder", "builder", "vandal")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    hashes = set()
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        said, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        hashes.update(said.split())
    assert len(hashes) == 1
    assert len(entries(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_is_one_sentence_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"the build cache .*file.* cannot be written \(.+\): free some space"):
        BuildCache(tmp_path / "file").get_or_build(CUDA, GPU_SOURCE, "sm_89")


def test_a_disk_that_fills_up_leaves_no_half_entry(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    CUDA.compile(GPU_SOURCE, "sm_89", tmp_path)  # whatever the compiler writes once, it has written
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))  # like a full disk: writes end early, with an error
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            BuildCache(tmp_path / "cache").get_or_build(CUDA, GPU_SOURCE, "sm_89")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert entries(tmp_path / "cache") == []
    assert not BuildCache(tmp_path / "cache").get_or_build(CUDA, GPU_SOURCE, "sm_89").cached
