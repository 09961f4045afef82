"""Each known mistake of a template is refused, by name, on the path that a search takes. On a GPU: tests/gpu."""

from __future__ import annotations

from contextlib import closing

import pytest

from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.problem.loading import load_kernel
from tests.adversaries.attention.cheats import ALL as OF_ATTENTION
from tests.adversaries.cheats import Cheat, names_for
from tests.adversaries.column_sums.cheats import ALL as OF_SUMS
from tests.adversaries.flat.cheats import ALL as OF_FLAT
from tests.adversaries.row_max.cheats import ALL as OF_MAXIMA
from tests.adversaries.strided.cheats import ALL as OF_STRIDES
from tests.adversaries.trial import FOLDER, Verdict, try_all, workload_for

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
    found = {}
    with closing(LocalExecutor("cpu", ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache")))) as executor:
        for name, cheats in CHEATS.items():
            folder, how = FOLDER if name == "layernorm" else FOLDER / name, {}
            workload = workload_for("cpu", "float32") if name == "layernorm" else load_kernel(str(folder)).example("cpu")
            if name == "attention":
                workload = load_kernel(str(folder)).workload("cpu", ATTENTION_WORKLOAD)
                how = {"neighbours": False, "timed": False}
            verdicts = try_all(executor, "cpu", "native", workload, cheats, folder=folder, **how)
            found[name] = {verdict.cheat.name: verdict for verdict in verdicts}
    return found


@pytest.mark.parametrize(("kernel", "cheat"), TRIED)
def test_a_search_on_the_cpu_refuses_a_mistake_and_nothing_that_is_right(
    verdicts: dict[str, dict[str, Verdict]], kernel: str, cheat: Cheat
) -> None:
    verdict = verdicts[kernel][cheat.name]
    assert verdict.stage or not cheat.stage, f"{cheat.name} was accepted"
    assert verdict.as_expected, verdict
