"""Attention for PyTorch: `scaled_dot_product_attention` in place of torch.nn.functional.scaled_dot_product_attention.

Every call gives what PyTorch's gives. One that a tuned variant serves (inference on tensors of one dtype, without dropout,
with a tuned head size and kind of mask, on a tuned device) runs that variant; any other is left to PyTorch's own function.
On a GPU the nearest variant is compiled for another head size (of 32, 64, 96, 128 and 256) when that is first met, unless
`also_serve` says otherwise.
`explain`, called with the same arguments, says which and why.

`build` builds the native launcher (frontend.cpp), with which a call costs less than PyTorch's; without it, variants are
launched from Python, which takes longer than a small kernel. It also makes the function an operator of PyTorch's
dispatcher, with gradients and for torch.compile, which `also_serve` turns on.

This file is copied into exported packages, and found here by those that are shipped; what it is written against is told
in evo/runtime/__init__.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled, math_sdp_enabled, mem_efficient_sdp_enabled
from torch.nn.functional import (
    scaled_dot_product_attention as torch_attention,  # as it is now: it may be replaced later
)

from . import PACKAGE
from .runtime import ALL, NONE, RECORDING, Call, Dispatch, Native, Patch, Recorded, Table, addresses, derive

__all__ = ["also_serve", "build", "explain", "patch", "scaled_dot_product_attention", "variants"]

_is_compiling = torch.compiler.is_compiling
_empty_like = torch.empty_like
_DENSEST_STRIDE = 8
"""What the strides of query, key and value are multiples of, in elements: rows then start at whole vectors."""
DATA_DECIDE = ("attn_mask",)
"""Sizes that, where they are not 0, make the time depend on what tensors hold: such problems are raced wherever they were
measured, as the masks to come may be others."""
_UNMASKED = (0, 0, 0, 0, 0)
"""In place of a mask's address and strides."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch.nn.functional.scaled_dot_product_attention, for every input."""
    if _is_compiling():
        return _compiled(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _call is not None:
        result: Tensor | None = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    else:
        result = served(DISPATCH, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if result is not None:
        return result
    return torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Which way such a call takes here and now: "variant 0 (...)", or "PyTorch: " and the reason."""
    if _is_compiling():
        return "within torch.compile: PyTorch's operation, unless also_serve(compiled=True) was called"
    if NATIVE.explain is not None:
        way = NATIVE.explain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return way if way.startswith("PyTorch") else f"{way}, native launcher"
    with torch.set_grad_enabled(torch.is_grad_enabled() and not _recording):  # the same variant serves calls that record
        found = _choose(DISPATCH, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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

    gradients, off at first: calls that record gradients, which then have the same results as those that record none. The
    forward pass is a variant's; for the backward pass PyTorch computes its own forward pass again and differentiates it:
    the same gradients, at the price of that.
    compiled, off at first, with the native launcher only: calls within torch.compile and torch.export, where a variant
    stands as one operation.
    untuned: head sizes that no variant has. The first call with one compiles the nearest variant for it and compares it
    with PyTorch and float64. On at first on a GPU, where that takes part of a second; off on a CPU, where it takes
    seconds.
    slower, off at first: problems whose nearest variant was measured, and PyTorch was faster.
    measure, on at first: problems unlike all that were measured are served by the fastest in a short race of the two nearest
    variants and PyTorch, at the first such call, once a machine. Off: by the nearest variant.
    """
    global _in_graphs, _recording
    if gradients is not None:
        _recording = gradients
        NATIVE.serve_gradients(ALL if gradients else NONE)
    if compiled is not None:
        _in_graphs = compiled
    DISPATCH.also_serve(untuned=untuned, slower=slower, measure=measure)


def patch() -> Patch:
    """torch.nn.functional.scaled_dot_product_attention is ours, for existing models that call it by that name: for the
    whole process, until `undo` of what is returned, or to the end of the block that it opens."""
    return Patch({"scaled_dot_product_attention": scaled_dot_product_attention})


def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """What torch.compile is to see: the operator where it may be a variant, which is looked up when it runs."""
    if _in_graphs and NATIVE.operator is not None and dropout_p == 0.0:
        recorded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        recorded = recorded or (torch.is_grad_enabled() and attn_mask is not None and attn_mask.requires_grad)
        fits = query.dim() == 4 and key.dim() == 4 and key.shape == value.shape
        fits = fits and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
        additive = attn_mask is not None and attn_mask.dtype is not torch.bool
        if attn_mask is not None:
            fits = fits and not is_causal and (not additive or attn_mask.dtype is query.dtype)
        fixed = {"head_dim": query.shape[-1], "causal": int(is_causal), "lse": 0}
        fixed |= {"attn_mask": int(attn_mask is not None), "additive": int(additive)}
        if fits and (_recording or not recorded) and PACKAGE.tuned(query.device.type, str(query.dtype)[6:], fixed):
            output: Tensor = NATIVE.operator(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            return output
    return torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _fake(query: Tensor, *_: Any, **_options: Any) -> Tensor:
    """Shape, dtype and layout of the operator's result."""
    return torch.empty_like(query)


def served(
    table: Table,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """The result, launched from Python; None where PyTorch is to do it."""
    found = _choose(table, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if found is RECORDING and _recording:
        return _record(table, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if type(found) is str:
        return None
    call, at, (mask, *mask_strides) = found
    output = _empty_like(query)  # its axes in memory in the order of the query's, as cuDNN and flash attention have it
    q, k, v, o = query.stride(), key.stride(), value.stride(), output.stride()
    # A mode that went unnoticed might have made the output something else than a plain tensor.
    if type(output) is Tensor and call(
        *at, mask, output.data_ptr(), 0, *call.sizes[:6], scale or 0.0, *q[:3], *k[:3], *v[:3], *o[:3], *mask_strides
    ):
        return output
    return None


def _record(table: Table, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *more: Any) -> Tensor | None:
    """The result of a call that records gradients; None where PyTorch is to do it."""
    tensors, how = (query, key, value, mask), {"scale": more[2], "enable_gqa": more[3]}
    with torch.no_grad():
        if type(_choose(table, *tensors, *more)) is str:
            return None

    def run() -> tuple[Tensor]:
        own = served(table, *tensors, *more)
        return (torch_attention(*tensors, *more[:2], **how) if own is None else own,)

    def gradients(gradient: Tensor, _: Any, tensors: Any, wanted: Any) -> tuple[Tensor | None, ...]:
        return derive(lambda *t: torch_attention(*t, *more[:2], **how), gradient, tensors, wanted)

    output: Tensor = Recorded.apply(run, gradients, *tensors)  # type: ignore[no-untyped-call]
    return output


def _choose(
    table: Table,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> tuple[Call, tuple[int, ...], tuple[int, ...]] | str:
    """A call out of `table` that serves these arguments, the addresses of the tensors, and address and strides of the mask;
    or why PyTorch is to do it.

    What is wrong is left to PyTorch as well: it knows the errors to raise.
    """
    if type(dropout_p) not in _NUMBERS or dropout_p != 0:
        return "there is dropout"
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return "is_causal or enable_gqa is not a bool"
    if scale is not None and (type(scale) not in _NUMBERS or not 1e-6 <= scale <= 1e6):
        return "scale is not a number from 1e-6 to 1e6"
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return "query, key or value is not a tensor"
    if not (math_sdp_enabled() and (flash_sdp_enabled() or mem_efficient_sdp_enabled() or cudnn_sdp_enabled())):
        return "a back end was chosen (torch.nn.attention.sdpa_kernel, torch.backends.cuda)"
    at = addresses(query, key, value)
    if type(at) is str:
        return at
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "query, key or value has not four dimensions"
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    if key.shape != (batch, kv_heads, kv_len, head_dim) or value.shape != key.shape:
        return "the shapes of query, key and value do not fit"
    if heads != kv_heads and not (enable_gqa and heads % kv_heads == 0):
        return "key has other heads than query, and they are not asked to share"
    if is_causal and q_len != kv_len:  # PyTorch's mask starts at the first key, the variants' ends at the last
        return "a causal mask over unequal lengths"
    for t in (query, key, value):
        strides = t.stride()
        if strides[3] != 1 or strides[0] % _DENSEST_STRIDE or strides[1] % _DENSEST_STRIDE or strides[2] % _DENSEST_STRIDE:
            return "a tensor's last dimension is not dense, or its rows start between vectors"
    if query.is_cuda:
        device = query.get_device()
    elif query.is_cpu:
        device = -1
    else:
        return f"nothing was tuned for {query.device.type}"
    mask, kind = _UNMASKED, (False, False)
    if attn_mask is not None:
        mask = _mask(attn_mask, query, kv_len, is_causal)
        if type(mask) is str:
            return mask
        kind = (True, attn_mask.dtype is not torch.bool)
    sizes = (batch, heads, kv_heads, q_len, kv_len, head_dim, is_causal, False, *kind)  # no lse
    call = table[(device, query.dtype, *sizes)]
    return call if type(call) is str else (call, at, mask)


def _mask(attn_mask: Any, query: Tensor, kv_len: int, is_causal: bool) -> Any:
    """Address and strides, 0 along axes that are broadcast; or why PyTorch is to do the call."""
    if is_causal:
        return "attn_mask and is_causal exclude each other"
    if not isinstance(attn_mask, Tensor):
        return "attn_mask is not a tensor"
    if attn_mask.device != query.device:
        return "attn_mask is on another device"
    at = addresses(attn_mask)
    if type(at) is str:
        return at
    # Variants read such a one, but slowly; of added ones PyTorch's read what is not there.
    if query.is_cuda and at[0] % 16 and attn_mask.dtype is torch.bool:
        return "attn_mask starts between vectors"
    if attn_mask.dtype not in (torch.bool, query.dtype):
        return "attn_mask is neither boolean nor of the dtype of query"
    whole, own = (*query.shape[:3], kv_len), attn_mask.shape
    if not 2 <= len(own) <= 4 or any(n not in (1, size) for n, size in zip(own, whole[-len(own) :], strict=True)):
        return "the shape of attn_mask does not fit those of query and key"
    return (*at, *attn_mask.expand(whole).stride())


_NUMBERS = frozenset({int, float})
_call: Callable[..., Tensor | None] | None = None
_recording = _in_graphs = False


def _use(native: Native) -> None:
    global _call
    _call = native.call
    native.serve_gradients(ALL if _recording else NONE)


# For `python -m PACKAGE check` and `bench`.
def SUBJECT(*args: Any) -> Tensor:
    """All arguments by position."""
    return scaled_dot_product_attention(*args[:6], scale=args[6], enable_gqa=args[7])


def ORIGINAL(*args: Any) -> Tensor:
    return torch_attention(*args[:6], scale=args[6], enable_gqa=args[7])


def comparable(*args: Any) -> Tensor:
    """Of aligned copies: from others cuDNN computes wrong results, or reads what is not there."""
    return ORIGINAL(*(t.clone() if isinstance(t, Tensor) and t.data_ptr() % 16 else t for t in args))


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In float64, a head at a time."""
    if query.dim() == 3:
        return exact(query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]
    group = query.shape[1] // max(1, key.shape[1])
    mask = attn_mask.expand(*query.shape[:3], key.shape[2]) if attn_mask is not None else None
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float64, device=query.device)
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            scores = query[b, h].double() @ key[b, h // group].double().mT * factor
            if is_causal:
                scores = scores.masked_fill(hidden, -torch.inf)
            if mask is not None and mask.dtype is torch.bool:
                scores = scores.masked_fill(~mask[b, h], -torch.inf)
            elif mask is not None:
                scores = (scores + mask[b, h].double()).masked_fill(mask[b, h] == -torch.inf, -torch.inf)
            weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
            out[b, h] = weights @ value[b, h // group].double()
    return out


def timed(sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Arguments of a call of these sizes. A mask is one that all heads share; it hides half of the keys, so scattered that
    no tile is skipped, and some side by side, of which variants look through all rows: a race knows nothing of the masks to
    come, and is to be won with any of them."""
    draw, mask = _Draw(dtype, device, seed), None
    shape = (sizes["batch"], sizes["heads"], sizes["kv_heads"], sizes["q_len"], sizes["kv_len"], sizes["head_dim"])
    if sizes["attn_mask"]:
        # One number a key: one for each pair would take more memory than the calls that masks are made for.
        mask = draw.mask(bool(sizes["additive"]), shape[4]).expand(shape[3:5]).contiguous()
        mask[:, 16:32] = -torch.inf if sizes["additive"] else False
    return (*draw.call(*shape), mask, 0.0, bool(sizes["causal"]), None, sizes["heads"] != sizes["kv_heads"])


def served_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Heads share keys evenly; a causal mask is served over equal lengths."""
    heads = sizes["kv_heads"] if sizes["heads"] % sizes["kv_heads"] else sizes["heads"]
    return sizes | {"heads": heads, "kv_len": sizes["q_len" if sizes["causal"] else "kv_len"]}


def cases(
    sizes: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls with the tuned head size and kind of mask, and some that must be left to PyTorch."""
    draw, d = _Draw(dtype, device, seed), sizes["head_dim"]
    causal, masked, additive = (bool(sizes[name]) for name in ("causal", "attn_mask", "additive"))
    masks = cycle(("bhqk", "qk", "b11k", "1hqk", "b1qk", "11qk"))

    def of(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Any, ...]:
        whole = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "k": k.shape[2], "1": 1}
        mask = draw.mask(additive, *(whole[axis] for axis in next(masks))) if masked else None
        return q, k, v, mask, 0.0, causal, scale, q.shape[1] != k.shape[1]

    q_len = min(sizes["q_len"], 1024)
    kv_len = q_len if causal else min(sizes["kv_len"], 1024)
    yield "as tuned, but shorter", of(*draw.call(2, 4, 4, q_len, kv_len, d))
    for n in (1, 3, 63, 64, 65, 127, 129, 257):
        yield f"{n} queries and keys", of(*draw.call(2, 3, 3, n, n, d))
    for n, m in ((1, 257), (65, 130), (130, 65)):
        yield f"{n} queries, {m} keys", of(*draw.call(1, 2, 2, n, m, d))
    yield "shared heads", of(*draw.call(2, 8, 2, 67, 67, d))
    yield "scale 0.3", of(*draw.call(1, 2, 2, 65, 65, d), 0.3)
    yield "the other mask", (*draw.call(1, 2, 2, 65, 65, d), None, 0.0, not causal, None, False)
    q, k, v = draw.call(2, 3, 3, 70, 70, d)
    yield "large scores", of(q * 12, k, v)
    yield "large values", of(q, k, v * (4e3 if dtype == torch.float16 else 1e14))
    yield "projections' memory order", of(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))
    together = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).contiguous()
    yield "slices of one buffer", of(*together.permute(2, 0, 3, 1, 4))
    yield "every other key", of(q, draw.call(2, 3, 3, 70, 140, d)[1][:, :, ::2], v)
    yield "expanded keys", of(q, k[:1].expand_as(k), v[:, :1].expand_as(v))
    yield "misaligned", of(*(draw.shifted(t) for t in (q, k, v)))
    yield "last dimension not dense", of(q.mT.contiguous().mT, k, v)
    mask, after = draw.mask(additive, 2, 1, 70, 70), (0.0, False, None, False)
    yield "a mask in another memory order", (q, k, v, mask.mT.contiguous().mT, *after)
    yield "a misaligned mask", (q, k, v, draw.shifted(mask), *after)
    mask[:, :, ::3] = -torch.inf if additive else False
    yield "queries that see no key", (q, k, v, mask, *after)
    yield "another kind of mask", (q, k, v, draw.mask(not additive, 70, 70), *after)
    yield "three dimensions", (q[0], k[0], v[0], None, 0.0, causal, None, False)
    yield "another head size", of(*draw.call(1, 2, 2, 33, 33, 40))
    yield "no queries", (*draw.call(1, 2, 2, 0, 0, d), None, *after)


class _Draw:
    """Random tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._generator = dtype, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        generator = self._generator
        return torch.randn(shape, generator=generator, device=generator.device).to(self._dtype)

    def call(
        self, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q of another scale for every head, v with a mean of its own for every head."""
        q = self.normal(batch, heads, q_len, head_dim) * (1 + self.normal(batch, heads, 1, 1).abs())
        v = self.normal(batch, kv_heads, kv_len, head_dim) + self.normal(batch, kv_heads, 1, 1)
        return q, self.normal(batch, kv_heads, kv_len, head_dim), v

    def mask(self, additive: bool, *shape: int) -> Tensor:
        """Any half of the keys is seen, and the first by all queries."""
        seen = self.normal(*shape) > 0
        seen[..., 0] = True
        return self.normal(*shape).masked_fill(~seen, -torch.inf) if additive else seen

    def shifted(self, tensor: Tensor) -> Tensor:
        """The same values one element past an aligned address."""
        memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        return memory.copy_(tensor)


DISPATCH = Dispatch(PACKAGE, sys.modules[__name__])
NATIVE = Native(DISPATCH, "scaled_dot_product_attention", _fake, _use)
# torch.jit.script has PyTorch's in its place.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
variants = DISPATCH.variants
