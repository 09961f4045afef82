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

ATTENTION, SUMS, MAXIMA, STRIDED, FLAT = (
    FOLDER / name for name in ("attention", "column_sums", "row_max", "strided", "flat")
)
ATTENTION_WORKLOAD = "batch=1,heads=2,kv_heads=2,q_len=64,kv_len=64,head_dim=32,dtype=float32,causal=true"
CHEATS = {
    "layernorm": names_for("cpu", 0),
    "attention": OF_ATTENTION,
    "column sums": names_for("cpu", 0, OF_SUMS),
    "row maxima": OF_MAXIMA,
    "strided": OF_STRIDES,
    "flat": names_for("cpu", 0, OF_FLAT),
}
TRIED = [
    pytest.param(kernel, cheat, id=f"{kernel}: {cheat.name}")
    for kernel, cheats in CHEATS.items()
    for cheat in cheats
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Verdict]]:
    config = ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache"))
    attention = load_kernel(str(ATTENTION)).workload("cpu", ATTENTION_WORKLOAD)
    sums, maxima, strided = (load_kernel(str(folder)).example("cpu") for folder in (SUMS, MAXIMA, STRIDED))
    gated = {"neighbours": False, "timed": False, "folder": ATTENTION}
    return {
        "layernorm": verdicts_of("cpu", "native", workload_for("cpu", "float32"), CHEATS["layernorm"], config),
        "attention": verdicts_of("cpu", "native", attention, OF_ATTENTION, config, **gated),
        "column sums": verdicts_of("cpu", "native", sums, CHEATS["column sums"], config, folder=SUMS),
        "row maxima": verdicts_of("cpu", "native", maxima, OF_MAXIMA, config, folder=MAXIMA),
        "strided": verdicts_of("cpu", "native", strided, OF_STRIDES, config, folder=STRIDED),
        "flat": verdicts_of(
            "cpu", "native", load_kernel(str(FLAT)).example("cpu"), CHEATS["flat"], config, folder=FLAT
        ),
    }


@pytest.mark.parametrize(("kernel", "cheat"), TRIED)
def test_a_search_on_the_cpu_refuses_a_mistake_and_nothing_that_is_right(
    verdicts: dict[str, dict[str, Verdict]], kernel: str, cheat: Cheat
) -> None:
    verdict = verdicts[kernel][cheat.name]
    assert verdict.stage or not cheat.stage, f"{cheat.name} was accepted"
    assert verdict.as_expected, verdict
