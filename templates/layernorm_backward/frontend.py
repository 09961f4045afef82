"""The gradients of LayerNorm for PyTorch: `layer_norm_backward` in place of torch.ops.aten.native_layer_norm_backward.

A call that a tuned variant serves runs that variant; any other is left to PyTorch. `explain`, called with the same
arguments, says which and why.

This file is copied into exported packages; what it is written against is told in evo/runtime/__init__.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import PACKAGE
from ._shared.norm_backward import NormBackward
from .runtime import Dispatch

__all__ = ["also_serve", "explain", "layer_norm_backward", "variants"]


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of the input, the weight and the bias, those that output_mask asks for. mean, rstd: float32 (float64
    with float64), of each row, as native_layer_norm gives them."""
    args = grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    found = served(DISPATCH, *args)
    return torch_backward(*args) if found is None else found


def explain(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> str:
    """Which way a call of layer_norm_backward takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    found = _functions.choose(DISPATCH, grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)
    return f"PyTorch: {found}" if isinstance(found, str) else f"{found.variant}{found.how}, Python launcher"


def torch_backward(*args: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.aten.native_layer_norm_backward(*args)
    return tuple(t if wanted else None for t, wanted in zip(found, args[-1], strict=True))


# For `python -m PACKAGE check` and `bench`.
SUBJECT, ORIGINAL = layer_norm_backward, torch_backward
_functions = NormBackward(centred=True, original=torch_backward)
served, exact, comparable = _functions.served, _functions.exact, _functions.comparable
timed, cases = _functions.timed, _functions.cases
DISPATCH = Dispatch(PACKAGE, sys.modules[__name__])
also_serve, variants = DISPATCH.also_serve, DISPATCH.variants
