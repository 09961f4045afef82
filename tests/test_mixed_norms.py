"""Norms with float32 weights beside inputs of 16 bits: every branch is right, what rounds a weight first is refused, and
CUDA sources compile."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evo.errors import UsageError
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel, template_root
from evo.problem.render import render
from evo.runtime.package import Package
from evo.targets import compile_source, find_target
from tests.test_norm_family import refused

CUDA, SESSION = find_target("cuda"), find_target("cpu").open()
FORWARD, BACKWARD = ("rmsnorm", "layernorm"), ("rmsnorm_backward", "layernorm_backward")
ADDED = tuple(f"add_{name}" for name in (*FORWARD, *BACKWARD))
ROUNDED = "(V)(((U){0} + 0x7fffu + ((U){0} >> 16 & 1u)) & 0xffff0000u)"


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load_kernel(str(request.param))


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", names, indirect=True)


def problem(kernel: Kernel, target: str = "cpu", cols: int = 200, dtype: str = "bfloat16", **options: bool) -> Workload:
    told = "".join(f",{n}={str(v).lower()}" for n, v in options.items())
    return kernel.workload(target, f"rows=67,cols={cols},dtype={dtype},weight_dtype=float32{told}")


def every_option(kernel: Kernel) -> dict[str, bool]:
    return {n: True for n, v in kernel.options.items() if v is False}


@of(*FORWARD, *BACKWARD)
def test_every_branch_passes_the_gate_on_a_cpu(kernel: Kernel, tmp_path: Path) -> None:
    workload = problem(kernel, **every_option(kernel))
    for number, point in enumerate(kernel.space("cpu", workload, SESSION.limits).branches()):
        assert not refused(kernel, point, workload, tmp_path / str(number)), point


@pytest.mark.slow
@of(*FORWARD, *BACKWARD)
def test_points_drawn_at_random_pass_the_gate_on_a_cpu(kernel: Kernel, tmp_path: Path) -> None:
    rng = random.Random(kernel.name)
    for number in range(50):
        workload = problem(kernel, **{n: rng.random() < 0.5 for n in every_option(kernel) if n != "sum"})
        point = kernel.space("cpu", workload, SESSION.limits).sample(rng)
        assert not refused(kernel, point, workload, tmp_path / str(number)), (workload.key, point)


MISTAKES = [
    ("rmsnorm", ("rstd[r] * weight.part[k]", f"rstd[r] * {ROUNDED.format('weight.part[k]')}")),
    ("layernorm", ("rstd[r] * weight.part[k]", f"rstd[r] * {ROUNDED.format('weight.part[k]')}")),
    ("layernorm", (" + bias.part[k]", f" + {ROUNDED.format('bias.part[k]')}")),
    ("layernorm", ("load(affine.bias + (j & affine.bias_mask))", "load((const T*)affine.bias + (j & affine.bias_mask))")),
    ("rmsnorm", ("load(affine.weight + (j &", "load((const T*)affine.weight + (j &")),
    ("rmsnorm_backward", ("p.weight ? load(p.weight + j)", f"p.weight ? {ROUNDED.format('load(p.weight + j)')}")),
    ("layernorm_backward", ("p.weight ? load(p.weight + j)", f"p.weight ? {ROUNDED.format('load(p.weight + j)')}")),
    ("layernorm_backward", ("(F)sum);", "widen([&] { T t; store(&t, (F)sum); return t; }()));")),
]


@pytest.mark.parametrize(("kernel", "mistake"), MISTAKES, indirect=["kernel"], ids=str)
def test_a_weight_that_is_rounded_first_or_of_another_type_is_refused(
    kernel: Kernel, mistake: tuple[str, str], tmp_path: Path
) -> None:
    workload = problem(kernel)
    point = kernel.space("cpu", workload, SESSION.limits).default
    assert refused(kernel, point, workload, tmp_path, mistake)


@of(*FORWARD, *BACKWARD, *ADDED)
def test_cuda_sources_compile_and_read_the_weights_in_halves_of_32_bytes_at_most(kernel: Kernel) -> None:
    rng = random.Random(kernel.name)
    for cols, arch, dtype in ((64, "sm_89", "float16"), (769, "sm_89", "bfloat16"), (4096, "sm_90", "bfloat16")):
        workload = problem(kernel, "cuda", cols, dtype, **every_option(kernel))
        space = kernel.space("cuda", workload, CUDA.limits(arch))
        assert space.is_legal(space.default), space.violations(space.default)
        for point in (space.default, space.sample(rng)):
            compile_source(render(kernel, "cuda", Genome.of(point), workload, arch), arch, Path())
            width, alignment = int(point["vector_bytes"]), kernel.plans("cuda", point, workload)[0].alignment
            assert alignment == (min(16, 2 * width) if width > 2 else 1)


@of(*FORWARD, *BACKWARD)
def test_more_registers_and_shared_memory_are_counted_than_for_weights_of_16_bits(kernel: Kernel) -> None:
    wide = problem(kernel, "cuda", 4096)
    short = replace(wide, options=tuple((n, "same" if n == "weight_dtype" else v) for n, v in wide.options))
    rng, only = random.Random(1), 0
    spaces = [kernel.space("cuda", w, CUDA.limits("sm_89")) for w in (wide, short)]
    for _ in range(300):
        point = spaces[1].sample(rng)
        only += not spaces[0].is_legal(point)
        assert spaces[1].is_legal(spaces[0].sample(rng))
    assert only > 0


@of(*FORWARD, *BACKWARD, *ADDED)
def test_it_is_for_16_bits_and_off_at_first(kernel: Kernel) -> None:
    assert kernel.example("cuda").option("weight_dtype") == "same"
    with pytest.raises(UsageError, match="weight_dtype=float32 is for float16 and bfloat16"):
        problem(kernel, "cpu", dtype="float32")
    dtypes = {a.name: a.dtype_of(problem(kernel)) for a in kernel.arguments}
    assert {dtypes[n] for n in ("weight", "bias", "dweight", "dbias") if n in dtypes} == {"float32"}
    assert {dtypes[n] for n in ("x", "y", "dx", "dy", "sum") if n in dtypes} == {"bfloat16"}


@of(*FORWARD, *BACKWARD)
def test_its_weights_are_none_of_16_bits(kernel: Kernel) -> None:
    inputs = kernel.inputs(problem(kernel), "normal", torch.Generator().manual_seed(1))
    weight = inputs["weight"]
    assert weight is not None
    assert weight.dtype == torch.float32
    assert not (weight == weight.bfloat16().float()).any()


@pytest.mark.parametrize("folder", ["rmsnorm", "layernorm", "rmsnorm/backward", "layernorm/backward", "add_rmsnorm"])
def test_a_manifest_that_is_older_than_the_option_is_of_weights_of_the_inputs_dtype(folder: str) -> None:
    path = template_root().parent / "kernels" / folder
    kernel = load_kernel(json.loads((path / "manifest.json").read_text())["kernel"]["name"])
    package = Package(kernel.name, [str(path), str(kernel.folder), str(template_root())])
    before = [str(v) for v in package.variants]
    package.complete(kernel)
    compiled_in = [n for n in kernel.options if n in kernel.compile_time_dims["cuda"]]
    assert [d["name"] for d in package.dimensions] == [*dict(kernel.example("cuda").dims), *compiled_in]
    same = [v for v in package.variants if v.sizes["weight_dtype"] == 0]
    assert same
    for variant in same:
        assert variant.fits(variant.sizes)
        assert not variant.fits({**variant.sizes, "weight_dtype": 1})
    assert [str(v) for v in package.variants] == before
    assert all("weight_dtype" in v["fixed"] for v in package.manifest["general"])
