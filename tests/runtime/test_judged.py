"""How packages judge their own results: the calls that are tried, and what is right of them."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evo.export import find_exporter
from evo.runtime.trial import _random_cases
from tests.cli.test_integer_outputs import write
from tests.export.exports import request_for
from tests.runtime.conftest import Importer


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory, use: Importer) -> ModuleType:
    """A kernel with an output of positions that may be tied, whose reference returns a tuple."""
    kernel, out = tmp_path_factory.mktemp("kernels") / "largest", tmp_path_factory.mktemp("export") / "exported_largest"
    write(kernel)
    find_exporter("module").export(request_for("cpu", "native", out, "rows=300,cols=200,dtype=float32", kernel=str(kernel)))
    return use(out)


def test_any_position_of_equal_elements_is_right_as_the_kernel_states(largest: ModuleType) -> None:
    trial = importlib.import_module(f"{largest.__name__}.runtime.trial")
    found = list(trial.verdicts(largest.frontend, 0, 3, 4))
    assert [v for v in found if v.reason] == []
    assert {"constant", "repeated"} <= {v.case for v in found if v.on_variant}


def test_positions_of_other_elements_and_beyond_are_wrong_whatever_axes_the_call_has(largest: ModuleType) -> None:
    trial = importlib.import_module(f"{largest.__name__}.runtime.trial")
    x = torch.tensor([[[1.0, 3.0, 3.0], [5.0, 5.0, 2.0]], [[4.0, 0.0, 4.0], [7.0, 8.0, 9.0]]])
    values = x.amax(-1)

    def reason(*positions: int) -> str:
        own = (values, torch.tensor(positions).view(2, 2))
        return str(trial._judged(largest.frontend, own, (x, -1), largest.frontend.PACKAGE)[2])

    assert reason(1, 0, 0, 2) == reason(2, 1, 2, 2) == ""
    assert "1 of 4 elements are wrong or were never written: 0 at [0, 0] instead of 1" in reason(0, 0, 0, 2)
    assert "2 of 4 elements are wrong or were never written: 3 at [0, 1]" in reason(1, 3, 0, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (6,), (1, 6), (5, 6), (2, 5, 6)])
def test_random_cases_are_made_of_any_first_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def timed(*of_case: Any) -> tuple[Any, ...]:
        return torch.ones(shape).to(dtype), 1

    package = SimpleNamespace(dimensions=[{"name": "n"}])
    variant: Any = SimpleNamespace(sizes={"n": 6}, package=package, fixed={}, dtype="float32")
    frontend = SimpleNamespace(timed=timed)
    found = list(_random_cases(frontend, variant, torch.device("cpu"), 0, 60))
    assert {(args[0].shape, args[0].dtype) for _, args in found} == {(shape, dtype)}
    kinds = {name.partition(" rows")[0] for name, _ in found}
    every = {"normal", "large", "tiny", "constant", "outlier"}
    wide = dtype in (torch.float32, torch.float16)
    assert kinds == (every | ({"NaN", "Inf", "-Inf"} if len(shape) < 3 else set()) if wide else {"normal", "constant"})
    if wide and len(shape) < 3:
        assert any(args[0].isnan().any() for name, args in found if name.startswith("NaN"))
