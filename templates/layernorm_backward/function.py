"""The gradients of LayerNorm, of those tensors that output_mask says. mean, rstd: of each row, as native_layer_norm gives
them."""

from evo.problem.function import Function

from ._norm_backward.conditions import ALIKE, fits
from ._norm_backward.originals import of_layer_norm

FUNCTION = Function(
    signature=(
        "layer_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor mean, Tensor rstd,"
        " Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
    ),
    original=of_layer_norm,
    tensors={"dy": "grad_out", "x": "input", "weight": "weight", "mean": "mean", "rstd": "rstd"},
    apart=("mean", "rstd", "bias"),
    results={"dx": "input", "dweight": "normalized_shape", "dbias": "normalized_shape"},
    sizes={"rows": "input.numel() // prod(normalized_shape)", "cols": "prod(normalized_shape)"},
    options={
        "dweight": "output_mask[1]",
        "dbias": "output_mask[2]",
        "weight_dtype": "weight.dtype if weight is not None else bias.dtype if bias is not None else input.dtype",
    },
    fits={**fits("mean", "rstd"), **ALIKE},
    call={"normalized_shape": "(cols,)", "bias": "None", "output_mask": "(True, dweight, dbias)"},
    passes={"bias": "bias"},
)
