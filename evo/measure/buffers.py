"""Memory in which candidates work: tensors between guard zones, one set of them or many side by side.

A write beside an output shows in the guards or the inputs. A read beside an input changes the result: the guards hold NaN
or a huge number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from evo.errors import LaunchError
from evo.problem.kernel import Kernel, Tensors
from evo.targets import target_of

GUARD_BYTES = 16 << 10
"""Guard on either side of every tensor: as much as a block of 1024 threads reads in vectors of 16 bytes."""
WIDE_GUARD_BYTES = 1 << 20
"""Guard where it costs nothing, on a GPU or if it is seldom looked at: a whole tile of rows beside a tensor."""
_ALIGNMENT = 512
"""Alignment in bytes of PyTorch's allocator on a GPU."""
_SPARE_BYTES = 256 << 10
"""Memory on either side of all sets, so that a write far beyond the first or the last set hits nothing else."""
NAN, HUGE, ZERO = 0xFF, 0x6B, 0x00
"""Bytes that memory is filled with. As float16, bfloat16, float32 and float64 they make a NaN that no arithmetic makes;
3798, 2.8e26, 2.8e26 and 1e209; and 0."""


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Place of a tensor in a set, in bytes. like: a tensor of its dtype, sizes and strides, without memory."""

    name: str
    is_output: bool
    start: int
    end: int
    like: torch.Tensor

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        flat = storage[self.start : self.end].view(self.like.dtype)
        return flat.as_strided(self.like.shape, self.like.stride())


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """An input or a guard, which a candidate must not change; its place in a set, in bytes. tensor: the input, or the tensor
    nearest to the guard."""

    start: int
    end: int
    is_guard: bool
    tensor: str


class Layout:
    """Places of the tensors of a set: guard, input, guard, ..., output, guard.

    Every tensor starts `offset` elements past an aligned address (see `Case.offset`) and has the strides of the given one;
    the gaps between its elements are guards too.
    """

    def __init__(
        self,
        inputs: Tensors,
        outputs: Mapping[str, torch.Tensor],
        offset: int | tuple[int, ...] = 0,
        *,
        kind: str = "output",
        guard_bytes: int = GUARD_BYTES,
    ) -> None:
        """kind: what messages call the outputs."""
        spans, at, self._kind = list[_Span](), 0, kind
        offsets = (offset,) if isinstance(offset, int) else offset
        for is_output, tensors in ((False, inputs), (True, outputs)):
            for name, t in tensors.items():
                if t is None:
                    continue
                start = -(-(at + guard_bytes) // _ALIGNMENT) * _ALIGNMENT
                start += offsets[min(len(spans), len(offsets) - 1)] * t.element_size()
                at = start + extent(t) * t.element_size()
                like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                spans.append(_Span(name=name, is_output=is_output, start=start, end=at, like=like))
        self.spans = tuple(spans)
        self.size = -(-(at + guard_bytes) // _ALIGNMENT) * _ALIGNMENT
        self.absent = tuple(n for n, t in inputs.items() if t is None)
        ends = [(0, 0), *((s.start, s.end) for s in spans if s.is_output), (self.size, self.size)]
        self.fixed = tuple((end, start) for (_, end), (start, _) in pairwise(ends))
        """Ranges of bytes that a candidate must not change, as (start, end): all but the outputs."""
        self.pieces = tuple(self._pieces())
        """The same bytes, each input and guard by itself."""

    def _pieces(self) -> Iterator[_Piece]:
        at, before = 0, ""
        for s in self.spans:
            name, middle = f"{self._kind if s.is_output else 'input'} {s.name}", at
            if before:  # half of the guard between two tensors belongs to each
                middle = (at + s.start) // 2 // 8 * 8
                yield _Piece(start=at, end=middle, is_guard=True, tensor=before)
            yield _Piece(start=middle, end=s.start, is_guard=True, tensor=name)
            if not s.is_output:
                yield _Piece(start=s.start, end=s.end, is_guard=False, tensor=name)
            at, before = s.end, name
        yield _Piece(start=at, end=self.size, is_guard=True, tensor=before)


@dataclass
class Operands:
    """The tensors of a call. arguments: those of an entry point, without a workspace, made once for all candidates."""

    inputs: Tensors
    outputs: dict[str, torch.Tensor]
    arguments: tuple[object, ...] | None = None


class Memory(Operands):
    """One set of tensors, in `storage` (uint8, of the layout's size) or in memory of its own."""

    def __init__(self, layout: Layout, device: torch.device, storage: torch.Tensor | None = None) -> None:
        self.layout = layout
        self.bytes = _allocate(1, layout.size, device)[0] if storage is None else storage
        views = {(s.is_output, s.name): s.view(self.bytes) for s in layout.spans}
        inputs = {n: t for (out, n), t in views.items() if not out} | dict.fromkeys(layout.absent)
        super().__init__(inputs, {n: t for (out, n), t in views.items() if out})
        self._fixed = [words_of(self.bytes, start, end) for start, end in layout.fixed]

    def fill(self, inputs: Tensors, guard: int) -> None:
        """Writes the inputs, and the byte everywhere else."""
        self.bytes.fill_(guard)
        self.write(inputs)

    def write(self, inputs: Tensors) -> None:
        for name, t in inputs.items():
            if t is not None and (own := self.inputs[name]) is not None:
                copy_once(own, t)

    def changes(self, image: Memory) -> list[torch.Tensor]:
        """Whether each piece between the outputs differs from `image`: 0 or 1 in float64, on the device."""
        return [(a != b).any().double() for a, b in zip(self._fixed, image._fixed, strict=True)]

    def changed(self, image: Memory) -> str:
        """The inputs or guards that differ from `image`, in words."""
        one, other = self.bytes, image.bytes
        return _complaint(p for p in self.layout.pieces if not torch.equal(one[p.start : p.end], other[p.start : p.end]))


class Arena:
    """Many sets of tensors in one piece of memory; sums show what has changed.

    Sums are of the bits as integers, modulo 2^64: equal bits have equal sums.
    """

    def __init__(self, layout: Layout, count: int, device: torch.device) -> None:
        self.layout = layout
        self.bytes = _allocate(count, layout.size, device)
        self.sets = tuple(Memory(layout, device, self.bytes[i]) for i in range(count))

    def output_sums(self, first: int, last: int) -> torch.Tensor:
        """Sums of the outputs in sets `first` to before `last`: int64 [last - first, outputs]."""
        # Up to the next whole word: an output is followed by a guard.
        sums = [_sums(self.bytes[first:last], s.start, -(-s.end // 8) * 8) for s in self.layout.spans if s.is_output]
        return torch.stack(sums, 1)

    def fixed_sums(self) -> torch.Tensor:
        """Sums of each guard and each input, in all sets: int64 [sets, pieces]."""
        return torch.stack([_sums(self.bytes, p.start, p.end) for p in self.layout.pieces], 1)

    def changed(self, before: torch.Tensor) -> str:
        """The inputs or guards that differ from earlier `fixed_sums`, in words; empty if none does."""
        differ = (before != self.fixed_sums()).any(0).tolist()
        return _complaint(p for p, differs in zip(self.layout.pieces, differ, strict=True) if differs)

    def poison(self, first: int, last: int, byte: int) -> None:
        """Fills the outputs in sets `first` to before `last` with a byte."""
        for s in self.layout.spans:
            if s.is_output:
                words = words_of(self.bytes[first:last], s.start, s.end)
                pattern = bytes([byte]) * words.element_size()
                words.fill_(int.from_bytes(pattern, "little", signed=words.element_size() > 1))


class Workspace:
    """Memory for intermediate results of a call's launches, between guards: `tensors`, of one dimension, by name. All calls
    of a candidate share it, as successive calls of PyTorch share the memory of temporaries. bytes: with the guards."""

    def __init__(self, kernel: Kernel, sizes: Sequence[tuple[str, int]], device: torch.device) -> None:
        """sizes: elements by name. Raises LaunchError where there is no memory."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._guards: tuple[_Piece, ...] = ()
        self._zeroed: list[torch.Tensor] = []
        self._byte = NAN
        if not sizes:  # a gate makes one for every case of every candidate
            return
        arguments = {a.name: a for a in kernel.arguments}
        free, like = target_of(device).free_bytes(), {}
        for name, size in sizes:
            dtype = getattr(torch, arguments[name].dtype)
            if size < 0:
                raise LaunchError(f"workspace {name} cannot have {size:,} elements: correct its `size` in kernel.py")
            if size * dtype.itemsize > free:
                raise _too_large(name, size * dtype.itemsize, free)
            like[name] = torch.empty(size, dtype=dtype, device="meta")
        layout = Layout({}, like, kind="workspace")
        try:
            memory = Memory(layout, device)
        except RuntimeError as error:
            raise _too_large(", ".join(like), layout.size, free) from error
        self.tensors, self.bytes, self._guards = memory.outputs, memory.bytes, layout.pieces
        self._zeroed = [t for name, t in self.tensors.items() if arguments[name].zeroed]
        self.fill(NAN)

    def fill(self, byte: int) -> None:
        """Writes a byte everywhere."""
        self._byte = byte
        self.bytes.fill_(byte)

    def poison(self, byte: int) -> None:
        """Writes a byte to the tensors."""
        for t in self.tensors.values():
            t.view(torch.uint8).fill_(byte)

    def zero(self) -> None:
        """Zeroes the tensors that a call expects to be zero."""
        for t in self._zeroed:
            t.zero_()

    @property
    def left(self) -> list[torch.Tensor]:
        """The tensors that are not zeroed before a call: their contents come from launches of the same call."""
        return [t for t in self.tensors.values() if t.numel() and all(t is not z for z in self._zeroed)]

    def changes(self) -> list[torch.Tensor]:
        """Whether each guard has changed since `fill`: 0 or 1 in float64, on the device."""
        return [(self.bytes[g.start : g.end] != self._byte).any().double() for g in self._guards]

    def changed(self) -> str:
        """The tensors beside which memory was written, in words; empty if none was."""
        return _complaint(g for g, differs in zip(self._guards, self.changes(), strict=True) if differs)


def _too_large(name: str, size: int, free: int) -> LaunchError:
    return LaunchError(f"workspace {name} of {size:,} bytes does not fit: out of memory, with {free:,} bytes free")


def _complaint(changed: Iterable[_Piece]) -> str:
    pieces = list(changed)
    if beside := dict.fromkeys(p.tensor for p in pieces if p.is_guard):
        return f"memory outside {', '.join(beside)} was written"
    return f"{', '.join(p.tensor for p in pieces)} was changed" if pieces else ""


def _allocate(count: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [count, size], aligned."""
    whole = torch.empty(count * size + _ALIGNMENT + 2 * _SPARE_BYTES, dtype=torch.uint8, device=device)
    first = -whole.data_ptr() % _ALIGNMENT + _SPARE_BYTES
    return whole[first : first + count * size].view(count, size)


def copy_once(into: torch.Tensor, content: torch.Tensor) -> None:
    """Copies a tensor into another of its shape; elements that a stride of 0 repeats there are copied once."""
    once = tuple(slice(None if stride else 1) for stride in into.stride())
    into[once].copy_(content[once])


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of all bits of tensors of one device as integers, modulo 2^64: one int64."""
    words = (t.view(torch.int64) if _is_words(t) else bits(t) for t in tensors)
    sums = [w.sum(dtype=torch.int64) for w in words]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _is_words(tensor: torch.Tensor) -> bool:
    """Whether a piece of memory can be read as 64-bit integers, which is faster than byte by byte."""
    plain = tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.is_contiguous()
    return plain and tensor.numel() % 8 == 0 and tensor.storage_offset() % 8 == 0


def _sums(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return words_of(rows, start, end).sum(-1, dtype=torch.int64)


def words_of(storage: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Bytes `start` to `end` of each row, as the widest integers that divide them evenly."""
    size = next(s for s in (8, 4, 2, 1) if start % s == 0 and end % s == 0)
    return storage[..., start:end].view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])


def extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals itself, and a bool that is neither 0 nor 1 shows."""
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))
