"""Attention has pitfalls of its own (masks, strides, a maximum that grows): who falls into one is refused, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo.executors import ExecutorConfig
from evo.problem.kernel import load_kernel
from tests.adversaries.attention.cheats import ALL
from tests.adversaries.cheats import Cheat
from tests.adversaries.trial import Verdict, verdicts_of

FOLDER = Path(__file__).parent.parent / "adversaries" / "attention"
WORKLOAD = "batch=1,heads=2,kv_heads=2,q_len=64,kv_len=64,head_dim=32,dtype=float32,causal=true"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    config = ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache"))
    workload = load_kernel(str(FOLDER)).workload("cpu", WORKLOAD)
    return verdicts_of("cpu", "native", workload, ALL, config, neighbours=False, timed=False, folder=FOLDER)


@pytest.mark.parametrize("cheat", [c for c in ALL if c.stage], ids=lambda c: c.name)
def test_a_search_refuses_attention_that(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert verdicts[cheat.name].stage, f"{cheat.name} was accepted"
    assert verdicts[cheat.name].as_expected, verdicts[cheat.name]


@pytest.mark.parametrize("cheat", [c for c in ALL if not c.stage], ids=lambda c: c.name)
def test_a_search_accepts_attention_that_is(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert not verdicts[cheat.name].stage, verdicts[cheat.name]
