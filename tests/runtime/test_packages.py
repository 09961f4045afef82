"""CPU variants on machines they were not built for: checked before they run, built again, or left to PyTorch."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.export.exports import FORKED, edit_manifest

X = torch.randn(8, 96)
NOT_A_LIBRARY = b"\x7fELF is how this begins, and nothing else of it is right"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries built on this machine are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "evo-kernels"


def serves(module: ModuleType) -> str:
    """Why the library in use is not the shipped one, after checking what it computes."""
    assert module.explain(X, (96,)).startswith("variant 0 "), module.explain(X, (96,))
    torch.testing.assert_close(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))
    return str(module.frontend.DISPATCH.rebuilt(0))


def refused(module: ModuleType) -> str:
    """Why there is no variant, after checking that PyTorch's result comes instead."""
    assert torch.equal(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))
    explanation = module.explain(X, (96,))
    assert explanation.startswith("PyTorch: ")
    return str(explanation)


def library_of(folder: Path) -> Path:
    return next(folder.glob("variant_0_*.so"))


def compiler_that(folder: Path, script: str) -> str:
    """A compiler of which the script decides what becomes of its arguments."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_moved_folder_still_works(copy_of: Path, use: Callable[[Path], ModuleType], cache: Path) -> None:
    assert serves(use(copy_of)) == ""
    assert not cache.exists()


def test_a_missing_library_is_built_from_the_source(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path
) -> None:
    library_of(copy_of).unlink()
    assert "cannot be read" in serves(use(copy_of))
    assert sorted(p.suffix for p in cache.iterdir()) == [".json", ".so"]


def test_a_library_that_was_tampered_with_is_not_loaded(copy_of: Path, use: Callable[[Path], ModuleType]) -> None:
    library_of(copy_of).write_bytes(NOT_A_LIBRARY)
    assert "sha256 differs" in serves(use(copy_of))


def claim(folder: Path, needs: dict[str, Any]) -> None:
    """Has the manifest say that the shipped library needs this, and puts one there that must not be loaded."""
    library_of(folder).write_bytes(NOT_A_LIBRARY)

    def change(manifest: dict[str, Any]) -> None:
        manifest["variants"][0]["needs"].update(needs)
        manifest["variants"][0]["binary_sha256"] = hashlib.sha256(NOT_A_LIBRARY).hexdigest()

    edit_manifest(folder, change)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"features": ["avx99"]}, "needs avx99, which this CPU lacks"),
        ({"features": None}, "is not known"),
        ({"machine": "linux-s390x"}, "is for linux-s390x"),
    ],
)
def test_a_library_for_another_cpu_is_built_again_and_never_loaded(
    copy_of: Path, use: Callable[[Path], ModuleType], needs: dict[str, Any], reason: str
) -> None:
    claim(copy_of, needs)
    found = serves(use(copy_of))
    assert reason in found
    assert "does not load" not in found


def test_a_library_that_does_not_load_is_built_again(copy_of: Path, use: Callable[[Path], ModuleType]) -> None:
    claim(copy_of, {})
    assert "does not load" in serves(use(copy_of))


def test_without_a_compiler_the_call_is_pytorchs(
    copy_of: Path, use: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library_of(copy_of).unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler (g++, c++, clang++)" in refused(use(copy_of))


def test_what_a_compiler_gets_wrong_is_found_before_it_is_used(
    copy_of: Path, use: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library_of(copy_of).unlink()
    wrong = f"exec {shutil.which('g++')} '-D__builtin_sqrt(x)=(1.01*__builtin_sqrtf(x))' \"$@\""
    monkeypatch.setenv("CXX", compiler_that(tmp_path, wrong))
    assert "its results are not PyTorch's" in refused(use(copy_of))


def test_a_source_that_was_changed_is_not_built(copy_of: Path, use: Callable[[Path], ModuleType]) -> None:
    library_of(copy_of).unlink()
    source = next(copy_of.glob("variant_0_*.cpp"))
    source.write_text(source.read_text() + "// a line more\n")
    assert "variant_0_float32_64x96.cpp is not the file that was exported" in refused(use(copy_of))


def test_what_was_built_once_is_kept(
    copy_of: Path,
    use: Callable[[Path], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: Path,
) -> None:
    library_of(copy_of).unlink()
    log = tmp_path / "log"
    compiler = compiler_that(tmp_path, f'echo "$1" >>{log}; exec {shutil.which("g++")} "$@"')
    monkeypatch.setenv("CXX", compiler)
    again = Path(shutil.copytree(copy_of, tmp_path / "again"))
    serves(use(copy_of))
    builds = [line for line in log.read_text().split() if line != "--version"]
    assert len(builds) == 1
    serves(use(again))
    assert [line for line in log.read_text().split() if line != "--version"] == builds
    assert len(list(cache.glob("*.so"))) == 1


def test_a_cache_that_others_can_write_to_is_not_used(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    library_of(copy_of).unlink()
    serves(use(copy_of))
    assert not list(cache.iterdir())


def test_threads_that_come_first_together_build_once(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path
) -> None:
    library_of(copy_of).unlink()
    module, results = use(copy_of), list[torch.Tensor]()
    threads = [threading.Thread(target=lambda: results.append(module.layer_norm(X, (96,)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, functional.layer_norm(X, (96,)))
    assert len(list(cache.glob("*.so"))) == 1


def test_a_forked_process_does_not_wait_for_threads_that_stayed_behind(copy_of: Path) -> None:
    program = FORKED.format(name=copy_of.name)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(copy_of.parent)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, many, one = done.stdout.splitlines()
    assert before.startswith("variant")
    assert "this process was forked" in many
    assert one == before


ALONE = """
import runpy, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"evo", "jinja2", "cuda", "numpy", "ninja", "psutil"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m PACKAGE ...` where neither evo nor anything it is built with can be imported."""
    return subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", ALONE, str(folder.parent), folder.name, *arguments],
        capture_output=True,
        text=True,
        cwd=os.sep,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # other tests use the cores, too
        timeout=120,
        check=False,
    )


def test_the_package_stands_alone_and_checks_itself(copy_of: Path) -> None:
    done = alone(copy_of, "check", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  right: 2") == 3
    assert "cases on it, 3 left to PyTorch" in done.stdout


def test_the_check_finds_a_variant_that_is_wrong(copy_of: Path) -> None:
    library, source = library_of(copy_of), next(copy_of.glob("variant_0_*.cpp"))
    wrong = "-D__builtin_sqrt(x)=(1.001*__builtin_sqrtf(x))"
    flags = ["-O1", "-fPIC", "-shared", "-fopenmp", "-fno-exceptions", "-Wno-psabi", "-nodefaultlibs"]
    command = ["g++", *flags, wrong, str(source), "-o", str(library), "-lm", "-lgcc", "-lc"]
    subprocess.run(command, check=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    edit_manifest(copy_of, lambda m: m["variants"][0].update(binary_sha256=digest))
    done = alone(copy_of, "check")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "built from its source" not in done.stdout
    assert "WRONG  as tuned" in done.stdout
    assert done.stdout.count("  right: 2") == 2


def test_the_benchmark_compares_with_pytorch(copy_of: Path) -> None:
    edit_manifest(copy_of, lambda m: m.update(variants=m["variants"][:1]))
    done = alone(copy_of, "bench", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [variant] = json.loads(done.stdout)
    [timing] = variant["timings"]
    assert timing["own_us"] > 0
    assert timing["torch_us"] > 0
    assert 0 < timing["speedup_low"] <= timing["speedup"] <= timing["speedup_high"]
    assert isinstance(timing["disturbed"], bool)
    assert variant["recorded"] is None


def recorded(disturbed: bool) -> dict[str, Any]:
    """What an export says of a winner: its final."""
    timing = {"stage": "final", "median_us": 5.0, "torch_us": 10.0, "disturbed": disturbed}
    timing |= {"ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.625}
    return {"timing": timing, "record": {"device": "Some CPU"}}


@pytest.mark.parametrize("command", ["show", "bench"])
@pytest.mark.parametrize("disturbed", [False, True])
def test_the_figure_of_the_final_is_told_with_its_mark(copy_of: Path, command: str, disturbed: bool) -> None:
    def keep_one(manifest: dict[str, Any]) -> None:
        del manifest["variants"][1:]
        manifest["variants"][0].update(recorded(disturbed))

    edit_manifest(copy_of, keep_one)
    rounds = ["--rounds", "1"] if command == "bench" else []
    done = alone(copy_of, command, *rounds)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "2.000 (1.600 to 2.500)" in line]
    assert line.endswith(" !") is disturbed
    assert "Some CPU" in done.stdout
    if disturbed:
        assert "do not trust the figure" in done.stdout
    (variant,) = json.loads(alone(copy_of, command, *rounds, "--json").stdout)
    assert (variant["recorded"]["own_us"], variant["recorded"]["torch_us"]) == (5.0, 10.0)
    assert variant["recorded"]["disturbed"] is disturbed


def test_rounds_that_something_disturbed_are_taken_again_or_else_marked(
    use: Callable[[Path], ModuleType], copy_of: Path
) -> None:
    timing = importlib.import_module(f"{use(copy_of).__name__}.runtime.timing")
    for verdicts, disturbed, taken in [((True, False, False, False), False, 8), ((True,) * 3, True, 6)]:
        calls: list[int] = []
        told = iter([v for verdict in verdicts for v in (False, verdict)])  # asked before and after each two rounds
        sample = lambda repeats, calls=calls: calls.append(repeats) or (1e-3,)  # noqa: E731
        found = timing.race({"own": sample, "torch": sample}, 6, lambda told=told: next(told))
        assert found.disturbed is disturbed
        assert len(calls) == 4 + 4 + 2 * taken
