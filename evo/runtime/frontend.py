"""What frontends share: where the memory of tensors lies, if a kernel may have it; calls that record gradients; putting
functions in PyTorch's place."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
_is_grad_enabled = torch.is_grad_enabled
# Private to PyTorch. Without the first, a mode is still noticed where it makes the output something else than a plain
# tensor; without the second, the public question is asked every time, which takes longer.
_count_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
# Not data_ptr(), which would copy a tensor that is cloned lazily; an older PyTorch may lack it.
_address: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr)
RECORDING = "gradients are being recorded"
_is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def addresses(*tensors: torch.Tensor | None) -> tuple[int, ...] | str:
    """Where the tensors lie in memory (0 for None), or why that must not be handed to a kernel.

    If it may, the tensors are plain and have the device and the dtype of the first. Asked at every call of the
    module: what costs time here is worth a look.
    """
    if _is_tracing():
        return "torch.jit.trace must see the operation"
    if has_torch_function(tensors):
        return "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved"
    if _count_dispatch_modes():
        return "a torch dispatch mode is active"
    if getattr(forward_ad, "_current_level", 0) >= 0:  # should PyTorch rename it, all is left to PyTorch
        return "forward-mode differentiation is active"
    recording = _is_grad_enabled()
    device = dtype = None
    found = []
    for t in tensors:
        if t is None:
            found.append(0)
            continue
        if type(t) not in _PLAIN:
            return f"an argument is a {type(t).__name__}, not a plain tensor"
        if recording and t.requires_grad:
            return RECORDING
        if t.is_nested or t.layout is not _STRIDED:
            return "an argument is not laid out as a plain array"
        if device is None:
            device, dtype = t.device, t.dtype
        elif t.dtype is not dtype:
            return "the arguments have different dtypes"
        elif t.device != device:
            return "the arguments are on different devices"
        if t.is_neg():
            return "an argument is a view that negates what it reads"
        try:
            address = _address(t)
        except RuntimeError:  # functorch's wrappers have no storage
            address = 0
        # A view into a released storage has an address, too: its offset from nothing.
        if not address or ((offset := t.storage_offset()) and t.untyped_storage().nbytes() <= offset * t.itemsize):
            return "an argument holds no memory (it is empty, released, on meta, or a functorch wrapper)"
        found.append(address)
    if device is not None and _is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return "autocast is enabled"
    return tuple(found)


def workspace(call: Any, like: torch.Tensor) -> list[torch.Tensor]:
    """Memory for what the launches of a Call pass on: a tensor for each of its workspace arguments, in order, on the device
    of `like`. It is to live until the call returns."""
    made = ((like.new_zeros if zeroed else like.new_empty, size) for size, zeroed in call.workspace)
    return [new(size, dtype=torch.uint8) for new, size in made]


Gradients = tuple[torch.Tensor | None, ...]


class Recorded(torch.autograd.Function):
    """A call from Python that records gradients, of which a variant gives the result.

    apply(run, derive, *tensors): run() gives the result, a tensor or a tuple of them, and what is kept beside the tensors,
    while nothing is recorded; derive(gradients, kept, tensors, wanted) gives the gradients of those tensors that `wanted`
    says, from those of the results, of which one that nothing was computed from is None. A tensor may be None.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Sequence[Any]], derive: Callable[..., Gradients], *tensors: Any) -> Any:
        result, *kept = run()
        ctx.save_for_backward(*kept, *tensors)
        ctx.derive, ctx.kept = derive, len(kept)
        ctx.set_materialize_grads(False)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        saved, kept = ctx.saved_tensors, ctx.kept
        if all(gradient is None for gradient in gradients):
            return None, None, *(None for _ in saved[kept:])
        return None, None, *ctx.derive(gradients, saved[:kept], saved[kept:], ctx.needs_input_grad[2:])


def of_any_dtypes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one result, which for floating-point tensors of several dtypes that it refuses takes copies in the
    widest of them, and rounds the result to the dtype of the first."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError:
            dtypes = [t.dtype for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
            if len({*dtypes}) < 2:
                raise
            wide = reduce(torch.promote_types, dtypes)
            return function(*(t.to(wide) if getattr(t, "dtype", None) in dtypes else t for t in args)).to(dtypes[0])

    return call


def derive(
    function: Callable[..., Any],
    gradients: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
) -> Gradients:
    """The gradients of those tensors that `wanted` says, by PyTorch's derivative of `function`, which is called again. They
    can be differentiated if that is recorded."""
    further = torch.is_grad_enabled()

    def leaf(t: torch.Tensor | None, asked: bool) -> torch.Tensor | None:
        if t is None:
            return None
        return t.view_as(t) if further else t.detach().requires_grad_(asked)  # hooks of t run in the outer pass

    with torch.enable_grad():
        leaves = [leaf(t, asked) for t, asked in zip(tensors, wanted, strict=True)]
        found = function(*leaves)
    results = (found,) if isinstance(found, torch.Tensor) else found
    of = [t for t, asked in zip(leaves, wanted, strict=True) if asked and t is not None]
    given = [(t, gradient) for t, gradient in zip(results, gradients, strict=True) if gradient is not None]
    through = [t for t, _ in given], of, [gradient for _, gradient in given]
    each = iter(torch.autograd.grad(*through, create_graph=further, allow_unused=True))
    return tuple(next(each) if asked else None for asked in wanted)


class Patch(ExitStack):
    """In force from the moment it is made until `undo`, or until the end of the block that it opens with `with`.

    functions: what torch.nn.functional is to have under these names. For the whole process: modules of PyTorch and models
    that call torch.nn.functional.NAME meet them, in every thread; who has imported the function itself does not.
    classes: for the modules of `model` that are exactly of a class, the class they are to have.
    Raises TypeError for a model that is none.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        model: torch.nn.Module | None = None,
        classes: Mapping[type, type] | None = None,
    ) -> None:
        super().__init__()
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"a model is a torch.nn.Module, got {type(model).__name__}; without one, functions are patched")
        functions, classes = functions or {}, classes or {}
        for name, function in functions.items():
            self.callback(_put_back, name, function, getattr(torch.nn.functional, name))
            setattr(torch.nn.functional, name, function)
        self.replaced, self.left = Counter(list(functions)), Counter[str]()
        for module in [*model.modules()] if model is not None else []:
            if type(module) in classes:
                self.exchange(module, classes[type(module)])

    def __len__(self) -> int:
        """How many functions, modules and other parts of a model it replaced."""
        return self.replaced.total()

    def __str__(self) -> str:
        """What it replaced and what it left alone, with how many of each, and why."""
        parts = [("replaced", self.replaced), ("left alone", self.left)]
        return "\n".join(f"{verb}: {number} x {what}" for verb, found in parts for what, number in found.items())

    def exchange(self, module: torch.nn.Module, own: type, *, count: bool = True) -> None:
        """Gives a module another class."""
        if count:
            self.replaced[type(module).__name__] += 1
        self.callback(_take_back, module, own, type(module))
        module.__class__ = own

    def add(self, other: "Patch") -> None:
        """What the other one has replaced is undone with this."""
        self.enter_context(other)
        self.replaced += other.replaced
        self.left += other.left

    def undo(self) -> None:
        """All as it was. What somebody else has replaced since then stays. Once is enough."""
        self.close()


def _take_back(module: torch.nn.Module, own: type, before: type) -> None:
    if type(module) is own:
        module.__class__ = before
    else:  # a parametrised module has a class of its own, which PyTorch has derived from the one it found
        type(module).__bases__ = tuple(before if base is own else base for base in type(module).__bases__)


def _put_back(name: str, function: Callable[..., Any], before: Callable[..., Any]) -> None:
    if getattr(torch.nn.functional, name) is function:
        setattr(torch.nn.functional, name, before)
