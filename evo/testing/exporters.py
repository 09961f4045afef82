"""What every export format of winners promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from evo.errors import CompileError, UsageError
from evo.evaluation import Binary
from evo.export import Exporter, ExportItem, ExportRequest, find_exporter
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.render import Source
from evo.targets import Language, find_language, find_target
from evo.testing import Suite


def item(target: str, arch: str, cols: int) -> ExportItem:
    """The default point of LayerNorm's search space at that size."""
    kernel = load_kernel("layernorm")
    workload = kernel.workload(target, f"rows=64,cols={cols},dtype=float32")
    space = kernel.space(target, workload, find_target(target).limits(arch))
    genome = Genome.of(space.complete(space.default))
    return ExportItem(workload=workload, genome=genome, candidate=f"demo/{cols}", record={"run": "demo"})


def listing(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class ExporterSuite(Suite):
    """What every export format of winners promises. gpu_only: names of those whose owners evaluate nothing else."""

    gpu_only: ClassVar[frozenset[str]] = frozenset()

    @pytest.fixture
    def exporter(self, name: str) -> Exporter:
        return find_exporter(name)

    @pytest.fixture(params=["cuda", "cpu"])
    def request_to_export(self, request: pytest.FixtureRequest, name: str, tmp_path: Path) -> ExportRequest:
        target, arch = request.param, find_target(request.param).example_arch
        if name in self.gpu_only and find_target(target).shares_cores:
            pytest.skip(f"{name} is for GPUs only")
        items, out = (item(target, arch, 64),), tmp_path / "below" / "exported"
        return ExportRequest(kernel="layernorm", target=target, arch=arch, items=items, out=out)

    def test_an_exporter_says_the_name_that_it_is_found_by(self, name: str) -> None:
        assert find_exporter(name).name == name

    def test_the_files_that_are_named_are_those_that_are_written_and_the_source_is_among_them(
        self, exporter: Exporter, request_to_export: ExportRequest
    ) -> None:
        written = exporter.export(request_to_export)
        out = request_to_export.out
        assert written
        assert sorted(written) == sorted(p for p in out.rglob("*") if p.is_file())
        assert [p.name for p in out.parent.iterdir()] == [out.name]
        entry = f"{load_kernel('layernorm').entry}(".encode()
        assert any(entry in p.read_bytes() for p in written if not p.name.endswith((".so", ".cubin")))

    def test_an_earlier_export_is_replaced(self, exporter: Exporter, request_to_export: ExportRequest) -> None:
        exporter.export(request_to_export)
        target, arch = request_to_export.target, request_to_export.arch
        other = replace(request_to_export, items=(item(target, arch, 128),))
        exporter.export(other)
        assert any(b"demo/128" in text for text in listing(other.out).values())
        assert not any(b"demo/64" in text for text in listing(other.out).values())

    def test_what_is_not_an_export_is_left_alone(self, exporter: Exporter, request_to_export: ExportRequest) -> None:
        out = request_to_export.out
        out.mkdir(parents=True)
        (out / "thesis.tex").write_text("mine")
        with pytest.raises(UsageError, match="not empty"):
            exporter.export(request_to_export)
        assert listing(out.parent) == {"exported/thesis.tex": b"mine"}

    def test_a_winner_that_no_longer_compiles_leaves_nothing_behind(
        self, exporter: Exporter, request_to_export: ExportRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, arch = request_to_export.target, request_to_export.arch
        compiler = type(find_language(find_target(target).language))
        compile_source = compiler.compile
        seen: list[Source] = []

        def compile_the_first(self: Language, source: Source, arch: str, workdir: Path) -> Binary:
            seen.append(source)
            later = replace(source, text=f"#error no longer\n{source.text}") if len(seen) > 1 else source
            return compile_source(self, later, arch, workdir)

        monkeypatch.setattr(compiler, "compile", compile_the_first)
        with pytest.raises(CompileError):
            exporter.export(replace(request_to_export, items=(*request_to_export.items, item(target, arch, 96))))
        assert not listing(request_to_export.out.parent)
