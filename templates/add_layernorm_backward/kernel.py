"""The gradients of a sum of two tensors and of its LayerNorm: of either tensor the same, of the weight and of the bias.
`_norm_backward/problem.py` states it."""

from __future__ import annotations

from ._norm_backward.problem import norm_backward

KERNEL = norm_backward("add_layernorm_backward", "residual addition and LayerNorm, backward", centred=True, added=True)
