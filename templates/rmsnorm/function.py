"""RMSNorm as PyTorch code calls it: over the last dimensions, with all axes before them gathered into rows."""

import warnings
from typing import Any

import torch

from evo.problem.function import Function

from ._norm.statistics import statistics

# The epsilon of the dtype in which PyTorch computes. Before 2.7 it was that of the input's, and such calls are PyTorch's.
_DEFAULT_EPS = "2.220446049250313e-16 if input.dtype == torch.float64 else 1.1920928955078125e-07 if since(2, 7) else 0.0"
_EPS = f"(eps if eps is not None else {_DEFAULT_EPS})"


def _keeps_the_dtype() -> bool:
    """Whether PyTorch's result has the dtype of the input where the weight is in float32. Older releases gave float32."""
    x = torch.ones(1, dtype=torch.bfloat16, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says once that such calls are slow
        return torch.nn.functional.rms_norm(x, (1,), x.float()).dtype == x.dtype


def _returned(given: Any, y: Any, x: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32) if torch.__version__ >= (2, 7) else x.dtype).eps
    return statistics(given, x, len(normalized_shape), eps, centred=False)


FUNCTION = Function(
    signature="rms_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor",
    original="torch.nn.functional.rms_norm",
    operator="aten.rms_norm(input, normalized_shape, weight, eps)",
    tensors={"x": "input", "weight": "weight"},
    saved=("rstd",),
    returned=_returned,
    sizes={"rows": "input.numel() // prod(normalized_shape)", "cols": "prod(normalized_shape)"},
    options={"eps": _EPS},
    fits={
        "normalized_shape is not the end of the input's shape": (
            "len(normalized_shape) > 0 and input.shape[-len(normalized_shape):] == normalized_shape"
        ),
        "weight is not contiguous and of normalized_shape": (
            "weight is None or weight.shape == normalized_shape and weight.is_contiguous()"
        ),
        **({} if _keeps_the_dtype() else {"weight has another dtype": "weight is None or weight.dtype == input.dtype"}),
        # With less, a row of zeros is noise, and PyTorch's own noise is what is expected.
        "eps is not a float from 1e-12 to 1e+06": f"1e-12 <= {_EPS} <= 1e6",
        # No layout of one of these kinds has another order of these two; of others, few have.
        "the channels of the input are last in memory, and PyTorch's result has them there, too": (
            "input.ndim not in (4, 5) or input.stride(1) > input.stride(-1)"
        ),
    },
    call={"normalized_shape": "(cols,)"},
    modules={"RMSNorm": ("torch.nn.RMSNorm", "rms_norm(x, self.normalized_shape, self.weight, self.eps)")},
)
