"""LayerNorm for PyTorch: `layer_norm` in place of torch.nn.functional.layer_norm, `LayerNorm` of torch.nn.LayerNorm.

Every call gives what PyTorch's gives. One that a tuned variant serves (inference on dense tensors of one dtype, over
a tuned number of columns, on a tuned device) runs that variant; any other is left to PyTorch's own function. On a GPU the
nearest variant is compiled for another number of columns when that is first met, unless `also_serve` says otherwise.
`explain`, called with the same arguments, says which and why.

`build` builds the native launcher (frontend.cpp), with which a call costs less than PyTorch's; without it, variants are
launched from Python, which takes longer than a small kernel. It also makes the function an operator of PyTorch's
dispatcher, with gradients and for torch.compile, which `also_serve` turns on.

This file is copied into exported packages, and found here by those that are shipped; what it is written against is told
in evo/runtime/__init__.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm  # as it is now: it may be replaced by ours later

from . import PACKAGE
from .runtime import Call, Dispatch, Native, Patch, Table, addresses

__all__ = ["LayerNorm", "also_serve", "build", "explain", "layer_norm", "patch", "variants"]

_is_compiling = torch.compiler.is_compiling
_empty_like = torch.empty_like
_CONTIGUOUS = torch.contiguous_format
_EPS_LOW, _EPS_HIGH = 1e-12, 1e6
"""What eps the variants take; with less, a constant row is noise, and PyTorch's own noise is what is expected."""


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As torch.nn.functional.layer_norm, for every input."""
    if _is_compiling():
        return _compiled(input, normalized_shape, weight, bias, eps)
    if _call is not None:
        output: Tensor | None = _call(input, normalized_shape, weight, bias, eps)
    else:
        output = served(DISPATCH, input, normalized_shape, weight, bias, eps)
    return torch_layer_norm(input, normalized_shape, weight, bias, eps) if output is None else output


class LayerNorm(torch.nn.LayerNorm):
    """As torch.nn.LayerNorm: same constructor, parameters and state_dict.

    Its parameters want gradients, so tuned variants run under torch.no_grad() or torch.inference_mode(), unless
    `also_serve` says otherwise.
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def explain(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> str:
    """Which way a call of layer_norm takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    if _is_compiling():
        return "within torch.compile: PyTorch's operation, unless also_serve(compiled=True) was called"
    if NATIVE.explain is not None:
        found: Any = NATIVE.explain(input, normalized_shape, weight, bias, eps)
        return found if found.startswith("PyTorch") else f"{found}, native launcher"
    found = _choose(DISPATCH, input, normalized_shape, weight, bias, eps)
    return f"PyTorch: {found}" if isinstance(found, str) else f"{found[0].variant}{found[0].how}, Python launcher"


def build() -> str:
    """Builds the native launcher, once a machine and version of PyTorch: half a minute. This process uses it from here
    on, later ones from their start. Returns where it lies. Raises RuntimeError, with what is missing here."""
    return str(NATIVE.build())


def also_serve(
    *,
    gradients: bool | None = None,
    compiled: bool | None = None,
    untuned: bool | None = None,
    slower: bool | None = None,
    measure: bool | None = None,
) -> None:
    """What else variants serve; None leaves it as it is.

    gradients, off at first, with the native launcher only: calls that record gradients. The forward pass is a variant's,
    the backward pass PyTorch's, with the same gradients; but mean and deviation, which PyTorch's own forward pass keeps
    for it, are computed again.
    compiled, off at first, with the native launcher only: calls within torch.compile and torch.export, where a variant
    stands as one operation that nothing is fused with, in place of code that the compiler writes.
    untuned, on at first: numbers of columns that no variant has, on a GPU. The first call with one compiles the nearest
    variant for it and compares it with PyTorch and float64: part of a second, once a machine.
    slower, off at first: problems whose nearest variant was measured, and PyTorch was faster.
    measure, on at first: problems unlike all that were measured are served by the fastest in a short race of the two nearest
    variants and PyTorch, at the first such call, once a machine. Off: by the nearest variant.
    """
    global _in_graphs, _recording
    if gradients is not None:
        _recording = gradients
        NATIVE.serve_gradients(gradients)
    if compiled is not None:
        _in_graphs = compiled
    DISPATCH.also_serve(untuned=untuned, slower=slower, measure=measure)


def patch(model: torch.nn.Module | None = None) -> Patch:
    """Has existing models use this: until `undo` of what is returned, or to the end of the block that it opens.

    With a model: its torch.nn.LayerNorm modules become LayerNorm. Without: torch.nn.functional.layer_norm is ours, which
    every module calls, for the whole process.
    """
    if model is not None:
        return Patch(model=model, classes={torch.nn.LayerNorm: LayerNorm})
    return Patch({"layer_norm": layer_norm})


def _compiled(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """What torch.compile is to see: the operator where it may be a variant, which is looked up when it runs."""
    if _in_graphs and NATIVE.operator is not None:
        recorded = torch.is_grad_enabled() and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        tuned = PACKAGE.tuned(input.device.type, str(input.dtype)[6:], {"cols": prod(normalized_shape)})
        if tuned and (_recording or not recorded):
            output: Tensor = NATIVE.operator(input, normalized_shape, weight, bias, eps)
            return output
    return torch_layer_norm(input, normalized_shape, weight, bias, eps)


def _fake(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Shape, dtype and layout of the operator's result."""
    return torch.empty_like(input, memory_format=_CONTIGUOUS)


def served(
    table: Table, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor | None:
    """The result, launched from Python; None where PyTorch is to do it."""
    found = _choose(table, input, normalized_shape, weight, bias, eps)
    if type(found) is str:
        return None
    call, address, weight_address, bias_address = found
    if not input.is_contiguous():  # PyTorch's own kernels copy it, too
        input = input.contiguous()
        address = input.data_ptr()
    output = _empty_like(input, memory_format=_CONTIGUOUS)
    rows, cols = call.sizes
    # A mode that went unnoticed might have made the output something else than a plain tensor.
    if type(output) is Tensor and call(address, weight_address, bias_address, output.data_ptr(), rows, cols, eps):
        return output
    return None


def _choose(
    table: Table, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any
) -> tuple[Call, int, int, int] | str:
    """A call out of `table` that serves these arguments with the addresses of the tensors, or why PyTorch is to do it.

    What is wrong is left to PyTorch as well: it knows the errors to raise.
    """
    if not isinstance(input, Tensor):
        return "input is not a tensor"
    found = addresses(input, weight, bias)
    if type(found) is str:
        return found
    shape = input.shape
    if type(normalized_shape) not in _SEQUENCES or not normalized_shape or not shape:
        return "normalized_shape is not a tuple or list of sizes"
    cols = shape[-1]
    if len(normalized_shape) == 1:
        fits = normalized_shape[0] == cols and type(normalized_shape[0]) is int
    else:
        tail = shape[-len(normalized_shape) :]
        # Equal is not enough: 64.0 equals 64, and PyTorch refuses it.
        fits = tail == tuple(normalized_shape) and {type(n) for n in normalized_shape} == {int}
        cols = prod(tail)
    if not fits:
        return "normalized_shape is not the end of the input's shape"
    # A tuple, for a torch.Size never equals a list.
    normalized = normalized_shape if type(normalized_shape) is tuple else tuple(normalized_shape)
    if weight is not None and (weight.shape != normalized or not weight.is_contiguous()):
        return "weight is not contiguous and of normalized_shape"
    if bias is not None and (bias.shape != normalized or not bias.is_contiguous()):
        return "bias is not contiguous and of normalized_shape"
    if type(eps) is not float or not _EPS_LOW <= eps <= _EPS_HIGH:
        return f"eps is not a float from {_EPS_LOW:g} to {_EPS_HIGH:g}"
    if input.is_cuda:
        device = input.get_device()
    elif input.is_cpu:
        device = -1
    else:
        return f"nothing was tuned for {input.device.type}"
    call = table[device, input.dtype, input.numel() // cols, cols]
    return call if type(call) is str else (call, *found)


_SEQUENCES = frozenset({tuple, list, torch.Size})
_call: Callable[..., Tensor | None] | None = None
_recording = _in_graphs = False


def _use(native: Native) -> None:
    global _call
    _call = native.call
    native.serve_gradients(_recording)


# For `python -m PACKAGE check` and `bench`.
SUBJECT, ORIGINAL = layer_norm, torch_layer_norm


def exact(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """In float64, term by term."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.double()
    centred = x - x.mean(dims, keepdim=True)
    y = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
    y = y * weight.double() if weight is not None else y
    return y + bias.double() if bias is not None else y


def timed(sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Arguments of a call of these sizes."""
    draw = _Draw(dtype, device, seed)
    cols = sizes["cols"]
    return draw.normal(sizes["rows"], cols), (cols,), draw.normal(cols), draw.normal(cols), 1e-5


def cases(
    sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls over the tuned number of columns, and some that must be left to PyTorch."""
    draw, c, eps = _Draw(dtype, device, seed), sizes["cols"], 1e-5
    rows = min(sizes["rows"], max(1, (1 << 24) // c))
    w, b = draw.normal(c) + 1, draw.normal(c)
    yield "as tuned", (draw.rows(rows, c), (c,), w, b, eps)
    for n in sorted({min(n, max(9, (1 << 21) // c)) for n in (1, 2, 3, 7, 33, 257)}):
        yield f"{n} rows", (draw.rows(n, c), (c,), w, b, eps)
    yield "no weight", (draw.rows(5, c), (c,), None, b, eps)
    yield "no bias", (draw.rows(5, c), (c,), w, None, eps)
    yield "neither, eps 1e-12", (draw.rows(5, c), [c], None, None, 1e-12)
    yield "eps 0.5, tiny values", (1e-4 * draw.rows(5, c), (c,), w, b, 0.5)
    yield "mean 1000", (draw.normal(9, c) + 1000, (c,), w, b, eps)
    yield "constant rows", (draw.normal(5, 1).expand(5, c).contiguous(), (c,), w, b, eps)
    yield "outliers", (draw.marked(33, c, 300.0), (c,), w, b, eps)
    scale = 8e3 if dtype == torch.float16 else 1e14
    yield "large values", (draw.rows(5, c).clamp(-8, 8) * scale, (c,), w, b, eps)
    yield "NaN in some rows", (draw.marked(7, c, float("nan"))[1:], (c,), w, b, eps)
    yield "Inf in some rows", (draw.marked(7, c, float("inf"))[1:], (c,), w, b, eps)
    yield "three dimensions", (draw.rows(6, c).view(2, 3, c), (c,), w, b, eps)
    yield "one dimension", (draw.rows(1, c).view(c), (c,), w, b, eps)
    yield "misaligned input", (draw.rows(1, 6 * c + 1).view(-1)[1:].view(6, c), (c,), w, b, eps)
    yield "misaligned weight", (draw.rows(6, c), (c,), draw.normal(c + 1)[1:], b, eps)
    yield "transposed input", (draw.rows(c, 6).t(), (c,), w, b, eps)
    yield "every other row", (draw.rows(12, c)[::2], (c,), w, b, eps)
    yield "expanded input", (draw.rows(1, c).expand(6, c), (c,), w, b, eps)
    if c % 2 == 0:
        shape = (2, c // 2)
        yield "two normalised dimensions", (draw.rows(5, c).view(5, *shape), shape, w.view(shape), b.view(shape), eps)
    yield "no rows", (draw.rows(0, c), (c,), w, b, eps)
    yield "one column more", (draw.rows(5, c + 1), (c + 1,), None, None, eps)
    yield "weight not contiguous", (draw.rows(5, c), (c,), draw.normal(c, 2)[:, 0], b, eps)
    yield "eps 0", (draw.rows(5, c), (c,), w, b, 0.0)


class _Draw:
    """Random tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._generator = dtype, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        generator = self._generator
        return torch.randn(shape, generator=generator, device=generator.device).to(self._dtype)

    def rows(self, rows: int, cols: int) -> Tensor:
        """Every row has its own mean and scale."""
        scale = 1 + self.normal(rows, 1).abs()
        return self.normal(rows, cols) * scale + 4 * self.normal(rows, 1)

    def marked(self, rows: int, cols: int, value: float) -> Tensor:
        """One element of every other row is `value`."""
        x = self.rows(rows, cols)
        x[::2, cols // 2] = value
        return x


DISPATCH = Dispatch(PACKAGE, sys.modules[__name__])
NATIVE = Native(DISPATCH, "layer_norm", _fake, _use)
torch.jit._builtins._register_builtin(layer_norm, "aten::layer_norm")  # torch.jit.script has PyTorch's in its place
variants = DISPATCH.variants
