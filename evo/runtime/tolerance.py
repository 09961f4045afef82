"""Whether a result is right: the rule by which the engine's gate, exported packages and their checks judge.

A result is compared elementwise, within a tolerance, with a reference in float64, and its largest error with the largest
error of PyTorch's own result on the same input: at most `torch_factor` times that (the rule FlashAttention tests by, Dao
et al. 2022), plus what rounding may do. Where the reference is not finite the result must agree exactly; where it is finite
the result must be. What the tolerance would let pass, and is to be kept nevertheless, is stated by
name: componentwise, denormals, overflow, rounding, zero_sign (`evo.problem.kernel.Tolerance` says what they mean).

Integers and bool are compared exactly (`expected_exactly`), but for positions of equal elements, where any of these may do.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

_SAMPLED = 1 << 17
"""Elements of an output in which denormals, rounding and zeros are looked at."""
_MANY, _SEVERAL = 4096, 8
"""Results, and denormal ones, below which a share says nothing."""
_LEAN = 0.2
"""Share of an eps by which results may lean towards 0, or away from it, in the mean; truncation leans by 0.35."""
FINDINGS = 6


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one output should be, and how far from it PyTorch's own result is."""

    name: str
    reference: torch.Tensor
    """float64, or the output's own dtype if that is no floating-point one; on the device."""
    finite: torch.Tensor
    """Where the reference, rounded to the output's dtype, is finite."""
    allowed: torch.Tensor
    """Elementwise bound on |output - reference|."""
    torch_error: float
    """If the output is exact, the number of elements of PyTorch's own result that are wrong."""
    largest_allowed: float
    all_finite: bool
    keeps: Collection[str] = ("overflow",)
    ties: tuple[torch.Tensor, int] | None = None
    """A tensor and its axis along which an exact output holds positions; any position of an equal element is right."""

    @property
    def exact(self) -> bool:
        """Whether the output is of integers or bool, for which there are no errors, only wrong elements."""
        return not self.reference.is_floating_point()


def as_outputs(outputs: Iterable[Any], result: object) -> dict[str, torch.Tensor]:
    """The outputs of a kernel by name, made from a tensor, a sequence of tensors or a mapping. Some may be missing."""
    if isinstance(result, Mapping):
        return dict(result)
    tensors = result if isinstance(result, tuple | list) else (result,)
    return dict(zip((a.name for a in outputs), tensors, strict=False))


def expected(
    name: str,
    reference: torch.Tensor,
    own: torch.Tensor | None,
    dtype: torch.dtype,
    tolerance: tuple[float, float, float],
    rounding: float = 0.0,
    keeps: Collection[str] = ("overflow",),
    of_sums: float = 0.0,
) -> Expected:
    """own: PyTorch's result; None if it has none to compare with. dtype: of the output. tolerance: atol, rtol and
    torch_factor. rounding: how far from the reference the roundings on the way may lead, as far as that is known. of_sums:
    the share of the largest result that long sums may lose (`Tolerance.of_sums`)."""
    atol, rtol, torch_factor = tolerance
    finite = _as_numbers(reference.to(dtype)).isfinite()
    if dtype.itemsize == 1:  # PyTorch's releases differ in what becomes of larger numbers
        finite &= reference.abs() <= torch.finfo(dtype).max
    magnitude = torch.where(finite, reference.abs(), 0.0)
    allowed, torch_error = atol + rtol * magnitude, 0.0
    if own is not None and reference.numel():
        both = finite & own.double().isfinite()
        torch_error = float(torch.where(both, (own.double() - reference).abs(), 0.0).max())
    scale = float(magnitude.max()) if reference.numel() else 0.0
    # PyTorch may be lucky on a case: float32 results of equal merit differ by some roundings of the last place, shorter
    # ones (computed in float32, rounded once) by one, float64 ones by those of the reference as well.
    roundings = {1: 0.5, 2: 0.5, 4: 2.0, 8: 8.0}[dtype.itemsize]
    limit = torch_factor * torch_error + (roundings * torch.finfo(dtype).eps + of_sums) * scale + rounding
    if own is None:
        limit = atol + rtol * scale
    elif "componentwise" not in keeps:
        allowed = allowed.clamp(min=limit)
    return Expected(
        name=name,
        reference=reference,
        finite=finite,
        allowed=allowed,
        torch_error=torch_error,
        largest_allowed=max(limit, torch.finfo(dtype).smallest_normal),
        all_finite=bool(finite.all()),
        keeps=keeps,
    )


def expected_exactly(
    name: str, reference: torch.Tensor, own: torch.Tensor | None, ties: tuple[torch.Tensor, int] | None = None
) -> Expected:
    """reference: of the output's dtype, which is of integers or bool. own: PyTorch's result; None if it has none."""
    found = Expected(
        name=name,
        reference=reference,
        finite=torch.ones((), dtype=torch.bool, device=reference.device).expand_as(reference),
        allowed=torch.zeros((), dtype=torch.float64, device=reference.device).expand_as(reference),
        torch_error=0.0,
        largest_allowed=0.0,
        all_finite=True,
        ties=ties,
    )
    return found if own is None else replace(found, torch_error=float(_wrong(own, found).sum()))


def input_roundings(given: torch.Tensor) -> float:
    """Number of roundings by which an input's elements are moved, to see what roundings on the way may do. Eight are about
    those of a sum of a hundred terms in order; they grow with the root of their number (Higham and Mary 2019). A kernel adds
    no more than that one behind the other in a row of a thousand; of more, its share of the row."""
    return 8 * max(1.0, given.shape[-1] / 1024) ** 0.5 if given.ndim else 8


def findings(output: torch.Tensor, expected: Expected) -> list[torch.Tensor]:
    """Largest error; elements beyond their bound; NaN or Inf of the reference that are lost; how far results lean towards 0;
    the share of denormal ones that are 0; zeros of the wrong sign: `FINDINGS` numbers, left on the device for `verdict`."""
    if expected.exact:
        none = torch.zeros((), dtype=torch.float64, device=output.device)
        return [none, _wrong(output, expected).sum(dtype=torch.float64), *[none] * (FINDINGS - 2)]
    wide = output.double()
    error = (wide - expected.reference).abs_()
    beyond = ~(error <= expected.allowed)  # a NaN is, too
    lost = error.new_zeros(())
    if not expected.all_finite:
        error, beyond = torch.where(expected.finite, error, 0.0), beyond & expected.finite
        lost = (~_agrees(output, expected) & ~expected.finite).sum(dtype=torch.float64)
    return [error.max(), beyond.sum(dtype=torch.float64), lost, *_habits(output, expected)]


def _wrong(output: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Elements of an exact output that are neither the reference's nor, where ties are allowed, as good."""
    if expected.ties is None:
        return _numbers(output) != _numbers(expected.reference)
    elements, axis = expected.ties
    (at, inside), (wanted, _) = (_positions(t, elements, axis) for t in (output, expected.reference))
    named, right = elements.gather(axis, at), elements.gather(axis, wanted)
    tied = inside & ((named == right) | ((named != named) & (right != right)))
    return ~tied.view(output.shape) | _repeated(output, expected)


def _positions(output: torch.Tensor, elements: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices for `gather`, and which of them are there at all; the others become 0. output: of any axes, which a function
    may have gathered for its kernel, or without the one of the positions."""
    sizes = [*elements.shape]
    sizes[axis] = output.numel() * sizes[axis] // max(1, elements.numel())
    at = output.long().reshape(sizes)
    inside = (at >= 0) & (at < elements.shape[axis])
    return at.where(inside, 0), inside


def _repeated(output: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Positions that stand several times in a row along the axis of an output's ties, where the reference has none twice."""
    if expected.ties is None:
        return torch.zeros_like(output, dtype=torch.bool)
    elements, axis = expected.ties
    several = []
    for positions in (output, expected.reference):
        at, inside = _positions(positions, elements, axis)
        number = torch.zeros(elements.shape, dtype=torch.int32, device=output.device).scatter_add(axis, at, inside.int())
        several.append((number.gather(axis, at) > 1) & inside)
    return (several[0] & ~several[1].any(axis, keepdim=True)).view(output.shape)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a bool tensor, in which a kernel may have written others than 0 and 1; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers of 8 bits in float64, as PyTorch does little with them; any other tensor as it is."""
    return tensor.double() if tensor.itemsize == 1 else tensor


def _agrees(output: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Where the output is what the reference is, rounded."""
    rounded, given = (_as_numbers(t) for t in (expected.reference.to(output.dtype), output))
    agrees = (given == rounded) | (rounded.isnan() & given.isnan())
    if "overflow" not in expected.keeps:
        saturates = expected.reference.isfinite() if output.itemsize > 1 else ~expected.reference.isnan()
        largest = torch.finfo(output.dtype).max
        agrees |= saturates & (given == expected.reference.clamp(-largest, largest))
    return agrees


def _habits(output: torch.Tensor, expected: Expected) -> list[torch.Tensor]:
    none = torch.zeros((), dtype=torch.float64, device=output.device)
    if not {"denormals", "rounding", "zero_sign"} & {*expected.keeps}:
        return [none] * 3
    result, wanted = output.flatten()[:_SAMPLED].double(), expected.reference.flatten()[:_SAMPLED]
    limits = torch.finfo(output.dtype)
    lean = flushed = turned = none
    if "rounding" in expected.keeps and limits.bits <= 16:
        normal = (wanted.abs() >= limits.smallest_normal) & (wanted.abs() <= limits.max)
        # From what is rounded to nearest: few numbers many times may all be rounded the same way.
        off = ((wanted.to(output.dtype).double() - result) / wanted / limits.eps).clamp(-1, 1)
        off = off.where(normal & wanted.isfinite() & result.isfinite(), 0.0)
        lean = off.sum() / normal.sum().clamp(min=_MANY)
    if "denormals" in expected.keeps:
        denormal = (wanted.abs() < limits.smallest_normal) & (wanted.abs() > limits.tiny * limits.eps)
        flushed = (denormal & (result == 0)).sum() / denormal.sum().clamp(min=_SEVERAL).double()
    if "zero_sign" in expected.keeps:
        turned = ((wanted == 0) & (result == 0) & (wanted.signbit() != result.signbit())).sum(dtype=torch.float64)
    return [lean, flushed, turned]


def verdict(
    found: tuple[float, ...], output: torch.Tensor | None, expected: Expected
) -> tuple[float | None, str]:
    """(largest error, reason for refusal or "") from the values of `findings`; an exact output has no error. output: None if
    it is no longer there."""
    measured, wrong, missing, lean, flushed, turned = found
    if expected.exact:
        first = _at(output, expected, lambda output, _: _wrong(output, expected).int()) if wrong else ""
        what = f"{wrong:.0f} of {expected.reference.numel()} elements are wrong or were never written"
        return None, f"{what}{first}" if wrong else ""
    if missing:
        lost = _at(output, expected, lambda output, _: (~_agrees(output, expected) & ~expected.finite).int())
        return None, f"{missing:.0f} of {int((~expected.finite).sum())} NaN or Inf of the reference are lost{lost}"
    if measured != measured:
        some = f"{int(output.double().isnan().sum())} of {output.numel()}" if output is not None else "some"
        return None, f"{some} elements are NaN or were never written"
    if wrong:
        beyond = _at(output, expected, lambda _, error: (error - expected.allowed).where(expected.finite, -math.inf))
        return measured, f"{wrong:.0f} of {expected.reference.numel()} elements are outside the tolerance{beyond}"
    if measured > expected.largest_allowed:
        allowed, own = expected.largest_allowed, expected.torch_error
        largest = _at(output, expected, lambda _, error: error.where(expected.finite, -math.inf))
        return measured, f"error {measured:.3g} exceeds {allowed:.3g} (PyTorch: {own:.3g}){largest}"
    if abs(lean) > _LEAN:
        way = "towards" if lean > 0 else "away from"
        return measured, f"results lean {way} 0, as if not rounded to nearest (if meant: `keeps` of its tolerance)"
    if flushed > 0.5:
        return measured, f"{flushed:.0%} of the results below the smallest normal number are 0"
    if turned:
        return measured, f"{turned:.0f} zeros have the wrong sign"
    return measured, ""


def _at(output: torch.Tensor | None, expected: Expected, found: Callable[..., torch.Tensor]) -> str:
    """What stands where `found`, given output and errors, is largest; nothing if the output is no longer there."""
    if output is None:
        return ""
    given, right = _numbers(output), _numbers(expected.reference)
    error = (given.double() - right).abs()
    place, at = int(found(output, error).argmax()), list[int]()
    several = expected.exact and bool(_repeated(output, expected).flatten()[place])
    result, off, wanted = (t.flatten()[place].item() for t in (given, error, right))
    for size in reversed(error.shape):  # torch.unravel_index imports for half a second
        place, here = divmod(place, size)
        at.insert(0, here)
    if expected.exact:
        equal = " or another position of an equal element" if expected.ties else ""
        why = ", which stands there more than once" if several else f" instead of {wanted}{equal}"
        return f": {result} at {at}{why}"
    return f": {result:.6g} at {at} instead of {wanted:.6g}" + (f" ({off:.3g} off)" if math.isfinite(off) else "")


def compare(output: torch.Tensor, expected: Expected) -> tuple[float | None, str]:
    """(largest error, reason for refusal or ""). One pass on the device, one synchronisation."""
    if not output.numel():
        return 0.0, ""
    return verdict(tuple(torch.stack(findings(output, expected)).tolist()), output, expected)
