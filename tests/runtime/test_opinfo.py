"""PyTorch's own samples of each operation, with its tolerances: eps below 0, no rows, masks, dropout, every layout."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.runtime.conftest import FUNCTIONS, TRAINED, is_norm, is_of, is_trained, of, own, serve, theirs

pytestmark = pytest.mark.slow


def infos_of(module: ModuleType, *more: str) -> list[Any]:
    """more: names beside that of PyTorch's function."""
    # Not at the top of the file: the import takes seconds, in every process that collects tests.
    opinfo = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")
    name = theirs(module).__name__
    return [info for info in opinfo.op_db if info.name in (name, f"nn.functional.{name}", *more)]


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
@of(*FUNCTIONS, *TRAINED)
def test_functions_agree_on_pytorchs_samples(module: ModuleType, dtype: torch.dtype) -> None:
    served, trained, is_attention, tolerance = 0, 0, is_of("attention", module), dict[str, float]()
    serve(module, gradients=True)
    if dtype == torch.float32 and is_norm(module):  # PyTorch's own: toleranceOverride of the operation
        tolerance = {"atol": 1e-4 if is_trained(module) else 1e-5, "rtol": 1e-3}  # 316 is rstd where a row is one element
    elif is_attention:  # two roundings of values up to 9, where weighted values cancel; in float32 those of
        # scores, which are up to 648, and errors of which are relative errors of the weights
        roundings = (2048 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
        tolerance = {"atol": roundings, "rtol": roundings}
    for sample in (s for info in infos_of(module) for s in info.sample_inputs("cpu", dtype, requires_grad=True)):
        args = [widened(a) if is_attention else a for a in (sample.input, *sample.args)]
        trained += module.explain(*args, **sample.kwargs).startswith("variant")
        with torch.no_grad():
            served += module.explain(*args, **sample.kwargs).startswith("variant")
        compare(module, args, sample.kwargs, tolerance)
    least = 1 if is_attention else 4
    assert served >= least
    assert trained >= least


@of("layernorm", "rmsnorm", *TRAINED)  # PyTorch has no samples of the others' errors
def test_errors_are_pytorchs(module: ModuleType) -> None:
    serve(module, gradients=True)
    infos = infos_of(module, f"native_{theirs(module).__name__}")
    errors = [e for info in infos if info.error_inputs_func for e in info.error_inputs("cpu")]
    assert len(errors) >= 3
    for sample, error in ((e.sample_input, e) for e in errors):
        for function in (own(module), module.frontend.NATIVE.operator):
            with pytest.raises(error.error_type, match=error.error_regex):
                function(sample.input, *sample.args, **sample.kwargs)
