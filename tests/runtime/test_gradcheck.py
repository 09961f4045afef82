"""Gradients of the norms against differences of their own results: no formula is involved that could share an error."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.runtime.conftest import TRAINED, fitting, of, own, serve

pytestmark = [
    pytest.mark.slow,
    # No variant is for float64; that is why step and tolerance are our own.
    pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision:UserWarning"),
]

STEP = 2.0**-7
"""Near the cube root of eps, where the errors of a quotient of differences are alike, about eps ** (2 / 3) = 2.4e-5: of
rounding, eps / STEP for results near 1, and of curvature, STEP ** 2 / 6 times the third derivative."""
TOLERANCE = 8 * torch.finfo(torch.float32).eps ** (2 / 3)
"""Results are up to 7. A term of a gradient is a product of numbers near 1, over 67 columns at most: 80 times as large."""
SHAPES = [((3, 5), (5,)), ((2, 1, 67), (67,)), ((3, 4, 8), (4, 8))]
"""Rows of less than one vector, of some and a rest, of whole vectors."""
CASES = pytest.mark.parametrize(("shape", "normalized"), SHAPES, ids=str)


def drawn(*shape: int) -> torch.Tensor:
    """Multiples of the step: adding it is exact."""
    return ((torch.randn(shape) / STEP).round() * STEP).requires_grad_()


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
        assert torch.autograd.gradcheck(function, args, eps=STEP, atol=TOLERANCE, rtol=0)


@CASES
@of(*TRAINED)
def test_gradients_of_many_upstreams_at_once_are_those_of_each(
    module: ModuleType, shape: tuple[int, ...], normalized: tuple[int, ...]
) -> None:
    args = arguments(module, shape, normalized, affine=True)
    leaves, result = [a for a in args if isinstance(a, torch.Tensor)], own(module)(*args)
    many = torch.randn(3, *shape)
    found = torch.autograd.grad(result, leaves, many, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(result, leaves, one, retain_graph=True) for one in many]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))
