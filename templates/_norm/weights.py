"""Weights and biases in float32 beside tensors of 16 bits: the option `weight_dtype` of the norms, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo.problem.kernel import DTYPE_BYTES, Workload

if TYPE_CHECKING:
    import torch

CHOICES = {"weight_dtype": ("same", "float32")}
"""`Kernel.choices` of the option."""


def is_mixed(workload: Workload) -> bool:
    return workload.option("weight_dtype") == "float32"


def element_bytes(workload: Workload) -> int:
    """Bytes of an element of a weight or a bias."""
    return 4 if is_mixed(workload) else DTYPE_BYTES[workload.dtype]


def fault(workload: Workload) -> str:
    """`Kernel.validate`, as far as it concerns the option."""
    wide = is_mixed(workload) and DTYPE_BYTES[workload.dtype] > 2
    return "weight_dtype=float32 is for float16 and bfloat16; leave it out for other dtypes" if wide else ""


def just_below_half_a_step(vector: torch.Tensor | None, workload: Workload) -> torch.Tensor | None:
    """A weight or a bias in float32 whose elements lie between two numbers of the workload's 16 bits, a little nearer to the
    one that is nearer to 0: a kernel that rounds them first has results that lean towards 0. Others are left as they are."""
    import torch

    if vector is None or not is_mixed(workload):
        return vector
    dtype = getattr(torch, workload.dtype)
    short = vector.to(dtype).float()
    step = torch.finfo(dtype).eps * torch.exp2(short.abs().log2().floor())
    return torch.where(short.isfinite() & (short != 0), short + 0.49 * step * short.sign(), vector)
