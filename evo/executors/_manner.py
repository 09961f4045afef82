"""How a process computes: what a candidate on the CPU can change for everybody after it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Manner", "gather_team"]

_ENDING_S = 0.2
"""How long threads that are no longer needed may take to end."""

_GLOBAL = ctypes.CDLL(None)

_ONE, _TINY, _LEAST = 1.0, 2.0**-60, sys.float_info.min
_TEAM_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Manner:
    """Threads that PyTorch computes with, whether their number may vary, rounding of floating-point numbers, the cores
    that may be used, and the threads there are (0 where that says nothing)."""

    team: int
    dynamic: int
    rounding: tuple[float, ...]
    cores: frozenset[int]
    threads: int

    @classmethod
    def present(cls) -> Manner | None:
        """None before PyTorch is there, and where candidates run on a GPU."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "get_num_threads") or torch.cuda.is_initialized():
            return None
        dynamic = 0
        with suppress(AttributeError):
            dynamic = int(_GLOBAL.omp_get_dynamic())
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        return cls(
            team=torch.get_num_threads(),
            dynamic=dynamic,
            rounding=(_ONE + _TINY, -_ONE - _TINY, _ONE - _TINY, _LEAST * 0.75, _LEAST / 2),
            cores=frozenset(cores),
            threads=_threads(),
        )

    def complaint(self) -> str:
        """What is not as it was, in a few words; empty if all is."""
        now = Manner.present()
        if now is None:
            return ""
        if now.team != self.team or now.dynamic != self.dynamic:
            return f"it changed with how many threads its process computes, from {self.team} to {now.team}"
        if now.rounding != self.rounding:
            return "it changed how its process rounds floating-point numbers"
        if now.cores != self.cores:
            return f"it changed which cores its process may use, from {len(self.cores)} to {len(now.cores)}"
        if self.threads and now.threads > self.threads and (left := _left_threads(self.threads)):
            return f"it left {left} {'thread' if left == 1 else 'threads'} running"
        return ""


def _left_threads(expected: int) -> int:
    """How many more there are when OpenMP has let go of those it does not need: with its next, smaller, team."""
    deadline = time.monotonic() + _ENDING_S
    while True:
        gather_team()
        left = _threads() - expected
        if left <= 0 or time.monotonic() > deadline:
            return max(0, left)
        time.sleep(_ENDING_S / 20)


def gather_team() -> None:
    """One computation by all of PyTorch's threads."""
    import torch

    torch.zeros(_TEAM_ELEMENTS).add_(1)


def _threads() -> int:
    """0 where the threads of OpenMP are not to be told from others: its runtime keeps those of the largest team, or
    there is no team."""
    import torch

    with suppress(OSError):
        if torch.get_num_threads() > 1 and _is_gnu():
            return sum(1 for _ in Path("/proc/self/task").iterdir())
    return 0


def _is_gnu() -> bool:
    """GNU's OpenMP runtime ends threads that the next team has no use for; others keep them."""
    from evo.targets._openmp import share_openmp_runtime

    return "gomp" in Path(share_openmp_runtime()).name
