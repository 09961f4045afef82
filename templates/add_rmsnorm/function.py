"""The sum of two tensors and its RMSNorm over the last dimension, as transformer blocks call it between their parts:
`y, residual = add_rms_norm(x, residual, weight)`."""

from typing import Any

import torch

from evo.problem.function import Function

from ._norm.added import normalised
from ._norm.statistics import statistics


def add_rms_norm(x: Any, residual: Any, weight: Any = None, eps: float = 1e-06) -> Any:
    total = x + residual
    return normalised(torch.nn.functional.rms_norm, total, weight, eps=eps), total


FUNCTION = Function(
    signature=(
        "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-06) -> (Tensor, Tensor)"
    ),
    original=add_rms_norm,
    tensors={"x": "x", "residual": "residual", "weight": "weight"},
    results={"y": "x", "sum": "x"},
    saved=("rstd",),
    returned=lambda given, y, total, x, residual, weight, eps: statistics(given, total, 1, eps, centred=False),
    sizes={"rows": "x.numel() // x.shape[-1]", "cols": "x.shape[-1]"},
    fits={
        "residual has not the shape of x": "residual.shape == x.shape",
        "weight is not contiguous and of the last dimension": (
            "weight is None or weight.shape == x.shape[-1:] and weight.is_contiguous()"
        ),
        # With less, a row of zeros is noise, and PyTorch's own noise is what is expected.
        "eps is not a float from 1e-12 to 1e+06": "1e-12 <= eps <= 1e6",
    },
    modules={
        "AddRMSNorm": (
            "torch.nn.RMSNorm",
            "add_rms_norm(x, residual, self.weight, 1.1920928955078125e-07 if self.eps is None else self.eps)",
        )
    },
)
