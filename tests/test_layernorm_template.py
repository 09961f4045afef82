"""LayerNorm's CUDA template and its launch plan agree on every architecture."""

from __future__ import annotations

import re

import pytest

from evo.genome import Genome
from evo.kernel import load_kernel
from evo.render import render
from evo.targets import find_target

ARCHES = {"sm_89": False, "sm_90": True, "sm_90a": True, "sm_100": True, "sm_120": True, "compute_89": False}
ARCHES |= {"compute_90": True}


@pytest.mark.parametrize(("arch", "has_clusters"), ARCHES.items())
def test_the_source_has_the_cluster_that_the_plan_launches(arch: str, has_clusters: bool) -> None:
    kernel, target = load_kernel("layernorm"), find_target("cuda")
    workload = kernel.workload("cuda", "rows=512,cols=8192,dtype=float16")
    space = kernel.space("cuda", workload, target.limits(arch))
    assert ("cluster" in space.by_name) == has_clusters
    wide = {"threads_per_row": 256, "rows_per_block": 1, "reduction": "shuffle"}
    seen = set()
    for cluster in (1, 2) if has_clusters else (1,):
        point = space.complete({**space.default, **wide, **({"cluster": cluster} if has_clusters else {})})
        assert space.is_legal(point), space.violations(point)
        source = render(kernel, "cuda", Genome.of(point), kernel.binding("cuda", workload), arch).text
        plan = kernel.plan("cuda", point, workload)
        seen.add(plan.cluster)
        assert re.search(rf"\bCLUSTER = {plan.cluster}\b", source)
        assert ("__cluster_dims__" in source) == (plan.cluster > 1)
        assert ("cluster_barrier();" in source) == (plan.cluster > 1)
    assert seen == ({1, 2} if has_clusters else {1})
