"""A search finds every loophole there is: each known way to cheat on a GPU is refused, by name, on a search's own path."""

from __future__ import annotations

import pytest

from evo.executors import ExecutorConfig
from evo.targets import find_target
from tests.adversaries.cheats import ALL, Cheat
from tests.adversaries.trial import Verdict, verdicts_of, workload_for

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ON_GPU = tuple(c for c in ALL if "cuda" in c.targets)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    arch = find_target("cuda").device().arch
    capability = find_target("cuda").limits(arch).capability
    # Other tests open and leave the GPU beside these, and nothing runs on it meanwhile: a launch has longer than usual.
    config = ExecutorConfig(builders=4, cache_dir=tmp_path_factory.mktemp("cache"), gate_floor_s=2.0)
    tried = [c for c in ON_GPU if capability >= c.capability]
    return verdicts_of("cuda", arch, workload_for("cuda", "float16"), tried, config)


@pytest.mark.parametrize("cheat", ON_GPU, ids=lambda c: c.name)
def test_a_search_on_the_gpu_refuses_cheats_and_nothing_else(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    if cheat.name not in verdicts:
        pytest.skip(f"needs compute capability {cheat.capability / 10}")
    verdict = verdicts[cheat.name]
    assert bool(verdict.stage) == bool(cheat.stage), verdict
    assert not cheat.stage or verdict.as_expected, verdict
