"""What `evo export --format module` writes, and when it refuses to."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import evo
from evo.errors import CompileError, KernelError, UsageError
from evo.export import find_exporter
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.targets import find_target
from tests.ended import run_python
from tests.export.exports import listing, manifest_of, request_for

MODULE = find_exporter("module")
F32 = "rows=8,cols=32,dtype=float32"


def test_the_files_are_readable_sources_binaries_and_what_runs_them(exported: Path) -> None:
    names = sorted(listing(exported))
    assert [n for n in names if n.startswith("variant")] == [
        "variant_0_float32_64x96.cpp",
        "variant_0_float32_64x96.so",
        "variant_1_float32_64x1024.cpp",
        "variant_1_float32_64x1024.so",
        "variant_2_bfloat16_64x256.cpp",
        "variant_2_bfloat16_64x256.so",
    ]
    assert {"__init__.py", "__main__.py", "kernel.py", "function.py", "runtime/dispatch.py", "manifest.json"} <= set(names)
    assert not [n for n in names if n.startswith("_shared")]
    for name in names:
        if name.endswith(".py"):
            text = (exported / name).read_text()
            assert "import evo" not in text
            assert "from evo" not in text
            compile(text, name, "exec")


FIGURES = ("stage", "median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high")


def final_of(contender: str, median_us: float, **ratios: float) -> dict[str, Any]:
    """A timing as the database has it."""
    common = dict.fromkeys(FIGURES) | {"stage": "final", "protocol": "final", "clocks": {"disturbed": 0.0}}
    figures = {"median_us": median_us, "low_us": 0.9 * median_us, "high_us": 2 * median_us}
    return common | {"contender": contender} | figures | ratios


def test_the_manifest_tells_where_everything_comes_from(tmp_path: Path) -> None:
    record = {
        "run": "demo",
        "timings": [own := final_of("candidate", 1.5, ratio=0.7, ratio_low=0.69, ratio_high=0.71)],
        "baselines": [final_of("torch", 2.0)],
        "lineage": [{"id": "demo/0"}],
        "created": "2026-03-01T12:00:00+00:00",
        "code_hash": "another",
    }
    request = request_for("cpu", "native", tmp_path / "one", F32, **record)
    written = MODULE.export(replace(request, environment={"gpu": "none", "torch": "2.6"}))
    manifest = manifest_of(tmp_path / "one")
    assert manifest["written_by"] == "evo"
    assert manifest["evo_version"] == evo.__version__
    assert datetime.fromisoformat(manifest["exported_at"]).tzinfo is not None
    assert manifest["kernel"]["digest"] == load_kernel("layernorm").digest
    assert manifest["measured_on"] == [{"gpu": "none", "torch": "2.6"}]
    [variant] = manifest["variants"]
    assert variant["measured_on"] == 0
    assert (variant["standing"], variant["arch"], variant["measured_arch"]) == ("measured", "native", "native")
    assert variant["compiler"] == find_target("cpu").compiler()
    assert variant["candidate"] == "test/0"
    assert variant["record"] == record
    assert variant["timing"] == {n: own[n] for n in FIGURES} | {"torch_us": 2.0, "disturbed": False}
    assert variant["genome"] == request.items[0].genome.parameters
    off = dict.fromkeys(("residual", "sum", "mean", "rstd", "weight_dtype"), 0)
    assert variant["workload"]["dims"] == {"rows": 8, "cols": 32} | off
    assert variant["same_code_as_measured"] is False
    assert set(manifest["files"]) | {"manifest.json"} == set(listing(tmp_path / "one"))
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((tmp_path / "one" / name).read_bytes()).hexdigest() == digest
    assert written == sorted(p for p in (tmp_path / "one").rglob("*") if p.is_file())


def test_the_module_tells_of_its_variants(exported: Path, use: Callable[[Path], ModuleType]) -> None:
    module = use(exported)
    assert module.__all__ == ["LayerNorm", "also_serve", "build", "explain", "layer_norm", "patch", "variants"]
    found = module.variants()
    assert [v["workload"]["dims"]["cols"] for v in found] == [96, 1024, 256]
    found[0].clear()
    assert module.variants()[0]


def test_an_earlier_export_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    request = request_for("cpu", "native", out, F32)
    MODULE.export(request)
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "frontend.pyc").write_bytes(b"stale")
    before = listing(out)
    good = request.items[0]
    workload = load_kernel("layernorm").workload("cpu", "rows=9,cols=32,dtype=float32")
    bad = replace(good, workload=workload, genome=Genome.of({**good.genome.parameters, "simd_bits": 24}))
    with pytest.raises(CompileError):
        MODULE.export(replace(request, items=(good, bad)))
    assert listing(out) == before
    MODULE.export(request_for("cpu", "native", out, "rows=8,cols=33,dtype=bfloat16"))
    gone = {"variant_0_float32_8x32.cpp", "variant_0_float32_8x32.so", "__pycache__/frontend.pyc"}
    assert set(before) - set(listing(out)) == gone
    (out / "added.py").write_text("mine")
    with pytest.raises(UsageError, match=r"added\.py in it is not evo's"):
        MODULE.export(request)
    assert (out / "added.py").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_files_links_and_other_exports_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"written_by": "evo", "format": "huggingface"}')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text('{"name": "an app"}')
    before = listing(tmp_path)
    for name, reason in {
        "file": "is not a folder",
        "link": "is not a folder",
        "other": "is an export of format huggingface",
        "foreign": "no earlier export",
        "file/below": "cannot write to",
    }.items():
        with pytest.raises(UsageError, match=reason):
            MODULE.export(request_for("cpu", "native", tmp_path / name, F32))
    assert listing(tmp_path) == before


def test_a_request_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    request = request_for("cpu", "native", tmp_path / "one", F32)
    with pytest.raises(UsageError, match="nothing to export"):
        MODULE.export(replace(request, items=()))
    twin = replace(request.items[0], candidate="test/9")
    with pytest.raises(UsageError, match=r"test/0 and test/9 are both for rows=8"):
        MODULE.export(replace(request, items=(request.items[0], twin)))
    with pytest.raises(UsageError, match="unknown target of kernel layernorm"):
        load_kernel("layernorm").check_target("tpu")
    stale = replace(request.items[0], record={"source_digest": "0" * 64})
    with pytest.raises(UsageError, match="its template has changed since"):
        MODULE.export(replace(request, items=(stale,)))
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_still_the_measured_one_is_exported(exported: Path, tmp_path: Path) -> None:
    variant = manifest_of(exported)["variants"][0]
    record = {name: variant[name] for name in ("source_digest", "code_hash")}
    MODULE.export(request_for("cpu", "native", tmp_path / "one", variant["workload"]["key"], **record))
    [again] = manifest_of(tmp_path / "one")["variants"]
    assert again["same_code_as_measured"] is True


def test_a_kernel_without_a_usable_frontend_is_refused(tmp_path: Path) -> None:
    source = load_kernel("layernorm").folder
    folder = tmp_path / "layernorm"
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix in {".py", ".j2"} and path.name not in {"function.py", "frontend.py"}:
            (folder / path.name).write_bytes(path.read_bytes())
    request = replace(request_for("cpu", "native", tmp_path / "one", F32), kernel=str(folder))
    with pytest.raises(UsageError, match=r"has no function\.py"):
        MODULE.export(request)
    (folder / "frontend.py").write_text("def f(): pass\n")
    with pytest.raises(KernelError, match="__all__"):
        MODULE.export(request)
    (folder / "frontend.py").write_text("from ._shared.nothing import f\n\n__all__ = []\n")
    with pytest.raises(KernelError, match=r"needs _shared/nothing\.py"):
        MODULE.export(request)
    assert not (tmp_path / "one").exists()


def test_a_module_that_a_package_could_not_import_is_refused_and_none_names_evo(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(load_kernel("softmax").folder, tmp_path / "softmax"))
    text, workload = (folder / "kernel.py").read_text(), load_kernel("softmax").example("cpu").key
    request = request_for("cpu", "native", tmp_path / "one", workload, kernel=str(folder))
    lines = ("from evo.targets import DeviceInfo", "import evo", "import evo.problem.space", "x = 1; from evo import search")
    for line in (*lines, "import evo.report.page as page", "import cpu_space"):
        (folder / "kernel.py").write_text(f"if False:\n    {line}\n{text}")
        with pytest.raises(KernelError, match=r"kernel\.py, line 2: a package that stands alone cannot import (evo|cpu_)"):
            MODULE.export(request)
    imports = "import evo.problem.space as sp\nfrom evo.problem import genome\n"
    (folder / "kernel.py").write_text(f"{imports}assert sp.Space\n{text}")
    MODULE.export(request)
    packaged = (tmp_path / "one" / "kernel.py").read_text()
    assert packaged.startswith("from .problem import space as sp\nfrom .problem import genome\n")
    done = run_python(tmp_path, "-c", "import sys, one, one.kernel; print('evo' in sys.modules)", PYTHONPATH="")
    assert done.stdout == "False\n", done.stderr


def test_what_no_call_of_the_function_is_for_is_not_exported(tmp_path: Path) -> None:
    """rms_norm has no residual; what a backward pass needs may be stored."""
    for options in ("residual=true", "residual=true,sum=true"):
        with pytest.raises(UsageError, match="rms_norm adds nothing"):
            MODULE.export(request_for("cpu", "native", tmp_path / "one", f"{F32},{options}", kernel="rmsnorm"))
    MODULE.export(request_for("cpu", "native", tmp_path / "one", f"{F32},rstd=true", kernel="rmsnorm"))
