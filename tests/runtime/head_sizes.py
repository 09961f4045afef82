"""Attention with a head size that no variant of a package has, called on a CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

torchs = functional.scaled_dot_product_attention


def qkv(dim: int, length: int = 70) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 4, length, dim) for _ in range(3))


def served(module: ModuleType, dim: int, **options: Any) -> str:
    """How a call is explained that a variant serves and that is right."""
    args = qkv(dim)
    own = module.scaled_dot_product_attention(*args, **options)
    torch.testing.assert_close(own, torchs(*args, **options), rtol=1e-4, atol=1e-4)
    way: str = module.explain(*args, **options)
    assert way.startswith("variant"), way
    return way


def refused(module: ModuleType, dim: int) -> str:
    """Why a call is PyTorch's."""
    args = qkv(dim)
    assert torch.equal(module.scaled_dot_product_attention(*args), torchs(*args))
    way: str = module.explain(*args)
    assert way.startswith("PyTorch: these sizes were not tuned for"), way
    return way
