"""What every export format promises. A new exporter file is picked up here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evo.errors import CompileError, UsageError
from evo.evaluation import Binary
from evo.export import Exporter, ExportItem, ExportRequest, exporter_names, find_exporter
from evo.problem.loading import load_kernel
from evo.problem.render import Source
from evo.targets import Target, find_target
from tests.export.exports import listing, request_for

TARGETS = [("cuda", "sm_89"), ("cpu", "native")]
OF_WINNERS = [name for name in exporter_names() if find_exporter(name).holds != "run"]
GPU_ONLY = {"kernelbench"}
"""Formats whose owners evaluate nothing else."""


@pytest.fixture(params=OF_WINNERS)
def exporter(request: pytest.FixtureRequest) -> Exporter:
    return find_exporter(request.param)


def item(target: str, arch: str, cols: int) -> ExportItem:
    request = request_for(target, arch, Path(), f"rows=64,cols={cols},dtype=float32", run="demo")
    return replace(request.items[0], candidate=f"demo/{cols}")


@pytest.fixture(params=TARGETS, ids=[target for target, _ in TARGETS])
def request_to_export(request: pytest.FixtureRequest, exporter: Exporter, tmp_path: Path) -> ExportRequest:
    target, arch = request.param
    if target == "cpu" and exporter.name in GPU_ONLY:
        pytest.skip(f"{exporter.name} is for GPUs only")
    items, out = (item(target, arch, 64),), tmp_path / "below" / "exported"
    return ExportRequest(kernel="layernorm", target=target, arch=arch, items=items, out=out)


@pytest.mark.parametrize("name", exporter_names())
def test_an_exporter_is_found_by_its_file_and_says_the_same_name(name: str) -> None:
    assert find_exporter(name).name == name


def test_the_files_that_are_named_are_those_that_are_written_and_the_source_is_among_them(
    exporter: Exporter, request_to_export: ExportRequest
) -> None:
    written = exporter.export(request_to_export)
    out = request_to_export.out
    assert written
    assert sorted(written) == sorted(p for p in out.rglob("*") if p.is_file())
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    entry = f"{load_kernel('layernorm').entry}(".encode()
    assert any(entry in p.read_bytes() for p in written if not p.name.endswith((".so", ".cubin")))


def test_an_earlier_export_is_replaced(exporter: Exporter, request_to_export: ExportRequest) -> None:
    exporter.export(request_to_export)
    target, arch = request_to_export.target, request_to_export.arch
    other = replace(request_to_export, items=(item(target, arch, 128),))
    exporter.export(other)
    assert any(b"demo/128" in text for text in listing(other.out).values())
    assert not any(b"demo/64" in text for text in listing(other.out).values())


def test_what_is_not_an_export_is_left_alone(exporter: Exporter, request_to_export: ExportRequest) -> None:
    out = request_to_export.out
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        exporter.export(request_to_export)
    assert listing(out.parent) == {"exported/thesis.tex": b"mine"}


LAYERNORM = "rows=64,cols=96,dtype=float32"
ATTENTION = "batch=1,heads=4,kv_heads=4,q_len=70,kv_len=80,head_dim=64,dtype=float32"
REFUSED = [
    ("module", "cpu", "my-kernel", LAYERNORM, "'my-kernel' cannot be imported"),
    ("module", "cpu", "class", LAYERNORM, "cannot be imported"),
    ("module", "cpu", "größe", LAYERNORM, "cannot be imported"),
    ("module", "cpu", "json", LAYERNORM, "would hide the one"),
    ("huggingface", "cpu", "1st", LAYERNORM, "'1st'"),
    ("kernelbench", "cpu", "out", LAYERNORM, "GPUs only, and these are for cpu"),
    ("kernelbench", "cuda", "out", f"{LAYERNORM},bias=false", "no place for: its problem has weight and bias"),
    ("module", "cuda", "out", f"{ATTENTION[:-2]}16,precision=half", "for research"),
    ("kernelbench", "cuda", "out", f"{ATTENTION[:-2]}16,precision=half", "for research"),
    ("flashinfer-bench", "cpu", "out", f"{ATTENTION},lse=true", "flashinfer-bench has no place for"),
    ("flashinfer-bench", "cpu", "out", f"{ATTENTION},causal=true", "flashinfer-bench has no place for"),
]


@pytest.mark.parametrize(("name", "target", "folder", "text", "reason"), REFUSED)
def test_a_name_or_workload_that_a_format_has_no_place_for_is_refused(
    name: str, target: str, folder: str, text: str, reason: str, tmp_path: Path
) -> None:
    kernel = "layernorm" if text.startswith(LAYERNORM) else "attention"
    with pytest.raises(UsageError, match=reason):
        find_exporter(name).export(request_for(target, dict(TARGETS)[target], tmp_path / folder, text, kernel=kernel))
    assert not list(tmp_path.iterdir())


def test_a_winner_that_no_longer_compiles_leaves_nothing_behind(
    exporter: Exporter, request_to_export: ExportRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, arch = request_to_export.target, request_to_export.arch
    compiler = type(find_target(target))
    compile_source = compiler.compile
    seen: list[Source] = []

    def compile_the_first(self: Target, source: Source, arch: str, workdir: Path) -> Binary:
        seen.append(source)
        later = replace(source, text=f"#error no longer\n{source.text}") if len(seen) > 1 else source
        return compile_source(self, later, arch, workdir)

    monkeypatch.setattr(compiler, "compile", compile_the_first)
    with pytest.raises(CompileError):
        exporter.export(replace(request_to_export, items=(*request_to_export.items, item(target, arch, 96))))
    assert not listing(request_to_export.out.parent)
