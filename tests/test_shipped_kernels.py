"""What `evo export` wrote to kernels/ is as it was written, compiles, and is right where a device for it is.

The same is asked of a package that is exported here, so that none of this goes unasked while kernels/ is empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evo.ready
from evo.export.module import ModuleExporter
from evo.problem.kernel import load_kernel
from evo.problem.render import Source
from evo.targets import find_target
from evo.targets._nvrtc import run_nvrtc
from tests.export.exports import request_for

KERNELS = Path(__file__).parent.parent / "kernels"
SHIPPED = sorted(path.parent.name for path in KERNELS.glob("*/manifest.json"))
MADE_HERE = "exported here"


def exported_here(out: Path) -> Path:
    """For CPUs and, compiled only, for GPUs."""
    cpu = request_for("cpu", "native", out, "rows=64,cols=96,dtype=float32")
    gpu = request_for("cuda", "sm_90", out, "rows=64,cols=1024,dtype=float16")
    ModuleExporter().export_together([replace(gpu, builds=("sm_90", "sm_89", "compute_89")), cpu])
    return out


@pytest.fixture(scope="module", params=[MADE_HERE, *SHIPPED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == MADE_HERE:
        return exported_here(tmp_path_factory.mktemp("kernels") / "layernorm_made_here")
    return KERNELS / str(request.param)


@pytest.fixture
def manifest(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return record


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_something_is_shipped() -> None:
    if not SHIPPED:
        pytest.skip(f"nothing has been exported to {KERNELS} yet")
    assert [kernel.name for kernel in evo.ready.kernels()] == SHIPPED
    for kernel in evo.ready.kernels():
        assert [name for name in kernel.functions if name not in dir(evo.ready)] == []


def test_every_file_is_as_it_was_exported(folder: Path, manifest: dict[str, Any]) -> None:
    files = {
        p.relative_to(folder).as_posix(): sha256(p)
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    del files["manifest.json"]
    assert files == manifest["files"]
    for v in manifest["variants"]:
        assert files[v["source"]] == v["source_sha256"]
        assert files[v["binary"]] == v["binary_sha256"]
        assert v["includes"].items() <= files.items()


def test_every_build_says_what_it_is(folder: Path, manifest: dict[str, Any]) -> None:
    assert manifest["format_version"] == 2
    seen = set()
    for v in manifest["variants"]:
        assert (v["standing"] == "measured") is (v["arch"] == v["measured_arch"])
        if v["standing"] == "compiled":
            assert {"timings", "baselines", "checks"}.isdisjoint(v["record"]), "figures of another architecture"
        elif folder.parent == KERNELS:
            assert v["record"]["timings"], "what is shipped as measured has the figures"
            assert v["record"]["checks"]
            assert all(check["passed"] for check in v["record"]["checks"])
        build = (v["target"], v["arch"], v["workload"]["key"])
        assert build not in seen
        seen.add(build)


def test_every_source_compiles_for_its_architecture(folder: Path, manifest: dict[str, Any], tmp_path: Path) -> None:
    entry = manifest["kernel"]["entry"]
    for v in manifest["variants"]:
        target = find_target(v["target"])
        text = (folder / v["source"]).read_text()
        source = Source(
            text=text, target=v["target"], entry=entry, flags=tuple(v["flags"]), include_dirs=(str(folder),)
        )
        binary = target.compile(source, v["arch"], tmp_path)
        assert binary.code
        if v["compiler"] == target.compiler() and v["arch"] != "native":
            assert binary.code_hash == v["code_hash"], v["binary"]
            assert (binary.registers, binary.spill_bytes) == (v["registers"], v["spill_bytes"])


def test_sources_for_sizes_that_nothing_was_tuned_for_compile(folder: Path, manifest: dict[str, Any]) -> None:
    for record in manifest["general"]:
        if record["target"] == "cuda":
            flags = tuple(record["untuned"]["recipe"]["flags"])
            assert run_nvrtc((folder / record["source"]).read_text(), record["arch"], flags, (str(folder),)).code


def test_the_launch_of_every_build_fits_its_architecture(manifest: dict[str, Any]) -> None:
    for v in manifest["variants"]:
        if v["target"] == "cuda":
            limits = find_target("cuda").limits(v["arch"].replace("compute_", "sm_"))
            launch = v["launch"]
            assert launch["threads"] <= limits.threads_per_block
            assert launch["smem_bytes"] + (v["smem_static_bytes"] or 0) <= limits.smem_bytes_per_block
            assert (launch["cluster"] == 1 and not launch["programmatic"]) or limits.capability >= 90


def test_the_kernel_it_was_found_for_is_still_here(manifest: dict[str, Any]) -> None:
    """So that it can be searched again, and exported in its place."""
    kernel = load_kernel(manifest["kernel"]["name"])
    assert kernel.replaces == manifest["kernel"]["replaces"]
    assert (kernel.folder / "frontend.py").is_file()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}


def run(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", folder.name, *arguments]
    return subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_it_is_right_where_a_device_for_it_is(folder: Path, environment: dict[str, str]) -> None:
    done = run(folder, environment, "check", "--json")
    variants = json.loads(done.stdout)
    checked = [v for v in variants if v["right"] is not None]
    if not checked:
        assert done.returncode == 1
        pytest.skip(f"no device for {folder.name} is here: {variants[0]['unavailable']}")
    wrong = [f"{v['workload']}: {c['case']}: {c['reason']}" for v in checked for c in v["cases"] if c["reason"]]
    assert wrong == []
    assert done.returncode == 0, done.stderr


def test_it_imports_and_tells_of_itself_on_any_machine(
    folder: Path, manifest: dict[str, Any], environment: dict[str, str]
) -> None:
    done = run(folder, environment, "show", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [v["arch"] for v in shown] == [v["arch"] for v in manifest["variants"]]
    assert all(v["unavailable"] or v["taken"] == v["variant"] for v in shown)
