"""What the gate feeds an attention kernel: lengths around tile edges, masks, groups of heads, memory layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from evo.problem.kernel import Case, Workload
from evo.problem.space import Value

__all__ = ["HEAD_DIMS", "OPTIONS", "cases", "neighbours", "workload"]

HEAD_DIMS = (32, 64, 96, 128, 256)

OPTIONS: dict[str, Value] = {
    "causal": False,
    "scale": 0.0,
    "layout": "bhsd",
    "lse": False,
    "attn_mask": False,
    "additive": False,
    "mask_axes": "qk",
    "precision": "float",
}


_MASK_AXES = ("bhqk", "bk", "qk", "bqk", "k", "hqk", "hk", "bhk")


def workload(
    shape: tuple[int, int, int, int, int, int], dtype: str, **options: Value
) -> Workload:
    """`shape`: batch, heads, kv_heads, q_len, kv_len, head_dim."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    return Workload.of(dict(zip(names, shape, strict=True)), dtype, {**OPTIONS, **options})


def cases(target: str, tuned: Workload) -> list[Case]:
    """Small, so that all of them together take a few milliseconds on a GPU."""
    head_dim, dtype, causal = tuned.dim("head_dim"), tuned.dtype, bool(tuned.option("causal"))
    masked, additive = bool(tuned.option("attn_mask")), bool(tuned.option("additive"))
    axes = itertools.cycle((tuned.option("mask_axes"), *_MASK_AXES))

    # PyTorch adds up the products of a lone query in several short sums: in float32 one long sum errs twice as much, and of
    # few keys, as a mask leaves them, now and then more.
    lone_keys = 33 if dtype == "float32" else 257

    def case(
        data: str, shape: tuple[int, int, int, int, int], offset: int = 0, **options: Value
    ) -> Case:
        if target == "cuda":  # compiled in
            options = {**options, "lse": tuned.option("lse")}
        if masked:
            options = {"mask_axes": next(axes), **options, "attn_mask": True, "additive": additive}
        problem = workload((*shape, head_dim), dtype, causal=causal, precision=tuned.option("precision"), **options)
        extras = ["causal"] if causal else []
        extras += [f"{k}={v}" for k, v in options.items()] + ([f"offset={offset}"] if offset else [])
        return Case(" ".join([data, "x".join(map(str, shape)), *extras]), problem, data, offset)

    found = [
        case("normal", (2, 3, 3, 129, 129), layout=tuned.option("layout"), lse=tuned.option("lse")),
        case("normal", (1, 2, 2, 64, 64), lse=True),
        case("normal", (2, 2, 2, 63, 65), layout="bshd"),
        case("normal", (1, 2, 2, 127, 257), layout="packed", lse=True),
        case("normal", (1, 2, 2, 65, 63), lse=True),
        case("normal", (2, 4, 2, 67, 128), lse=True),
        case("normal", (2, 4, 1, 128, 127), layout="bshd"),
        case("normal", (2, 2, 2, 65, 65), layout="packed"),
        *([] if masked and dtype == "float32" else [case("needle", (2, 5, 5, 1, lone_keys), lse=True)]),
        case("normal", (1, 2, 2, 33, 129), scale=0.3),
        case("normal", (2, 2, 2, 65, 66), offset=1),
        case("normal", (1, 2, 2, 66, 65), offset=1, layout="packed", lse=True),
        case("normal", (3, 5, 5, 3, 3), layout="bshd"),
        case("normal", (7, 5, 5, 3, 1)),
        case("normal", (1, 2, 2, 321, 577)),
        case("peaked", (1, 2, 2, 128, 257), lse=True),
        case("needle", (1, 2, 2, 257, 257), lse=True),
        case("needle", (2, 4, 2, 65, 129), layout="packed"),
        case("huge_scores", (1, 6, 2, 33, 129), lse=True),
        case("uniform_keys", (1, 2, 2, 31, 129), lse=True),
        case("large_logits", (1, 2, 2, 64, 257), lse=True),
        case("large_logits", (1, 2, 2, 257, 128)),
        case("tiny", (1, 2, 2, 33, 65), lse=True),
        case("huge", (1, 2, 2, 65, 129)),
        case("non_finite", (1, 4, 4, 65, 129)),
        case("non_finite", (2, 4, 4, 129, 129), layout="bshd"),
    ]
    if masked:
        found += [
            case("sparse", (2, 4, 2, 129, 193), mask_axes="bhqk", lse=True),
            case("sparse", (1, 2, 2, 321, 577), mask_axes="qk", lse=True),
            case("sparse", (2, 2, 2, 65, 257), mask_axes="bk", layout="packed"),
            case("sparse", (2, 3, 3, 63, 129), mask_axes="bqk", layout="bshd"),
            case("sparse", (2, 4, 1, 66, 130), mask_axes="bhqk", layout="packed"),
            case("sparse", (2, 4, 2, 66, 131), offset=1, mask_axes="hk"),
            case("sparse", (2, 2, 2, 67, 65), mask_axes="bhq", lse=True),
            case("sparse", (3, 4, 4, 33, 65), mask_axes="bh", lse=True),
            case("sparse", (2, 3, 3, 34, 66), mask_axes="hq", layout="packed"),
            case("lone_key", (2, 2, 2, 321, 577), mask_axes="qk", lse=True),
            case("lone_key", (2, 4, 2, 65, 1025), mask_axes="bhk", lse=True),
            case("lone_key", (3, 5, 5, 129, 130), offset=1, mask_axes="bqk", layout="bshd"),
            case("lone_key", (4, 4, 2, 1, 577), mask_axes="bhqk"),
        ]
    if additive:
        found += [
            case("least", (2, 2, 2, 65, 257), mask_axes="bqk", lse=True),
            case("least", (1, 4, 2, 129, 130), mask_axes="hqk"),
            case("least", (2, 2, 2, 33, 65), mask_axes="bk", lse=True),
            case("least", (2, 2, 2, 66, 65), mask_axes="bhq"),
        ]
    if target == "cuda":  # more tiles than a persistent grid takes at once; a long row of keys; groups with few queries
        found += [
            case("normal", (3, 96, 8, 193, 64)),
            case("normal", (1, 2, 1, 65, 4099), lse=True),
            case("normal", (2, 20, 1, 1, 1025)),
            case("needle", (2, 6, 2, 5, 300), layout="bshd"),
            case("normal", (1, 6, 2, 7, 66), offset=1, lse=True),
        ]
    return found


def neighbours(target: str, tuned: Workload) -> Sequence[Workload]:
    """The same genome for the other head sizes, for a causal mask where there is none and the reverse, and with or without
    lse where that is compiled in; heads share keys as in the workload."""
    kept = ("causal", "lse", "attn_mask", "additive", "mask_axes", "precision")
    own: dict[str, Value] = {name: tuned.option(name) for name in kept}
    head_dim = tuned.dim("head_dim")
    kinds = [(other, own) for other in HEAD_DIMS if other != head_dim]
    if not own["attn_mask"]:
        kinds.append((head_dim, {**own, "causal": not own["causal"]}))
    if target == "cuda" and own["precision"] == "float":
        kinds.append((head_dim, {**own, "lse": not own["lse"]}))
    heads = 2 * tuned.dim("heads") // tuned.dim("kv_heads")
    return [workload((1, heads, 2, 129, 129, size), tuned.dtype, **options) for size, options in kinds]
