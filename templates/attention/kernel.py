"""Attention forward: o = softmax(scale * q k^T) v for every batch and head, masked where it is causal, as
torch.nn.functional.scaled_dot_product_attention computes it (Dao et al. 2022, FlashAttention, arXiv:2205.14135).

Layout: q and o are [batch, heads, q_len, head_dim], k and v [batch, kv_heads, kv_len, head_dim], of one dtype. The last
axis is dense; the strides of the others are arguments, in elements, and multiples of 32 wherever an axis has more than
one element. Head h of q works with head h * kv_heads // heads of k and v. The option `layout` says in which order the
axes lie in memory: bhsd; bshd, as projections give them; packed, slices of one buffer for q, k and v with the order of
bshd.
Options: causal, by which query i sees the keys j <= i + kv_len - q_len; a query that sees none gives o = 0. scale, where
0 stands for 1 / sqrt(head_dim), in the argument of that name, too. lse: also the natural logarithm of the sum of
exp(scale * q k^T), float32 [batch, heads, q_len], dense, -inf for a query that sees no key. attn_mask: a tensor of
[batch, heads, q_len, kv_len]: bytes that are 1 where a query sees a key, or, if additive, numbers of the dtype that are
added to scale * q k^T, where -inf hides a key and the lowest finite number does not. mask_axes names the axes that it has,
in the order bhqk; along the others its stride is 0.
Scores, sums and results are accumulated in float32. precision=half, for research: parts of them may be in float16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evo.problem.kernel import (
    DTYPE_BYTES,
    TOLERANCE,
    Argument,
    Baseline,
    Cost,
    Dimension,
    Kernel,
    LaunchPlan,
    Limits,
    Tensors,
    Tolerance,
    Workload,
)
from evo.problem.space import Space, Value

from . import cpu_space, cuda_shape, cuda_space
from .cases import HEAD_DIMS, OPTIONS, cases, neighbours, workload
from .data import DATA, LAYOUTS, draw, is_padded, scale_of

if TYPE_CHECKING:
    import torch

_MASKED_PAIRS = 1 << 20
"""Of queries and keys, for which a mask may be a tensor."""

_PAIRS_AT_ONCE = 1 << 24
"""How many scores the reference holds, in float64."""

_MAX_LENGTH = 1 << 20

_MOST_FUSED = 1e7
"""Product of the largest elements of q and k beyond which FlashAttention's weights are off: a maximum times the scale is
rounded before it is subtracted."""

_HALF = Tolerance(atol=2**-7, rtol=2**-7, torch_factor=12, keeps=("overflow",))
"""Of sums in float16. At most 128 weighted values in one, 8 at a time: 16 roundings of 2^-11. A score has head_dim / 8, and
PyTorch's, rounded to float16, has one: they add up as their root, which is 6 at most, and may be twice that."""


_LOST_A_KEY = 2.0**-26
"""The share of a float32 sum that one more key may cost. Tensor cores cut off what they add to, 8 keys at a time: each
time less than 2^-23 is lost, always towards zero (Fasi et al. 2021, doi:10.7717/peerj-cs.330)."""
_LOST_A_ROOT = 2.0**-25
"""The share that a float32 sum rounded to nearest may lose, over the root of the number of keys (Higham and Mary 2019)."""


def _tolerance(problem: Workload, output: str) -> Tolerance | None:
    if problem.option("precision") == "half":
        return _HALF
    if output != "o":
        return None
    keys = problem.dim("kv_len")
    lost = keys * _LOST_A_KEY if DTYPE_BYTES[problem.dtype] == 2 else keys**0.5 * _LOST_A_ROOT
    return replace(TOLERANCE[problem.dtype], of_sums=lost)


def _reference(inputs: Tensors, problem: Workload) -> dict[str, torch.Tensor]:
    """Some heads and queries at a time: all scores of a long sequence would fit no memory."""
    import torch

    q, k, v = (_required(inputs, name) for name in "qkv")
    heads, kv_heads, q_len, kv_len = (problem.dim(n) for n in ("heads", "kv_heads", "q_len", "kv_len"))
    o = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device)
    rows = max(1, min(q_len, _PAIRS_AT_ONCE // kv_len))
    together = max(1, _PAIRS_AT_ONCE // (rows * kv_len))
    query, key = (torch.arange(n, device=q.device) for n in (q_len, kv_len))
    mask, additive = inputs["attn_mask"], bool(problem.option("additive"))
    for first in range(0, q.shape[0] * heads, together):
        both = torch.arange(first, min(first + together, q.shape[0] * heads), device=q.device)
        b, h = both // heads, both % heads
        keys, values = k[b, h * kv_heads // heads], v[b, h * kv_heads // heads]
        for row in range(0, q_len, rows):
            part = slice(row, row + rows)
            scores = (q[b, h, part] @ keys.mT).mul_(scale_of(problem))
            if problem.option("causal"):
                scores.masked_fill_(key > query[part, None] + (kv_len - q_len), -torch.inf)
            if mask is not None:  # what a hidden key holds is replaced, also NaN
                own = mask[b, h, part]
                scores, hidden = (scores + own, own == -torch.inf) if additive else (scores, ~own)
                scores.masked_fill_(hidden, -torch.inf)
            most = scores.amax(dim=-1, keepdim=True)
            most.masked_fill_(most == -torch.inf, 0.0)
            weights = scores.sub_(most).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            o[b, h, part] = torch.where(total == 0, 0.0, (weights @ values) / total)
            lse[b, h, part] = (most + total.log())[..., 0]
    return {"o": o, "lse": lse}


def _sdpa(inputs: Tensors, problem: Workload) -> torch.Tensor:
    """PyTorch's own choice of a back end. Its is_causal aligns the mask with the first key, not the last."""
    import torch.nn.functional as functional

    q, k, v = (_required(inputs, name) for name in "qkv")
    equal = problem.dim("q_len") == problem.dim("kv_len")
    causal = bool(problem.option("causal"))
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_causal_mask(problem, q.device) if causal and not equal else inputs["attn_mask"],
        is_causal=causal and equal,
        scale=scale_of(problem),
        enable_gqa=problem.dim("heads") != problem.dim("kv_heads"),
    )


def _causal_mask(problem: Workload, device: torch.device) -> torch.Tensor:
    """Aligned with the last key. Where it is large, PyTorch's own object for that, which its fast back ends know; loading
    that takes seconds, and it warns of queries without a key."""
    import torch

    q_len, kv_len = problem.dim("q_len"), problem.dim("kv_len")
    if q_len <= kv_len and q_len * kv_len > _MASKED_PAIRS:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(q_len, kv_len)
    return torch.ones((q_len, kv_len), dtype=torch.bool, device=device).tril(kv_len - q_len)


def _forced(*backends: str) -> Callable[[Tensors, Workload], torch.Tensor]:
    """PyTorch's choice of these back ends. Raises RuntimeError where none can run, and for cuDNN where it is switched off:
    then the race is for a GPU on which PyTorch has another."""

    def call(inputs: Tensors, problem: Workload) -> torch.Tensor:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if "CUDNN_ATTENTION" in backends and not torch.backends.cuda.cudnn_sdp_enabled():
            raise RuntimeError("cuDNN's attention is switched off")
        with sdpa_kernel([getattr(SDPBackend, name) for name in backends]):
            return _sdpa(inputs, problem)

    return call


def _same_dtype(inputs: Tensors, problem: Workload) -> torch.Tensor:
    """Without cuDNN, which would plan some 50 ms for each case; PyTorch takes it on few architectures only, and not on Ada.
    NaN, which measures nothing, where a mask leaves a query no number above the lowest: there the back ends differ."""
    import torch

    half, math_is_half = problem.option("precision") == "half", torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    huge = inputs["q"].numel() and float(inputs["q"].abs().max()) * float(inputs["k"].abs().max()) > _MOST_FUSED
    backends = ("MATH",) if half or huge else ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    math_is_half(half)  # scores and weights are then rounded to it
    try:
        found, mask = _forced(*backends)(inputs, problem), inputs["attn_mask"]
    finally:
        math_is_half(False)
    if mask is None:
        return found
    lowest = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    return found.masked_fill(~(mask > lowest).any(-1, keepdim=True), torch.nan)


def _flex(inputs: Tensors, problem: Workload) -> torch.Tensor:
    """FlexAttention, compiled. Raises where it cannot be compiled."""
    if problem.option("attn_mask"):
        raise NotImplementedError("its masks are functions, not tensors")
    q, k, v = (_required(inputs, name) for name in "qkv")
    causal, lengths = bool(problem.option("causal")), (problem.dim("q_len"), problem.dim("kv_len"))
    found: torch.Tensor = _compiled_flex()(
        q,
        k,
        v,
        block_mask=_flex_mask(*lengths, str(q.device)) if causal else None,
        scale=scale_of(problem),
        enable_gqa=problem.dim("heads") != problem.dim("kv_heads"),
    )
    return found


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _flex_mask(q_len: int, kv_len: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        lambda batch, head, query, key: key <= query + (kv_len - q_len), None, None, q_len, kv_len, device=device
    )


def _validate(problem: Workload) -> str:
    heads, kv_heads, head_dim = (problem.dim(name) for name in ("heads", "kv_heads", "head_dim"))
    if heads % kv_heads:
        return f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    masked, axes = bool(problem.option("attn_mask")), str(problem.option("mask_axes"))
    if problem.option("additive") and not masked:
        return "additive says of attn_mask that it is added, and there is none"
    if axes != OPTIONS["mask_axes"] and not masked:
        return "mask_axes says of attn_mask which axes it has, and there is none"
    if problem.option("causal") and masked:
        return "causal and attn_mask exclude each other, as in PyTorch"
    if not axes or axes != "".join(axis for axis in "bhqk" if axis in axes):
        return f"mask_axes must be some of bhqk in this order, got {axes!r}"
    if (precision := problem.option("precision")) not in ("float", "half"):
        return f"precision must be one of float, half, got {precision!r}"
    if precision == "half" and (problem.dtype != "float16" or problem.option("lse")):
        return "precision=half is for float16 on CUDA, without lse"
    if problem.option("layout") not in LAYOUTS:
        return f"layout must be one of {', '.join(LAYOUTS)}, got {problem.option('layout')!r}"
    return ""


def _memory_order(problem: Workload, output: str) -> tuple[int, ...]:
    if output == "lse":
        return (0, 1, 2)
    return (0, 1, 2, 3) if problem.option("layout") == "bhsd" else (0, 2, 1, 3)


def _cost(problem: Workload) -> Cost:
    """q, k, v and the mask in, o out; two multiplications and two additions for each pair of a query and a key it sees, and
    channel. A mask hides as much as one that is timed may: behind half of the keys nothing is needed where it is padded."""
    batch, heads, kv_heads, q_len, kv_len, head_dim = (size for _, size in problem.dims)
    axes = str(problem.option("mask_axes")) if problem.option("attn_mask") else ""
    mask = math.prod(n for axis, n in zip("bhqk", (batch, heads, q_len, kv_len), strict=True) if axis in axes) if axes else 0
    pairs = q_len * kv_len
    if problem.option("causal") or "qk" in axes:
        seen = min(q_len, kv_len)  # queries that see a key: kv_len of them for the last, one fewer for each before it
        pairs = seen * kv_len - seen * (seen - 1) // 2
    padded = 2 if is_padded(problem) else 1
    elements = 2 * batch * head_dim * (heads * q_len + kv_heads * -(-kv_len // padded))
    elements, mask_bytes = (elements + mask, 0) if problem.option("additive") else (elements, mask)
    log_sums = 4 * batch * heads * q_len if problem.option("lse") else 0
    return Cost(
        bytes=elements * DTYPE_BYTES[problem.dtype] + mask_bytes + log_sums,
        flops=4 * batch * heads * (pairs // padded) * head_dim,
        rate=2.0 if problem.option("precision") == "half" else 1.0,
    )


def _space(target: str, problem: Workload, limits: Limits) -> Space:
    return (cuda_space if target == "cuda" else cpu_space).space(problem, limits)


def _plan(target: str, point: Mapping[str, Value], problem: Workload) -> LaunchPlan:
    return cuda_shape.plan(point, problem) if target == "cuda" else LaunchPlan(threads=1)


def _compile_flags(target: str, point: Mapping[str, Value]) -> tuple[str, ...]:
    """The CPU template spells its vectors out: what the compiler adds costs compile time and registers."""
    return ("-fno-tree-vectorize", "-fno-tree-slp-vectorize") if target == "cpu" else ()


def _required(inputs: Tensors, name: str) -> torch.Tensor:
    tensor = inputs[name]
    assert tensor is not None
    return tensor


def _strides() -> tuple[Argument, ...]:
    axes = [(f"{tensor}_{axis}", tensor, n) for tensor in "qkvo" for n, axis in enumerate(("batch", "head", "seq"))]
    axes += [(f"mask_{axis}", "attn_mask", n) for n, axis in enumerate(("batch", "head", "query", "key"))]
    return tuple(Argument(name=name, kind="scalar", dtype="int64", stride_of=(tensor, n)) for name, tensor, n in axes)


_CPU_SHAPE = (2, 8, 8, 512, 512, 64)

KERNEL = Kernel(
    name="attention",
    title="Attention forward",
    entry="attention",
    dimensions=(
        Dimension(name="batch", low=1, high=65_535, batch=True),
        Dimension(name="heads", low=1, high=65_535),
        Dimension(name="kv_heads", low=1, high=65_535),
        Dimension(name="q_len", low=0, high=_MAX_LENGTH),
        Dimension(name="kv_len", low=1, high=_MAX_LENGTH),
        Dimension(name="head_dim", low=min(HEAD_DIMS), high=max(HEAD_DIMS)),
    ),
    dtypes={"cuda": ("bfloat16", "float16"), "cpu": ("float32", "bfloat16")},
    options=OPTIONS,
    option_min={"scale": 0.0},
    compile_time_dims={
        "cuda": ("head_dim", "causal", "lse", "attn_mask", "additive"),
        "cpu": ("head_dim", "causal", "attn_mask", "additive"),
    },
    arguments=(
        Argument(name="q", kind="input"),
        Argument(name="k", kind="input"),
        Argument(name="v", kind="input"),
        Argument(name="attn_mask", kind="input", optional=True),
        Argument(name="o", kind="output", shape=("batch", "heads", "q_len", "head_dim")),
        Argument(name="lse", kind="output", dtype="float32", shape=("batch", "heads", "q_len"), optional=True),
        *(
            Argument(name=name, kind="scalar", dtype="int64")
            for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        ),
        Argument(name="scale", kind="scalar", dtype="float32"),
        *_strides(),
    ),
    own_tolerance=_tolerance,
    reference=_reference,
    same_dtype=_same_dtype,
    inputs=draw,
    data=DATA,
    exact_data=("huge_scores",),
    cases=cases,
    neighbours=neighbours,
    cost=_cost,
    baselines=(
        Baseline(name="torch", role="reference", call=_sdpa),
        Baseline(name="flash", role="peer", call=_forced("FLASH_ATTENTION"), targets=("cuda",)),
        Baseline(name="cudnn", role="peer", call=_forced("CUDNN_ATTENTION"), targets=("cuda",)),
        Baseline(name="efficient", role="peer", call=_forced("EFFICIENT_ATTENTION"), targets=("cuda",)),
        Baseline(name="flex", role="peer", call=_flex, targets=("cuda",)),
        Baseline(name="math", role="peer", call=_forced("MATH")),
    ),
    workloads={
        "cuda": (workload((4, 16, 16, 2048, 2048, 64), "bfloat16"),),
        "cpu": (workload(_CPU_SHAPE, "float32"), workload(_CPU_SHAPE, "bfloat16")),
    },
    space=_space,
    plan=_plan,
    inactive={"cuda": cuda_shape.INACTIVE, "cpu": cpu_space.INACTIVE},
    compile_flags=_compile_flags,
    memory_order=_memory_order,
    validate=_validate,
    replaces="torch.nn.functional.scaled_dot_product_attention",
)
