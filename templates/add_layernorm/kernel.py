"""The sum of x and residual, and its LayerNorm, per row: what a transformer block does between its parts.
`_norm/problem.py` states it."""

from __future__ import annotations

from ._norm.problem import norm

KERNEL = norm("add_layernorm", "residual addition and LayerNorm, forward", centred=True, added=True)
