"""The gradients of `add_layer_norm`, from those of its results. sum: its second result. mean, rstd: of each row of that."""

from typing import Any

from evo.problem.function import Function

from ._norm_backward.conditions import ALIKE, fits
from ._norm_backward.originals import of_layer_norm, with_sum


def _original(grad_out: Any, grad_sum: Any, sum: Any, mean: Any, rstd: Any, weight: Any, bias: Any, wanted: Any) -> Any:
    mask = wanted[0], *wanted[2:]
    return with_sum(of_layer_norm(grad_out, sum, sum.shape[-1:], mean, rstd, weight, bias, mask), grad_sum)


FUNCTION = Function(
    signature=(
        "add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, Tensor mean, Tensor rstd, Tensor? weight,"
        " Tensor? bias, bool[4] wanted) -> (Tensor, Tensor, Tensor)"
    ),
    original=_original,
    tensors={"dy": "grad_out", "dresidual": "grad_sum", "x": "sum", "weight": "weight", "mean": "mean", "rstd": "rstd"},
    apart=("mean", "rstd", "bias"),
    results={"dx": "sum", "dweight": "sum.shape[-1:]", "dbias": "sum.shape[-1:]"},
    gradients=("dx", "dx", "dweight", "dbias"),
    sizes={"rows": "sum.numel() // sum.shape[-1]", "cols": "sum.shape[-1]"},
    options={
        "dweight": "wanted[2]",
        "dbias": "wanted[3]",
        "weight_dtype": "weight.dtype if weight is not None else bias.dtype if bias is not None else sum.dtype",
    },
    fits={
        "grad_sum has not the shape of sum": "grad_sum is None or grad_sum.shape == sum.shape",
        **fits("mean", "rstd", input="sum", shape="sum.shape[-1:]", mask="wanted", weight=2),
        **ALIKE,
    },
    call={"bias": "None", "wanted": "(True, True, dweight, dbias)"},
    passes={"bias": "bias"},
)
