"""LayerNorm forward: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, per row (Ba et al. 2016, arXiv:1607.06450),
with the population variance, as torch.nn.functional.layer_norm computes it. `_norm/problem.py` states it."""

from __future__ import annotations

from ._norm.problem import norm

KERNEL = norm("layernorm", "LayerNorm forward", centred=True)
