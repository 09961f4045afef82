"""Witnesses: buffer sets of which it is known what their outputs should be, for more than one state of their inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from evo.measure.buffers import Memory
from evo.measure.reference import Expected, compare
from evo.problem.kernel import Tensors

__all__ = ["Part", "Version", "Witness", "block_version", "fresh_version", "parts_of"]

_SAMPLED_ELEMENTS = 1 << 18
"""How many elements of an output are compared with the reference where all of them would take too long."""

_PARTS = 8
"""How many choices of rows there are, of which one is picked each time."""

_TRIES = 4

_Expect = Callable[[Tensors], tuple[Expected, ...]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of an output, and what is expected there. at: indices of all dimensions but the last; None for all."""

    expected: Expected
    at: tuple[torch.Tensor, ...] | None = None

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return output.clone() if self.at is None else output[self.at]


@dataclass(frozen=True, kw_only=True)
class Version:
    """Other inputs for a witness. parts: by output, what may be compared; outputs that are as before are not there."""

    values: Mapping[str, torch.Tensor]
    """By input: what is written there."""
    before: Mapping[str, torch.Tensor]
    """And what was there."""
    slices: Mapping[str, tuple[int, int]]
    """By input: (axis, index) of where it is written; whole where there is none."""
    parts: Mapping[str, tuple[Part, ...]]

    def apply(self, memory: Memory) -> None:
        self._write(memory, self.values)

    def revert(self, memory: Memory) -> None:
        self._write(memory, self.before)

    def _write(self, memory: Memory, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            tensor = memory.inputs[name]
            assert tensor is not None
            (tensor.select(*self.slices[name]) if name in self.slices else tensor).copy_(value)


@dataclass(frozen=True, kw_only=True)
class Witness:
    """One buffer set. inputs: a copy of what it holds; expected: for that, whole, and `parts` of it."""

    index: int
    memory: Memory
    inputs: Tensors
    expected: tuple[Expected, ...]
    parts: Mapping[str, tuple[Part, ...]]
    versions: list[Version] = field(default_factory=list)


def fresh_version(before: Tensors, data: Tensors, expect: _Expect) -> Version:
    """All inputs are others."""
    values = {n: t for n, t in data.items() if t is not None}
    olds = {n: t for n, t in before.items() if t is not None}
    return Version(values=values, before=olds, slices={}, parts={e.name: parts_of(e) for e in expect(data)})


def block_version(witness: Witness, data: Tensors, expect: _Expect, rng: random.Random) -> Version | None:
    """One slice of one input is another, taken from `data`: nearly always of the largest input.

    None if no slice that was tried changes an output so much that the old one would be refused.
    """
    sizes = {n: t.numel() for n, t in witness.inputs.items() if t is not None and t.dim() and t.numel()}
    for _ in range(_TRIES if sizes else 0):
        name = max(sizes, key=sizes.__getitem__) if rng.random() < 0.75 else rng.choice(list(sizes))
        old, other = witness.inputs[name], data[name]
        assert old is not None
        assert other is not None
        axis = rng.randrange(old.dim())
        at = axis, rng.randrange(old.shape[axis])
        inputs = {**witness.inputs, name: old.clone()}
        changed = inputs[name]
        assert changed is not None
        changed.select(*at).copy_(other.select(*at))
        expected = []
        rows: dict[str, torch.Tensor] = {}
        for before, after in zip(witness.expected, expect(inputs), strict=True):
            differ = (before.reference != after.reference) & ~(before.reference.isnan() & after.reference.isnan())
            found = _rows(differ).any(1).nonzero()[:, 0]
            if not len(found):
                continue
            least = max(1, _SAMPLED_ELEMENTS // _rows(differ).shape[1])
            found = found[torch.randperm(len(found), device=found.device)[:least]]
            expected.append(_restricted(after, found))
            rows[after.name] = found
        shapes = {e.name: e.reference.shape for e in witness.expected}
        olds = {e.name: _restricted(e, rows[e.name]) for e in witness.expected if e.name in rows}
        if any(compare(olds[e.name].reference, e)[1] for e in expected):
            return Version(
                values={name: other.select(*at).clone()},
                before={name: old.select(*at).clone()},
                slices={name: at},
                parts={e.name: (Part(expected=e, at=_places(shapes[e.name], rows[e.name])),) for e in expected},
            )
    return None


def parts_of(expected: Expected) -> tuple[Part, ...]:
    """Choices of rows, each with the first and the last; or all of a small output."""
    shape = expected.reference.shape
    if expected.reference.numel() <= _SAMPLED_ELEMENTS or len(shape) < 2:
        return (Part(expected=expected),)
    rows = expected.reference.numel() // shape[-1]
    found = []
    for _ in range(_PARTS):
        at = torch.randint(0, rows, (max(2, _SAMPLED_ELEMENTS // shape[-1]),), device=expected.reference.device)
        at[0], at[-1] = 0, rows - 1
        found.append(Part(expected=_restricted(expected, at), at=_places(shape, at)))
    return tuple(found)


def _places(shape: torch.Size, rows: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Not by torch.unravel_index, whose first call imports sympy: a third of a second, or two where that has to be
    compiled first."""
    if len(shape) < 2:
        return None
    places = []
    for size in reversed(shape[1:-1]):
        places.append(rows % size)
        rows = rows // size
    return (rows, *reversed(places))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _restricted(expected: Expected, rows: torch.Tensor) -> Expected:
    if expected.reference.dim() < 2:
        return expected
    return replace(
        expected,
        reference=_rows(expected.reference)[rows],
        finite=_rows(expected.finite)[rows],
        allowed=_rows(expected.allowed)[rows],
    )
