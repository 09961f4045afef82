"""A kernel's arguments, and what its outputs should be; whether a candidate's come close enough, evo.runtime.tolerance
decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING

from evo.problem.kernel import Kernel, Tensors, Workload
from evo.runtime.tolerance import Expected, compare, expected, findings, verdict

if TYPE_CHECKING:
    import torch

__all__ = [
    "Expected",
    "allocate_outputs",
    "argument_values",
    "as_outputs",
    "compare",
    "expected_outputs",
    "findings",
    "poison",
    "verdict",
]

_ODD_VALUE = 12288.0
"""Exact in every dtype, and written by no kernel."""


def argument_values(
    kernel: Kernel, workload: Workload, inputs: Tensors, outputs: Mapping[str, torch.Tensor]
) -> tuple[object, ...]:
    """The entry point's arguments in order: tensors, None for an absent optional one, numbers."""
    sizes = {**dict(workload.dims), **dict(workload.options)}
    tensors = {**inputs, **outputs}
    values: list[object] = []
    for a in kernel.arguments:
        if a.kind != "scalar":
            values.append(tensors.get(a.name) if a.optional else tensors[a.name])
        elif a.stride_of is not None:
            tensor = tensors[a.stride_of[0]]
            values.append(0 if tensor is None else tensor.stride(a.stride_of[1]))
        else:
            number = sizes[a.name]
            values.append(float(number) if a.dtype.startswith("float") else int(number))
    return tuple(values)


def allocate_outputs(kernel: Kernel, workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """Makes uninitialised outputs."""
    import torch

    outputs = {}
    for a in kernel.outputs(workload):
        dtype = getattr(torch, workload.dtype if a.dtype == "problem" else a.dtype)
        order = kernel.memory_order(workload, a.name) if kernel.memory_order else range(len(a.shape))
        sizes = [workload.dim(a.shape[axis]) for axis in order]
        axes = sorted(range(len(sizes)), key=list(order).__getitem__)
        outputs[a.name] = torch.empty(sizes, dtype=dtype, device=device).permute(axes)
    return outputs


def poison(output: torch.Tensor, *, all_finite: bool) -> None:
    """Fills an output with NaN, or with an odd number where NaN may be expected."""
    output.fill_(float("nan") if all_finite else _ODD_VALUE)


def as_outputs(kernel: Kernel, workload: Workload, result: object) -> dict[str, torch.Tensor]:
    """A baseline's result, a tensor or a sequence of them, by output name. Some outputs may be missing."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    return dict(zip((a.name for a in kernel.outputs(workload)), tensors, strict=False))


def expected_outputs(kernel: Kernel, inputs: Tensors, workload: Workload) -> tuple[Expected, ...]:
    """References and bounds for one set of inputs, on their device."""
    import torch

    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    references = kernel.reference(wide, workload)
    own = as_outputs(kernel, workload, kernel.reference_baseline.call(inputs, workload))
    found = []
    for argument in kernel.outputs(workload):
        dtype = workload.dtype if argument.dtype == "problem" else argument.dtype
        tolerance = astuple(kernel.tolerance[dtype])
        reference, torchs = references[argument.name], own.get(argument.name)
        found.append(expected(argument.name, reference, torchs, getattr(torch, dtype), tolerance))
    return tuple(found)
