"""LayerNorm for PyTorch: `layer_norm` in place of torch.nn.functional.layer_norm, `LayerNorm` of torch.nn.LayerNorm.

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
from torch.nn.functional import layer_norm as torch_layer_norm  # as it is now: it may be replaced by ours later

from ._shared.norm import Norm
from .runtime import Call

__all__ = ["LayerNorm", "also_serve", "build", "explain", "layer_norm", "patch", "variants"]

_is_compiling = torch.compiler.is_compiling
_call: Callable[..., Tensor | None] | None = None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As torch.nn.functional.layer_norm, for every input."""
    if _is_compiling():
        return _NORM.compiled(input, normalized_shape, weight, bias, eps)
    if _call is not None:
        output = _call(input, normalized_shape, weight, bias, eps)
    else:
        output = served(DISPATCH, input, normalized_shape, weight, bias, eps)
    return torch_layer_norm(input, normalized_shape, weight, bias, eps) if output is None else output


class LayerNorm(torch.nn.LayerNorm):
    """As torch.nn.LayerNorm: same constructor, parameters and state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def explain(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> str:
    """Which way a call of layer_norm takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    return _NORM.explain(input, normalized_shape, weight, bias, eps)


def exact(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """In float64, term by term."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.double()
    centred = x - x.mean(dims, keepdim=True)
    y = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
    y = y * weight.double() if weight is not None else y
    return y + bias.double() if bias is not None else y


def launch(
    call: Call, x: int, weight: int, bias: int, y: int, mean: int, rstd: int, rows: int, cols: int, eps: float
) -> bool:
    residual = sums = 0
    return call(x, residual, weight, bias, y, sums, mean, rstd, rows, cols, eps)


def _use(call: Callable[..., Tensor | None] | None) -> None:
    global _call
    _call = call


SUBJECT, ORIGINAL = layer_norm, torch_layer_norm
_NORM = Norm(
    sys.modules[__name__],
    "layer_norm",
    torch_layer_norm,
    LayerNorm,
    _use,
    launch,
    centred=True,
    default_eps=None,
    keeps_channels_last=False,
)
DISPATCH, NATIVE = _NORM.dispatch, _NORM.native
also_serve, build, patch, variants = _NORM.also_serve, _NORM.build, _NORM.patch, _NORM.variants
served, cases, timed = _NORM.served, _NORM.cases, _NORM.timed
