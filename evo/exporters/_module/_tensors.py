"""Whether the memory of tensors may be handed to a kernel, or only PyTorch can do right by them."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

__all__ = ["obstacle"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_count_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
"""Private: without it a mode is still noticed where it makes the output something else than a plain tensor."""


def obstacle(*tensors: torch.Tensor | None) -> str:
    """Why a kernel must not be given these tensors; empty if it may. None stands for one that is left out.

    If it may, they are dense in some order, hold memory, and have the device and dtype of the first one.
    """
    if torch.jit.is_tracing():
        return "torch.jit.trace must see the operation"
    if has_torch_function(tensors):
        return "a tensor subclass or a torch function mode (such as torch.set_default_device) is involved"
    if _count_dispatch_modes():
        return "a torch dispatch mode is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    recording = torch.is_grad_enabled()
    device, dtype = None, None
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN:
            return f"an argument is a {type(t).__name__}, not a plain tensor"
        if recording and t.requires_grad:
            return "gradients are being recorded"
        if t.is_nested or t.layout is not torch.strided:
            return "an argument is not laid out as a plain array"
        if device is None:
            device, dtype = t.device, t.dtype
        elif t.device != device:
            return "the arguments are on different devices"
        elif t.dtype is not dtype:
            return "the arguments have different dtypes"
        if t.is_neg():
            return "an argument is a view that negates what it reads"
        if not _has_memory(t):
            return "an argument has no memory of its own (meta, functorch, empty or released)"
    if device is not None and torch.is_autocast_enabled(device.type):
        return "autocast is enabled"
    return ""


def _has_memory(t: torch.Tensor) -> bool:
    try:
        if not t.data_ptr():
            return False
    except RuntimeError:  # functorch's wrappers have no storage
        return False
    # A view into a released storage has an address too: its offset from nothing.
    offset = t.storage_offset()
    return not offset or t.untyped_storage().nbytes() > offset * t.element_size()
