"""Templates are found by their names, and what is wrong with them is said with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evo.errors import CompileError, TemplateError
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, LaunchPlan
from evo.problem.loading import load_kernel
from evo.problem.render import Source, render, unread_parameters
from evo.targets import compile_source, find_target
from evo.testing.toy_kernel import write_kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return load_kernel(str(write_kernel(tmp_path / "toy")))


def rendered(kernel: Kernel) -> Source:
    genome, workload = Genome.of({"mode": "honest", "unroll": 4}), kernel.example("cpu")
    return render(kernel, "cpu", genome, workload, "native")


def test_a_template_is_named_after_its_target_and_its_language(kernel: Kernel) -> None:
    before = rendered(kernel)
    assert "GCC unroll 4" in before.text
    assert before.language == "cpp"
    for other in ("zig", "cu"):  # no language, and one for another target
        template = (kernel.folder / "cpu.cpp.j2").rename(kernel.folder / f"cpu.{other}.j2")
        with pytest.raises(TemplateError, match=rf"cpu\.{other}\.j2 is in no language for target cpu: \.cpp is cpp$"):
            rendered(kernel)
        template.rename(kernel.folder / "cpu.cpp.j2")
    assert rendered(kernel) == before


def test_no_template_for_the_target_and_two_are_refused_by_name(kernel: Kernel) -> None:
    needs = r"'toy' needs one template for target cpu in .*toy, cpu\.SUFFIX\.j2, or a source .*, cpu\.SUFFIX; it has"
    (kernel.folder / "cpu.zig.j2").write_text("")
    with pytest.raises(TemplateError, match=rf"{needs} cpu\.cpp\.j2, cpu\.zig\.j2: \.cpp is cpp$"):
        rendered(kernel)
    for template in kernel.folder.glob("*.j2"):
        template.unlink()
    with pytest.raises(TemplateError, match=rf"{needs} none: \.cpp is cpp$"):
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


def test_a_parameter_is_told_that_no_part_of_the_template_has_and_the_launch_does_not_read(kernel: Kernel) -> None:
    genome, workload = Genome.of({"mode": "honest", "unroll": 4}), kernel.example("cpu")

    def unread(text: str, **changes: object) -> list[str]:
        (kernel.folder / "cpu.cpp.j2").write_text(text)
        changed = replace(kernel, **changes)  # type: ignore[arg-type]
        object.__setattr__(changed, "folder", kernel.folder)
        return unread_parameters(changed, "cpu", find_target("cpu").limits("native"), [(workload, genome)])

    (kernel.folder / "part.j2").write_text("{% if p.mode == 'other' %}{{ p.unroll }}{% endif %}")
    assert unread('{% include "part.j2" %}') == []
    assert unread("{# p.unroll #}{{ p.mode }}") == ["unroll"]
    assert unread("{% set q = p %}{{ q.unroll }}{{ p['mode'] }}") == []
    assert unread("{{ p.mode }}", plan=lambda target, point, workload: LaunchPlan(threads=point["unroll"])) == []
    assert unread("{% include p.mode ~ '.j2' %}") == []


# -- a source whose parameters are macros -------------------------------------------------------------------------

PLAIN = """// MODE is a macro only below
#ifndef UNROLL
#define UNROLL 4 /* two
                    lines */
#endif
#define mode other
extern "C" void twice(const float* x, float* y, long long n) {
    for (long long i = 0; i < n; i += UNROLL) y[i] = mode(x[i]);
}
"""


def plain(kernel: Kernel, text: str = PLAIN) -> Source:
    (kernel.folder / "cpu.cpp.j2").unlink(missing_ok=True)
    (kernel.folder / "cpu.cpp").write_text(text)
    return rendered(kernel)


def test_a_plain_source_gets_a_macro_for_each_parameter_instead_of_its_own_and_keeps_its_lines(kernel: Kernel) -> None:
    given, digest = plain(kernel).text.splitlines(), kernel.digest
    assert given[:3] == ["#define mode honest", "#define UNROLL 4", '#line 1 "cpu.cpp"']
    own = PLAIN.splitlines()
    assert [after for before, after in zip(own, given[3:], strict=True) if before != after] == [" /* two", ""]
    assert "#define UNROLL 4" not in given[3:]
    plain(kernel, PLAIN + "\n")
    assert load_kernel(str(kernel.folder)).digest != digest


def test_an_error_in_a_plain_source_is_said_with_its_own_line(kernel: Kernel, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"cpu\.cpp:8:\d+: error: .*nothing"):
        compile_source(plain(kernel, PLAIN.replace("x[i]", "nothing[i]")), "native", tmp_path)


def test_a_parameter_that_a_plain_source_does_not_use_and_a_missing_entry_point_are_refused(kernel: Kernel) -> None:
    unused = r"parameter 'unroll' of the space is no macro of .*cpu\.cpp: use unroll in the source where .*, or take it out"
    for text in (PLAIN.replace("i += UNROLL", "++i"), PLAIN.replace("UNROLL", "STEP")):  # also where it is but defined
        with pytest.raises(TemplateError, match=unused):
            plain(kernel, text)
    read = replace(kernel, plan=lambda target, point, workload: LaunchPlan(threads=point["unroll"]))
    object.__setattr__(read, "folder", kernel.folder)
    assert "unroll" not in rendered(read).text.lower(), "what the launch depends on need not be a macro"
    with pytest.raises(TemplateError, match=r"cpu\.cpp has no entry point 'twice', it has none: give kernel\.py the"):
        plain(kernel, PLAIN.replace("twice", "thrice"))
