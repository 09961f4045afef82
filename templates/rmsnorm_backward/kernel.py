"""RMSNorm backward: the gradients of x and weight from that of y = x * rstd * weight (Zhang & Sennrich 2019,
arXiv:1910.07467), with the statistic that the forward saved. `_norm_backward/problem.py` states it."""

from __future__ import annotations

from ._norm_backward.problem import norm_backward

KERNEL = norm_backward("rmsnorm_backward", "RMSNorm backward", centred=False)
