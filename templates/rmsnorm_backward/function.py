"""The gradients of RMSNorm, of those tensors that output_mask says. rstd: by what the forward has multiplied each row."""

from typing import Any

import torch

from evo.problem.function import Function

from ._norm_backward.conditions import fits


def _original(grad_out: Any, input: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Any) -> Any:
    """PyTorch's operator; where it has none, what its autograd does, in the dtype of rstd."""
    if input.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        found = torch.ops.aten._fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)
        return tuple(t if wanted else None for t, wanted in zip(found, output_mask, strict=True))
    dy, x, r = (t.to(rstd.dtype).reshape(rstd.numel(), -1) for t in (grad_out, input, rstd))
    xhat, g = x * r, dy if weight is None else dy * weight.flatten()
    of_input = ((g - xhat * (g * xhat).mean(1, keepdim=True)) * r).to(input.dtype).view(input.shape)
    of_weight = (dy * xhat).sum(0).to(input.dtype).view(normalized_shape)
    return of_input if output_mask[0] else None, of_weight if output_mask[1] else None


FUNCTION = Function(
    signature=(
        "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight,"
        " bool[2] output_mask) -> (Tensor, Tensor)"
    ),
    original=_original,
    tensors={"dy": "grad_out", "x": "input", "weight": "weight", "rstd": "rstd"},
    apart=("rstd",),
    results={"dx": "input", "dweight": "normalized_shape"},
    sizes={"rows": "input.numel() // prod(normalized_shape)", "cols": "prod(normalized_shape)"},
    options={"dweight": "output_mask[1]"},
    fits=fits("rstd"),
    call={"normalized_shape": "(cols,)", "output_mask": "(True, dweight)"},
)
