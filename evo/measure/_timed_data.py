"""What is timed on: buffer sets between guards, witnesses among them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from evo.measure._witness import Witness, block_version, fresh_version, parts_of
from evo.measure.buffers import NAN, Arena, Layout
from evo.measure.gate import Gate
from evo.measure.reference import Expected, allocate_outputs
from evo.problem.kernel import Kernel, Tensors, Workload
from evo.targets import Session

__all__ = ["TimedData"]


class TimedData:
    """`count` sets of fresh random inputs and of outputs, all between guards: equal data in all sets would be kinder
    than life. Two of the sets are witnesses: what their outputs should be is known."""

    def __init__(self, kernel: Kernel, workload: Workload, session: Session, gate: Gate, count: int, seed: int) -> None:
        self._kernel, self._workload, self._session, self._gate = kernel, workload, session, gate
        self._generator = torch.Generator(device=session.device).manual_seed(seed % 2**63)
        rng = random.Random(seed)
        first = self._draw()
        layout = Layout(first, allocate_outputs(kernel, workload, session.device))
        self.arena = Arena(layout, count, session.device)
        self.arena.bytes.fill_(NAN)
        for i, memory in enumerate(self.arena.sets):
            memory.write(self._draw() if i else first)
        del first
        self.output_bytes = sum(s.end - s.start for s in layout.spans if s.is_output)
        self._pieces = self.arena.piece_sums()
        self._fixed = self.arena.fixed_sums(0, count)
        self.witnesses = self._choose_witnesses(rng)

    def _draw(self) -> Tensors:
        return self._kernel.inputs(self._workload, self._kernel.data[0], self._generator)

    def _choose_witnesses(self, rng: random.Random) -> tuple[Witness, ...]:
        one, other = rng.sample(range(len(self.arena.sets)), 2)
        other_data = self._draw()

        def expect(inputs: Tensors) -> tuple[Expected, ...]:
            return self._gate.expect(inputs, self._workload)

        found = []
        for index in (one, other):
            inputs = {n: t.clone() if t is not None else None for n, t in self.arena.sets[index].inputs.items()}
            expected = expect(inputs)
            parts = {e.name: parts_of(e) for e in expected}
            memory = self.arena.sets[index]
            found.append(Witness(index=index, memory=memory, inputs=inputs, expected=expected, parts=parts))
        found[0].versions.append(fresh_version(found[0].inputs, other_data, expect))
        if (version := block_version(found[1], other_data, expect, rng)) is not None:
            found[1].versions.append(version)
        return tuple(found)

    def nudge(self, first: int, last: int) -> None:
        """See `Arena.nudge`."""
        self.arena.nudge(first, last, self._generator)

    def changes(self) -> torch.Tensor:
        """Whether anything differs that no candidate may write: 0 or 1 in float64, on the device. Of all sets: what one
        candidate has done must not be found when the next is judged."""
        return (self.arena.fixed_sums(0, len(self.arena.sets)) != self._fixed).any().double()

    def changed(self) -> str:
        """What it was, in words."""
        return self.arena.changed(self._pieces, self.arena.piece_sums())

    def span(
        self,
        limit_bytes: Mapping[str, int],
        within: tuple[int, int],
        around: int,
        rng: random.Random,
        most: int = 1 << 20,
    ) -> tuple[int, int]:
        """(first, last + 1) of the sets next to each other, `around` among them, whose outputs hold that many bytes; of
        those in `within`, at `most` so many."""
        low, high = within
        wanted = max(1, min(high - low, most, limit_bytes[self._session.device.type] // max(1, self.output_bytes)))
        first = min(max(low, around - rng.randrange(wanted)), high - wanted)
        return first, first + wanted

    @property
    def device(self) -> torch.device:
        return self._session.device
