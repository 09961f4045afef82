"""RMSNorm for PyTorch: `rms_norm` in place of torch.nn.functional.rms_norm, `RMSNorm` of torch.nn.RMSNorm.

Every call gives what PyTorch's gives. One that a tuned variant serves (on dense tensors of one dtype, over a tuned number
of columns, on a tuned device) runs that variant; any other is left to PyTorch's own function. Calls that record gradients
are served, too, where the package holds the backward kernel and variants serve both passes. On a GPU the nearest variant is
compiled for another number of columns when that is first met, unless `also_serve` says otherwise. `explain`, called with
the same arguments, says which and why.

`build` builds the native launcher (frontend.cpp), with which a call costs less than PyTorch's; without it, variants are
launched from Python, which takes longer than a small kernel. It also makes the function an operator of PyTorch's
dispatcher, with gradients, and for torch.compile where `also_serve` turns that on.

This file is copied into exported packages, and found here by those that are shipped; what it is written against is told
in evo/runtime/__init__.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm  # as it is now: it may be replaced by ours later

from ._shared.norm import Norm
from .runtime import Call, Table

__all__ = ["RMSNorm", "also_serve", "build", "explain", "patch", "rms_norm", "variants"]

_is_compiling = torch.compiler.is_compiling
_call: Callable[..., Tensor | None] | None = None
_DEFAULT_EPS = torch.finfo(torch.float32).eps if torch.__version__ >= (2, 7) else None
"""Of float32, in which PyTorch computes but in float64; before 2.7 it was the input's, and such calls are PyTorch's."""


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """As torch.nn.functional.rms_norm, for every input."""
    if _is_compiling():
        return _NORM.compiled(input, normalized_shape, weight, None, eps)
    if _call is not None:
        output = _call(input, normalized_shape, weight, eps)
    else:
        output = _NORM.served(DISPATCH, input, normalized_shape, weight, None, eps)
    return torch_rms_norm(input, normalized_shape, weight, eps) if output is None else output


class RMSNorm(torch.nn.RMSNorm):
    """As torch.nn.RMSNorm: same constructor, parameters and state_dict."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def explain(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> str:
    """Which way a call of rms_norm takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    return _NORM.explain(input, normalized_shape, weight, None, eps)


def exact(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """In float64, term by term."""
    x = input.double()
    squares = x.square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    default = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    y = x / (squares + (default if eps is None else eps)).sqrt()
    return y * weight.double() if weight is not None else y


def served(
    table: Table, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Tensor | None:
    """The result, launched from Python; None where PyTorch is to do it."""
    return _NORM.served(table, input, normalized_shape, weight, None, eps)


def launch(
    call: Call, x: int, weight: int, bias: int, y: int, mean: int, rstd: int, rows: int, cols: int, eps: float
) -> bool:
    residual = sums = 0
    return call(x, residual, weight, y, sums, rstd, rows, cols, eps)


def _use(call: Callable[..., Tensor | None] | None) -> None:
    global _call
    _call = call


SUBJECT, ORIGINAL = rms_norm, torch_rms_norm
_NORM = Norm(
    sys.modules[__name__],
    "rms_norm",
    torch_rms_norm,
    RMSNorm,
    _use,
    launch,
    centred=False,
    default_eps=_DEFAULT_EPS,
    keeps_channels_last=True,
)
DISPATCH, NATIVE = _NORM.dispatch, _NORM.native
also_serve, build, patch, variants = _NORM.also_serve, _NORM.build, _NORM.patch, _NORM.variants
cases, timed = _NORM.cases, _NORM.timed
