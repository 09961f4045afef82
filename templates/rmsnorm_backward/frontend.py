"""The gradients of RMSNorm for PyTorch: `rms_norm_backward` in place of torch.ops.aten._fused_rms_norm_backward.

A call that a tuned variant serves runs that variant; any other is left to PyTorch. `explain`, called with the same
arguments, says which and why. In a package of the forward, calls that record
gradients are served by both.

This file is copied into exported packages; what it is written against is told in evo/runtime/__init__.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from . import PACKAGE
from ._shared.norm_backward import NormBackward
from .runtime import Dispatch

__all__ = ["also_serve", "explain", "rms_norm_backward", "variants"]


def rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of the input and the weight, those that output_mask asks for. rstd: float32 (float64 with
    float64), what the forward has multiplied each row by."""
    args = grad_out, input, normalized_shape, rstd, weight, output_mask
    found = served(DISPATCH, *args)
    return torch_backward(*args) if found is None else found


def explain(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> str:
    """Which way a call of rms_norm_backward takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    found = _functions.choose(DISPATCH, grad_out, input, normalized_shape, rstd, weight, output_mask)
    return f"PyTorch: {found}" if isinstance(found, str) else f"{found.variant}{found.how}, Python launcher"


def torch_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """PyTorch's operator; where it has none, what its autograd does, in the dtype of rstd."""
    if input.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        found = torch.ops.aten._fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)
        return tuple(t if wanted else None for t, wanted in zip(found, output_mask, strict=True))
    dims = tuple(range(-len(normalized_shape), 0))
    r = rstd.view(*input.shape[: -len(dims)], *(1 for _ in dims))
    dy, xhat = grad_out.to(r.dtype), input.to(r.dtype) * r
    g = dy if weight is None else dy * weight.to(r.dtype)
    of_input = (g - xhat * (g * xhat).mean(dims, keepdim=True)) * r
    of_weight = (dy * xhat).sum(tuple(range(input.dim() - len(dims)))).to(input.dtype) if output_mask[1] else None
    return of_input.to(input.dtype) if output_mask[0] else None, of_weight


# For `python -m PACKAGE check` and `bench`.
SUBJECT, ORIGINAL = rms_norm_backward, torch_backward
_functions = NormBackward(centred=False, original=torch_backward)
served, exact, comparable = _functions.served, _functions.exact, _functions.comparable
timed, cases = _functions.timed, _functions.cases
DISPATCH = Dispatch(PACKAGE, sys.modules[__name__])
also_serve, variants = DISPATCH.also_serve, DISPATCH.variants
