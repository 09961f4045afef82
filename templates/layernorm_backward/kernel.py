"""LayerNorm backward: the gradients of x, weight and bias from that of y = (x - mean) * rstd * weight + bias (Ba et al.
2016, arXiv:1607.06450), with the statistics that the forward saved. `_norm_backward/problem.py` states it."""

from __future__ import annotations

from ._norm_backward.problem import norm_backward

KERNEL = norm_backward("layernorm_backward", "LayerNorm backward", centred=True)
