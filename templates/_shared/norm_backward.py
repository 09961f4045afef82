"""The function of a package of LayerNorm's or RMSNorm's backward kernel: what their frontends have in common.

Arguments are, by position, those of PyTorch's operators: native_layer_norm_backward (grad_out, input, normalized_shape,
mean, rstd, weight, bias, output_mask) and _fused_rms_norm_backward, which has neither mean nor bias. Results: the gradients
that output_mask asks for, None in the place of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime import Call, Table, addresses, workspace

Gradients = tuple[Tensor | None, ...]


class _Arguments(NamedTuple):
    grad: Tensor
    input: Tensor
    shape: Sequence[int]
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    wanted: Sequence[bool]


class NormBackward:
    """centred: LayerNorm's. original: PyTorch's function. What is public here is what a frontend has to define."""

    def __init__(self, centred: bool, original: Callable[..., Gradients]) -> None:
        self._centred, self._original = centred, original

    def _read(self, args: tuple[Any, ...]) -> _Arguments:
        return _Arguments(*args[:6], args[7]) if self._centred else _Arguments(*args[:3], None, *args[3:])

    def _written(self, a: _Arguments) -> tuple[Any, ...]:
        if self._centred:
            return *a[:6], a.input.new_zeros(tuple(a.shape)), a.wanted
        return *a[:3], *a[4:]

    def served(self, table: Table, *args: Any) -> Gradients | None:
        """The gradients, launched from Python; None where PyTorch is to do it."""
        call = self.choose(table, *args)
        if isinstance(call, str):
            return None
        a = self._read(args)
        grad, input = a.grad.contiguous(), a.input.contiguous()
        results = [torch.empty_like(input), *(input.new_empty(tuple(a.shape)) if w else None for w in a.wanted[1:])]
        read = [grad, input, a.weight, *((a.mean,) if self._centred else ()), a.rstd, None]
        memory = workspace(call, input)
        values = [0 if t is None else t.data_ptr() for t in (*read, *results, *memory)]
        return tuple(results) if call(*values, *call.sizes[:2]) else None

    def choose(self, table: Table, *args: Any) -> Call | str:
        """A call out of `table` that serves these arguments, or why PyTorch is to do it."""
        a = self._read(args)
        for found in (addresses(a.input, a.grad, a.weight), addresses(a.rstd, a.mean)):
            if isinstance(found, str):
                return found
        shape = tuple(a.shape)
        if not shape or tuple(a.input.shape[-len(shape) :]) != shape or a.grad.shape != a.input.shape:
            return "normalized_shape is not the end of the shape of the input and of the gradient"
        cols = a.input.shape[-len(shape) :].numel()
        rows = a.input.numel() // cols
        opmath = torch.promote_types(a.input.dtype, torch.float32)
        for t in (a.rstd,) if a.mean is None else (a.rstd, a.mean):
            if t.device != a.input.device or t.dtype != opmath or t.numel() != rows or not t.is_contiguous():
                return f"a statistic is not {str(opmath)[6:]}, one a row, on the device of the input"
        if a.weight is not None and (tuple(a.weight.shape) != shape or not a.weight.is_contiguous()):
            return "weight is not contiguous and of normalized_shape"
        if not a.wanted[0] or (a.wanted[1] and a.weight is None):
            return "no gradient of the input is wanted, or one of a weight that is not there"
        device = a.input.get_device() if a.input.is_cuda else -1
        options = (int(a.weight is not None), int(a.wanted[1]), 0, *map(int, a.wanted[2:]))  # 0: no gradient to be added
        return table[device, a.input.dtype, rows, cols, *options]

    def exact(self, *args: Any) -> Gradients:
        """In float64."""
        return self._by_definition(self._read(args), -1.0)

    def comparable(self, *args: Any) -> Gradients:
        """PyTorch's gradients, whose errors ours may be twice; in float32 and float64 with an error that sums of such terms
        may have: one order of summation is lucky where another of equal merit is not."""
        original, a = self._original(*args), self._read(args)
        if a.input.itemsize < 4:
            return original
        sizes, eps = self._by_definition(a, 1.0), torch.finfo(a.input.dtype).eps
        pairs = zip(original, sizes, strict=True)
        return tuple(None if t is None or n is None else t + (eps * n).to(t.dtype) for t, n in pairs)

    def _by_definition(self, a: _Arguments, sign: float) -> Gradients:
        """sign: of the means. 1, and every term by its size: what errors are relative to."""
        rows = a.rstd.numel()
        dy, x, rstd = (t.double().reshape(rows, -1) for t in (a.grad, a.input, a.rstd))
        xhat = (x if a.mean is None else x - a.mean.double().reshape(rows, 1)) * rstd
        weight = torch.ones_like(x[:1]) if a.weight is None else a.weight.double().reshape(1, -1)
        if sign > 0:
            dy, xhat, weight = dy.abs(), xhat.abs(), weight.abs()
        g = dy * weight
        dx = g + sign * xhat * (g * xhat).mean(1, keepdim=True)
        dx = dx if a.mean is None else dx + sign * g.mean(1, keepdim=True)
        found = (dx * rstd).reshape(a.input.shape), (dy * xhat).sum(0), dy.sum(0)
        shapes = (a.input.shape, tuple(a.shape), tuple(a.shape))
        return tuple(t.reshape(s) if w else None for t, s, w in zip(found, shapes, a.wanted, strict=False))

    def timed(self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        """Arguments of a call of these sizes."""
        draw = _Draw(self._centred, dtype, device, seed)
        return self._written(draw.call(sizes["rows"], (sizes["cols"],), sizes))

    def cases(
        self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Calls over the tuned number of columns, and some that must be left to PyTorch."""
        for name, call in _cases(_Draw(self._centred, dtype, device, seed), sizes):
            yield name, self._written(call)


def _cases(draw: _Draw, sizes: dict[str, int]) -> Iterator[tuple[str, _Arguments]]:
    c = sizes["cols"]
    most = max(1, (1 << 23) // c)
    yield "as tuned", draw.call(min(sizes["rows"], most), (c,), sizes)
    for n in sorted({min(n, most) for n in (1, 2, 3, 33, 257, 4099)}):
        yield f"{n} rows", draw.call(n, (c,), sizes)
    yield "mean 1000", draw.call(9, (c,), sizes, draw.normal(9, c) + 1000)
    yield "constant rows", draw.call(9, (c,), sizes, draw.normal(9, 1).expand(9, c).contiguous())
    yield "NaN in some rows", draw.call(7, (c,), sizes, draw.marked(7, c))
    if c % 2 == 0:
        yield "two normalised dimensions", draw.call(5, (2, c // 2), sizes)
    misaligned = draw.normal(1, 6 * c + 1).view(-1)[1:].view(6, c)
    yield "misaligned input", draw.call(6, (c,), sizes, misaligned)
    yield "transposed input", draw.call(6, (c,), sizes, draw.normal(c, 6).t())
    yield "one column more", draw.call(5, (c + 1,), sizes)


class _Draw:
    """Random calls of one dtype on one device."""

    def __init__(self, centred: bool, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._centred, self._dtype, self._generator = centred, dtype, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        generator = self._generator
        return torch.randn(shape, generator=generator, device=generator.device).to(self._dtype)

    def marked(self, rows: int, cols: int) -> Tensor:
        x = self.normal(rows, cols)
        x[::2, cols // 2] = torch.nan
        return x

    def call(
        self, rows: int, shape: tuple[int, ...], options: dict[str, int], x: Tensor | None = None
    ) -> _Arguments:
        """options: of which `weight`, `dweight` and `dbias` say what there is, and what is wanted."""
        if x is None:  # every row has its own mean
            x = self.normal(rows, *shape) + self.normal(rows, *(1 for _ in shape))
        dims = tuple(range(1, x.dim()))
        wide = x.double()
        mean = wide.mean(dims, keepdim=True) if self._centred else wide.new_zeros(rows, *(1 for _ in shape))
        rstd = ((wide - mean).square().mean(dims, keepdim=True) + 1e-5).rsqrt()
        weight = self.normal(*shape) + 1 if options["weight"] else None
        wanted = [True, bool(options["dweight"]), *([bool(options["dbias"])] if self._centred else [])]
        opmath = torch.promote_types(self._dtype, torch.float32)
        statistics = mean.to(opmath) if self._centred else None, rstd.to(opmath)
        return _Arguments(self.normal(rows, *shape), x, shape, *statistics, weight, wanted)
