"""The sum of x and residual, and its RMSNorm, per row: what a transformer block does between its parts.
`_norm/problem.py` states it."""

from __future__ import annotations

from ._norm.problem import norm

KERNEL = norm("add_rmsnorm", "residual addition and RMSNorm, forward", centred=False, added=True)
