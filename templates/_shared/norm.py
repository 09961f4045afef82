"""What the frontends of norms over the last dimensions share: those of layer_norm and rms_norm.

It is copied into exported packages beside the frontend.py that imports it, and found here by those that are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import PACKAGE
from ..runtime import ALL, NONE, PAY, RECORDING, Call, Dispatch, Native, Patch, Recorded, Table, addresses, derive

_is_compiling = torch.compiler.is_compiling
_empty_like = torch.empty_like
_CONTIGUOUS = torch.contiguous_format
_SEQUENCES = frozenset({tuple, list, torch.Size})
_EPS_OF_FLOAT64 = torch.finfo(torch.float64).eps
_EPS_LOW, _EPS_HIGH = 1e-12, 1e6
"""What eps the variants take; with less, a constant row is noise, and PyTorch's own noise is what is expected."""


class Norm:
    """One function of PyTorch's and what stands in for it. Methods take input, normalized_shape, weight, bias and eps, bias
    None where the function has none.

    frontend: the kernel's module, which has the function under `name`. original: PyTorch's. layer: the module, derived from
    PyTorch's. use(call): told the native launcher's function, once there is one.
    launch(call, x, weight, bias, y, mean, rstd, rows, cols, eps): calls with the entry point's arguments.
    centred: whether it subtracts a mean, and adds a bias.
    default_eps: what eps=None stands for but in float64; None where that is not for variants.
    keeps_channels_last: PyTorch's result for an input of that layout has it, too, and a variant's would not.
    """

    def __init__(
        self,
        frontend: ModuleType,
        name: str,
        original: Callable[..., Tensor],
        layer: type[torch.nn.Module],
        use: Callable[[Callable[..., Tensor | None] | None], None],
        launch: Callable[..., bool],
        *,
        centred: bool,
        default_eps: float | None,
        keeps_channels_last: bool,
    ) -> None:
        self._frontend, self._name, self._original, self._layer = frontend, name, original, layer
        self._use, self._launch = use, launch
        self._centred, self._saved = centred, ("mean", "rstd") if centred else ("rstd",)
        self._options = dict.fromkeys(("residual", "sum", *self._saved), 0)  # that are compiled in, as the function has them
        self._values = tuple(self._options.values())
        self._saving = tuple((self._options | dict.fromkeys(self._saved, 1)).values())
        PACKAGE.unasked = frozenset(self._saved)
        self._default_eps, self._keeps_channels_last = default_eps, keeps_channels_last
        self.dispatch, self._backward = Dispatch(PACKAGE, frontend), None
        self._in_graphs, self._recording = False, NONE
        if PACKAGE.path("backward/manifest.json").is_file():
            self._gradients = import_module(f"{PACKAGE.name}.backward.frontend")
            self._backward, self._recording = self._gradients.DISPATCH, PAY
            self.dispatch.also_serve(more=True)
        self.native = Native(self.dispatch, name, _fake, self._use_native, self._backward)
        self.variants = self.dispatch.variants
        # torch.jit.script has PyTorch's in its place.
        torch.jit._builtins._register_builtin(getattr(frontend, name), f"aten::{name}")

    def _use_native(self, native: Native) -> None:
        self._use(native.call)
        native.serve_gradients(self._recording)

    def _args(self, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
        """As the function takes them."""
        return (input, normalized_shape, weight, bias, eps) if self._centred else (input, normalized_shape, weight, eps)

    def explain(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
    ) -> str:
        """Which way such a call takes here and now."""
        if _is_compiling():
            return "within torch.compile: PyTorch's operation, unless also_serve(compiled=True) was called"
        if self.native.explain is not None:
            way = self.native.explain(*self._args(input, normalized_shape, weight, bias, eps))
            return way if way.startswith("PyTorch") else f"{way}, native launcher"
        found = self._choose(self.dispatch, input, normalized_shape, weight, bias, eps)
        if found is RECORDING:
            found = self._choose_recorded(self.dispatch, input, normalized_shape, weight, bias, eps)
        return f"PyTorch: {found}" if isinstance(found, str) else f"{found[0].variant}{found[0].how}, Python launcher"

    def build(self) -> str:
        """Builds the native launcher, once a machine and version of PyTorch: half a minute. This process uses it from here
        on, later ones from their start. Returns where it lies. Raises RuntimeError, with what is missing here."""
        return str(self.native.build())

    def also_serve(
        self,
        *,
        gradients: bool | None = None,
        compiled: bool | None = None,
        untuned: bool | None = None,
        slower: bool | None = None,
        measure: bool | None = None,
    ) -> None:
        """What else variants serve; None leaves it as it is.

        gradients: calls that record gradients. True: all, which have the same results as those that record none; where no
        variant of the backward serves, PyTorch computes its own forward pass again and differentiates it. At first those of
        which variants serve both passes, where the package holds the backward kernel. False: none.
        compiled, off at first, with the native launcher only: calls within torch.compile and torch.export, where a variant
        stands as one operation that nothing is fused with, in place of code that the compiler writes.
        untuned, on at first: numbers of columns that no variant has, on a GPU. The first call with one compiles the nearest
        variant for it and compares it with PyTorch and float64: part of a second, once a machine.
        slower, off at first: problems whose nearest variant was measured, and PyTorch was faster.
        measure, on at first: problems unlike all that were measured are served by the fastest in a short race of the two
        nearest variants and PyTorch, at the first such call, once a machine. Off: by the nearest variant.
        """
        if gradients is not None:
            self._recording = ALL if gradients else NONE
            self.native.serve_gradients(self._recording)
            self.dispatch.also_serve(more=gradients and self._backward is not None)
        if compiled is not None:
            self._in_graphs = compiled
        for dispatch in (self.dispatch, *([] if self._backward is None else [self._backward])):
            dispatch.also_serve(untuned=untuned, slower=slower, measure=measure)

    def patch(self, model: torch.nn.Module | None = None) -> Patch:
        """Has existing models use this: until `undo` of what is returned, or to the end of the block that it opens.

        With a model: its modules of PyTorch's class become this package's. Without: the function in torch.nn.functional is
        ours, which every module calls, for the whole process.
        """
        if model is not None:
            return Patch(model=model, classes={self._layer.__base__: self._layer})
        return Patch({self._name: getattr(self._frontend, self._name)})

    def compiled(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        """What torch.compile is to see: the operator where it may be a variant, which is looked up when it runs."""
        args = self._args(input, normalized_shape, weight, bias, eps)
        if self._in_graphs and self.native.operator is not None:
            recorded = torch.is_grad_enabled() and (
                input.requires_grad
                or (weight is not None and weight.requires_grad)
                or (bias is not None and bias.requires_grad)
            )
            sizes = {"cols": prod(normalized_shape), "residual": 0, "sum": 0}  # with statistics or without
            # Of calls that record gradients, which variants serve both passes is known where they are eager.
            if (self._recording == ALL or not recorded) and PACKAGE.tuned(input.device.type, str(input.dtype)[6:], sizes):
                output: Tensor = self.native.operator(*args)
                return output
        return self._original(*args)

    def served(
        self,
        table: Table,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
    ) -> Tensor | None:
        """The result, launched from Python; None where PyTorch is to do it."""
        found = self._choose(table, input, normalized_shape, weight, bias, eps)
        if found is RECORDING:
            return self._record(table, input, normalized_shape, weight, bias, eps)
        return None if type(found) is str else self._run(input, *found)[0]

    def _run(
        self, input: Tensor, call: Call, addresses: tuple[int, ...], eps: float
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The result, None where PyTorch is to give it, and mean and rstd, if the variant gives them (rms_norm's mean holds
        nothing)."""
        address, weight_address, bias_address = addresses
        if not input.is_contiguous():  # PyTorch's own kernels copy it, too
            input = input.contiguous()
            address = input.data_ptr()
        output = _empty_like(input, memory_format=_CONTIGUOUS)
        sizes, mean, rstd = call.sizes, None, None
        if call.variant.sizes["rstd"]:
            opmath = torch.promote_types(input.dtype, torch.float32)
            mean, rstd = (torch.empty(sizes[0], dtype=opmath, device=input.device) for _ in range(2))
        statistics = (0, 0) if mean is None or rstd is None else (mean.data_ptr(), rstd.data_ptr())
        # A mode that went unnoticed might have made the output something else than a plain tensor.
        if type(output) is Tensor and self._launch(
            call, address, weight_address, bias_address, output.data_ptr(), *statistics, sizes[0], sizes[1], eps
        ):
            return output, mean, rstd
        return None, None, None

    def _record(
        self, table: Table, input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: Any
    ) -> Tensor | None:
        """The result of a call that records gradients; None where PyTorch is to do it."""
        found = self._choose_recorded(table, input, normalized_shape, weight, bias, eps)
        if type(found) is str:
            return None
        call, at, number = found
        saving = self._saving_call(table, input, weight, bias, call)

        def run() -> tuple[Tensor | None, ...]:
            output, mean, rstd = self._run(input, call, at, number)
            if output is None:
                return self._original(*self._args(input, normalized_shape, weight, bias, eps)), None, None
            if rstd is None and saving is not None:
                _, mean, rstd = self._run(input, saving, at, number)
            return output, mean, rstd

        def gradients(gradient: Tensor, kept: Any, tensors: Any, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
            (mean, rstd), (x, w, b) = kept, tensors
            if rstd is not None and wanted[0] and not torch.is_grad_enabled():
                args = (mean, rstd, w, b, wanted) if self._centred else (rstd, w, wanted[:2])
                own = self._gradients.served(self._backward, gradient, x, normalized_shape, *args)
                if own is not None:
                    return own if self._centred else (*own, None)
            return derive(
                lambda *t: self._original(*self._args(t[0], normalized_shape, *t[1:], eps)), gradient, tensors, wanted
            )

        output: Tensor = Recorded.apply(run, gradients, input, weight, bias)  # type: ignore[no-untyped-call]
        return output

    def _choose_recorded(
        self, table: Table, input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: Any
    ) -> tuple[Call, tuple[int, ...], float] | str:
        """As `_choose`, whose answer it is: a call has the same result whether or not it records gradients."""
        if self._recording == NONE:
            return RECORDING
        with torch.no_grad():
            found = self._choose(table, input, normalized_shape, weight, bias, eps)
        if type(found) is str or self._recording == ALL:
            return found
        if self._saving_call(table, input, weight, bias, found[0]) is None:
            return "no variant of the backward serves it"
        return found

    def _saving_call(
        self, table: Table, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
    ) -> Call | None:
        """What gives the statistics of a call whose gradients a variant of the backward gives; None where there is none."""
        if self._backward is None or not input.requires_grad:
            return None
        asked = [int(t is not None and t.requires_grad) for t in (weight, bias)]
        device = input.get_device() if input.is_cuda else -1
        key, options = (device, input.dtype, *call.sizes[:2]), (int(weight is not None), asked[0], 0, *asked[1:])
        if type(self._backward[key + options[: len(self._values)]]) is str:
            return None
        saving = call if call.variant.sizes["rstd"] else table[key + self._saving]
        return None if type(saving) is str else saving

    def _choose(
        self, table: Table, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any
    ) -> tuple[Call, tuple[int, ...], float] | str:
        """A call out of `table` that serves these arguments with the addresses of the tensors and eps, or why PyTorch is to
        do it.

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
        if eps is None:
            eps = _EPS_OF_FLOAT64 if input.dtype is torch.float64 else self._default_eps
        if type(eps) is not float or not _EPS_LOW <= eps <= _EPS_HIGH:
            return f"eps is not a float from {_EPS_LOW:g} to {_EPS_HIGH:g}"
        # No layout of one of these kinds has another order of these two; of others, few have.
        if self._keeps_channels_last and len(shape) in (4, 5) and input.stride(1) <= input.stride(-1):
            return "the channels of the input are last in memory, and PyTorch's result has them there, too"
        if input.is_cuda:
            device = input.get_device()
        elif input.is_cpu:
            device = -1
        else:
            return f"nothing was tuned for {input.device.type}"
        call = table[(device, input.dtype, input.numel() // cols, cols, *self._values)]
        return call if type(call) is str else (call, found, eps)

    # For `python -m PACKAGE check` and `bench`.

    def timed(self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        """Arguments of a call of these sizes."""
        draw = _Draw(dtype, device, seed)
        cols = sizes["cols"]
        return self._args(draw.normal(sizes["rows"], cols), (cols,), draw.normal(cols), draw.normal(cols), 1e-5)

    def cases(
        self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Calls over the tuned number of columns, and some that must be left to PyTorch."""
        draw, c, eps, args = _Draw(dtype, device, seed), sizes["cols"], 1e-5, self._args
        rows = min(sizes["rows"], max(1, (1 << 24) // c))
        w, b = draw.normal(c) + 1, draw.normal(c)
        yield "as tuned", args(draw.rows(rows, c), (c,), w, b, eps)
        for n in sorted({min(n, max(9, (1 << 21) // c)) for n in (1, 2, 3, 7, 33, 257)}):
            yield f"{n} rows", args(draw.rows(n, c), (c,), w, b, eps)
        yield "no weight", args(draw.rows(5, c), (c,), None, b, eps)
        if self._centred:
            yield "no bias", args(draw.rows(5, c), (c,), w, None, eps)
        yield "neither, eps 1e-12", args(draw.rows(5, c), [c], None, None, 1e-12)
        yield "eps 0.5, tiny values", args(1e-4 * draw.rows(5, c), (c,), w, b, 0.5)
        if self._default_eps is not None:
            yield "no eps, tiny values", args(1e-4 * draw.rows(5, c), (c,), w, b, None)
        yield "mean 1000", args(draw.normal(9, c) + 1000, (c,), w, b, eps)
        yield "constant rows", args(draw.normal(5, 1).expand(5, c).contiguous(), (c,), w, b, eps)
        yield "outliers", args(draw.marked(33, c, 300.0), (c,), w, b, eps)
        scale = 8e3 if dtype == torch.float16 else 1e14
        yield "large values", args(draw.rows(5, c).clamp(-8, 8) * scale, (c,), w, b, eps)
        yield "NaN in some rows", args(draw.marked(7, c, float("nan"))[1:], (c,), w, b, eps)
        yield "Inf in some rows", args(draw.marked(7, c, float("inf"))[1:], (c,), w, b, eps)
        yield "three dimensions", args(draw.rows(6, c).view(2, 3, c), (c,), w, b, eps)
        yield "one dimension", args(draw.rows(1, c).view(c), (c,), w, b, eps)
        yield "misaligned input", args(draw.rows(1, 6 * c + 1).view(-1)[1:].view(6, c), (c,), w, b, eps)
        yield "misaligned weight", args(draw.rows(6, c), (c,), draw.normal(c + 1)[1:], b, eps)
        yield "transposed input", args(draw.rows(c, 6).t(), (c,), w, b, eps)
        yield "every other row", args(draw.rows(12, c)[::2], (c,), w, b, eps)
        yield "expanded input", args(draw.rows(1, c).expand(6, c), (c,), w, b, eps)
        if c % 2 == 0:
            shape = (2, c // 2)
            two = (draw.rows(5, c).view(5, *shape), shape, w.view(shape), b.view(shape), eps)
            yield "two normalised dimensions", args(*two)
        yield "no rows", args(draw.rows(0, c), (c,), w, b, eps)
        yield "one column more", args(draw.rows(5, c + 1), (c + 1,), None, None, eps)
        yield "weight not contiguous", args(draw.rows(5, c), (c,), draw.normal(c, 2)[:, 0], b, eps)
        yield "eps 0", args(draw.rows(5, c), (c,), w, b, 0.0)


def _fake(input: Tensor, *_: Any, **_options: Any) -> Tensor:
    """Shape, dtype and layout of the operator's result."""
    return torch.empty_like(input, memory_format=_CONTIGUOUS)


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
