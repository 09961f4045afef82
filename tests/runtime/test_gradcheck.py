"""Gradients of the norms against differences of their own results, in float64: no formula is involved that could share an
error."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.runtime.conftest import TRAINED, fitting, left_to_pytorch, of, own, serve, theirs

pytestmark = pytest.mark.slow
SHAPES = [((3, 5), (5,)), ((2, 1, 67), (67,)), ((3, 4, 8), (4, 8))]
"""Rows of less than one vector, of some and a rest, of whole vectors."""
CASES = pytest.mark.parametrize(("shape", "normalized"), SHAPES, ids=str)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def arguments(module: ModuleType, shape: tuple[int, ...], normalized: tuple[int, ...], affine: bool) -> tuple[Any, ...]:
    """Of a call that records gradients and is served."""
    serve(module, gradients=True)
    weight, bias = (drawn(*normalized) if affine else None for _ in range(2))
    args = fitting(module, (drawn(*shape), normalized, weight, bias, 1e-5))
    assert module.explain(*args).startswith("variant"), module.explain(*args)
    return args


@CASES
@pytest.mark.parametrize("affine", [True, False])
@of(*TRAINED)
def test_gradients_are_those_of_the_variants_results(
    module: ModuleType, shape: tuple[int, ...], normalized: tuple[int, ...], affine: bool
) -> None:
    args = arguments(module, shape, normalized, affine)
    for function in (own(module), module.frontend.NATIVE.operator):
        assert torch.autograd.gradcheck(function, args)


@CASES
@of(*TRAINED)
def test_gradients_of_many_upstreams_at_once_are_those_of_each(
    module: ModuleType, shape: tuple[int, ...], normalized: tuple[int, ...]
) -> None:
    args = arguments(module, shape, normalized, affine=True)
    leaves, result = [a for a in args if isinstance(a, torch.Tensor)], own(module)(*args)
    many = torch.randn(3, *shape, dtype=torch.float64)
    found = torch.autograd.grad(result, leaves, many, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(result, leaves, one, retain_graph=True) for one in many]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))


@CASES
@of(*TRAINED)
def test_nothing_between_the_passes_is_rounded_to_float32(
    module: ModuleType, shape: tuple[int, ...], normalized: tuple[int, ...]
) -> None:
    args = arguments(module, shape, normalized, affine=True)
    leaves, upstream = [a for a in args if isinstance(a, torch.Tensor)], torch.randn(shape, dtype=torch.float64)
    found, torchs = (torch.autograd.grad(f(*args), leaves, upstream) for f in (own(module), theirs(module)))
    torch.testing.assert_close(found, torchs, rtol=1e-11, atol=1e-11)


@of("trained_rmsnorm")
def test_the_eps_of_float64_is_pytorchs(module: ModuleType) -> None:
    """By default it is float64's own, which is below what variants take."""
    x = 1e-4 * torch.randn(5, 96, dtype=torch.float64)
    left_to_pytorch(module, "eps is not a float from 1e-12", x, (96,), None, None, None)
    assert module.frontend.served(module.frontend.DISPATCH, x, (96,), None, None) is None
    assert module.frontend.served(module.frontend.DISPATCH, x, (96,), None, 1e-6) is not None
