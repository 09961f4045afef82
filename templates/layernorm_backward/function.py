"""The gradients of LayerNorm, of those tensors that output_mask says. mean, rstd: of each row, as native_layer_norm gives
them."""

from typing import Any

import torch

from evo.problem.function import Function


def _original(
    grad_out: Any, input: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    """PyTorch's operator, which asks whether there is a bias, and does not read it."""
    bias = input.new_empty(normalized_shape) if bias is None and output_mask[2] else bias
    args = grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    found = torch.ops.aten.native_layer_norm_backward(*args)
    return tuple(t if wanted else None for t, wanted in zip(found, output_mask, strict=True))


def _is_statistic(name: str) -> str:
    return (
        f"{name}.dtype == (torch.float64 if input.dtype == torch.float64 else torch.float32)"
        f" and {name}.numel() == input.numel() // prod(normalized_shape) and {name}.is_contiguous()"
    )


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
    fits={
        "no gradient of the input is wanted": "output_mask[0]",
        "a gradient of a weight is wanted that is not there": "weight is not None or not output_mask[1]",
        "normalized_shape is not the end of the shape of the input and of the gradient": (
            "len(normalized_shape) > 0 and input.shape[-len(normalized_shape):] == normalized_shape"
            " and grad_out.shape == input.shape"
        ),
        "weight is not contiguous and of normalized_shape": (
            "weight is None or weight.shape == normalized_shape and weight.is_contiguous()"
        ),
        "mean is not contiguous, one a row, in float32, or float64 for an input of that": _is_statistic("mean"),
        "rstd is not contiguous, one a row, in float32, or float64 for an input of that": _is_statistic("rstd"),
    },
    call={"normalized_shape": "(cols,)", "bias": "None", "output_mask": "(True, dweight, dbias)"},
)
