"""Is every variant right? Fresh random inputs and edge cases, against PyTorch and float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._launcher import MANIFEST, Dispatch

__all__ = ["Verdict", "check"]


@dataclass(frozen=True)
class Verdict:
    """What was found out about one case. `path`: what ran. `reason`: why it is refused; empty if it is right."""

    case: str
    path: str
    error: float
    """Infinite where the result is NaN and should not be."""
    torch_error: float
    reason: str

    @property
    def on_variant(self) -> bool:
        return self.path.startswith("variant")


def check(frontend: Any, dispatch: Dispatch, index: int, seed: int) -> Iterator[Verdict]:
    """Runs the frontend's cases for one variant, with no other one allowed to step in."""
    workload = MANIFEST["variants"][index]["workload"]
    device = dispatch.device_of(index)
    place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    with dispatch.only(index), torch.no_grad():
        for name, args in frontend.cases(workload["dims"], getattr(torch, workload["dtype"]), place, seed):
            own, original, exact = frontend.SUBJECT(*args), frontend.ORIGINAL(*args), frontend.exact(*args)
            error, torch_error, reason = _compare(own, original, exact)
            yield Verdict(name, frontend.explain(*args), error, torch_error, reason)


def _compare(own: torch.Tensor, original: torch.Tensor, exact: torch.Tensor) -> tuple[float, float, str]:
    """(largest error, PyTorch's largest error, why `own` is refused): the rule that evo's gate accepts by."""
    if (own.shape, own.dtype, own.device, own.stride()) != (
        original.shape,
        original.dtype,
        original.device,
        original.stride(),
    ):
        return 0.0, 0.0, f"{own.dtype} {tuple(own.shape)} is not the form of PyTorch's result"
    if not own.numel():
        return 0.0, 0.0, ""
    tolerance = MANIFEST["kernel"]["tolerance"][str(own.dtype).removeprefix("torch.")]
    rounded = exact.to(own.dtype).double()
    finite, wide = rounded.isfinite(), own.double()
    lost = ~finite & ~((wide == rounded) | (wide.isnan() & rounded.isnan()))
    magnitude = torch.where(finite, exact.abs(), 0.0)
    error = torch.where(finite, (wide - exact).abs(), 0.0)
    both = finite & original.isfinite()
    torch_error = float(torch.where(both, (original.double() - exact).abs(), 0.0).max())
    allowed = (tolerance["atol"] + tolerance["rtol"] * magnitude).clamp(min=2 * torch_error)
    roundings = 2.0 if own.dtype.itemsize > 2 else 0.5
    limit = tolerance["torch_factor"] * torch_error + roundings * torch.finfo(own.dtype).eps * float(magnitude.max())
    largest = float(error.nan_to_num(nan=float("inf")).max())
    if lost.any():
        return largest, torch_error, f"{int(lost.sum())} NaN or Inf are lost"
    wrong = int((~(error <= allowed)).sum())
    if wrong:
        return largest, torch_error, f"{wrong} of {own.numel()} elements are outside the tolerance"
    if largest > max(limit, torch.finfo(own.dtype).smallest_normal):
        return largest, torch_error, f"the largest error exceeds {limit:.3g}"
    return largest, torch_error, ""
