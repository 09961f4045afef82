"""What a kernel's outputs should be, in float64, and whether a candidate's come close enough.

An output is compared elementwise within the kernel's tolerance, and its largest error with the largest error of
PyTorch's own result on the same input: at most `Tolerance.torch_factor` times that (the rule FlashAttention tests by,
Dao et al. 2022), plus what rounding alone may do. Where the reference is not finite the candidate must agree exactly;
where it is finite the candidate must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evo.problem.kernel import Kernel, Tensors, Workload

if TYPE_CHECKING:
    import torch

__all__ = [
    "Expected",
    "allocate_outputs",
    "argument_values",
    "as_outputs",
    "compare",
    "expect",
    "findings",
    "poison",
    "verdict",
]

_ODD_VALUE = 12288.0
"""Exact in every dtype, and what no kernel writes."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one output should be, and how far from it PyTorch's own result is."""

    name: str
    reference: torch.Tensor
    """float64, on the device."""
    finite: torch.Tensor
    """Where the reference, rounded to the output's dtype, is finite."""
    allowed: torch.Tensor
    """Elementwise bound on |output - reference|."""
    torch_error: float
    largest_allowed: float
    all_finite: bool


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
    """Uninitialised outputs."""
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
    """Fills an output with what no kernel writes: NaN, or an odd number where NaN may be expected."""
    output.fill_(float("nan") if all_finite else _ODD_VALUE)


def as_outputs(kernel: Kernel, workload: Workload, result: object) -> dict[str, torch.Tensor]:
    """A baseline's result, a tensor or a sequence of them, by output name: not all need be there."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    return dict(zip((a.name for a in kernel.outputs(workload)), tensors, strict=False))


def expect(kernel: Kernel, inputs: Tensors, workload: Workload) -> tuple[Expected, ...]:
    """References and bounds for one set of inputs, on their device."""
    import torch

    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    references = kernel.reference(wide, workload)
    reference_call = kernel.reference_baseline
    own = as_outputs(kernel, workload, reference_call.call(inputs, workload))
    found = []
    for argument in kernel.outputs(workload):
        reference = references[argument.name]
        name = workload.dtype if argument.dtype == "problem" else argument.dtype
        dtype, tolerance = getattr(torch, name), kernel.tolerance[name]
        finite = reference.to(dtype).isfinite()
        magnitude = torch.where(finite, reference.abs(), 0.0)
        torch_error = 0.0
        if argument.name in own and reference.numel():
            both = finite & own[argument.name].isfinite()
            torch_error = float(torch.where(both, (own[argument.name].double() - reference).abs(), 0.0).max())
        scale = float(magnitude.max()) if reference.numel() else 0.0
        # PyTorch may be lucky on a case: float32 results of equal merit differ by some roundings of the
        # last place, 16-bit ones (computed in float32, rounded once) by one.
        roundings = 2.0 if dtype.itemsize > 2 else 0.5
        limit = tolerance.torch_factor * torch_error + roundings * torch.finfo(dtype).eps * scale
        if argument.name not in own:  # PyTorch's call has no such output: there is nothing to be compared with
            limit = tolerance.atol + tolerance.rtol * scale
        limit = max(limit, torch.finfo(dtype).smallest_normal)
        found.append(
            Expected(
                name=argument.name,
                reference=reference,
                finite=finite,
                allowed=torch.clamp(tolerance.atol + tolerance.rtol * magnitude, min=2 * torch_error),
                torch_error=torch_error,
                largest_allowed=limit,
                all_finite=bool(finite.all()),
            )
        )
    return tuple(found)


def findings(output: torch.Tensor, expected: Expected) -> list[torch.Tensor]:
    """Largest error, elements beyond their bound, NaN or Inf of the reference that are lost: float64, left on the
    device, for `verdict`."""
    import torch

    error = (output.double() - expected.reference).abs_()  # not in place: a float64 tensor is its own double()
    if expected.all_finite:
        return [error.max(), (~(error <= expected.allowed)).sum().double(), error.new_zeros(())]
    wide = output.double()
    agrees = (wide == expected.reference.to(output.dtype).double()) | (expected.reference.isnan() & wide.isnan())
    error = torch.where(expected.finite, error, 0.0)
    beyond = ~(error <= expected.allowed) & expected.finite
    return [error.max(), beyond.sum().double(), (~agrees & ~expected.finite).sum().double()]


def verdict(
    found: tuple[float, ...], output: torch.Tensor | None, expected: Expected
) -> tuple[float | None, str]:
    """(largest error, reason for refusal or "") from the values of `findings`. output: None if it is no longer there."""
    measured, wrong, missing = found
    if missing:
        return None, f"{missing:.0f} of {int((~expected.finite).sum())} NaN or Inf of the reference are lost"
    if measured != measured:
        some = f"{int(output.isnan().sum())} of {output.numel()}" if output is not None else "some"
        return None, f"{some} elements are NaN or were never written"
    if wrong:
        return measured, f"{wrong:.0f} of {expected.reference.numel()} elements are outside the tolerance"
    if measured > expected.largest_allowed:
        allowed, own = expected.largest_allowed, expected.torch_error
        return measured, f"error {measured:.3g} exceeds {allowed:.3g} (PyTorch: {own:.3g})"
    return measured, ""


def compare(output: torch.Tensor, expected: Expected) -> tuple[float | None, str]:
    """(largest error, reason for refusal or ""). One pass on the device, one synchronisation."""
    import torch

    if not output.numel():
        return 0.0, ""
    return verdict(tuple(torch.stack(findings(output, expected)).tolist()), output, expected)
