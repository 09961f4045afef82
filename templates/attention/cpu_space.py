"""The search space of cpu.cpp.j2: parameters, constraints and default."""

from __future__ import annotations

from collections.abc import Mapping

from evo.problem.kernel import Limits, Workload
from evo.problem.space import Categorical, Constraint, Ordinal, Parameter, Point, Space, Value, When

__all__ = ["INACTIVE", "space"]

INACTIVE: dict[str, Value] = {
    "schedule": "blocks",
    "simd_bits": 512,
    "register_rows": 6,
    "register_vectors": 4,
    "tile_rows": 1,
    "tile_columns": 1,
}

_TILES = 8
"""AMX tiles of a core."""

_TILE_ROWS = 16

_SCRATCH_BYTES = 8 << 20
"""What a thread may hold: it asks for it in every call."""


def _parameters(dtype: str, cores: int) -> tuple[Parameter, ...]:
    products = ("fma", "dot", "tiles") if dtype == "bfloat16" else ("fma", "tiles")
    in_registers = When(parameter="product", values=tuple(p for p in products if p != "tiles"))
    in_tiles = When(parameter="product", values=("tiles",))
    found: list[Parameter] = [
        # One thread or all: libgomp ends and restarts its workers when the size of a team changes between calls.
        Ordinal(
            name="threads",
            values=(1, cores) if cores > 1 else (1,),
            why="waking a second core costs more than a small problem",
        ),
    ]
    if cores > 1:
        found.append(
            Categorical(
                name="schedule",
                values=("blocks", "interleaved", "dynamic"),
                structural=True,
                when=(When(parameter="threads", values=(cores,)),),
                why="neighbours share keys in the cache, dynamic tasks level out a mask or a busy core",
            )
        )
    found += [
        Ordinal(
            name="task_queries",
            values=(64, 128, 256, 512, 1024),
            why="more use packed keys more often, fewer give every core a task",
        ),
        Ordinal(
            name="chunk", values=(128, 256, 512, 1024, 2048), why="packed keys that stay in the second-level cache"
        ),
        Ordinal(
            name="block_q",
            values=(16, 24, 32, 48, 64, 96, 128, 192),
            why="queries that use keys while those are in the first-level cache",
        ),
        Ordinal(
            name="block_k",
            values=(64, 128, 256, 512, 1024),
            why="long blocks seldom move a maximum, short ones keep scores in the first-level cache",
        ),
        Categorical(
            name="product",
            values=products,
            structural=True,
            why="multiply-adds of float32, of pairs of bfloat16, or tiles",
        ),
        Ordinal(
            name="simd_bits",
            values=(256, 512),
            when=(When(parameter="product", values=("fma",)),),
            why="wide registers, where they do not lower the clock",
        ),
        Ordinal(
            name="register_rows",
            values=(2, 3, 4, 6, 8, 12, 14),
            when=(in_registers,),
            why="rows in registers use a vector as often as it is loaded",
        ),
        Ordinal(
            name="register_vectors",
            values=(1, 2, 3, 4, 6),
            when=(in_registers,),
            why="vectors in registers use a number as often as it is loaded",
        ),
        Ordinal(name="tile_rows", values=(1, 2, 3, 4), when=(in_tiles,), why="a tile loaded is used as often"),
        Ordinal(name="tile_columns", values=(1, 2, 3), when=(in_tiles,), why="a tile loaded is used as often"),
        Categorical(
            name="exponential",
            values=("native", "integer"),
            structural=True,
            why="AVX-512 has instructions for two of its steps",
        ),
        Ordinal(
            name="degree",
            values=(4, 5) if dtype == "bfloat16" else (5, 6),
            why="a shorter polynomial costs digits that a 16-bit result does not have",
        ),
        Ordinal(
            name="padding", values=(0, 64), why="rows a power of two apart share cache sets, padded ones do not"
        ),
        Categorical(
            name="rescale",
            values=("moved", "always"),
            structural=True,
            why="most blocks leave the maximum as it is; always has no branch",
        ),
    ]
    return tuple(found)


def _scratch_bytes(point: Mapping[str, Value], dtype: str, head_dim: int) -> int:
    p = {name: value for name, value in point.items() if isinstance(value, int)}
    pieces_bytes = {"fma": 4, "dot": 2, "tiles": 2 if dtype == "bfloat16" else 6}[str(point["product"])]
    operands = pieces_bytes * (2 * p["chunk"] * head_dim + p["block_q"] * (head_dim + min(p["block_k"], p["chunk"])))
    results = 4 * (p["block_q"] * min(p["block_k"], p["chunk"]) + max(p["task_queries"], p["block_q"]) * head_dim)
    return operands + results


def _constraints(dtype: str, head_dim: int) -> tuple[Constraint, ...]:
    return (
        Constraint(
            name="blocks_divide_a_chunk",
            holds=lambda p: int(p["block_k"]) <= int(p["chunk"]),
            reason="a block of keys is part of a packed chunk",
        ),
        Constraint(
            name="blocks_divide_a_task",
            holds=lambda p: int(p["block_q"]) <= int(p["task_queries"]),
            reason="a block of queries is part of a task",
        ),
        Constraint(
            name="registers_divide_a_block",
            holds=lambda p: int(p["block_q"]) % int(p.get("register_rows", 1)) == 0,
            reason="rows left over are computed one by one",
        ),
        Constraint(
            name="sums_fit_the_registers",
            holds=lambda p: "register_rows" not in p
            or (int(p["register_rows"]) + 1) * int(p["register_vectors"]) + 1
            <= (16 if p.get("simd_bits") == 256 else 32),
            reason="sums and vectors beyond the processor's registers spill",
        ),
        Constraint(
            name="sums_hide_latency",
            holds=lambda p: "register_rows" not in p or int(p["register_rows"]) * int(p["register_vectors"]) >= 8,
            reason="fewer than 8 independent sums wait for each other",
        ),
        Constraint(
            name="tiles_divide_a_block",
            holds=lambda p: "tile_rows" not in p or int(p["block_q"]) % (_TILE_ROWS * int(p["tile_rows"])) == 0,
            reason="a block is made of whole tiles of 16 rows",
        ),
        Constraint(
            name="sums_fit_the_tiles",
            holds=lambda p: "tile_rows" not in p
            or (int(p["tile_rows"]) + 1) * int(p["tile_columns"]) + 1 <= _TILES,
            reason="a core has eight tiles, of which one or more hold each factor",
        ),
        Constraint(
            name="scratch_is_small",
            holds=lambda p: _scratch_bytes(p, dtype, head_dim) <= _SCRATCH_BYTES,
            reason="packed keys and values, scores and sums of a thread take at most 8 MiB",
        ),
    )


def space(workload: Workload, limits: Limits) -> Space:
    half = workload.dtype == "bfloat16"
    default: Point = {
        "threads": limits.multiprocessors,
        "task_queries": 256,
        "chunk": 512,
        "block_q": 48,
        "block_k": 256,
        "product": "fma",
        "simd_bits": 512,
        "register_rows": 6,
        "register_vectors": 4,
        "tile_rows": 1,
        "tile_columns": 1,
        "exponential": "native",
        "degree": 4 if half else 5,
        "padding": 64,
        "rescale": "moved",
    }
    if limits.multiprocessors > 1:
        default["schedule"] = "blocks"
    return Space(
        parameters=_parameters(workload.dtype, limits.multiprocessors),
        constraints=_constraints(workload.dtype, workload.dim("head_dim")),
        default=default,
    )
