"""LayerNorm and RMSNorm, forward: the templates, and what their kernels say alike.

A kernel of this family has the dimensions rows and cols. One without the option `bias` has no mean either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from evo.problem.kernel import LaunchPlan, Limits, Tensors, Workload
from evo.problem.space import Space, Value

from . import cpu_space, cuda_shape, cuda_space

if TYPE_CHECKING:
    import torch

__all__ = ["INACTIVE", "MAX_COLS", "compile_flags", "plan", "required", "space"]

INACTIVE = {"cuda": cuda_shape.INACTIVE, "cpu": cpu_space.INACTIVE}
MAX_COLS = 65_536


def space(target: str, workload: Workload, limits: Limits) -> Space:
    return (cuda_space if target == "cuda" else cpu_space).space(workload, limits)


def plan(target: str, point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    return cuda_shape.plan(point, workload) if target == "cuda" else LaunchPlan(threads=1)


def compile_flags(target: str, point: Mapping[str, Value]) -> tuple[str, ...]:
    """The CPU template spells its vectors out: what the compiler adds costs compile time and registers."""
    return ("-fno-tree-vectorize", "-fno-tree-slp-vectorize") if target == "cpu" else ()


def required(inputs: Tensors, name: str) -> torch.Tensor:
    tensor = inputs[name]
    assert tensor is not None
    return tensor
