"""The mean and rstd of rows, as the forward functions of the norms give them to calls that ask for them."""

from collections.abc import Iterable
from typing import Any

import torch


def statistics(given: Iterable[Any] | None, x: Any, axes: int, eps: float, *, centred: bool) -> Any:
    """mean and rstd = 1 / sqrt(var + eps), or where not `centred` the rstd of a mean of 0 alone, over the last `axes` axes
    of x, of the shape that is before these; float64 for that dtype, else float32; without a gradient. given: these as one
    axis; None: they are computed."""
    shape = x.shape[: x.ndim - axes]
    if given is not None:
        return [t.view(shape) for t in given]
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if not centred:
        return [(x.square().mean(tuple(range(-axes, 0))) + eps).rsqrt()]
    found = torch.native_layer_norm(x, x.shape[x.ndim - axes :], None, None, eps)[1:]
    return [t.reshape(shape) for t in found]
