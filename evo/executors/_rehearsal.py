"""A gate run with nobody on trial, so that the first candidate of a process meets a gate as quick as the last.

PyTorch loads a GPU kernel when it is first called, tens of milliseconds each: a gate of three milliseconds takes half a
second in a new process. Limits of time would have to allow for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from evo.measure.gate import Gate, PreparedCase
from evo.problem.kernel import Kernel, Launch, Workload

__all__ = ["rehearse"]


class _Right:
    """Writes the reference for each launch of a case in turn. The methods are those of `evo.targets.Loaded`."""

    def __init__(self, prepared: PreparedCase) -> None:
        self._trials = iter(prepared.trials)

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        trial = next(self._trials, None)
        for e in trial.expected if trial is not None else ():
            trial.memory.outputs[e.name].copy_(e.reference)  # type: ignore[union-attr]

    def close(self) -> None:
        """Nothing is held."""


class _Idle:
    """Writes nothing, which is wrong."""

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        """Nothing happens."""

    def close(self) -> None:
        """Nothing is held."""


def rehearse(kernel: Kernel, target: str, workload: Workload, gate: Gate) -> None:
    """Prepares every case, and runs it: with what is right, and the first also with what is wrong."""
    cases = kernel.cases(target, workload)
    for number, case in enumerate(cases):
        prepared = gate.prepare(case, repeated=number == 0)
        launch = Launch(grid=(1, 1, 1), block=(1, 1, 1))
        gate.check(_Right(prepared), launch, prepared)
        if number == 0:
            gate.check(_Idle(), launch, prepared)
