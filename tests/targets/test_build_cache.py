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
from evo.targets import CachedBinary, cached_build, find_language
from evo.targets.languages.cpp import Cpp

CPP, CUDA_CPP = find_language("cpp"), find_language("cuda_cpp")
SOURCE = Source(text='extern "C" void k(float* y) { *y = 1; }', target="cpu", language="cpp", entry="k")
GPU_SOURCE = Source(text='extern "C" __global__ void k(float* y) { *y = 1; }', target="cuda", language="cuda_cpp", entry="k")


def entries(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def build(folder: Path, source: Source = GPU_SOURCE, arch: str = "sm_89") -> CachedBinary:
    return cached_build(folder, CUDA_CPP, source, arch)


def test_what_was_built_once_comes_from_the_cache_with_its_seconds(tmp_path: Path) -> None:
    first, second = build(tmp_path), build(tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert first.binary == second.binary
    assert first.seconds == second.seconds > 0
    assert len(entries(tmp_path)) == 1


def test_everything_that_the_code_depends_on_is_part_of_the_key(tmp_path: Path) -> None:
    assert not build(tmp_path).cached
    for source, arch in (
        (GPU_SOURCE, "sm_80"),
        (replace(GPU_SOURCE, text=GPU_SOURCE.text + " "), "sm_89"),
        (replace(GPU_SOURCE, flags=("--ftz=true",)), "sm_89"),
    ):
        assert not build(tmp_path, source, arch).cached
    assert build(tmp_path).cached


@pytest.mark.parametrize("quotes", ['""', "<>"])
def test_a_header_counts_however_it_is_included_and_one_that_changes_meanwhile_keeps_its_binary_out(
    tmp_path: Path, quotes: str
) -> None:
    header, compiler = tmp_path / "one.hpp", tmp_path / "g++"
    text = f'#include {quotes[0]}one.hpp{quotes[1]}\nextern "C" void k(float* y) {{ *y = ONE; }}'
    source = Source(text=text, target="cpu", language="cpp", entry="k", include_dirs=(str(tmp_path),))
    header.write_text("#define ONE 1\n")
    compiler.write_text(f"#!/bin/sh\necho '#define ONE 2' > {header}\nexec g++ \"$@\"\n")
    compiler.chmod(0o755)
    language = Cpp(str(compiler))
    source.digest  # noqa: B018  as it was read
    two = cached_build(tmp_path / "cache", language, source, "native")
    assert not entries(tmp_path / "cache")
    header.write_text("#define ONE 1\n")
    compiler.write_text("#!/bin/sh\nexec g++ \"$@\"\n")
    one = cached_build(tmp_path / "cache", language, replace(source), "native")
    assert not one.cached
    assert one.binary.code_hash != two.binary.code_hash
    assert cached_build(tmp_path / "cache", language, replace(source), "native").cached
    header.write_text("#define ONE 2\n")
    assert cached_build(tmp_path / "cache", language, replace(source), "native").binary.code_hash == two.binary.code_hash


def test_another_compiler_is_another_key(tmp_path: Path) -> None:
    script = tmp_path / "g++-other"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ other 99" && exit\nexec g++ "$@"\n')
    script.chmod(0o755)
    other = Cpp(compiler=str(script))
    cached = [cached_build(tmp_path / "cache", language, SOURCE, "native").cached for language in (CPP, other, other)]
    assert cached == [False, False, True]


def test_a_failure_is_never_cached(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError, match="nonsense"):
            build(tmp_path / "cache", replace(GPU_SOURCE, text="nonsense"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_entry_is_built_again_and_repaired(tmp_path: Path, damage: str) -> None:
    whole = build(tmp_path).binary
    (entry,) = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-100] ^= 1
    else:
        content = bytearray(b"" if damage == "emptied" else b"some other file\n")
    entry.write_bytes(content)
    again = build(tmp_path)
    assert not again.cached
    assert again.binary == whole
    assert build(tmp_path).cached


def test_processes_that_race_for_one_key_all_get_the_binary_and_leave_one_entry(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from evo.problem.render import Source
from evo.targets import cached_build, find_language
source = Source(text={GPU_SOURCE.text!r}, target="cuda", language="cuda_cpp", entry="k")
language = find_language("cuda_cpp")
language.compiler()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    print(cached_build(Path({str(tmp_path)!r}), language, source, "sm_89").binary.code_hash)
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
        assert racer.stdout.readline() == "ready\n"
    hashes = set()
    for racer in racers:
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
        build(tmp_path / "file")


def test_a_disk_that_fills_up_leaves_no_half_entry(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    CUDA_CPP.compile(GPU_SOURCE, "sm_89", tmp_path)  # whatever the compiler writes once, it has written
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))  # like a full disk: writes end early, with an error
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            build(tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert entries(tmp_path / "cache") == []
    assert not build(tmp_path / "cache").cached
