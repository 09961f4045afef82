"""The gradients of a sum of two tensors and of its RMSNorm: of either tensor the same, and of the weight.
`_norm_backward/problem.py` states it."""

from __future__ import annotations

from ._norm_backward.problem import norm_backward

KERNEL = norm_backward("add_rmsnorm_backward", "residual addition and RMSNorm, backward", centred=False, added=True)
