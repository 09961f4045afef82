"""How a process computes: what a candidate on the CPU can change for everybody after it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Manner"]

_ENDING_S = 0.2
"""How long threads that are no longer needed may take to end."""

_GLOBAL = ctypes.CDLL(None)

_SUMS = (1.0, 2.0**-60), (-1.0, -(2.0**-60)), (1.0, -(2.0**-60)), (2.0**-1022 * 0.75, 0.0)
"""Each rounds otherwise upward, downward, towards zero, or where denormal numbers count as zero."""

_PAUSE_SOFT = 1
"""omp_pause_soft of OpenMP 5.0: GNU's runtime ends its threads, and has others when they are needed again."""

_SHARE = 1 << 15
"""Elements that PyTorch gives to one thread at least (at::internal::GRAIN_SIZE)."""

_BINDING = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
"""Variables by which a user binds threads to cores."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """Threads that PyTorch computes with, whether their number may vary, how each of them rounds floating-point numbers,
    the cores that its threads may use, and the threads there are (0 where that says nothing)."""

    team: int
    dynamic: int
    rounding: tuple[float, ...]
    cores: frozenset[frozenset[int]]
    threads: int

    @classmethod
    def present(cls) -> Manner | None:
        """None before PyTorch is there."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "get_num_threads"):
            return None
        dynamic = 0
        with suppress(AttributeError):
            dynamic = int(_GLOBAL.omp_get_dynamic())
        team = torch.get_num_threads()
        return cls(  # what is computed by all threads first: then they are there to be counted
            team=team, dynamic=dynamic, rounding=_team_rounding(team), cores=_cores(), threads=_threads()
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
        if not now.cores <= self.cores:
            before, after = (max(map(len, cores)) for cores in (self.cores, now.cores - self.cores))
            return f"it changed which cores its process may use, from {before} to {after}"
        if self.threads and now.threads > self.threads and (left := _left_threads(self.threads)):
            return f"it left {left} {'thread' if left == 1 else 'threads'} running"
        return ""


def _team_rounding(team: int) -> tuple[float, ...]:
    """What `_SUMS` are to each of PyTorch's threads: all candidates, and their references, are computed by the same."""
    one, other = _summands(team)
    return tuple((one + other).view(team, -1)[:, : len(_SUMS)].flatten().tolist())


@cache
def _summands(team: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    both = torch.tensor(_SUMS, dtype=torch.float64).T.repeat(1, team * _SHARE // len(_SUMS))
    return both[0].contiguous(), both[1].contiguous()


def _cores() -> frozenset[frozenset[int]]:
    """Those of every thread of the process that are not the same as another's. Threads that the user has bound to cores
    each have their own, and come and go: then only the main thread's."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    found = {frozenset(os.sched_getaffinity(0))}
    if not _BINDING & os.environ.keys():
        with suppress(OSError):
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # it has ended
                    found.add(frozenset(os.sched_getaffinity(int(thread.name))))
    return frozenset(found)


def _left_threads(expected: int) -> int:
    """How many more there are when OpenMP has let go of those it does not need."""
    deadline = time.monotonic() + _ENDING_S
    while True:
        _let_go()
        left = _threads() - expected
        if left <= 0 or time.monotonic() > deadline:
            return max(0, left)
        time.sleep(_ENDING_S / 20)


def _let_go() -> None:
    """OpenMP does so with its next, smaller, team. With a team of one it starts none, and is asked."""
    import torch

    team = torch.get_num_threads()
    if team > 1:
        _team_rounding(team)
    else:
        _GLOBAL.omp_pause_resource_all(_PAUSE_SOFT)


def _threads() -> int:
    """0 where the threads of OpenMP are not to be told from others: its runtime keeps those of the largest team."""
    import torch

    with suppress(OSError):
        if _is_gnu() and (torch.get_num_threads() > 1 or hasattr(_GLOBAL, "omp_pause_resource_all")):
            return sum(1 for _ in Path("/proc/self/task").iterdir())
    return 0


def _is_gnu() -> bool:
    """GNU's OpenMP runtime ends threads that the next team has no use for; others keep them."""
    from evo.targets._openmp import share_openmp_runtime

    return "gomp" in Path(share_openmp_runtime()).name
