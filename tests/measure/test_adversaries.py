"""A search finds every loophole there is: each known way to cheat is refused, by name, on the path that a search takes."""

from __future__ import annotations

import pytest

from evo.executors import ExecutorConfig
from tests.adversaries.cheats import ALL, Cheat, names_for
from tests.adversaries.trial import Verdict, verdicts_of, workload_for

TRIED = names_for("cpu", 0)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    config = ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache"))
    return verdicts_of("cpu", "native", workload_for("cpu", "float32"), TRIED, config)


@pytest.mark.parametrize("cheat", [c for c in TRIED if c.stage], ids=lambda c: c.name)
def test_a_search_on_the_cpu_refuses_a_candidate_that(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert verdicts[cheat.name].stage, f"{cheat.name} was accepted"
    assert verdicts[cheat.name].as_expected, verdicts[cheat.name]


@pytest.mark.parametrize("cheat", [c for c in TRIED if not c.stage], ids=lambda c: c.name)
def test_a_search_on_the_cpu_accepts_a_candidate_that_is(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert not verdicts[cheat.name].stage, verdicts[cheat.name]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_cheat_is_tried_twice(target: str) -> None:
    names = [c.name for c in ALL if target in c.targets]
    assert len(names) == len(set(names))
