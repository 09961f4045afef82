"""What a package would compile for columns that nothing was tuned for: the very source that evo renders for them, of a
genome that is legal there, with the launch that it needs. Nothing here runs on a GPU."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evo.errors import CompileError, KernelError, UsageError
from evo.export import ExportRequest, find_exporter
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel, template_root
from evo.problem.render import render
from evo.runtime import nvrtc
from evo.runtime.choice import rank
from evo.runtime.package import Package, Unavailable
from evo.targets import find_target
from evo.targets._machine_code import code_hash
from evo.targets.languages.cuda_cpp import run_nvrtc
from tests.export.exports import manifest_of, near, request_for

KERNEL = load_kernel("layernorm")
PICKED = Path(__file__).parents[1] / "picked"
COLUMNS = [1, 2, 3, 7, 96, 100, 255, 256, 500, 767, 769, 1000, 1001, 1025, 1536, 1600, 2047, 4096, 4097, 5120, 8190]
COLUMNS += [8191, 8192, 12288, 16383, 16384, 20000, 32768, 50257, 65535, 65536]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants as they are by default, and one that stages rows in shared memory and is persistent."""
    out = tmp_path_factory.mktemp("export") / "layernorm_for_sm_90"
    request = request_for("cuda", "sm_90", out, "rows=64,cols=1024,dtype=float16", "rows=64,cols=768,dtype=float32")
    workload = KERNEL.workload("cuda", "rows=4096,cols=8192,dtype=float16")
    space = KERNEL.space("cuda", workload, find_target("cuda").limits("sm_90"))
    point = near(space, {"grid": "persistent", "load_path": "bulk", "stages": 2})
    staged = replace(request.items[0], workload=workload, genome=Genome.of(point), candidate="test/staged")
    find_exporter("module").export(replace(request, items=(*request.items, staged)))
    return out


@pytest.fixture(scope="module")
def module(folder: Path, use: Callable[[Path], ModuleType]) -> ModuleType:
    return use(folder)


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a source is chosen."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))


def sources(module: ModuleType, dtype: str, cols: int, rows: int = 64) -> list[Any]:
    off = dict.fromkeys(("residual", "sum", "mean", "rstd", "weight_dtype"), 0)
    return module.frontend.DISPATCH._jit.fallbacks(0, dtype, {"rows": rows, "cols": cols, **off})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_source_is_what_is_rendered_for_the_size_and_legal_there(module: ModuleType, dtype: str) -> None:
    limits, launches = find_target("cuda").limits("sm_90"), set()
    for cols in COLUMNS:
        workload = KERNEL.workload("cuda", f"rows=64,cols={cols},dtype={dtype}")
        space = KERNEL.space("cuda", workload, limits)
        found = sources(module, dtype, cols)
        assert found, cols
        for variant in found:
            parameters, package = variant.record["genome"], module.PACKAGE
            expected = render(KERNEL, "cuda", Genome.of(parameters), workload, "sm_90")
            assert variant.source() == expected.text.encode()
            assert package.headers(variant.source()) == {n: text.encode() for n, text in expected.includes.items()}
            assert space.violations(parameters) == []
            plan = KERNEL.plan("cuda", parameters, workload)
            (own,) = variant.plans
            assert json.dumps(asdict(own)) == json.dumps(asdict(plan))
            launches.add(own.smem_bytes)
    assert dtype == "float32" or len(launches) > 2  # the staged one needs more for more columns


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kernel", ["layernorm", "softmax"])
def test_every_number_of_columns_has_a_source(
    kernel: str, dtype: str, tmp_path: Path, use: Callable[[Path], ModuleType]
) -> None:
    (dimension,) = (d for d in load_kernel(kernel).dimensions if d.name == "cols")
    out = tmp_path / f"{kernel}_in_{dtype}"
    find_exporter("module").export(request_for("cuda", "sm_90", out, f"rows=64,cols=1024,dtype={dtype}", kernel=kernel))
    module = use(out)
    variant = importlib.import_module(f"{module.__name__}.runtime.package").Variant
    general = [variant(module.PACKAGE, -1, r) for r in module.PACKAGE.manifest["general"]]
    assert [n for n in range(1, dimension.high + 1) if not any(v.at(n) for v in general)] == []


def test_the_nearest_variant_that_is_legal_comes_first(module: ModuleType) -> None:
    def first(cols: int, rows: int = 64) -> str:
        return str(sources(module, "float16", cols, rows)[0])

    assert first(1000).startswith("variant 0 ")
    assert first(1536).startswith("variant 0 ")
    assert first(6144).startswith("variant 2 ")
    assert first(1001).startswith("variant for any size")  # no whole vectors: it is legal for none of them
    assert first(64).startswith("variant for any size")
    assert sources(module, "float16", 6144)[0].plans[0].threads >= 32


def test_a_source_needs_an_architecture_as_new_as_its_own(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 9))
    assert sources(module, "float16", 1000) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (12, 0))
    assert sources(module, "float16", 1000)


def test_its_machine_code_is_what_evo_makes_of_it(module: ModuleType) -> None:
    compiler = importlib.import_module(f"{module.__name__}.runtime.nvrtc").compiler()
    assert compiler.arch_for((9, 0)) == "sm_90"
    assert compiler.arch_for((99, 0)).startswith("compute_")
    assert [compiler.arch_for((9, 0), arch) for arch in ("sm_80", "sm_90", "sm_90a", "compute_90a")] == [
        "sm_90", "sm_90", "sm_90a", "sm_90a"
    ]  # fmt: skip
    for dtype, cols in (("float16", 1000), ("float16", 1001), ("float16", 6144), ("float32", 300)):
        variant, package = sources(module, dtype, cols)[0], module.PACKAGE
        text, flags = variant.source(), variant.record["recipe"]["flags"]
        code = compiler.compile(text, package.headers(text), flags, "sm_90").code
        workload = KERNEL.workload("cuda", f"rows=64,cols={cols},dtype={dtype}")
        genome = Genome.of(variant.record["genome"])
        expected = render(KERNEL, "cuda", genome, workload, "sm_90")
        theirs = run_nvrtc(expected.text, "sm_90", expected.flags, expected.include_dirs).code
        assert code_hash(code) == code_hash(theirs)
        ptx = compiler.compile(text, package.headers(text), flags, "compute_90").code
        assert b".entry layernorm(" in ptx


def test_what_the_compiler_refuses_is_quoted(module: ModuleType) -> None:
    nvrtc = importlib.import_module(f"{module.__name__}.runtime.nvrtc")
    with pytest.raises(nvrtc.Refused, match=r"refuses it \(candidate.cu\(1\): error"):
        nvrtc.compiler().compile(b"int x = ;", {}, [], "sm_90")


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, ExportRequest]:
    """A copy of the kernel's folder, and a request for what is in it."""
    kernel = Path(shutil.copytree(KERNEL.folder, tmp_path / "layernorm"))
    request = request_for("cuda", "sm_90", tmp_path / "out", "rows=64,cols=1024,dtype=float16")
    return kernel, replace(request, kernel=str(kernel))


def test_a_size_that_the_template_computes_with_is_not_exchanged(own: tuple[Path, ExportRequest]) -> None:
    kernel, request = own
    text = (template_root() / "_norm" / "forward.cu.j2").read_text()
    assert "COLS = {{ dims.cols }}" in text
    (kernel / "_norm").mkdir()  # what lies in the kernel's folder comes first
    shutil.copy(template_root() / "_norm" / "formats.toml", kernel / "_norm")
    (kernel / "_norm" / "forward.cu.j2").write_text(text.replace("COLS = {{ dims.cols }}", "COLS = {{ dims.cols * 1 }}"))
    with pytest.raises(KernelError, match="depends on it in another way"):
        find_exporter("module").export(request)
    (kernel / "formats.toml").unlink()
    find_exporter("module").export(request)
    manifest = manifest_of(request.out)
    assert (manifest["variants"][0]["jit"], manifest["general"]) == (None, [])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("to = 1536", "to = 9000", "cols from 1 to 9000: not every size in it is legal"),
        ("as_for = 512,", "as_for = 9000,", "cols from 1 to 1536: unrolled_loops_are_short"),
        ("as_for = 512,", "","lacks 'as_for'"),
    ],
)
def test_a_range_that_is_not_legal_throughout_is_refused(
    own: tuple[Path, ExportRequest], old: str, new: str, reason: str
) -> None:
    kernel, request = own
    text = (template_root() / "_norm" / "formats.toml").read_text()
    assert old in text
    (kernel / "_norm").mkdir()
    (kernel / "_norm" / "formats.toml").write_text(text.replace(old, new))
    with pytest.raises(KernelError, match=reason):
        find_exporter("module").export(request)


def test_a_source_that_uses_what_one_architecture_alone_has_is_compiled_for_that() -> None:
    """setmaxnreg is an instruction of sm_90a, and not of sm_90."""
    compiler = nvrtc.compiler()
    source = b'extern "C" __global__ void f() { asm volatile("setmaxnreg.inc.sync.aligned.u32 64;"); }'
    code = compiler.compile(source, {}, (), compiler.arch_for((9, 0), "sm_90a")).code
    assert code.startswith(b"\x7fELF")
    with pytest.raises(nvrtc.Refused):
        compiler.compile(source, {}, (), compiler.arch_for((9, 0), "sm_90"))
    with pytest.raises(Unavailable, match="does not compile for sm_990a"):
        compiler.arch_for((99, 0), "sm_99a")


def test_a_source_that_says_which_gpu_it_needs_is_shipped_for_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Path(shutil.copytree(PICKED, tmp_path / "picked"))
    template, own = kernel / "cuda.cu.j2", 'asm volatile("setmaxnreg.inc.sync.aligned.u32 64;");'
    uses = template.read_text().replace("const long long r =", f"{own}\n    const long long r =")
    template.write_text(f"// needs sm_90a: setmaxnreg\n{uses}")
    asked = request_for("cuda", "sm_90", tmp_path / "out", "rows=64,cols=96,dtype=float32", kernel=str(kernel))
    find_exporter("shipped").export(replace(asked, builds=("sm_90", "compute_90")))
    (variant,) = Package("shipped_picked", [str(tmp_path / "out"), str(kernel)]).variants
    assert (variant.arch, variant.record["measured_arch"], variant.record["standing"]) == ("sm_90a", "sm_90a", "measured")
    runs = []
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None, found=capability: found)
        runs += [capability] if rank(variant, 0) is not None else []
    assert runs == [(9, 0)]
    compiler = nvrtc.compiler()
    arch = compiler.arch_for((9, 0), variant.arch)
    assert compiler.compile(variant.source(), {}, variant.record["recipe"]["flags"], arch).code.startswith(b"\x7fELF")
    with pytest.raises(UsageError, match=r"for one: .*its source needs sm_90a, and code for sm_89 is wanted"):
        find_exporter("shipped").export(replace(asked, out=tmp_path / "other", builds=("sm_90", "sm_89")))
    template.write_text(uses)  # without a word
    with pytest.raises(CompileError, match="setmaxnreg"):
        find_exporter("shipped").export(replace(asked, out=tmp_path / "none"))
