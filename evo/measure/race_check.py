"""The check in a race: a kernel that is right in the gate can be wrong where it is timed, at another size or behind other
calls.

All contenders of a race walk over the same buffer sets (`TimedData`). Between their samples, untimed, they are checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from evo.evaluation import Check
from evo.measure.buffers import HUGE, NAN, Arena, Layout, Workspace
from evo.measure.gate import allocate_outputs
from evo.measure.reference import expected_outputs, figures
from evo.problem.kernel import Kernel, Tensors, Workload
from evo.runtime.tolerance import Expected, findings, verdict
from evo.targets import Replay, Session, target_of


class TimedData:
    """The data of races: `count` buffer sets with random inputs of their own, all between guards; and `inputs` that are
    drawn anew from race to race, with their `expected` outputs (`draw`)."""

    def __init__(self, kernel: Kernel, workload: Workload, session: Session, count: int, seed: int) -> None:
        self._kernel, self._workload, self._device = kernel, workload, session.device
        self._generator = torch.Generator(device=self._device).manual_seed(seed % 2**63)
        self._choice = random.Random(seed)
        self.draw()
        layout = Layout(self.inputs, allocate_outputs(kernel, workload, self._device))
        self.arena = Arena(layout, count, self._device)
        self.arena.bytes.fill_(NAN)
        for memory in self.arena.sets:
            memory.write(self._drawn())
        output_bytes = sum(s.end - s.start for s in layout.spans if s.is_output)
        self.summed_sets = max(1, target_of(self._device).summed_bytes // max(1, output_bytes))
        self._sums = self.arena.fixed_sums()

    def _drawn(self) -> Tensors:
        return self._kernel.inputs(self._workload, self._kernel.data[0], self._generator)

    def draw(self) -> None:
        """Draws other inputs, and their reference."""
        self.expected, self._compared = tuple[Expected, ...](), list[Expected]()  # their memory counts as free
        self.inputs = self._drawn()
        self.expected = expected_outputs(self._kernel, self.inputs, self._workload)
        most = target_of(self._device).compared_elements
        self._rows = {e.name: None if e.ties else _some_rows(e.reference, most) for e in self.expected}
        self._compared = [self._some(e) for e in self.expected]

    def of_two_sets(self, sets: int, run: Callable[[], object]) -> list[tuple[Expected, torch.Tensor]]:
        """Findings for each output, or some rows of it, after `run` with the drawn inputs in the first of `sets` sets and in
        any other; afterwards both sets have their own inputs again. A candidate that keeps results keeps those of the first
        sets."""
        chosen = [self.arena.sets[i] for i in {0, self._choice.randrange(sets)}]
        before = [{n: t.clone() if t is not None else None for n, t in memory.inputs.items()} for memory in chosen]
        for memory in chosen:
            memory.write(self.inputs)
        run()
        found = []
        for memory, inputs in zip(chosen, before, strict=True):
            outputs = memory.outputs
            found += [(e, torch.stack(findings(_at(outputs[e.name], self._rows[e.name]), e))) for e in self._compared]
            memory.write(inputs)
        return found

    def _some(self, e: Expected) -> Expected:
        rows = self._rows[e.name]
        reference, finite, allowed = (_at(t, rows) for t in (e.reference, e.finite, e.allowed))
        return replace(e, reference=reference, finite=finite, allowed=allowed)

    def changed(self) -> str:
        """The inputs or guards of any set that have changed, in words; empty if none has."""
        return self.arena.changed(self._sums)


def _some_rows(output: torch.Tensor, most_elements: int) -> torch.Tensor | None:
    """Numbers of rows with about so many elements, spread evenly from the first to the last; None for all rows."""
    if output.numel() <= most_elements or output.ndim < 2:
        return None
    rows = output.numel() // output.shape[-1]
    number = min(rows, max(2, most_elements // output.shape[-1]))
    return torch.linspace(0, rows - 1, number, dtype=torch.float64, device=output.device).long()


def _at(output: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return output if rows is None else output.flatten(0, -2)[rows]


@dataclass(kw_only=True)
class _Progress:
    """The state of one contender in a race, on the device until the verdict. sets: number of the sets that its samples call.
    sums: of the outputs in the first of these sets."""

    sets: int
    workspace: Workspace | None
    samples: int = 0
    sums: torch.Tensor | None = None
    differs: list[torch.Tensor] = field(default_factory=list)


class RaceCheck:
    """Checks contenders in a race, untimed.

    Before the warm-up and the second sample of each pair, outputs and workspace are poisoned, with NaN or with a huge
    number; after it the outputs must have, bit for bit, the same sums as the first time. When the race is over, a sample is
    taken with other inputs in two sets, one of them chosen only now, whose outputs must be right in float64; and inputs
    and guards of all sets must be as they were.
    """

    def __init__(self, data: TimedData, checked: Mapping[str, tuple[int, Workspace | None]]) -> None:
        """checked: the number of sets that a sample of each contender calls, and its workspace. data_changed: inputs or
        guards have changed, by any of the contenders."""
        self._data, self.data_changed = data, False
        self._progress = {name: _Progress(sets=sets, workspace=own) for name, (sets, own) in checked.items()}

    def before(self, name: str) -> None:
        """Prepares a contender's sample."""
        if (p := self._progress.get(name)) is not None and not p.samples % 2:
            self._poison(p, HUGE if p.samples // 2 % 3 else NAN)

    def after(self, name: str) -> None:
        """Examines a contender's sample."""
        if (p := self._progress.get(name)) is None:
            return
        p.samples += 1
        if p.samples % 2:
            sums = self._data.arena.output_sums(0, min(p.sets, self._data.summed_sets))
            p.sums = sums if p.sums is None else p.sums
            p.differs.append((sums != p.sums).any())

    def _poison(self, p: _Progress, byte: int) -> None:
        self._data.arena.poison(0, p.sets, byte)
        if p.workspace is not None:
            p.workspace.poison(byte)

    def verdict(self, name: str, replay: Replay) -> Check:
        """Whether a contender has done its work. Raises LaunchError. replay: its sample."""
        p = self._progress[name]
        check = Check(case="timed", passed=True)
        self._poison(p, NAN)
        found_of = self._data.of_two_sets(p.sets, replay.run_us)
        if reason := self._data.changed():
            self.data_changed = True
            return replace(check, passed=False, reason=f"{reason} (in a timed call)")
        if p.workspace is not None and (reason := p.workspace.changed()):
            return replace(check, passed=False, reason=f"{reason} (in a timed call)")
        for e, found in found_of:
            error, reason = verdict(tuple(found.tolist()), None, e)
            if reason or not e.exact:
                check = replace(check, **figures(error, e))
            if reason:
                return replace(check, passed=False, reason=f"{e.name}: {reason} (in a timed call)")
        if torch.stack(p.differs).any():
            return replace(check, passed=False, reason="another result on the same data (in a timed call)")
        return check
