"""PyTorch's gradients of the norms, of those tensors that a mask asks for; None for the others. Where a weight or a bias has
another dtype than the input, they are those of copies in the wider one: PyTorch's operators refuse some of these."""

from functools import reduce
from typing import Any

import torch


def of_layer_norm(
    grad_out: Any, input: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    """PyTorch's operator, which asks whether there is a bias, and does not read it."""
    if bias is None and output_mask[2]:
        bias = (input if weight is None else weight).new_empty(normalized_shape)
    dtypes = input.dtype, *(input.dtype if t is None else t.dtype for t in (weight, bias))
    of_cpu = mean.dtype if input.is_cpu else input.dtype  # where statistics have to be of the dtype of the input
    if {*dtypes, of_cpu} != {input.dtype}:
        wide = reduce(torch.promote_types, dtypes, of_cpu)
        grad_out, input, weight, bias = (t if t is None else t.to(wide) for t in (grad_out, input, weight, bias))
    args = grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    found = torch.ops.aten.native_layer_norm_backward(*args)
    return tuple(t.to(dtype) if asked else None for t, asked, dtype in zip(found, output_mask, dtypes, strict=True))


def of_rms_norm(grad_out: Any, input: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Any) -> Any:
    """PyTorch's operator; where it has none, what its autograd does, in the dtype of rstd."""
    is_alike = weight is None or weight.dtype == input.dtype
    if input.is_cuda and is_alike and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        found = torch.ops.aten._fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)
        return tuple(t if wanted else None for t, wanted in zip(found, output_mask, strict=True))
    dy, x, r = (t.to(rstd.dtype).reshape(rstd.numel(), -1) for t in (grad_out, input, rstd))
    xhat, g = x * r, dy if weight is None else dy * weight.flatten()
    of_input = ((g - xhat * (g * xhat).mean(1, keepdim=True)) * r).to(input.dtype).view(input.shape)
    of_weight = (dy * xhat).sum(0).to(input.dtype if weight is None else weight.dtype).view(normalized_shape)
    return of_input if output_mask[0] else None, of_weight if output_mask[1] else None


def with_sum(found: Any, grad_sum: Any) -> Any:
    """The gradients of a norm of a sum, from those of the norm and the gradient that the sum got elsewhere."""
    return found if found[0] is None or grad_sum is None else (found[0] + grad_sum, *found[1:])
