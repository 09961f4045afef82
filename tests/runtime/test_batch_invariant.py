"""`also_serve(batch_invariant=True)`: a row has the same bits whatever else is in its batch."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evo.export import find_exporter
from tests.ended import run_python
from tests.export.exports import request_for
from tests.runtime.conftest import Importer, python

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = str(BENCHMARKS / "batch_invariance.py")

SIZES = ("rows=4,cols=96,dtype=float32", "rows=4096,cols=96,dtype=float32", "rows=64,cols=1000,dtype=float32")
CALLS: dict[str, Any] = {
    "layernorm": lambda m, x: m.layer_norm(x, x.shape[-1:]),
    "rmsnorm": lambda m, x: m.rms_norm(x, x.shape[-1:]),
    "softmax": lambda m, x: m.softmax(x, -1),
}


@pytest.fixture(scope="module", params=list(CALLS))
def loaded(
    request: pytest.FixtureRequest, use: Importer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModuleType, Any]:
    out = tmp_path_factory.mktemp("export") / f"invariant_{request.param}"
    find_exporter("module").export(request_for("cpu", "native", out, *SIZES, kernel=request.param))
    return use(Path(out)), CALLS[request.param]


def explained(module: ModuleType, x: torch.Tensor) -> str:
    name = module.frontend.BOUND.function.name
    more = {"softmax": (-1,)}.get(name, (x.shape[-1:],))
    return str(module.explain(x, *more))


@pytest.mark.parametrize("columns", [96, 100, 1000, 1001])
def test_a_row_has_the_same_bits_in_any_batch(loaded: tuple[ModuleType, Any], columns: int) -> None:
    module, call = loaded
    module.also_serve(batch_invariant=True)
    try:
        chance = random.Random(columns)
        x = torch.randn(4096, columns, generator=torch.Generator().manual_seed(columns))
        whole, variants = call(module, x), set[str]()
        for _ in range(25):
            rows = torch.tensor([chance.randrange(4096) for _ in range(chance.choice([1, 2, 7, 64, 513]))])
            variants.add(explained(module, x[rows]))
            assert torch.equal(call(module, x[rows]), whole[rows])
            first = int(rows[0])
            assert torch.equal(call(module, x[first : first + 9]), whole[first : first + 9])
        assert len(variants) == 1, variants
        assert variants.pop().startswith("variant")
    finally:
        module.also_serve(batch_invariant=False)


def test_without_it_the_number_of_rows_chooses(loaded: tuple[ModuleType, Any]) -> None:
    module, _ = loaded
    module.also_serve(measure=False, slower=True)
    assert explained(module, torch.randn(4, 96)) != explained(module, torch.randn(4096, 96))


@pytest.mark.parametrize("can_be_tried", [True, False])
def test_a_variant_whose_rows_depend_on_their_batch_or_may_serves_nothing_then(
    loaded: tuple[ModuleType, Any], monkeypatch: pytest.MonkeyPatch, can_be_tried: bool
) -> None:
    module, call = loaded
    dispatch = module.frontend.DISPATCH
    monkeypatch.setattr(dispatch, "_varies", {})
    tried = list[int]()

    def same_in_any_batch(*of: Any) -> bool:
        tried.append(0)
        if not can_be_tried:
            raise ValueError("it does not serve a problem like its own")
        return False

    monkeypatch.setattr(module.frontend, "same_in_any_batch", same_in_any_batch)
    module.also_serve(batch_invariant=True)
    try:
        x = torch.randn(4, 96)
        assert explained(module, x) == "PyTorch: results of no variant here are the same in any batch"
        assert call(module, x).shape == x.shape
        assert len(tried) > 1, "the next one is tried"
    finally:
        module.also_serve(batch_invariant=False)
    assert not explained(module, torch.randn(4, 96)).startswith("PyTorch: results of no variant")


def test_a_lack_of_memory_for_the_trial_decides_nothing(
    loaded: tuple[ModuleType, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = loaded
    dispatch = module.frontend.DISPATCH
    monkeypatch.setattr(dispatch, "_varies", {})

    def same_in_any_batch(*of: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.frontend, "same_in_any_batch", same_in_any_batch)
    module.also_serve(batch_invariant=True)
    try:
        assert explained(module, torch.randn(4, 96)).startswith("PyTorch: no memory is left to try")
        assert dispatch._varies == {}
    finally:
        module.also_serve(batch_invariant=False)


def test_the_test_of_it_finds_a_dependence(loaded: tuple[ModuleType, Any]) -> None:
    """It compares what was computed: here of a variant that is given another one's sizes for one row."""
    module, _ = loaded
    frontend, sizes = module.frontend, {d["name"]: 0 for d in module.frontend.PACKAGE.dimensions}
    variant = frontend.PACKAGE.variants[0]
    sizes |= variant.sizes
    here = torch.device("cpu")
    found = frontend.DISPATCH._load(variant, -1)
    assert frontend.same_in_any_batch("rows", found, sizes, torch.float32, here)

    class Varying:
        def call(self, sizes: dict[str, int], *of: Any) -> Any:
            return found.call({**sizes, "cols": sizes["cols"] - (sizes["rows"] == 1)}, *of)

    assert not frontend.same_in_any_batch("rows", Varying(), sizes, torch.float32, here)


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    return int(module.runtime.main(module.PACKAGE, module.frontend))


def test_check_tells_whether_it_is_so_of_each_variant(
    loaded: tuple[ModuleType, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _ = loaded
    assert run(module, monkeypatch, "check", "--batch-invariant") == 0
    assert capsys.readouterr().out.count("  the same bits in any batch: yes\n") == len(SIZES)
    monkeypatch.setattr(module.frontend.DISPATCH, "_varies", {})
    monkeypatch.setattr(module.frontend, "same_in_any_batch", lambda *of: False)
    assert run(module, monkeypatch, "check") == 0, "nobody has asked for it"
    told = capsys.readouterr().out
    assert told.count("  the same bits in any batch: no: it has other bits in another batch\n") == len(SIZES)
    assert run(module, monkeypatch, "check", "--batch-invariant", "--json") == 1
    variants = json.loads(capsys.readouterr().out)
    assert [(v["right"], v["varies"]) for v in variants] == [(True, "it has other bits in another batch")] * len(SIZES)
    monkeypatch.setattr(module.frontend.DISPATCH, "batch", "")
    assert run(module, monkeypatch, "check", "--batch-invariant") == 2
    assert capsys.readouterr().err == f"--batch-invariant: no dimension of {module.__name__} is a batch\n"
    assert run(module, monkeypatch, "check") == 0
    assert "in any batch" not in capsys.readouterr().out


def test_bench_tells_what_it_costs(loaded: tuple[ModuleType, Any]) -> None:
    folder = Path(str(loaded[0].__file__)).parent
    told = python(folder, "-m", folder.name, "bench", "--rounds", "2", "--batch-invariant", "--json")
    variants = json.loads(told.communicate(timeout=300)[0])
    # The one for 4096 rows serves the sizes of the one for 4, too.
    assert [v["batch_invariant"]["variant"] for v in variants] == [1, 1, 2]
    assert variants[0]["batch_invariant"]["ratio"] != 1, "it was timed"
    assert [v["batch_invariant"]["ratio"] for v in variants[1:]] == [1, 1]


def test_random_batches_of_every_family_have_the_same_bits() -> None:
    told = run_python(BENCHMARKS, BENCHMARK, "--device", "cpu", "--batches", "12", "--rounds", "0", "--json")
    families = json.loads(told.stdout)
    assert told.returncode == 0, families
    assert [f["family"].removeprefix("batches_of_") for f in families] == [
        "layernorm", "rmsnorm", "add_layernorm", "add_rmsnorm", "softmax", "attention",
    ]  # fmt: skip
    for family in families:
        assert (family["batches"], family["left_to_pytorch"], family["bits_differing"]) == (12, 0, 0)
        assert family["rows"] > 12


def test_the_benchmark_finds_bits_that_depend_on_a_batch(
    loaded: tuple[ModuleType, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = loaded
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("batch_invariance")
    package = benchmark.load(Path(str(module.__file__)).parent)
    served, place = package.frontend.SUBJECT, torch.device("cpu")
    assert benchmark.compared(package, place, 9, random.Random(0))["bits_differing"] == 0
    monkeypatch.setattr(package.frontend, "SUBJECT", lambda x, *more: served(x, *more) + (len(x) == 1))
    assert benchmark.compared(package, place, 9, random.Random(0))["bits_differing"] > 0
    [cost, *_] = benchmark.costs(package, place, 1)
    assert cost["ways"]["with"] == "variant"
    assert cost["ratio"] > 0
