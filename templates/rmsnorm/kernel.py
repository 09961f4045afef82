"""RMSNorm forward: y = x / sqrt(mean(x * x) + eps) * weight, per row (Zhang & Sennrich 2019, arXiv:1910.07467), as
torch.nn.functional.rms_norm computes it. `_norm/problem.py` states it."""

from __future__ import annotations

from ._norm.problem import norm

KERNEL = norm("rmsnorm", "RMSNorm forward", centred=False)
