"""The gradients of RMSNorm, of those tensors that output_mask says. rstd: by what the forward has multiplied each row."""

from evo.problem.function import Function

from ._norm_backward.conditions import fits
from ._norm_backward.originals import of_rms_norm

FUNCTION = Function(
    signature=(
        "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight,"
        " bool[2] output_mask) -> (Tensor, Tensor)"
    ),
    original=of_rms_norm,
    tensors={"dy": "grad_out", "x": "input", "weight": "weight", "rstd": "rstd"},
    apart=("rstd",),
    results={"dx": "input", "dweight": "normalized_shape"},
    sizes={"rows": "input.numel() // prod(normalized_shape)", "cols": "prod(normalized_shape)"},
    options={"dweight": "output_mask[1]"},
    fits=fits("rstd"),
    call={"normalized_shape": "(cols,)", "output_mask": "(True, dweight)"},
)
