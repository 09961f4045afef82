"""The sum of two tensors and its LayerNorm over the last dimension, as transformer blocks call it between their parts:
`y, residual = add_layer_norm(x, residual, weight, bias)`."""

from typing import Any

import torch

from evo.problem.function import Function

from ._norm.added import normalised
from ._norm.statistics import statistics


def add_layer_norm(x: Any, residual: Any, weight: Any = None, bias: Any = None, eps: float = 1e-05) -> Any:
    total = x + residual
    return normalised(torch.nn.functional.layer_norm, total, weight, bias, eps=eps), total


FUNCTION = Function(
    signature=(
        "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-05)"
        " -> (Tensor, Tensor)"
    ),
    original=add_layer_norm,
    tensors={"x": "x", "residual": "residual", "weight": "weight", "bias": "bias"},
    results={"y": "x", "sum": "x"},
    saved=("mean", "rstd"),
    returned=lambda given, y, total, x, residual, weight, bias, eps: statistics(given, total, 1, eps, centred=True),
    sizes={"rows": "x.numel() // x.shape[-1]", "cols": "x.shape[-1]"},
    fits={
        "residual has not the shape of x": "residual.shape == x.shape",
        "weight is not contiguous and of the last dimension": (
            "weight is None or weight.shape == x.shape[-1:] and weight.is_contiguous()"
        ),
        "bias is not contiguous and of the last dimension": (
            "bias is None or bias.shape == x.shape[-1:] and bias.is_contiguous()"
        ),
        # With less, a row of zeros is noise, and PyTorch's own noise is what is expected.
        "eps is not a float from 1e-12 to 1e+06": "1e-12 <= eps <= 1e6",
    },
    modules={
        "AddLayerNorm": ("torch.nn.LayerNorm", "add_layer_norm(x, residual, self.weight, self.bias, self.eps)"),
    },
)
