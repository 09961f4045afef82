"""CPU variants on machines they were not built for: checked before they run, built again, or left to PyTorch. And the
commands of a package."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.runtime.package import Package, Unavailable
from tests.ended import run_python
from tests.export.exports import edit_manifest
from tests.runtime.conftest import Importer

X = torch.randn(8, 96)
NOT_A_LIBRARY = b"\x7fELF is how this begins, and nothing else of it is right"
WRONG_ROOT = "-D__builtin_sqrt(x)=(1.01*__builtin_sqrtf(x))"


@pytest.fixture(autouse=True)
def _cache(cache: Path) -> None:
    """Nothing was built yet."""


def serves(module: ModuleType) -> str:
    """Why the library in use is not the shipped one, after checking what it computes."""
    assert module.explain(X, (96,)).startswith("variant 0 "), module.explain(X, (96,))
    torch.testing.assert_close(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))
    return str(module.PACKAGE.variants[0].rebuilt)


def refused(module: ModuleType) -> str:
    """Why there is no variant, after checking that PyTorch's result comes instead."""
    assert torch.equal(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))
    explanation = module.explain(X, (96,))
    assert explanation.startswith("PyTorch: ")
    return str(explanation)


def library_of(folder: Path) -> Path:
    return next(folder.glob("variant_0_*.so"))


def remove(folder: Path) -> None:
    library_of(folder).unlink()


def tamper(folder: Path) -> None:
    library_of(folder).write_bytes(NOT_A_LIBRARY)


def claim(**needs: Any) -> Callable[[Path], None]:
    """Has the manifest say that the shipped library needs this, and puts one there that must not be loaded."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["variants"][0]["needs"].update(needs)
        manifest["files"][manifest["variants"][0]["binary"]] = hashlib.sha256(NOT_A_LIBRARY).hexdigest()

    def spoil(folder: Path) -> None:
        tamper(folder)
        edit_manifest(folder, change)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (remove, "cannot be read"),
        (tamper, "sha256 differs"),
        (claim(features=["avx99"]), "needs avx99, which this CPU lacks"),
        (claim(features=None), "is not known"),
        (claim(machine="linux-s390x"), "is for linux-s390x"),
        (claim(), "does not load"),
    ],
)
def test_a_library_that_does_not_run_here_is_built_again_once_and_never_loaded(
    copy_of: Path, use: Importer, compilations: Callable[[], int], spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(copy_of)
    again = Path(shutil.copytree(copy_of, copy_of.with_name(f"{copy_of.name}_again")))
    for folder in (copy_of, again):  # what was built is kept for the second
        found = serves(use(folder))
        assert reason in found
        assert ("does not load" in found) is ("does not load" in reason)
        assert compilations() == 1


def test_a_moved_folder_works_and_without_its_library_and_a_compiler_the_call_is_pytorchs(
    copy_of: Path, use: Importer, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = use(copy_of)
    assert serves(module) == ""
    assert not cache.exists()
    remove(copy_of)
    monkeypatch.setenv("PATH", str(tmp_path))
    again = use(Path(shutil.copytree(copy_of, copy_of.with_name(f"{copy_of.name}_again"))))
    assert "no C++ compiler (g++, c++, clang++)" in refused(again)


def test_what_a_compiler_gets_wrong_is_found_before_it_is_used(
    copy_of: Path, use: Importer, compiler: Callable[[str], None]
) -> None:
    remove(copy_of)
    compiler(f"set -- '{WRONG_ROOT}' \"$@\"")
    assert "its results are not PyTorch's" in refused(use(copy_of))


def test_a_source_that_was_changed_is_not_built(copy_of: Path, use: Importer) -> None:
    remove(copy_of)
    source = next(copy_of.glob("variant_0_*.cpp"))
    source.write_text(source.read_text() + "// a line more\n")
    assert "variant_0_float32_64x96.cpp is not the file that was exported" in refused(use(copy_of))


def test_a_cache_that_others_can_write_to_is_not_used(copy_of: Path, use: Importer, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    remove(copy_of)
    serves(use(copy_of))
    assert not list(cache.iterdir())


def test_threads_that_come_first_together_build_once(
    copy_of: Path, use: Importer, compilations: Callable[[], int]
) -> None:
    remove(copy_of)
    module = use(copy_of)
    with ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: module.layer_norm(X, (96,)), range(4)):
            torch.testing.assert_close(result, functional.layer_norm(X, (96,)))
    assert compilations() == 1
    assert serves(module)


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


def test_the_package_stands_alone_and_checks_itself(copy_of: Path) -> None:
    """`python -m PACKAGE` where neither evo nor anything it is built with can be imported."""
    alone = ("-I", "-W", "ignore", "-c", ALONE, str(copy_of.parent), copy_of.name)
    check = (*alone, "check", "--seed", "1", "--cases", "40")
    done = run_python(Path(os.sep), *check, OMP_NUM_THREADS="1")  # other tests use the cores, too
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  right: 77 cases on it, 2 left to PyTorch") == 3, done.stdout


def test_the_check_finds_a_variant_that_is_wrong(copy_of: Path, command: Any) -> None:
    library, source = library_of(copy_of), next(copy_of.glob("variant_0_*.cpp"))
    flags = ["-O1", "-fPIC", "-shared", "-fopenmp", "-fno-exceptions", "-Wno-psabi", "-nodefaultlibs"]
    compile = ["g++", *flags, WRONG_ROOT, str(source), "-o", str(library), "-lm", "-lgcc", "-lc"]
    subprocess.run(compile, check=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    edit_manifest(copy_of, lambda m: m["files"].update({library.name: digest}))
    code, text = command(copy_of, "check")
    assert code == 1
    assert "built from its source" not in text
    assert "WRONG  normal: " in text
    assert text.count("  right: 37 cases on it") == 2, text


@pytest.mark.parametrize("kind", ["cpp", "so"])
def test_the_check_finds_a_file_that_is_not_as_it_was_exported(copy_of: Path, kind: str) -> None:
    next(copy_of.glob(f"variant_0_*.{kind}")).write_bytes(b"other")
    done = run_python(copy_of.parent, "-m", copy_of.name, "check", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stdout
    assert re.search(rf"^DAMAGED  variant_0_\S+\.{kind} is not the file that was exported", done.stderr, re.MULTILINE)


def test_the_source_of_a_variant_is_printed_whole(copy_of: Path, command: Any) -> None:
    source = next(copy_of.glob("variant_1_*.cpp")).read_text()
    assert command(copy_of, "show", "--source", "1") == (0, source)
    code, text = command(copy_of, "show", "--source", "1", "--json")
    assert (code, json.loads(text)) == (0, {"source": source})
    with pytest.raises(SystemExit) as ended:
        command(copy_of, "show", "--source", "9")
    assert ended.value.code == 2


@pytest.mark.parametrize("disturbed", [False, True])
def test_the_figure_of_the_final_is_told_with_its_mark_beside_new_ones(
    copy_of: Path, command: Any, disturbed: bool
) -> None:
    timing = {"stage": "final", "median_us": 5.0, "torch_us": 10.0, "disturbed": disturbed}
    timing |= {"ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.625}

    def keep_one(manifest: dict[str, Any]) -> None:
        del manifest["variants"][1:]
        manifest["variants"][0].update(timing=timing, record={"device": "Some CPU"})

    edit_manifest(copy_of, keep_one)
    for way in [["show"], ["bench", "--rounds", "1"]][: 1 + disturbed]:
        code, text = command(copy_of, *way)
        assert code == 0, text
        (line,) = [line for line in text.splitlines() if "Some CPU" in line]
        assert ("2.000 (1.600 to 2.500)" in line) is not disturbed
        assert ("not sure: the machine was too busy" in line) is disturbed
    code, text = command(copy_of, "bench", "--rounds", "1", "--json")
    assert code == 0, text
    (variant,) = json.loads(text)
    recorded = variant["recorded"]
    assert (recorded["own_us"], recorded["torch_us"], recorded["disturbed"]) == (5.0, 10.0, disturbed)
    assert recorded["speedup"] == (None if disturbed else 2.0)
    (found,) = variant["timings"]
    assert min(found["own_us"], found["torch_us"]) > 0
    # Other programs may run beside this one.
    assert found["disturbed"] or 0 < found["speedup_low"] <= found["speedup"] <= found["speedup_high"]


# -- manifests that are not as they were written ------------------------------------------------------------------


def changed(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Where a manifest is changed and what stands there then, or DELETED; of a list's elements the first."""
    others: dict[type, Any] = {str: ("", 7, []), bool: (1, "x"), float: (-1.0, "x"), type(None): (3, "x")}
    others |= {int: (-1, 0, 2**70, "9", True, 1.5), list: ({}, "x", [None]), dict: ([], "x", {"x": None})}
    if path:
        yield from ((path, other) for other in (DELETED, None, *others[type(value)]))
    for key in value if isinstance(value, dict) else range(len(value))[:1] if isinstance(value, list) else ():
        yield from changed(value[key], (*path, key))


DELETED = object()


def test_a_package_of_another_manifest_is_imported_and_works_or_is_no_package_in_one_sentence(
    copy_of: Path, use: Importer
) -> None:
    path = copy_of / "manifest.json"
    written = json.loads(path.read_text())
    working = 0
    for place, instead in changed(written):
        manifest = json.loads(json.dumps(written))
        *within, last = place
        holder = functools.reduce(lambda part, key: part[key], within, manifest)
        if instead is DELETED:
            del holder[last]
        else:
            holder[last] = instead
        path.write_text(json.dumps(manifest))
        try:
            package = Package("changed", [str(copy_of)])
        except ImportError as error:
            told = str(error)
            assert told.startswith(f"{path} is no manifest of an export: "), (place, instead)
            assert told.endswith("; export it again, or copy its folder whole"), told
            assert "\n" not in told
            assert len(told) < 400 + len(str(path)), told
            continue
        working += 1
        known = ("measured_on", "exported_on", "left_out", "files", "genome", "timing", "record", "lineage")
        if any(key in known for key in place):
            continue  # of these nothing decides a call
        for variant in package.variants:
            variant.plans[0].grid({d["name"]: 5 for d in package.dimensions}, 4)
            with suppress(Unavailable):
                variant.source()
        module = use(copy_of)
        assert module.layer_norm(X, (96,)).shape == X.shape, (place, instead)
        assert module.explain(X, (96,))
    assert working > 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "it cannot be read (No such file or directory)"),
        ("", "it is no JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"format_version": 4, "kernel": {', "it is no JSON ("),
        ("[" * 100_000, "it is no JSON ("),
        ("\udcff", "it is no JSON ("),
        ("[]", "it is no object"),
        ("{}", "it has no 'format_version'"),
        ('{"format_version": 3}', "it is of format 3, and this run time reads 4"),
    ],
)
def test_a_manifest_that_cannot_be_read_ends_the_import_with_what_is_wrong(
    copy_of: Path, use: Importer, text: str | None, said: str
) -> None:
    path = copy_of / "manifest.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ImportError) as caught:
        use(copy_of)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path} is no manifest of an export: ")


def workload(manifest: dict[str, Any], old: str, new: str) -> None:
    variant = manifest["variants"][0]
    variant["workload"] = variant["workload"].replace(old, new)


def elsewhere(manifest: dict[str, Any]) -> None:
    manifest["targets"]["cuda"] = manifest["targets"]["cpu"]
    manifest["variants"][0].update(arch="sm_x", target="cuda")


def growing(manifest: dict[str, Any], **growth: Any) -> None:
    manifest["variants"][0]["jit"] = {"dimension": "cols", "blanks": [], "sizes": [{"first": 96, "growth": growth}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["variants"].clear(), "it has no variants"),
        (lambda m: m["targets"]["cpu"]["fixed"].append("depth"), "it.variants[0] names 'depth', which is no dimension"),
        (lambda m: m["targets"].clear(), "workload that is not told whole (KeyError('cpu')"),
        (lambda m: m["variants"][0].update(measured_on=1), "workload that is not told whole (IndexError("),
        (lambda m: workload(m, "rows=64", "rows"), "workload that is not told whole (ValueError("),
        (lambda m: workload(m, "rows=64,", ""), "workload that is not told whole (KeyError('rows')"),
        (lambda m: workload(m, "rows=64", "rows=-1"), "workload that is not told whole (ValueError('a size below 0')"),
        (lambda m: growing(m, threads="x"), "it.variants[0].jit.sizes[0].growth.threads has"),
        (lambda m: growing(m, tiles=1), "it.variants[0].jit has a launch that grows from what is no number"),
        (lambda m: m["variants"][0]["launch"].update(tiles=[["rows", 0]]), "launch.tiles[0][1] has 0 where a count belongs"),
        (lambda m: m["variants"][0]["launch"].update(threads=[8, 0]), "launch.threads has [8, 0] where a block belongs"),
        (lambda m: m["variants"][0]["launch"].update(tiles=[["n ** 2", 4]]), "it.variants[0].launch has the tiles 'n **"),
        (lambda m: m["variants"][0]["launch"].update(more=1), "it.variants[0].launch is none ("),
        (lambda m: elsewhere(m), "it.variants[0] is for target 'cuda' and 'sm_x', which is no machine"),
        (lambda m: m["variants"][0].pop("source"), "it.variants[0] has no 'source'"),
        (lambda m: m["kernel"]["tolerance"].clear(), "of which there is no tolerance"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_told_where(
    copy_of: Path, use: Importer, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    edit_manifest(copy_of, change)
    with pytest.raises(ImportError) as caught:
        use(copy_of)
    assert said in str(caught.value)


@pytest.mark.parametrize("missing", ["variant_0", "general"])
def test_a_package_without_one_of_its_files_leaves_the_calls_that_need_it_to_pytorch(
    copy_of: Path, use: Importer, missing: str
) -> None:
    for path in copy_of.glob(f"{missing}_*"):
        path.unlink()
    module = use(copy_of)
    if missing == "variant_0":
        assert "cannot be read (No such file or directory)" in refused(module)
    else:
        serves(module)
