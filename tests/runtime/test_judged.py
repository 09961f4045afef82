"""How packages judge their own results: the calls that are tried, and what is right of them."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from evo.export import find_exporter
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
