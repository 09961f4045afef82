"""LayerNorm's CUDA template and its launch plan agree on every architecture."""

from __future__ import annotations

import re

import pytest

from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.targets import find_target

KERNEL, CUDA = load_kernel("layernorm"), find_target("cuda")
ARCHES = {"sm_89": False, "sm_90": True, "sm_90a": True, "sm_100": True, "sm_120": True, "compute_89": False}
ARCHES |= {"compute_90": True}


@pytest.mark.parametrize(("arch", "has_clusters"), ARCHES.items())
def test_the_source_has_the_cluster_that_the_plan_launches(arch: str, has_clusters: bool) -> None:
    workload = KERNEL.workload("cuda", "rows=512,cols=8192,dtype=float16")
    space = KERNEL.space("cuda", workload, CUDA.limits(arch))
    assert ("cluster" in space.by_name) == has_clusters
    wide = {"threads_per_row": 256, "rows_per_block": 1, "reduction": "shuffle"}
    seen = set()
    for cluster in (1, 2) if has_clusters else (1,):
        point = space.complete({**space.default, **wide, **({"cluster": cluster} if has_clusters else {})})
        assert space.is_legal(point), space.violations(point)
        source = render(KERNEL, "cuda", Genome.of(point), workload, arch).text
        plan = KERNEL.plan("cuda", point, workload)
        seen.add(plan.cluster)
        assert re.search(rf"\bCLUSTER = {plan.cluster}\b", source)
        assert ("__cluster_dims__" in source) == (plan.cluster > 1)
        assert ("cluster_barrier();" in source) == (plan.cluster > 1)
    assert seen == ({1, 2} if has_clusters else {1})


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_the_source_waits_where_the_plan_launches_early(arch: str) -> None:
    workload = KERNEL.workload("cuda", "rows=32,cols=4096,dtype=float16")
    space = KERNEL.space("cuda", workload, CUDA.limits(arch))
    assert ("launch" in space.by_name) == (arch == "sm_90")
    choices = space.by_name["launch"].values if arch == "sm_90" else ("plain",)
    for choice in choices:
        point = {**space.default, **({"launch": choice} if arch == "sm_90" else {}), "x_load": "nc"}
        source = render(KERNEL, "cuda", Genome.of(point), workload, arch).text
        early = KERNEL.plan("cuda", point, workload).programmatic
        assert early == (choice == "programmatic")
        assert ("griddepcontrol.wait" in source) == early
        assert ("ld.global.nc" in source) != early  # what the kernel before writes is not read-only
        if early:  # nothing is read before
            body = source.split("__global__")[-1]
            assert "load_" not in body.partition("griddepcontrol.wait")[0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("vector_bytes", [2, 4, 8, 16])
def test_vectors_have_an_entry_point_for_addresses_that_are_not_aligned(dtype: str, vector_bytes: int) -> None:
    workload = KERNEL.workload("cuda", f"rows=32,cols=4096,dtype={dtype}")
    space = KERNEL.space("cuda", workload, CUDA.limits("sm_89"))
    point = {**space.default, "vector_bytes": vector_bytes, "threads_per_row": 1024, "min_blocks": 0}
    if not space.is_legal(point):
        pytest.skip("no such kernel")
    source = render(KERNEL, "cuda", Genome.of(point), workload, "sm_89").text
    alignment = KERNEL.plan("cuda", point, workload).alignment
    element_bytes = 2 if dtype == "float16" else 4
    assert alignment == (vector_bytes if vector_bytes > element_bytes else 1)
    assert ("layernorm_unaligned" in source) == (alignment > 1)
