"""The gradients of LayerNorm, of those tensors that output_mask says. mean, rstd: of each row, as native_layer_norm gives
them."""

from typing import Any

import torch

from evo.problem.function import Function

from ._norm_backward.conditions import fits


def _original(
    grad_out: Any, input: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    """PyTorch's operator, which asks whether there is a bias, and does not read it."""
    bias = input.new_empty(normalized_shape) if bias is None and output_mask[2] else bias
    args = grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    found = torch.ops.aten.native_layer_norm_backward(*args)
    return tuple(t if wanted else None for t, wanted in zip(found, output_mask, strict=True))


FUNCTION = Function(
    signature=(
        "layer_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor mean, Tensor rstd,"
        " Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
    ),
    original=_original,
    tensors={"dy": "grad_out", "x": "input", "weight": "weight", "mean": "mean", "rstd": "rstd"},
    apart=("mean", "rstd"),
    results={"dx": "input", "dweight": "normalized_shape", "dbias": "normalized_shape"},
    sizes={"rows": "input.numel() // prod(normalized_shape)", "cols": "prod(normalized_shape)"},
    options={"dweight": "output_mask[1]", "dbias": "output_mask[2]"},
    fits=fits("mean", "rstd"),
    call={"normalized_shape": "(cols,)", "bias": "None", "output_mask": "(True, dweight, dbias)"},
    passes={"bias": "bias"},
)
