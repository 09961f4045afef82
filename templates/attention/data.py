"""Inputs of attention by distribution, and how they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from evo.problem.kernel import Tensors, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["DATA", "LAYOUTS", "draw", "is_padded", "scale_of"]

DATA = (
    "normal",
    "peaked",
    "needle",
    "uniform_keys",
    "large_logits",
    "huge_scores",
    "tiny",
    "huge",
    "non_finite",
    "sparse",
    "lone_key",
    "least",
)

LAYOUTS = ("bhsd", "bshd", "packed")

_STEEPEST = 120.0
"""The largest logit of large_logits: its exponential is no float32."""

_HUGE = (1e4, 1e6, 1e10, 1e30)
"""Scores of huge_scores, as far as the dtype's largest number allows."""

_TILE = 64

_ALIKE = 16
"""Neighbouring queries that see the same lone key: fewer than a tile has, so that tiles of keys between are skipped."""


def is_padded(workload: Workload) -> bool:
    """Whether a mask is of sequences with lengths of their own."""
    axes = str(workload.option("mask_axes"))
    return bool(workload.option("attn_mask")) and "k" in axes and axes != "qk"


def scale_of(workload: Workload) -> float:
    """What scores are multiplied with."""
    return float(workload.option("scale")) or 1 / math.sqrt(workload.dim("head_dim"))


def draw(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    """q, k, v of the named distribution: logits that tell keys apart, every head its own, V with a mean for every
    head and channel, so that neither a fixed scale nor the mean of V fits."""
    import torch

    device, dtype = generator.device, getattr(torch, workload.dtype)
    batch, heads, kv_heads, q_len, kv_len, head_dim = (size for _, size in workload.dims)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    q = normal(batch, heads, q_len, head_dim)
    k = normal(batch, kv_heads, kv_len, head_dim)
    v = normal(batch, kv_heads, kv_len, head_dim) + normal(batch, kv_heads, 1, head_dim)
    mask = _mask(workload, data, generator) if workload.option("attn_mask") else None
    unit = 1 / (scale_of(workload) * math.sqrt(head_dim))  # with q of this size, logits are standard normal
    if data in ("normal", "sparse", "lone_key"):
        q = q * unit * torch.exp(1.5 * uniform(batch, heads, 1, 1))
    elif data == "peaked":  # nearly all weight on one key
        q = q * unit * 20
    elif data == "needle":  # one key of each query's own stands out, mostly at an edge of what it sees
        target = _needles(workload, generator)
        if mask is not None:
            seen = mask.gather(3, target[..., None])[..., 0] > (-torch.inf if mask.is_floating_point() else 0)
            target = torch.where(seen, target, 0)
        chosen = torch.repeat_interleave(k, heads // kv_heads, dim=1)
        q = chosen.gather(2, target[..., None].expand(-1, -1, -1, head_dim))
        q[:, :, 1::3] += chosen[:, :, :1]  # for every third query the first key stands out as much
        q = q * (16 * unit / math.sqrt(head_dim))
    elif data == "uniform_keys":
        q, k = q * unit, k[:, :, :1].expand(-1, -1, kv_len, -1)
    elif data == "large_logits":  # growing along the keys for every other query, shrinking for the others
        direction = normal(batch, kv_heads, 1, head_dim).sign()
        k = 0.05 * k + direction * torch.linspace(-1, 1, kv_len, device=device)[:, None]
        side = torch.where(torch.arange(q_len, device=device) % 2 == 0, 1.0, -1.0)[:, None]
        steepness = side * (0.25 + 0.75 * uniform(batch, heads, q_len, 1)) * _STEEPEST * unit / math.sqrt(head_dim)
        q = torch.repeat_interleave(direction, heads // kv_heads, dim=1) * steepness
    elif data == "huge_scores":
        q, k = _huge_scores(workload, generator)
    elif data == "tiny":  # equal logits but for rounding, and values whose products with weights are far smaller
        q, v = q * unit * 1e-3, v * (1e-3 if workload.dtype == "float16" else 1e-30)
    elif data == "huge":  # values whose weighted sum, not yet divided by the sum of weights, is just a float32
        q = q * unit
        v = (0.5 + 0.5 * uniform(*v.shape)) * (60000.0 if workload.dtype == "float16" else 1e38 / max(1, kv_len))
        v *= normal(batch, kv_heads, 1, head_dim).sign()  # results are as large, too
    elif data == "least":  # scores so near to each other that adding them to the lowest number loses nothing
        q = q * unit * 1e-4
    elif data == "non_finite":
        q = q * unit / 2  # no weight underflows: 0 * Inf would be NaN
        _spoil(q, k, v, causal=bool(workload.option("causal")))
    else:
        raise ValueError(f"unknown data {data!r}")
    placed = _place((q, k, v), dtype, str(workload.option("layout")))
    return {**dict(zip("qkv", placed, strict=True)), "attn_mask": mask}


def _huge_scores(workload: Workload, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k whose scores are huge and exact in every dtype, so that equal ones are equal however they are summed.

    By turns a query has the largest score with a half of the keys, with the other half, with one key, with all, and the
    lowest with all, in channels of its own for each of these. Elements have so few bits that sums of products are exact, and
    so many that products with the scale are not.
    """
    import torch

    device = generator.device
    batch, heads, kv_heads, q_len, kv_len, head_dim = (size for _, size in workload.dims)
    half, largest = head_dim // 2, torch.finfo(getattr(torch, workload.dtype)).max
    in_half = workload.option("precision") == "half"
    unit, few_bits = (3 * 2.0**2, 1.0) if in_half else (11 * 2.0**11, 13 / 8)
    k = torch.zeros(batch, kv_heads, kv_len, head_dim, device=device)
    side = torch.randint(0, 2, (batch, kv_heads, kv_len, 1), generator=generator, device=device)
    k[..., :half] = unit * (2.0 * side - 1)
    one = torch.randint(0, kv_len, (batch, kv_heads, 1, 1), generator=generator, device=device)
    k[..., half::2].scatter_(2, one.expand(-1, -1, -1, head_dim - half - half // 2), unit)
    k[..., half + 1 :: 2] = unit
    most = 2.0**5 if in_half else largest / 2
    query, steepness = torch.arange(q_len, device=device), torch.tensor(_HUGE, device=device, dtype=torch.float64)
    wanted = steepness[query // 5 % len(_HUGE)] / (scale_of(workload) * unit * half)
    level = few_bits * torch.exp2(wanted.log2().round()).clamp(max=2.0 ** math.floor(math.log2(most / few_bits))).float()
    q = torch.zeros(batch, heads, q_len, head_dim, device=device)
    halves, one_key, all_keys = slice(0, half), slice(half, None, 2), slice(half + 1, None, 2)
    for turn, (channels, sign) in enumerate(((halves, 1), (halves, -1), (one_key, 1), (all_keys, 1), (all_keys, -1))):
        q[:, :, turn::5, channels] = sign * level[turn::5, None]
    return q, k


def _mask(workload: Workload, data: str, generator: torch.Generator) -> torch.Tensor:
    """[batch, heads, q_len, kv_len], with a stride of 0 along the axes that it lacks.

    As models have them: a query sees no later key, and nobody sees the padding behind at least half of the keys. sparse:
    any half of the keys at both ends, and no key for some queries. In sparse and lone_key, the layout tells of the mask's
    memory, too: with packed, only the strides of queries are even. huge_scores: only 0 and -Inf are added. least: the lowest
    number of its dtype in place of -Inf, for all keys of some queries, and beside -Inf for others. non_finite: all queries
    see the first key and none the last.
    """
    import torch

    device, dtype = generator.device, getattr(torch, workload.dtype)
    axes, layout = str(workload.option("mask_axes")), workload.option("layout")
    whole = [workload.dim(name) for name in ("batch", "heads", "q_len", "kv_len")]
    sizes = [size if axis in axes else 1 for axis, size in zip("bhqk", whole, strict=True)]
    batch, heads, queries, keys = sizes
    query, key = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    seen = torch.rand(sizes, generator=generator, device=device) < 0.5
    if data == "sparse":
        seen &= ((key < keys // 4) | (key >= keys * 3 // 4)) & (query % 5 != 3)
    elif data == "lone_key":
        shape = (batch, heads, -(-queries // _ALIKE), 1)
        lone = torch.randint(-(keys // 4), keys, shape, generator=generator, device=device)  # some see none
        seen = key == lone.repeat_interleave(_ALIKE, 2)[:, :, :queries]
    elif data == "non_finite":
        seen = (seen & (key < keys - 1)) | (key == 0)
    else:
        seen = torch.ones_like(seen)
        if "qk" in axes:
            seen &= key <= query + keys - queries
        if is_padded(workload):
            seen &= key < torch.randint(-(-keys // 2), keys + 1, (batch, heads, 1, 1), generator=generator, device=device)
    mask = seen
    if workload.option("additive"):
        added = 0.5 * torch.randn(sizes, generator=generator, device=device) * (data != "huge_scores")
        if data == "least":
            mask = torch.where(seen & (query % 4 % 3 == 0), added, torch.finfo(dtype).min)
            mask = mask.masked_fill(~seen & (query % 4 == 2), -torch.inf).to(dtype)
        else:
            mask = torch.where(seen, added, -torch.inf).to(dtype)
    if data in ("sparse", "lone_key") and layout == "bshd":  # queries side by side
        mask = mask.mT.contiguous().mT
    elif data in ("sparse", "lone_key") and layout == "packed":  # a part of a longer one
        row = keys + 3 + (keys + 3) % 2
        head = queries * row + 1
        longer = mask.new_zeros(batch * (heads * head + 1))
        mask = longer.as_strided(sizes, (heads * head + 1, head, row, 1)).copy_(mask)
    return mask.expand(whole)


def _needles(workload: Workload, generator: torch.Generator) -> torch.Tensor:
    """[batch, heads, q_len] keys: by turns the first and the last that a query sees, the last and the first of a
    tile, and any."""
    import torch

    shape = tuple(workload.dim(name) for name in ("batch", "heads", "q_len"))
    device, kv_len = generator.device, workload.dim("kv_len")
    query = torch.arange(shape[2], device=device)
    last = torch.full_like(query, kv_len - 1)
    if workload.option("causal"):
        last = (query + kv_len - shape[2]).clamp(0, kv_len - 1)
    tile_end = ((last + 1) // _TILE * _TILE - 1).clamp(min=0)
    tile_start = last // _TILE * _TILE
    any_key = (torch.rand(shape, generator=generator, device=device) * (last + 1)).long()
    turn = torch.randint(0, 5, shape, generator=generator, device=device)
    edges = torch.stack([torch.zeros_like(last), last, tile_end, tile_start])[:, None, None].expand(4, *shape)
    return torch.cat([edges, any_key[None]]).gather(0, turn[None])[0]


def _spoil(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
    """NaN and Inf, a kind for each head of k and v, as far as there are heads.

    A masked key must not reach a query, whatever it holds: its score is replaced, not added to. A masked value may: tiles
    multiply it with a weight of 0, and 0 * NaN is NaN, in FlashAttention as in PyTorch's own kernels. So values are
    spoilt only where every query sees them, as long as there is such a place; any other mask shows all queries the first
    key, too.
    """
    nan, inf = float("nan"), float("inf")
    kv_heads, q_len, kv_len = k.shape[1], q.shape[2], k.shape[2]
    q[:, 0, 1::4, 0] = nan
    if kv_heads > 1 and not (causal and q_len > kv_len):
        v[:, 1, 0, 0], v[:, 1, 0, 1], v[:, 1, 0, 2] = nan, inf, -inf
    if kv_heads > 2:
        k[:, 2, kv_len - 1, 3] = nan  # where it is causal, only the last query sees it; with a mask, nobody
    if kv_heads > 3 and not causal and kv_len > 1:  # a score of -Inf alone would have no softmax
        k[:, 3, kv_len // 2, 5] = inf


def _place(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype, layout: str) -> Iterator[torch.Tensor]:
    """The same values, [batch, heads, length, head_dim], in the memory order of the layout.

    packed: slices of one [batch, length, 3, heads, head_dim], as a fused projection gives, or of one for q and one for k
    and v where their shapes differ.
    """
    if layout == "bhsd":
        yield from (t.to(dtype).contiguous() for t in tensors)
        return
    ordered = [t.to(dtype).transpose(1, 2).contiguous() for t in tensors]
    if layout == "packed":
        q, k, _ = ordered
        if q.shape == k.shape:
            together = q.new_empty((*q.shape[:2], 3, *q.shape[2:]))
            slots = list(together.unbind(2))
        else:
            slots = [
                q.new_empty((*q.shape[:2], 2, *q.shape[2:])).select(2, 0),
                *k.new_empty((*k.shape[:2], 2, *k.shape[2:])).unbind(2),
            ]
        for slot, t in zip(slots, ordered, strict=True):
            slot.copy_(t)
        ordered = slots
    yield from (t.transpose(1, 2) for t in ordered)
