"""A kernel may have several templates for one target, each with its own space, tied by one parameter that samplers see."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from evo.errors import SpaceError, TemplateError
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.problem.render import render, unread_parameters
from evo.problem.space import Categorical, Ordinal, Space, When, tied
from evo.targets import find_target
from tests.two_templates import write_two_templates

LIMITS = find_target("cpu").limits("native")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return load_kernel(str(write_two_templates(tmp_path / "doubled")))


def space_of(kernel: Kernel) -> Space:
    return kernel.space("cpu", kernel.example("cpu"), LIMITS)


def test_one_structural_parameter_chooses_a_template_and_the_others_belong_to_it(kernel: Kernel) -> None:
    space = space_of(kernel)
    choice, *others = space.parameters
    assert (choice.name, choice.values, choice.structural) == ("template", ("simple", "other"), True)
    assert {p.name: p.when[0].values for p in others} == {
        "unroll": ("simple", "other"), "split": ("other",), "chunk": ("other",)
    }  # fmt: skip
    assert space.complete({}) == {"template": "simple", "unroll": 2}
    assert space.initial_points == (
        {"template": "other", "unroll": 8, "split": False},
        {"template": "other", "unroll": 4, "split": True, "chunk": 64},
    )
    assert all(space.is_legal(point) for point in space.initial_points)


def test_the_legal_points_are_those_of_each_template_alone(kernel: Kernel) -> None:
    found = sorted(space_of(kernel).points(), key=repr)
    simple = [{"template": "simple", "unroll": n} for n in (1, 2, 4)]
    whole = [{"template": "other", "unroll": n, "split": False} for n in (4, 8)]
    split = [{"template": "other", "unroll": 4, "split": True, "chunk": n} for n in (64, 256)]
    assert found == sorted([*simple, *whole, *split], key=repr)
    assert {repr(space_of(kernel).sample(random.Random(seed))) for seed in range(200)} == set(map(repr, found))
    (reason,) = space_of(kernel).violations({"template": "simple", "unroll": 8})
    assert reason == "unroll of simple: template simple has it at 1, 2, 4"


def test_every_branch_of_every_template_can_be_reached_from_the_default(kernel: Kernel) -> None:
    branches = [(p["template"], p.get("split")) for p in space_of(kernel).branches()]
    assert sorted(branches, key=repr) == [("other", False), ("other", True), ("simple", None)]
    held = space_of(kernel).restricted({"template": "other"})
    assert {p["template"] for p in held.points()} == {"other"}
    assert space_of(kernel).restricted({"chunk": 64}).is_legal(held.complete({"unroll": 4, "split": True, "chunk": 64}))


def test_a_space_alone_and_one_behind_a_function_are_tied_alike() -> None:
    spaces = {"a": Space(parameters=(Ordinal(name="n", values=(1, 2)),)), "b": Space(parameters=())}
    assert [*tied(spaces).points()] == [{"template": "a", "n": 1}, {"template": "a", "n": 2}, {"template": "b"}]
    for stated in (spaces, lambda target, workload, limits: spaces):
        changed = load_kernel("softmax")
        changed = type(changed)(**{
            **{name: getattr(changed, name) for name in ("name", "dtypes", "arguments", "reference", "workloads", "plan")},
            "space": stated,
        })  # fmt: skip
        found = changed.space("cpu", changed.example("cpu"), LIMITS)
        assert [*found.points()] == [*tied(spaces).points()]


@pytest.mark.parametrize(
    "other",
    [
        Categorical(name="n", values=(1, 2)),
        Ordinal(name="n", values=(1, 2), when=(When(parameter="on", values=(True,)),)),
    ],
    ids=["kind", "condition"],
)
def test_a_parameter_that_means_something_else_in_another_template_needs_a_name_of_its_own(other: Ordinal) -> None:
    on = Categorical(name="on", values=(True, False))
    spaces = {"a": Space(parameters=(Ordinal(name="n", values=(1, 2)),)), "b": Space(parameters=(on, other))}
    with pytest.raises(SpaceError, match="parameter 'n' of template 'b' has another condition or kind than that of 'a'"):
        tied(spaces)


def test_a_genome_is_rendered_by_the_template_that_it_names(kernel: Kernel) -> None:
    workload, space = kernel.example("cpu"), space_of(kernel)
    points = {name: space.complete({"template": name, "unroll": 4}) for name in ("simple", "other")}
    texts = {name: render(kernel, "cpu", Genome.of(point), workload, "native") for name, point in points.items()}
    assert "y[i] = 2 * x[i]" in texts["simple"].text
    assert "y[i] = x[i] * 2" in texts["other"].text
    assert texts["simple"].digest != texts["other"].digest
    genome = Genome.of({"template": "other", "unroll": 4, "split": False})
    (kernel.folder / "cpu.other.cpp.j2").unlink()
    with pytest.raises(TemplateError, match=r"cpu\.other\.SUFFIX\.j2, or a source .*; it has none"):
        render(kernel, "cpu", genome, workload, "native")


def test_a_parameter_that_only_another_template_reads_is_told(kernel: Kernel) -> None:
    points = [(kernel.example("cpu"), Genome.of(point)) for point in space_of(kernel).points()]
    assert unread_parameters(kernel, "cpu", LIMITS, points) == []
    template = kernel.folder / "cpu.simple.cpp.j2"
    template.write_text(re.sub(r"#pragma.*\n", "", template.read_text()))
    assert unread_parameters(kernel, "cpu", LIMITS, points) == ["unroll"]


def test_an_edit_of_either_template_is_another_kernel(kernel: Kernel) -> None:
    digests = {kernel.digest}
    for name in ("simple", "other"):
        template = kernel.folder / f"cpu.{name}.cpp.j2"
        template.write_text(template.read_text() + "// edited\n")
        digests.add(load_kernel(str(kernel.folder)).digest)
    assert len(digests) == 3


def test_what_a_build_knows_of_its_launch_goes_before_what_the_plan_gives() -> None:
    kernel = load_kernel("softmax")
    workload, limits = kernel.example("cuda"), find_target("cuda").limits("sm_90")
    point = kernel.space("cuda", workload, limits).complete({})
    (stated,) = kernel.sequence("cuda", point, workload, limits).launches
    own = {"threads": 96, "smem_bytes": 512, "entry": "other"}
    (built,) = kernel.sequence("cuda", point, workload, limits, own).launches
    assert (built.block, built.smem_bytes, built.entry) == ((96, 1, 1), 512, "other")
    assert (built.grid, built.cluster, built.alignment) == (stated.grid, stated.cluster, stated.alignment)
    assert stated.entry == kernel.entry


def test_a_plain_source_may_be_a_template_of_several_and_use_templates_of_cpp(kernel: Kernel) -> None:
    (kernel.folder / "cpu.other.cpp.j2").unlink()
    (kernel.folder / "cpu.other.cpp").write_text(
        "template <int N> struct Many { static constexpr int n = unroll * N + chunk + split; };\n"
        'extern "C" void doubled() {}\n'
    )
    genome = Genome.of({"template": "other", "unroll": 4, "split": False})
    text = render(kernel, "cpu", genome, kernel.example("cpu"), "native").text
    assert text.startswith("#define chunk 0\n#define split 0\n#define unroll 4\n#line 1")
    assert "template <int N>" in text
