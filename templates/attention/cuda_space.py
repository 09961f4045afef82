"""The search space of cuda.cu.j2: parameters, constraints and default."""

from __future__ import annotations

from math import prod
from typing import Any

from evo.problem.kernel import Limits, Workload
from evo.problem.space import Categorical, Constraint, Derivation, Ordinal, Parameter, Space, Value, When

from .cuda_shape import INACTIVE, Shape, plan, shape_of

__all__ = ["space"]

_CLUSTERS_AND_PROGRAMMATIC_LAUNCH = 90
_MORE_REGISTERS = 32
"""For addresses, loops and a fragment or two."""

_MOST_PRODUCTS = 512
"""Of a warp in a step: they are unrolled."""


def _parameters(workload: Workload, limits: Limits) -> tuple[Parameter, ...]:
    clusters = limits.capability >= _CLUSTERS_AND_PROGRAMMATIC_LAUNCH
    group = workload.dim("heads") // workload.dim("kv_heads")
    masked = bool(workload.option("attn_mask"))
    split = Ordinal(
        name="split_kv",
        values=(1, 2, 4, 8),
        structural=True,
        why="blocks that read a part of the keys each, where there are few rows for them, and merge",
    )
    tiles = Categorical(
        name="mask_tiles",
        values=("all", "seen"),
        structural=True,
        why="tiles of keys that a mask hides from a whole block, against looking for them",
    )
    found: list[Parameter] = [
        Ordinal(name="warps_m", values=(1, 2, 4, 8), why="more rows share a tile of keys, fewer fill a small grid"),
        Ordinal(name="m_tiles", values=(1, 2), structural=True, why="a fragment of k or v feeds as many products"),
        Ordinal(
            name="heads_a_tile",
            values=tuple(n for n in (1, 2, 4, 8, 16) if n < 2 * group),  # rows for more heads would be empty
            structural=True,
            why="keys are read once for the heads that share them, which fill a tile where queries are few",
        ),
        Ordinal(name="warps_n", values=(1, 2, 4, 8), structural=True, why="keys among warps where rows are few"),
        Ordinal(name="block_n", values=(16, 32, 48, 64, 96, 128, 192, 256), why="barriers a key against registers"),
        Ordinal(name="k_stages", values=(1, 2, 3, 4), structural=True, why="tiles of k in flight"),
        Ordinal(name="v_stages", values=(1, 2, 3, 4), structural=True, why="tiles of v in flight"),
        Categorical(
            name="barrier",
            values=("block", "column"),
            structural=True,
            when=(When(parameter="warps_n", values=(2, 4, 8)),),
            why="columns of warps that wait for themselves alone get out of step: products beside softmax",
        ),
        Categorical(
            name="merge",
            values=("over", "beside"),
            structural=True,
            when=(When(parameter="warps_n", values=(2, 4, 8)),),
            why="less shared memory, or less to wait for before columns of warps merge",
        ),
        Categorical(
            name="shared_base",
            values=("asked", "kept"),
            why="a register less, or no lookup of shared memory's address before each tile is copied",
        ),
        Categorical(
            name="copies",
            values=("unrolled", "looped"),
            structural=True,
            why="no jump between a first tile's rows, or less code to fetch before they are asked for",
        ),
        Ordinal(name="ahead", values=(0, 1), structural=True, why="the next scores under the softmax of these"),
        Categorical(
            name="stagger",
            values=("none", "half"),
            structural=True,
            when=(
                When(parameter="warps_m", values=(8,)),
                When(parameter="warps_n", values=(1,)),
                When(parameter="k_stages", values=(2, 3, 4)),
                When(parameter="v_stages", values=(3, 4)),
                When(parameter="ahead", values=(0,)),
            ),
            why="products of half of the warps beside exponentials of the others",
        ),
        Categorical(
            name="first_copies",
            values=("few", "all"),
            structural=True,
            when=(When(parameter="ahead", values=(0,)),),
            why="memory is waited for once, where sequences are short",
        ),
        Ordinal(
            name="k_parts",
            values=(1, 2, 4),
            structural=True,
            when=(When(parameter="first_copies", values=("few",)),),
            why="the first scores while the other keys of the step still come, at a barrier each",
        ),
        Categorical(
            name="v_wait",
            values=("early", "late"),
            structural=True,
            when=(When(parameter="k_stages", values=(2, 3, 4)), When(parameter="v_stages", values=(2, 3, 4))),
            why="scores before v has come, against a barrier",
        ),
        Categorical(
            name="q_store", values=("shared", "registers"), structural=True, why="reloads against registers"
        ),
        Categorical(name="layout", values=("swizzle", "padding"), why="addresses against shared memory"),
        Categorical(
            name="overlap",
            values=("none", "values", "both"),
            structural=True,
            why="exponentials under products, which another unit computes",
        ),
        Categorical(
            name="rescale",
            values=("always", "moved", "lazy"),
            structural=True,
            why="earlier sums need scaling only where a maximum moved",
        ),
        Categorical(
            name="sum", values=("add", "product"), structural=True, why="additions against products with ones"
        ),
        Categorical(
            name="exponential",
            values=("unit", "poly8", "poly4", "poly3", "poly2"),
            why="the special-function unit is narrow",
        ),
        *(
            Categorical(name=name, values=("float", "half"), structural=True, why="products of twice the speed, rounded")
            for name in ("scores", "values")
            if workload.option("precision") == "half"
        ),
        Categorical(
            name="mask",
            values=("inside",) if masked else ("inside", "apart"),  # a mask may hide keys in any step
            structural=True,
            when=(When(parameter="ahead", values=(0,)),),
            why="a jump a step against twice the code",
        ),
        *((tiles,) if masked else ()),
        Ordinal(name="fragments", values=(1, 2), why="loads ahead of their use"),
        Ordinal(
            name="unroll",
            values=(0, 1, 2),
            structural=True,
            when=(When(parameter="q_store", values=("shared",)),),
            why="less code to fetch, against address arithmetic",
        ),
        Categorical(
            name="grid",
            values=("tiles", "persistent"),
            structural=True,
            why="blocks that start late against a division",
        ),
        *((split,) if clusters else ()),
        Categorical(
            name="rows",
            values=("together", "ends"),
            structural=True,
            when=(When(parameter="warps_m", values=(2, 4, 8)),),
            why="causal blocks with as many scores as each other, against warps that wait for those with more",
        ),
        Categorical(name="order", values=("rows", "heads"), why="keys shared in L2 against an even end"),
        Categorical(name="l2", values=("plain", "keep"), why="keys that many blocks read against what else L2 may hold"),
        Categorical(
            name="epilogue",
            values=("direct", "shared", "shuffled"),
            when=(
                When(parameter="warps_n", values=(1,)),
                *((When(parameter="split_kv", values=(1,)),) if clusters else ()),
            ),
            why="whole chunks against a detour",
        ),
        Ordinal(name="min_blocks", values=(0, 1, 2, 3, 4), why="caps registers so that so many blocks fit an SM"),
    ]
    if clusters:
        found.append(
            Categorical(
                name="launch",
                values=("plain", "programmatic"),
                structural=True,
                why="blocks start while the kernel before them ends",
            )
        )
    return tuple(found)


def _divides(a: int, b: int) -> bool:
    """Whether either is a multiple of the other."""
    return max(a, b) % min(a, b) == 0


def _copiers(point: dict[str, Any], shape: Shape) -> int:
    """Threads that copy a tile of keys together."""
    return 32 * int(point["warps_m"]) if point["barrier"] == "column" else shape.threads


def _constraints(workload: Workload, limits: Limits) -> tuple[Constraint, ...]:
    head_dim = workload.dim("head_dim")
    rule = Derivation(lambda point: shape_of(point, head_dim), INACTIVE).constraint

    def blocks(p: dict[str, Any]) -> int:
        return max(1, int(p["min_blocks"]))

    def registers(p: dict[str, Any], s: Shape) -> int:
        """With a mask, a register for two scores holds what it says of them."""
        return s.registers + (p["m_tiles"] * s.keys // 4 if workload.option("attn_mask") else 0)

    def tiles(p: dict[str, Any]) -> int:
        return prod(-(-workload.dim(name) // size) for name, size in plan(p, workload).tiles)

    reserved = limits.smem_bytes_reserved_per_block
    return (
        rule("whole_fragments", lambda p, s: s.keys >= 16 and s.keys % 16 == 0, "a warp takes multiples of 16 keys"),
        rule(
            "whole_split", lambda p, s: p["block_n"] % p["warps_n"] == 0, "every warp takes as many keys of a step"
        ),
        rule(
            "whole_shares",
            lambda p, s: head_dim // 8 % p["warps_n"] == 0,
            "every column of warps merges the same share of a row",
        ),
        rule(
            "stagger_is_plain",
            lambda p, s: p["stagger"] == "none"
            or (p["first_copies"], p["k_parts"], p["v_wait"], p["mask"]) == ("few", 1, "early", "inside"),
            "staggered warps have one way to wait and one loop",
        ),
        rule(
            "ends_need_a_mask",
            lambda p, s: p["rows"] == "together" or bool(workload.option("causal")),
            "without a mask all rows see as many keys",
        ),
        rule(
            "ends_have_one_loop",
            lambda p, s: p["rows"] == "together" or p["mask"] == "inside",
            "mask=apart tells masked steps by the first row of a block whose rows follow each other",
        ),
        rule(
            "split_needs_tiles",
            lambda p, s: p["split_kv"] == 1 or p["grid"] == "tiles",
            "a cluster works on one tile of rows",
        ),
        rule(
            "split_needs_room",
            lambda p, s: p["split_kv"] == 1 or tiles(p) <= limits.multiprocessors,
            "blocks share keys where one for every tile of rows would leave SMs idle",
        ),
        rule(
            "whole_cluster_shares",
            lambda p, s: head_dim // 8 % p["split_kv"] == 0
            and _divides(max(1, head_dim // 8 // p["warps_n"]), p["split_kv"]),
            "blocks of a cluster merge the same share each of what a warp holds, or the first of them a piece each",
        ),
        rule(
            "paired_rows_are_plain",
            lambda p, s: p["heads_a_tile"] == 1 or (p["grid"], p["rows"]) == ("tiles", "together"),
            "a block with rows of several heads has one run of queries, and its loop is over the heads of a group",
        ),
        rule("block_threads", lambda p, s: s.threads <= 512, "a block has at most 512 threads"),
        rule(
            "registers_fit",
            lambda p, s: registers(p, s) + _MORE_REGISTERS
            <= min(255, limits.registers_per_multiprocessor // (s.threads * blocks(p))),
            "sums, scores and q must fit the registers of a thread",
        ),
        rule(
            "products_are_few",
            lambda p, s: p["m_tiles"] * s.keys // 8 * head_dim // 16 * 2 <= _MOST_PRODUCTS,
            "a step is unrolled whole",
        ),
        rule(
            "shared_memory",
            lambda p, s: s.smem_bytes <= limits.smem_bytes_per_block,
            "the tiles of q, k and v must fit the shared memory of a block",
        ),
        rule(
            "shared_occupancy",
            lambda p, s: (s.smem_bytes + reserved) * blocks(p) <= limits.smem_bytes_per_multiprocessor,
            "min_blocks blocks must fit the shared memory of an SM",
        ),
        rule(
            "resident_threads",
            lambda p, s: s.threads * blocks(p) <= limits.threads_per_multiprocessor,
            "min_blocks blocks must fit the threads of an SM",
        ),
        rule(
            "ahead_needs_keys", lambda p, s: not p["ahead"] or p["k_stages"] >= 2, "the next keys must be there early"
        ),
        rule(
            "whole_parts",
            lambda p, s: s.keys % (16 * p["k_parts"]) == 0,
            "every part of a tile of keys has multiples of 16 of them",
        ),
        rule(
            "parts_before_values",
            lambda p, s: p["k_parts"] == 1 or p["v_wait"] == "late" or min(p["k_stages"], p["v_stages"]) == 1,
            "who multiplies keys as they come waits for values late",
        ),
        rule(
            "parts_are_shared",
            lambda p, s: p["k_parts"] == 1 or p["warps_n"] == 1 or p["barrier"] == "column",
            "warps wait for parts of a tile that they all multiply",
        ),
        rule(
            "both_needs_next",
            lambda p, s: p["overlap"] != "both" or (p["ahead"] == 1 and p["q_store"] == "registers"),
            "next scores are computed beside these weights with ahead=1, and q in registers",
        ),
        rule(
            "persistent_needs_blocks",
            lambda p, s: p["grid"] == "tiles" or p["min_blocks"] >= 1,
            "a persistent grid has min_blocks blocks an SM",
        ),
        rule(
            "whole_turns",
            lambda p, s: _copiers(p, s) >= 64 or head_dim % 64 != 0 or p["layout"] == "padding",
            "threads copy every eighth row of a swizzled tile or one of its multiples",
        ),
        rule(
            "half_sums_are_short",
            lambda p, s: p["values"] == "float" or (s.keys <= 128 and p["rescale"] != "lazy"),
            "at most 128 products, with weights that no maximum lags behind, stay in the range of float16",
        ),
        rule(
            "exact_log_sum",
            lambda p, s: p["sum"] == "add" or not workload.option("lse"),
            "the log-sum-exp of rounded weights is not exact enough",
        ),
    )


def _default(head_dim: int) -> dict[str, Value]:
    """FlashAttention-2's shape, for shared memory of 99 KB: 64 rows, 4 warps, keys by head dimension."""
    return {
        "warps_m": 4,
        "m_tiles": 1,
        "heads_a_tile": 1,
        "warps_n": 1,
        "block_n": 64 if head_dim <= 128 else 32,
        "k_stages": 1,
        "v_stages": 1,
        "q_store": "shared",
        "layout": "swizzle",
        "ahead": 0,
        "overlap": "none",
        "rescale": "always",
        "sum": "add",
        "exponential": "unit",
        "mask": "inside",
        "first_copies": "few",
        "shared_base": "asked",
        "copies": "unrolled",
        "k_parts": 1,
        "fragments": 1,
        "unroll": 0,
        "grid": "tiles",
        "rows": "together",
        "order": "rows",
        "l2": "plain",
        "epilogue": "shared",
        "min_blocks": 0,
    }


def space(workload: Workload, limits: Limits) -> Space:
    parameters = _parameters(workload, limits)
    default = _default(workload.dim("head_dim"))
    if any(p.name == "launch" for p in parameters):
        default |= {"split_kv": 1, "launch": "plain"}
    return Space(
        parameters=parameters, constraints=_constraints(workload, limits), default=default
    )
