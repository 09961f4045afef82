"""Softmax for PyTorch: `softmax` in place of torch.nn.functional.softmax, `Softmax` of torch.nn.Softmax.

Every call gives what PyTorch's gives. One that a tuned variant serves (over the last axis of a dense tensor, in its own
dtype, on a tuned device) runs that variant; any other is left to PyTorch's own function. Gradients are PyTorch's, of the
result. On a GPU the nearest
variant is compiled for another number of columns when that is first met, unless `also_serve` says otherwise. `explain`,
called with the same arguments, says which and why.

`build` builds the native launcher (frontend.cpp), with which a call costs less than PyTorch's; without it, variants are
launched from Python, which takes longer than a small kernel. It also makes the function an operator of PyTorch's
dispatcher, for torch.compile, which `also_serve` turns on.

This file is copied into exported packages, and found here by those that are shipped; what it is written against is told
in evo/runtime/__init__.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax as torch_softmax  # as it is now: it may be replaced by ours later

from . import PACKAGE
from .runtime import RECORDING, Call, Dispatch, Native, Patch, Recorded, Table, addresses

__all__ = ["Softmax", "also_serve", "build", "explain", "patch", "softmax", "variants"]

_is_compiling = torch.compiler.is_compiling
_empty_like = torch.empty_like
_CONTIGUOUS = torch.contiguous_format
_OTHER_AXIS = "dim is not the last axis"
_OTHER_DTYPE = "dtype is not the input's own"


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """As torch.nn.functional.softmax, for every input."""
    if _is_compiling():
        output = _compiled(input, dim, dtype)
    elif _call is not None:
        output = _call(input, dim, dtype)
    else:
        output = served(DISPATCH, input, dim, _stacklevel, dtype)
    if output is not None:
        return output
    # Without dim PyTorch warns, and is to name our caller.
    return torch_softmax(input, dim, _stacklevel + 1 if dim is None else _stacklevel, dtype)


class Softmax(torch.nn.Softmax):
    """As torch.nn.Softmax: same constructor and state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return softmax(input, self.dim, _stacklevel=5)


def explain(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> str:
    """Which way a call of softmax takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    if _is_compiling():
        return "within torch.compile: PyTorch's operation, unless also_serve(compiled=True) was called"
    if NATIVE.explain is not None:
        found: Any = NATIVE.explain(input, dim, dtype)
        return found if found.startswith("PyTorch") else f"{found}, native launcher"
    with torch.no_grad():  # the same variant serves a call that records gradients
        found = _choose(DISPATCH, input, dim, dtype)
    return f"PyTorch: {found}" if isinstance(found, str) else f"{found[0].variant}{found[0].how}, Python launcher"


def build() -> str:
    """Builds the native launcher, once a machine and version of PyTorch: half a minute. This process uses it from here
    on, later ones from their start. Returns where it lies. Raises RuntimeError, with what is missing here."""
    return str(NATIVE.build())


def also_serve(
    *,
    compiled: bool | None = None,
    untuned: bool | None = None,
    slower: bool | None = None,
    measure: bool | None = None,
) -> None:
    """What else variants serve; None leaves it as it is.

    compiled, off at first, with the native launcher only: calls within torch.compile and torch.export, where a variant
    stands as one operation that nothing is fused with, in place of code that the compiler writes.
    untuned, on at first: numbers of columns that no variant has, on a GPU. The first call with one compiles the nearest
    variant for it and compares it with PyTorch and float64: part of a second, once a machine.
    slower, off at first: problems whose nearest variant was measured, and PyTorch was faster.
    measure, on at first: problems unlike all that were measured are served by the fastest in a short race of the two nearest
    variants and PyTorch, at the first such call, once a machine. Off: by the nearest variant.
    """
    global _in_graphs
    if compiled is not None:
        _in_graphs = compiled
    DISPATCH.also_serve(untuned=untuned, slower=slower, measure=measure)


def patch(model: torch.nn.Module | None = None) -> Patch:
    """Has existing models use this: until `undo` of what is returned, or to the end of the block that it opens.

    With a model: its torch.nn.Softmax modules become Softmax. Without: torch.nn.functional.softmax is ours, for the whole
    process; torch.softmax and the tensors' method stay PyTorch's.
    """
    if model is not None:
        return Patch(model=model, classes={torch.nn.Softmax: Softmax})
    return Patch({"softmax": softmax})


def _compiled(input: Tensor, dim: int | None, dtype: torch.dtype | None) -> Tensor | None:
    """What torch.compile is to see: the operator where it may be a variant, which is looked up when it runs; None:
    PyTorch's operation."""
    fits = _in_graphs and NATIVE.operator is not None and not _misfit(input, dim, dtype)
    if fits and PACKAGE.tuned(input.device.type, str(input.dtype)[6:], {"cols": input.shape[-1]}):
        output: Tensor = NATIVE.operator(input, dim)
        return output
    return None


def _fake(input: Tensor, dim: int) -> Tensor:
    """Shape, dtype and layout of the operator's result."""
    return torch.empty_like(input, memory_format=_CONTIGUOUS)


def served(
    table: Table, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor | None:
    """The result, launched from Python; None where PyTorch is to do it."""
    found = _choose(table, input, dim, dtype)
    if found is RECORDING:
        return _record(table, input, dim, dtype)
    if type(found) is str:
        return None
    call, address = found
    if not input.is_contiguous():  # PyTorch's own kernels copy it, too
        input = input.contiguous()
        address = input.data_ptr()
    output = _empty_like(input, memory_format=_CONTIGUOUS)
    # A mode that went unnoticed might have made the output something else than a plain tensor.
    return output if type(output) is Tensor and call(address, output.data_ptr(), *call.sizes) else None


def _record(table: Table, input: Tensor, dim: Any, dtype: Any) -> Tensor | None:
    """The result of a call that records gradients; None where PyTorch is to do it."""
    with torch.no_grad():
        if type(_choose(table, input, dim, dtype)) is str:
            return None

    def run() -> tuple[Tensor, Tensor]:
        own = served(table, input, dim, dtype=dtype)
        result = torch_softmax(input, dim, dtype=dtype) if own is None else own
        return result, result

    def gradients(gradient: Tensor, kept: Any, tensors: Any, wanted: Any) -> tuple[Tensor]:
        return (torch.ops.aten._softmax_backward_data(gradient, *kept, -1, input.dtype),)

    output: Tensor = Recorded.apply(run, gradients, input)  # type: ignore[no-untyped-call]
    return output


def _choose(table: Table, input: Any, dim: Any, dtype: Any) -> tuple[Call, int] | str:
    """A call out of `table` that serves these arguments with the address of the input, or why PyTorch is to do it.

    What is wrong is left to PyTorch as well: it knows the errors to raise.
    """
    if not isinstance(input, Tensor):
        return "input is not a tensor"
    found = addresses(input)
    if type(found) is str:
        return found
    if reason := _misfit(input, dim, dtype):
        return reason
    if input.is_cuda:
        device = input.get_device()
    elif input.is_cpu:
        device = -1
    else:
        return f"nothing was tuned for {input.device.type}"
    cols = input.shape[-1]
    call = table[device, input.dtype, input.numel() // cols, cols]
    return call if type(call) is str else (call, *found)


def _misfit(input: Tensor, dim: Any, dtype: Any) -> str:
    """Why no variant is for such a call, whichever there are; empty if one may be."""
    if type(dim) is not int or not (dim == -1 or dim == input.dim() - 1) or input.dim() == 0:
        return _OTHER_AXIS
    return "" if dtype is None or dtype is input.dtype else _OTHER_DTYPE


_call: Callable[..., Tensor | None] | None = None
_in_graphs = False


def _use(native: Native) -> None:
    global _call
    _call = native.call


# For `python -m PACKAGE check` and `bench`.
SUBJECT, ORIGINAL = softmax, torch_softmax


def exact(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """In float64, term by term."""
    x = input.double()
    weights = (x - x.amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)


def timed(sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Arguments of a call of these sizes."""
    return _normal(dtype, device, seed)(sizes["rows"], sizes["cols"]), -1


def cases(
    sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls over the tuned number of columns, and some that must be left to PyTorch."""
    normal, c = _normal(dtype, device, seed), sizes["cols"]

    def marked(value: float) -> Tensor:
        """One element of every other row is `value`."""
        x = rows(7, c)
        x[::2, c // 2] = value
        return x

    def rows(number: int, cols: int) -> Tensor:
        """Every row has its own mean and scale."""
        return normal(number, cols) * (1 + normal(number, 1).abs()) + 4 * normal(number, 1)

    yield "as tuned", (rows(min(sizes["rows"], max(1, (1 << 24) // c)), c), -1)
    for n in sorted({min(n, max(9, (1 << 21) // c)) for n in (1, 2, 3, 7, 33, 257)}):
        yield f"{n} rows", (rows(n, c), -1)
    yield "the axis by its number, dtype named", (rows(5, c), 1, 3, dtype)
    yield "mean 1000", (normal(9, c) + 1000, -1)
    yield "equal values", (normal(5, 1).expand(5, c).contiguous(), -1)
    yield "one value that is far larger", (marked(300.0), -1)
    yield "one value that is far smaller", (marked(-300.0), -1)
    largest = torch.finfo(dtype).max
    yield "as large as the dtype holds", (rows(5, c).clamp(-1, 1) * largest, -1)
    yield "NaN in some rows", (marked(float("nan")), -1)
    yield "Inf in some rows", (marked(float("inf")), -1)
    yield "-Inf in some rows", (marked(-float("inf")), -1)
    yield "half of the values -Inf", (rows(9, c).masked_fill(normal(9, c) < 0, -float("inf")), -1)
    yield "nothing but -Inf in some rows", (rows(7, c).masked_fill(normal(7, 1) < 0, -float("inf")), -1)
    yield "three dimensions", (rows(6, c).view(2, 3, c), 2)
    yield "one dimension", (rows(1, c).view(c), 0)
    yield "misaligned input", (rows(1, 6 * c + 1).view(-1)[1:].view(6, c), -1)
    yield "transposed input", (rows(c, 6).t(), -1)
    yield "every other row", (rows(12, c)[::2], -1)
    yield "expanded input", (rows(1, c).expand(6, c), -1)
    yield "no rows", (rows(0, c), -1)
    yield "one column more", (rows(5, c + 1), -1)
    yield "another axis", (rows(5, c), 0)


def _normal(dtype: torch.dtype, device: torch.device, seed: int) -> Callable[..., Tensor]:
    """Draws random tensors of a shape."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


DISPATCH = Dispatch(PACKAGE, sys.modules[__name__])
NATIVE = Native(DISPATCH, "softmax", _fake, _use)
softmax.__prepare_scriptable__ = lambda: torch_softmax  # torch.jit.script has PyTorch's in its place
variants = DISPATCH.variants
