"""What lies in kernels/ is as it was measured, compiles to the same machine code, and is right where a device for it is."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import evo.ready
from evo.export import written
from evo.problem.kernel import FUNCTION_FILES
from evo.problem.loading import load_kernel, template_root
from evo.runtime.nvrtc import compiler
from evo.runtime.package import DIFFERENCES, Package, Variant
from evo.targets import find_target
from evo.targets._machine_code import code_hash

pytestmark = pytest.mark.slow

KERNELS = Path(__file__).parent.parent / "kernels"
SHIPPED = sorted(path.parent.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("manifest.json"))
"""Of a package that holds its backward, that is one of its own, too."""


@pytest.fixture(scope="module", params=SHIPPED)
def package(request: pytest.FixtureRequest) -> Package:
    folder = KERNELS / str(request.param)
    name = json.loads((folder / "manifest.json").read_text())["kernel"]["name"]
    return Package(folder.name, [str(folder), str(load_kernel(name).folder), str(template_root())])


def test_something_is_shipped() -> None:
    assert SHIPPED == [
        "add_layernorm", "add_rmsnorm", "attention", "layernorm", "layernorm/backward", "rmsnorm", "rmsnorm/backward",
        "softmax_forward",
    ]  # fmt: skip
    assert [kernel.name for kernel in evo.ready.kernels()] == [name for name in SHIPPED if "/" not in name]
    for kernel in evo.ready.kernels():
        assert all(callable(getattr(evo.ready, name)) for name in kernel.functions)


def test_a_folder_holds_a_manifest_and_sources_and_all_are_as_they_were(package: Package) -> None:
    folder, manifest = package.folders[0], package.manifest
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    del found["manifest.json"]
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == manifest["files"]
    assert (folder / "manifest.json").read_bytes() == written(manifest), "it leaves out all that follows from the rest"
    sources = {record["source"] for record in (*manifest["variants"], *manifest["general"])}
    assert {name for name in found if "/" not in name} - {DIFFERENCES} < sources
    for name in sources:
        assert package.source(name).endswith(b"\n")


def test_every_build_says_what_it_is(package: Package) -> None:
    seen = set()
    for v in package.manifest["variants"]:
        assert (v["standing"] == "measured") is (v["arch"] == v["measured_arch"])
        assert (v["timing"] is not None) is (v["standing"] == "measured"), "figures are of one architecture"
        assert {"run", "order", "device", "created"} <= v["record"].keys()
        build = (v["target"], v["arch"], v["workload"]["key"])
        assert build not in seen
        seen.add(build)


def test_every_source_compiles_to_the_code_that_was_measured(package: Package) -> None:
    """As it does at its first call: with the headers of today. Another compiler may make other code of it. The builds for
    other architectures differ from these in a few lines; some stand for all."""
    compiled = [v for v in package.manifest["variants"] if v["standing"] == "compiled"]
    measured = [v for v in package.manifest["variants"] if v["standing"] == "measured"]
    for v in [*measured, *compiled[::8], *package.manifest["general"]]:
        text = Variant(package, -1, v).source()
        code = compiler().compile(text, package.headers(text), v["recipe"]["flags"], v["arch"]).code
        if "code_hash" in v and v["compiler"] == find_target("cuda").compiler():
            assert code_hash(code) == v["code_hash"], v["source"]


def test_the_launch_of_every_build_fits_its_architecture(package: Package) -> None:
    for variant in package.variants:
        limits = find_target("cuda").limits(variant.arch)
        for plan in variant.plans:
            assert plan.threads <= limits.threads_per_block
            assert plan.smem_bytes + variant.record["smem_static_bytes"] <= limits.smem_bytes_per_block
            assert (plan.cluster == 1 and not plan.programmatic) or limits.capability >= 90


def test_the_kernel_it_was_found_for_is_still_here(package: Package) -> None:
    """So that it can be searched again, and exported in its place."""
    kernel = load_kernel(package.kernel["name"])
    assert kernel.replaces == package.kernel["replaces"]
    assert any((kernel.folder / file).is_file() for file in FUNCTION_FILES)


def test_it_tells_of_itself_on_any_machine_and_is_right_where_a_device_for_it_is(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = ".".join(("evo.ready", *package.folders[0].relative_to(KERNELS).parts))

    def run(command: str) -> tuple[int, list[dict[str, Any]]]:
        """As `python -m` does, less the start of a process."""
        monkeypatch.setattr(sys, "argv", [module, command, "--json"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)

    code, shown = run("show")
    assert code == 0
    assert [v["arch"] for v in shown] == [v.arch for v in package.variants]
    assert all(v["unavailable"] or v["taken"] == v["variant"] for v in shown)
    code, variants = run("check")
    checked = [v for v in variants if v["right"] is not None]
    wrong = [f"{v['workload']}: {c['case']}: {c['reason']}" for v in checked for c in v["cases"] if c["reason"]]
    assert wrong == []
    assert code == (0 if checked else 1)
