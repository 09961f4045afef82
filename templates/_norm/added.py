"""PyTorch's norm of a sum, as the functions that add before they normalise have it."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch


def normalised(norm: Callable[..., Any], total: Any, *vectors: Any, eps: float) -> Any:
    """The norm over the last dimension, in the dtype of what is normalised. vectors: weight and bias, or None. Where they
    have another dtype, the norm is that of a copy in the wider one, and rounded once."""
    if all(v is None or v.dtype == total.dtype for v in vectors):
        return norm(total, total.shape[-1:], *vectors, eps)
    wide = reduce(torch.promote_types, (v.dtype for v in vectors if v is not None), total.dtype)
    given = (v if v is None else v.to(wide) for v in vectors)
    return norm(total.to(wide), total.shape[-1:], *given, eps).to(total.dtype)
