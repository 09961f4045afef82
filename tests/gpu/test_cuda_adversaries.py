"""A search finds every loophole there is: each known way to cheat on a GPU is refused, by name, on a search's own path."""

from __future__ import annotations

import pytest

from evo.executors import ExecutorConfig
from evo.problem.kernel import load_kernel
from evo.targets import find_target
from tests.adversaries.cheats import ALL, Cheat
from tests.adversaries.column_sums.cheats import ALL as OF_SUMS
from tests.adversaries.flat.cheats import ALL as OF_FLAT
from tests.adversaries.trial import FOLDER, Verdict, verdicts_of, workload_for

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SUMS, FLAT = FOLDER / "column_sums", FOLDER / "flat"
ON_GPU = [
    pytest.param(kernel, cheat, id=f"{kernel}: {cheat.name}")
    for kernel, cheats in (("layernorm", ALL), ("column sums", OF_SUMS), ("flat", OF_FLAT))
    for cheat in cheats
    if "cuda" in cheat.targets
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Verdict]]:
    arch = find_target("cuda").device().arch
    capability = find_target("cuda").limits(arch).capability
    # Other tests open and leave the GPU beside these, and nothing runs on it meanwhile: a launch has longer than usual.
    config = ExecutorConfig(builders=4, cache_dir=tmp_path_factory.mktemp("cache"), gate_floor_s=2.0)
    tried, of_sums, of_flat = (
        [c for c in cheats if "cuda" in c.targets and capability >= c.capability] for cheats in (ALL, OF_SUMS, OF_FLAT)
    )
    sums = load_kernel(str(SUMS)).example("cuda")
    return {
        "layernorm": verdicts_of("cuda", arch, workload_for("cuda", "float16"), tried, config),
        "column sums": verdicts_of("cuda", arch, sums, of_sums, config, folder=SUMS),
        "flat": verdicts_of("cuda", arch, load_kernel(str(FLAT)).example("cuda"), of_flat, config, folder=FLAT),
    }


@pytest.mark.parametrize(("kernel", "cheat"), ON_GPU)
def test_a_search_on_the_gpu_refuses_cheats_and_nothing_else(
    verdicts: dict[str, dict[str, Verdict]], kernel: str, cheat: Cheat
) -> None:
    if cheat.name not in verdicts[kernel]:
        pytest.skip(f"needs compute capability {cheat.capability / 10}")
    verdict = verdicts[kernel][cheat.name]
    assert bool(verdict.stage) == bool(cheat.stage), verdict
    assert not cheat.stage or verdict.as_expected, verdict
