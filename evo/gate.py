"""The gate: is a candidate's output right? Nothing is timed, stored or exported that did not pass here.

For every case the candidate gets clones of the inputs and poisoned outputs. Its result is compared with a
float64 reference, elementwise within the kernel's tolerance, and its largest error with the largest error of
PyTorch's own result on the same input: at most `Tolerance.torch_factor` times that (the rule FlashAttention
tests by, Dao et al. 2022), plus what rounding alone may do. Where the reference is not finite the
candidate must agree exactly; where it is finite the candidate must be. Inputs must come back untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evo.errors import LaunchError
from evo.evaluation import Check
from evo.kernel import Case, Kernel, Launch, Tensors, Workload

if TYPE_CHECKING:
    import torch

    from evo.targets import Loaded, Session

__all__ = ["Expected", "Gate", "PreparedCase", "allocate_outputs", "argument_values", "as_outputs", "compare"]

_GUARD_ELEMENTS = 256
"""Elements on either side of a gated output that nobody may write; whole cache lines, so alignment stays."""

_GUARD_VALUE = 12288.0
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


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case with its data on the device; made once, used for every candidate."""

    case: Case
    seed: int
    pristine: Tensors
    working: dict[str, torch.Tensor | None]
    outputs: dict[str, torch.Tensor]
    guards: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """What lies before and after each output."""
    expected: tuple[Expected, ...]


def argument_values(
    kernel: Kernel, workload: Workload, inputs: Tensors, outputs: Mapping[str, object]
) -> tuple[object, ...]:
    """The entry point's arguments in order: tensors, None for an absent optional one, numbers."""
    sizes = {**dict(workload.dims), **dict(workload.options)}
    values: list[object] = []
    for a in kernel.arguments:
        if a.kind == "output":
            values.append(outputs[a.name])
        elif a.kind == "input":
            values.append(inputs[a.name])
        else:
            number = sizes[a.name]
            values.append(float(number) if a.dtype.startswith("float") else int(number))
    return tuple(values)


def allocate_outputs(kernel: Kernel, workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised outputs."""
    import torch

    outputs = {}
    for a in kernel.outputs:
        dtype = getattr(torch, workload.dtype if a.dtype == "problem" else a.dtype)
        outputs[a.name] = torch.empty([workload.dim(d) for d in a.shape], dtype=dtype, device=device)
    return outputs


def _guarded(output: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(guard before, output, guard after) in one piece of memory; `offset` elements past an aligned address."""
    import torch

    before, count = _GUARD_ELEMENTS + offset, output.numel()
    storage = torch.full(
        (before + count + _GUARD_ELEMENTS,), _GUARD_VALUE, dtype=output.dtype, device=output.device
    )
    return storage[:before], storage[before : before + count].view(output.shape), storage[before + count :]


def poison(output: torch.Tensor, *, all_finite: bool) -> None:
    """Fills an output with what no kernel writes: NaN, or an odd number where NaN may be expected."""
    output.fill_(float("nan") if all_finite else _GUARD_VALUE)


def as_outputs(kernel: Kernel, result: object) -> dict[str, torch.Tensor]:
    """A baseline's result, a tensor or a sequence of them, by output name."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    return dict(zip((a.name for a in kernel.outputs), tensors, strict=False))


def compare(output: torch.Tensor, expected: Expected) -> tuple[float | None, str]:
    """(largest error, reason for refusal or ""). One pass on the device, one synchronisation."""
    import torch

    if not output.numel():
        return 0.0, ""
    wide = output.double()
    error = (wide - expected.reference).abs()
    lost: torch.Tensor | float = 0.0
    if not expected.all_finite:
        agrees = (wide == expected.reference.to(output.dtype).double()) | (expected.reference.isnan() & wide.isnan())
        lost = (~agrees & ~expected.finite).sum().double()
        error = torch.where(expected.finite, error, 0.0)
    beyond = (~(error <= expected.allowed) & expected.finite).sum().double()
    found = [error.max(), beyond, lost] if isinstance(lost, torch.Tensor) else [error.max(), beyond]
    measured, wrong, missing = (*torch.stack(found).tolist(), 0.0)[:3]  # one synchronisation
    if missing:
        return None, f"{missing:.0f} of {int((~expected.finite).sum())} NaN or Inf of the reference are lost"
    if measured != measured:
        count = int(wide.isnan().sum())
        return None, f"{count} of {output.numel()} elements are NaN or were never written"
    if wrong:
        return measured, f"{wrong:.0f} of {output.numel()} elements are outside the tolerance"
    if measured > expected.largest_allowed:
        allowed, own = expected.largest_allowed, expected.torch_error
        return measured, f"error {measured:.3g} exceeds {allowed:.3g} (PyTorch: {own:.3g})"
    return measured, ""


class Gate:
    """Prepares cases once per process and judges candidates on them."""

    def __init__(self, kernel: Kernel, target: str, session: Session, seed: int) -> None:
        self._kernel, self._target, self._session, self._seed = kernel, target, session, seed
        self._prepared: dict[Case, PreparedCase] = {}

    def expect(self, inputs: Tensors, workload: Workload) -> tuple[Expected, ...]:
        """References and bounds for one set of inputs."""
        import torch

        wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
        references = self._kernel.reference(wide, workload)
        reference_call = next(b for b in self._kernel.baselines if b.role == "reference")
        own = as_outputs(self._kernel, reference_call.call(inputs, workload))
        tolerance = self._kernel.tolerance[workload.dtype]
        found = []
        for argument in self._kernel.outputs:
            reference = references[argument.name]
            dtype = getattr(torch, workload.dtype if argument.dtype == "problem" else argument.dtype)
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

    def prepare(self, case: Case) -> PreparedCase:
        import torch

        if case in self._prepared:
            return self._prepared[case]
        seed = case_seed(self._seed, case)
        generator = torch.Generator(device=self._session.device).manual_seed(seed)
        drawn = self._kernel.inputs(case.workload, case.data, generator)
        pristine = {n: _shifted(t, case.offset) if t is not None else None for n, t in drawn.items()}
        bare = allocate_outputs(self._kernel, case.workload, self._session.device)
        guarded = {n: _guarded(o, case.offset) for n, o in bare.items()}
        prepared = PreparedCase(
            case=case,
            seed=seed,
            pristine=pristine,
            working={n: _shifted(t, case.offset) if t is not None else None for n, t in drawn.items()},
            outputs={n: output for n, (_, output, _) in guarded.items()},
            guards={n: (before, after) for n, (before, _, after) in guarded.items()},
            expected=self.expect(pristine, case.workload),
        )
        self._prepared[case] = prepared
        return prepared

    def check(self, loaded: Loaded, launch: Launch, prepared: PreparedCase) -> Check:
        """Runs one case. A launch that fails raises LaunchError: it may have broken the device."""
        kernel, workload = self._kernel, prepared.case.workload
        for e in prepared.expected:
            poison(prepared.outputs[e.name], all_finite=e.all_finite)
        if all(o.numel() for o in prepared.outputs.values()):
            loaded(argument_values(kernel, workload, prepared.working, prepared.outputs), launch)
            self._session.synchronize()
        mutated, overrun = self._restore_mutated(prepared), _restore_guards(prepared)
        error, torch_error, allowed, reason = None, None, None, ""
        for e in prepared.expected:
            error, reason = compare(prepared.outputs[e.name], e)
            torch_error, allowed = e.torch_error, e.largest_allowed
            if reason:
                reason = f"{e.name}: {reason}"
                break
        if mutated:
            reason = f"input {', '.join(mutated)} was changed"
        if overrun:
            reason = f"memory outside output {', '.join(overrun)} was written"
        return Check(
            case=prepared.case.name,
            passed=not reason,
            error=error,
            allowed=allowed,
            torch_error=torch_error,
            reason=reason,
            seed=prepared.seed,
        )

    def run(self, loaded: Loaded, cases: Sequence[tuple[Case, Launch]]) -> tuple[Check, ...]:
        """Checks in order, up to and including the first that fails."""
        checks: list[Check] = []
        for case, launch in cases:
            prepared = self.prepare(case)
            try:
                checks.append(self.check(loaded, launch, prepared))
            except LaunchError as error:
                raise LaunchError(f"case {case.name}: {error}") from error
            if not checks[-1].passed:
                break
        return tuple(checks)

    def _restore_mutated(self, prepared: PreparedCase) -> list[str]:
        """Names of inputs that no longer equal what was passed, bit for bit; they are restored."""
        import torch

        mutated = []
        for name, original in prepared.pristine.items():
            working = prepared.working[name]
            if original is None or working is None:
                continue
            if not torch.equal(_bits(original), _bits(working)):
                working.copy_(original)
                mutated.append(name)
        return mutated


def _restore_guards(prepared: PreparedCase) -> list[str]:
    """Names of outputs beside which something was written; the guards are restored."""
    overrun = []
    for name, guards in prepared.guards.items():
        if bool(sum((guard != _GUARD_VALUE).sum() for guard in guards)):  # one synchronisation
            overrun.append(name)
            for guard in guards:
                guard.fill_(_GUARD_VALUE)
    return overrun


def case_seed(seed: int, case: Case) -> int:
    """A seed of the case's own, so that adding a case leaves the data of the others as they were."""
    import zlib

    return (seed * 0x9E3779B1 + zlib.crc32(f"{case.name}|{case.workload.key}|{case.data}".encode())) % 2**63


def _shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that starts `offset` elements past an aligned address."""
    import torch

    storage = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
    view = storage[offset:].view(tensor.shape)
    view.copy_(tensor)
    return view


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
