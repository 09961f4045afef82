"""A search finds every loophole there is: each known way to cheat on a GPU is refused, by name, on a search's own path."""

from __future__ import annotations

import pytest

from evo.executors import ExecutorConfig
from evo.problem.loading import load_kernel
from evo.targets import find_target
from tests.adversaries.cheats import ALL, Cheat
from tests.adversaries.column_sums.cheats import ALL as OF_SUMS
from tests.adversaries.flat.cheats import ALL as OF_FLAT
from tests.adversaries.row_max.cheats import ALL as OF_MAXIMA
from tests.adversaries.strided.cheats import ALL as OF_STRIDES
from tests.adversaries.trial import FOLDER, Verdict, verdicts_of, workload_for

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

FAMILIES = {"layernorm": ALL, "column_sums": OF_SUMS, "row_max": OF_MAXIMA, "strided": OF_STRIDES, "flat": OF_FLAT}
"""Cheats by the folder of their kernel."""
ON_GPU = [
    pytest.param(kernel, cheat, id=f"{kernel}: {cheat.name}")
    for kernel, cheats in FAMILIES.items()
    for cheat in cheats
    if "cuda" in cheat.targets
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Verdict]]:
    arch = find_target("cuda").device().arch
    capability = find_target("cuda").limits(arch).capability
    # Other tests open and leave the GPU beside these, and nothing runs on it meanwhile: a launch has longer than usual.
    config = ExecutorConfig(builders=4, cache_dir=tmp_path_factory.mktemp("cache"), gate_floor_s=2.0)
    tried = {n: [c for c in cheats if "cuda" in c.targets and capability >= c.capability] for n, cheats in FAMILIES.items()}
    found = {"layernorm": verdicts_of("cuda", arch, workload_for("cuda", "float16"), tried["layernorm"], config)}
    for name in FAMILIES.keys() - found.keys():
        example = load_kernel(str(FOLDER / name)).example("cuda")
        found[name] = verdicts_of("cuda", arch, example, tried[name], config, folder=FOLDER / name)
    return found


@pytest.mark.parametrize(("kernel", "cheat"), ON_GPU)
def test_a_search_on_the_gpu_refuses_cheats_and_nothing_else(
    verdicts: dict[str, dict[str, Verdict]], kernel: str, cheat: Cheat
) -> None:
    if cheat.name not in verdicts[kernel]:
        pytest.skip(f"needs compute capability {cheat.capability / 10}")
    verdict = verdicts[kernel][cheat.name]
    assert bool(verdict.stage) == bool(cheat.stage), verdict
    assert not cheat.stage or verdict.as_expected, verdict


def test_a_sum_in_no_fixed_order_is_not_blamed_on_its_workspace(verdicts: dict[str, dict[str, Verdict]]) -> None:
    reason = verdicts["column_sums"]["sums_by_atomics"].reason
    assert "result differs" in reason
    assert "workspace" not in reason
