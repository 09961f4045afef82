"""References: the right outputs of a call in float64, and how far from them a candidate's may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evo.errors import KernelError
from evo.problem.kernel import Argument, Case, Kernel, Tensors, Tolerance, Workload
from evo.problem.stated import call_stated, mistake, wrong_outputs
from evo.runtime.tolerance import Expected, as_outputs, expected, expected_exactly, input_roundings
from evo.targets import target_of

_FEW_ELEMENTS, _DRAWS = 1 << 14, 8
"""Among so few elements of the outputs the largest change is luck, too: the largest of so many draws is taken."""
_MOST_ELEMENTS, _COPIES = 1 << 28, 4
"""Among more elements of all tensors, changes of the inputs take too long; each element has so many copies in float64."""
_WRONG = 4
"""Largest ratio of PyTorch's error to the tolerance that rounding explains in harmless data."""


def stated_outputs(
    kernel: Kernel, what: str, function: Callable[..., object], inputs: Tensors, workload: Workload
) -> dict[str, torch.Tensor]:
    """The outputs that the reference, a baseline or `same_dtype` makes, by name; only the reference need give all.
    Raises KernelError for a mistake in it."""
    found = as_outputs(kernel.outputs(workload), call_stated(kernel, what, function, inputs, workload))
    if fault := wrong_outputs(kernel, found, workload, complete=what == "`reference`"):
        raise mistake(kernel, what, function, fault)
    return found


def reference_outputs(kernel: Kernel, inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    """The outputs in float64, by name. Raises KernelError for a mistake in the reference."""
    return stated_outputs(kernel, "`reference`", kernel.reference, _widened(inputs), workload)


def _widened(inputs: Tensors) -> Tensors:
    return {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}


def expected_outputs(kernel: Kernel, inputs: Tensors, workload: Workload, data: str = "") -> tuple[Expected, ...]:
    """References and bounds for one set of inputs, on their device. data: the inputs' distribution, by default the kernel's
    first; in others, errors of whole rows may lean one way together."""
    wide = _widened(inputs)
    references = stated_outputs(kernel, "`reference`", kernel.reference, wide, workload)
    same_dtype = kernel.same_dtype or kernel.reference_baseline.call
    outputs = {a.name: (a, getattr(torch, a.dtype_of(workload))) for a in kernel.outputs(workload)}
    own = stated_outputs(kernel, _whose_own(kernel), same_dtype, inputs, workload)
    own = {name: own[name].to(dtype) for name, (_, dtype) in outputs.items() if name in own}
    exact = bool(data) and {*data.split("+")} <= {*kernel.exact_data}
    wide_outputs = [name for name, (_, dtype) in outputs.items() if dtype.is_floating_point and dtype.itemsize > 2]
    compared = {name: references[name] for name in wide_outputs if name in own and not exact}
    roundings = _roundings(kernel, wide, workload, compared)
    found = []
    for name, (argument, dtype) in outputs.items():
        if not dtype.is_floating_point:
            right = references[name].to(dtype)
            found.append(expected_exactly(name, right, own.get(name), _ties(kernel, argument, inputs, right, workload)))
            continue
        tolerance = _tolerance(kernel, argument, workload)
        numbers = (tolerance.atol, tolerance.rtol, tolerance.torch_factor)
        kept = [k for k in tolerance.keeps if k != "rounding" or data in ("", kernel.data[0])]
        moved = roundings.get(name, 0.0)
        found.append(expected(name, references[name], own.get(name), dtype, numbers, moved, kept, tolerance.of_sums))
    return tuple(found)


def _ties(
    kernel: Kernel, output: Argument, inputs: Tensors, right: torch.Tensor, workload: Workload
) -> tuple[torch.Tensor, int] | None:
    """The elements and the axis of an output of positions that may be tied (`Argument.ties`). Raises KernelError where the
    reference names no position."""
    if output.ties is None or (elements := inputs[output.ties[0]]) is None:
        return None
    name, axis = output.ties
    size = elements.shape[axis]
    if beyond := [n for n in map(int, (right.min(), right.max())) if not 0 <= n < size] if right.numel() else []:
        fault = f"returns {beyond[0]} in {output.name!r} for {workload.key}, which is no position in the {size} of"
        raise mistake(kernel, "`reference`", kernel.reference, f"{fault} axis {axis} of {name!r}, as `ties` states")
    return elements, axis


def figures(error: float | None, output: Expected) -> dict[str, Any]:
    """The numbers of a Check; an exact output has none."""
    if output.exact:
        return {"error": None, "allowed": None, "torch_error": None}
    return {"error": error, "allowed": output.largest_allowed, "torch_error": output.torch_error}


def _tolerance(kernel: Kernel, output: Argument, workload: Workload) -> Tolerance:
    dtype = output.dtype_of(workload)
    if (found := kernel.own_tolerance(workload, output.name) or kernel.tolerance.get(dtype)) is None:
        where = f"{kernel.folder / 'kernel.py'}: `tolerance` has none for {dtype}, of which output {output.name!r} is stated"
        raise KernelError(f"{where}: give it one, or the output another dtype")
    return found


def _whose_own(kernel: Kernel) -> str:
    return "`same_dtype`" if kernel.same_dtype else f"the reference baseline {kernel.reference_baseline.name!r}"


def check_own(kernel: Kernel, case: Case, found: Sequence[Expected]) -> None:
    """Raises KernelError where PyTorch's own result is wrong: it would excuse whatever is as wrong."""
    for e, argument in zip(found, kernel.outputs(case.workload), strict=True):
        if e.exact:
            bound, off = 0.0, f"in {e.torch_error:.0f} of {e.reference.numel()} elements"
            fix = "mend it, or state `ties` if any position of equal elements will do; rounded integers are not served yet"
        else:
            tolerance = _tolerance(kernel, argument, case.workload)
            largest = float(torch.where(e.finite, e.reference.abs(), 0.0).max()) if e.reference.numel() else 0.0
            bound, off = _WRONG * (tolerance.atol + tolerance.rtol * largest), f"{e.torch_error:.3g} away"
            fix = "mend it, or allow for it in tolerance"
        if e.torch_error > bound:
            raise KernelError(
                f"{kernel.folder / 'kernel.py'}: {_whose_own(kernel)} gives another {e.name} than reference does in float64,"
                f" {off} for case {case.name!r} of {case.workload}: {fix}"
            )


def _roundings(
    kernel: Kernel, wide: Tensors, workload: Workload, references: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Distance that each of these float32 or float64 outputs moves if the inputs are off by some roundings, up or down: a
    backward stable computation may err so far (Higham 2002, 1.5), measured as in Monte Carlo arithmetic (Parker 1997).
    PyTorch's error alone says less: on few elements it may be small by luck. (In 16 bits the last rounding outweighs the
    others.)"""
    floats = {n: t for n, t in wide.items() if t is not None and t.is_floating_point()}
    elements = sum(t.numel() for t in (*floats.values(), *references.values()))
    if not references or elements > _MOST_ELEMENTS:
        return {}
    device = next(iter(references.values())).device
    if not target_of(device).has_room(_COPIES * 8 * elements):
        return {}
    few = sum(t.numel() for t in references.values()) <= _FEW_ELEMENTS
    unit = torch.finfo(torch.float64 if workload.dtype == "float64" else torch.float32).eps / 2
    draw, found = torch.Generator(device=device).manual_seed(0), dict.fromkeys(references, 0.0)
    for number in range(_DRAWS if few else 2):
        moved = dict(wide)
        for name, t in floats.items():  # element by element, as in sums of both signs, and row by row, as in those of one
            shape = (*t.shape[:-1], 1) if number % 2 and t.ndim else t.shape
            up = torch.randint(2, shape, generator=draw, dtype=torch.int8, device=device)
            moved[name] = t * (1 + input_roundings(t) * unit * (2 * up - 1).double())
        results = as_outputs(kernel.outputs(workload), kernel.reference(moved, workload))
        for name, reference in references.items():
            change = (results[name] - reference).abs()
            if change.numel():
                found[name] = max(found[name], float(torch.where(change.isfinite(), change, 0.0).max()))
    return found
