"""What `evo bench` races where it is asked for several architectures. Nothing is run."""

from __future__ import annotations

import pytest

from evo.cli.measure import _for_each
from evo.genome import Genome
from evo.kernel import load_kernel
from evo.targets import find_target

KEY = "batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16"


def test_a_genome_goes_without_what_an_architecture_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = load_kernel("attention")
    workload = kernel.workload("cuda", KEY)
    space = kernel.space("cuda", workload, find_target("cuda").limits("sm_90"))
    early = Genome.of(space.complete({"launch": "programmatic", "block_n": 128}))
    large = Genome.of(space.complete({"launch": "plain", "block_n": 256, "k_stages": 2, "v_stages": 2}))
    found = list(_for_each([("early", early), ("large", large)], kernel, workload, ["sm_90", "compute_89"], "cuda"))
    assert [(name, arch) for name, arch, _ in found] == [("early", "sm_90"), ("early", "compute_89"), ("large", "sm_90")]
    assert found[0][2] == early
    assert found[1][2].parameters == {n: v for n, v in early.parameters.items() if n not in ("launch", "split_kv")}
    told = capsys.readouterr().err
    assert told.startswith("evo: large is not legal for compute_89 (shared_memory: ")
    assert told.endswith("it is not timed there\n")
