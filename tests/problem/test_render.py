"""Templates are found by their names, and what is wrong with them is said with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo.errors import TemplateError
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, load_kernel
from evo.problem.render import Source, render
from tests.toy_kernel import write_kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return load_kernel(str(write_kernel(tmp_path / "toy")))


def rendered(kernel: Kernel) -> Source:
    genome, workload = Genome.of({"mode": "honest", "unroll": 4}), kernel.example("cpu")
    return render(kernel, "cpu", genome, workload, "native")


def test_a_template_is_named_after_its_target_in_any_language(kernel: Kernel) -> None:
    before = rendered(kernel)
    assert "GCC unroll 4" in before.text
    (kernel.folder / "cpu.cpp.j2").rename(kernel.folder / "cpu.zig.j2")
    assert rendered(kernel) == before


def test_no_template_for_the_target_and_two_are_refused_by_name(kernel: Kernel) -> None:
    needs = r"'toy' needs one template for target cpu in .*toy, cpu\.LANGUAGE\.j2, such as .*; it has"
    (kernel.folder / "cpu.zig.j2").write_text("")
    with pytest.raises(TemplateError, match=rf"{needs} cpu\.cpp\.j2, cpu\.zig\.j2$"):
        rendered(kernel)
    for template in kernel.folder.glob("*.j2"):
        template.unlink()
    with pytest.raises(TemplateError, match=rf"{needs} none$"):
        rendered(kernel)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [("one\n{{ p.unrol }}\n", 2, "unrol"), ("{% if %}\n", 1, "Expected"), ("\n\n{{ 1 / 0 }}\n", 3, "division")],
    ids=["unknown name", "syntax", "arithmetic"],
)
def test_what_is_wrong_in_an_included_file_is_said_with_its_name(kernel: Kernel, text: str, line: int, words: str) -> None:
    (kernel.folder / "part.j2").write_text(text)
    template = kernel.folder / "cpu.cpp.j2"
    template.write_text('{% include "part.j2" %}\n' + template.read_text())
    with pytest.raises(TemplateError, match=rf"toy/part\.j2, line {line}: .*{words}"):
        rendered(kernel)
