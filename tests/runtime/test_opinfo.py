"""PyTorch's own samples of each operation, with its tolerances: eps below 0, no rows, masks, dropout, every layout."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.runtime.conftest import FUNCTIONS, is_norm, is_of, own, serve, theirs

pytestmark = pytest.mark.slow

opinfo = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")


@pytest.fixture(params=list(FUNCTIONS))
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    found: ModuleType = request.getfixturevalue("native" if request.param == "layernorm" else f"native_{request.param}")
    serve(found, gradients=True)
    yield found
    serve(found)


def infos_of(module: ModuleType) -> Iterator[Any]:
    torch.manual_seed(0)
    name = theirs(module).__name__
    return (info for info in opinfo.op_db if info.name in (name, f"nn.functional.{name}"))


def widened(value: Any) -> Any:
    """Heads of 64 where the samples have 8, which no variant is for; as a leaf of its own."""
    if not isinstance(value, torch.Tensor) or value.shape[-1:] != (8,):
        return value
    return value.detach().repeat(*[1] * (value.dim() - 1), 8).requires_grad_(value.requires_grad)


def compare(module: ModuleType, args: list[Any], options: dict[str, Any], tolerance: dict[str, float]) -> None:
    """Results without and with gradients, and the gradients."""
    for recording in (False, True):
        results = []
        for function in (own(module), theirs(module)):
            torch.manual_seed(1)  # of dropout
            with torch.set_grad_enabled(recording):
                results.append(function(*args, **options))
        torch.testing.assert_close(results[0], results[1], equal_nan=True, **tolerance)
        assert results[0].stride() == results[1].stride()
    wanted = [a for a in [*args, *options.values()] if isinstance(a, torch.Tensor) and a.requires_grad]
    upstream = torch.ones_like(results[0])
    found = [torch.autograd.grad(y, wanted, upstream, allow_unused=True) for y in results]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_agree_on_pytorchs_samples(module: ModuleType, dtype: torch.dtype) -> None:
    served, is_attention, tolerance = 0, is_of("attention", module), dict[str, float]()
    if dtype == torch.float32 and is_norm(module):  # PyTorch's own: toleranceOverride of the operation
        tolerance = {"atol": 1e-5, "rtol": 1e-3}
    elif is_attention:  # two roundings of values up to 9, where weighted values cancel; in float32 many more
        roundings = (256 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
        tolerance = {"atol": roundings, "rtol": roundings}
    for sample in (s for info in infos_of(module) for s in info.sample_inputs("cpu", dtype, requires_grad=True)):
        args = [widened(a) if is_attention else a for a in (sample.input, *sample.args)]
        with torch.no_grad():
            served += module.explain(*args, **sample.kwargs).startswith("variant")
        compare(module, args, sample.kwargs, tolerance)
    assert served >= 1 if is_attention else served >= 4


def test_errors_are_pytorchs(module: ModuleType) -> None:
    infos = [info for info in infos_of(module) if info.error_inputs_func is not None]
    if not infos:
        pytest.skip("PyTorch has no samples of them")
    for error in (e for info in infos for e in info.error_inputs("cpu")):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            own(module)(sample.input, *sample.args, **sample.kwargs)
