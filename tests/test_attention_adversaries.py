"""Attention has pitfalls of its own (masks, strides, a maximum that grows): who falls into one is refused, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.kernel import load_kernel
from tests.adversaries.attention.cheats import ALL
from tests.adversaries.cheats import Cheat
from tests.adversaries.trial import Verdict, try_all

FOLDER = Path(__file__).parent / "adversaries" / "attention"
WORKLOAD = "batch=1,heads=2,kv_heads=2,q_len=64,kv_len=64,head_dim=32,dtype=float32,causal=true"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Verdict]]:
    executor = LocalExecutor("cpu", ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache")))
    try:
        workload = load_kernel(str(FOLDER)).workload("cpu", WORKLOAD)
        found = try_all(executor, "cpu", "native", workload, ALL, neighbours=False, timed=False, folder=FOLDER)
        yield {v.cheat.name: v for v in found}
    finally:
        executor.close()


@pytest.mark.parametrize("cheat", [c for c in ALL if c.stage], ids=lambda c: c.name)
def test_a_search_refuses_attention_that(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert verdicts[cheat.name].stage, f"{cheat.name} was accepted"
    assert verdicts[cheat.name].as_expected, verdicts[cheat.name]


@pytest.mark.parametrize("cheat", [c for c in ALL if not c.stage], ids=lambda c: c.name)
def test_a_search_accepts_attention_that_is(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert not verdicts[cheat.name].stage, verdicts[cheat.name]
