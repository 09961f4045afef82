"""The gradients of `add_rms_norm`, from those of its results. sum: its second result. rstd: by what the forward has
multiplied each row."""

from typing import Any

from evo.problem.function import Function

from ._norm_backward.conditions import fits
from ._norm_backward.originals import of_rms_norm, with_sum


def _original(grad_out: Any, grad_sum: Any, sum: Any, rstd: Any, weight: Any, wanted: Any) -> Any:
    mask = wanted[0], wanted[2]
    return with_sum(of_rms_norm(grad_out, sum, sum.shape[-1:], rstd, weight, mask), grad_sum)


FUNCTION = Function(
    signature=(
        "add_rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, Tensor rstd, Tensor? weight, bool[3] wanted)"
        " -> (Tensor, Tensor)"
    ),
    original=_original,
    tensors={"dy": "grad_out", "dresidual": "grad_sum", "x": "sum", "weight": "weight", "rstd": "rstd"},
    apart=("rstd",),
    results={"dx": "sum", "dweight": "sum.shape[-1:]"},
    gradients=("dx", "dx", "dweight"),
    sizes={"rows": "sum.numel() // sum.shape[-1]", "cols": "sum.shape[-1]"},
    options={"dweight": "wanted[2]"},
    fits={
        "grad_sum has not the shape of sum": "grad_sum is None or grad_sum.shape == sum.shape",
        **fits("rstd", input="sum", shape="sum.shape[-1:]", mask="wanted", weight=2),
    },
    call={"wanted": "(True, True, dweight)"},
)
