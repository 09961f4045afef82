"""Is every variant right? Fresh random inputs and edge cases, against PyTorch and float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._launcher import MANIFEST, Dispatch
from ._trial import compare

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
            error, torch_error, reason = compare(own, original, exact, MANIFEST["kernel"]["tolerance"])
            yield Verdict(name, frontend.explain(*args), error, torch_error, reason)
