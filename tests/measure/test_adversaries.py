"""Each known mistake of a template is refused, by name, on the path that a search takes. On a GPU: tests/gpu."""

from __future__ import annotations

import pytest

from evo.executors import ExecutorConfig
from evo.problem.loading import load_kernel
from tests.adversaries.attention.cheats import ALL as OF_ATTENTION
from tests.adversaries.cheats import Cheat, names_for
from tests.adversaries.column_sums.cheats import ALL as OF_SUMS
from tests.adversaries.flat.cheats import ALL as OF_FLAT
from tests.adversaries.row_max.cheats import ALL as OF_MAXIMA
from tests.adversaries.strided.cheats import ALL as OF_STRIDES
from tests.adversaries.trial import FOLDER, Verdict, verdicts_of, workload_for

pytestmark = pytest.mark.slow

ATTENTION_WORKLOAD = "batch=1,heads=2,kv_heads=2,q_len=64,kv_len=64,head_dim=32,dtype=float32,causal=true"
CHEATS = {
    "layernorm": names_for("cpu", 0),
    "attention": OF_ATTENTION,
    "column_sums": names_for("cpu", 0, OF_SUMS),
    "row_max": OF_MAXIMA,
    "strided": OF_STRIDES,
    "flat": names_for("cpu", 0, OF_FLAT),
}
"""Cheats by the folder of their kernel."""
TRIED = [pytest.param(name, cheat, id=f"{name}: {cheat.name}") for name, cheats in CHEATS.items() for cheat in cheats]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Verdict]]:
    config = ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache"))
    found = {"layernorm": verdicts_of("cpu", "native", workload_for("cpu", "float32"), CHEATS["layernorm"], config)}
    for name in CHEATS.keys() - found.keys():
        kernel, gated = load_kernel(str(FOLDER / name)), {"neighbours": False, "timed": False} if name == "attention" else {}
        workload = kernel.workload("cpu", ATTENTION_WORKLOAD) if gated else kernel.example("cpu")
        found[name] = verdicts_of("cpu", "native", workload, CHEATS[name], config, folder=FOLDER / name, **gated)
    return found


@pytest.mark.parametrize(("kernel", "cheat"), TRIED)
def test_a_search_on_the_cpu_refuses_a_mistake_and_nothing_that_is_right(
    verdicts: dict[str, dict[str, Verdict]], kernel: str, cheat: Cheat
) -> None:
    verdict = verdicts[kernel][cheat.name]
    assert verdict.stage or not cheat.stage, f"{cheat.name} was accepted"
    assert verdict.as_expected, verdict
