"""The search space of cuda.cu.j2, the sizes that follow from a point, and the launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evo.problem.kernel import DTYPE_BYTES, LaunchPlan, Limits, Workload
from evo.problem.space import Categorical, Constraint, Derivation, Ordinal, Parameter, Space, Value, When

__all__ = ["INACTIVE", "plan", "space"]

INACTIVE: dict[str, Value] = {"blocks_per_sm": 1, "unroll": 1, "launch": "plain"}
_ARCH_HAS_EARLY_STARTS = 90
_REDUCTION_BYTES = 4096
"""Of shared memory, at most."""

_PARAMETERS: tuple[Parameter, ...] = (
    Ordinal(name="vector_bytes", values=(2, 4, 8, 16), why="wider accesses need fewer instructions"),
    Ordinal(
        name="threads_per_row",
        values=(8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
        why="more threads shorten a row's latency, fewer make its reductions cheaper",
    ),
    Ordinal(name="rows_per_block", values=(1, 2, 4, 8, 16, 32), why="fills a block where rows are short"),
    Categorical(
        name="algorithm",
        values=("two_pass", "online"),
        structural=True,
        why="one reduction for maximum and sum instead of two, at the price of more exponentials",
    ),
    Categorical(
        name="row_store",
        values=("registers", "registers_f32", "shared", "reread"),
        structural=True,
        why="where the row waits between the sum and the result",
    ),
    Categorical(
        name="exponent",
        values=("fused", "difference"),
        structural=True,
        why="one instruction for a product and a difference, or two that no finite value breaks",
    ),
    Categorical(name="grid", values=("rows", "persistent"), structural=True, why="a persistent block starts only once"),
    Ordinal(
        name="blocks_per_sm",
        values=(1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
        when=(When(parameter="grid", values=("persistent",)),),
        why="resident blocks hide each other's latency",
    ),
    Categorical(
        name="reduction",
        values=("warp", "shuffle", "broadcast", "leader"),
        structural=True,
        why="barriers against redundant work",
    ),
    Categorical(
        name="x_load",
        values=("default", "nc", "no_allocate", "cs", "lu", "evict_first"),
        why="data used once need not displace what is used again",
    ),
    Categorical(
        name="y_store", values=("default", "cg", "cs", "wt", "no_allocate", "evict_first"), why="as for x_load"
    ),
    Ordinal(
        name="unroll",
        values=(1, 2, 4, 8),
        when=(When(parameter="row_store", values=("shared", "reread")),),
        why="loads in flight against registers",
    ),
    Ordinal(
        name="min_blocks",
        values=(0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
        why="caps registers so that so many blocks fit an SM",
    ),
)
_OF_HOPPER = Categorical(
    name="launch",
    values=("plain", "programmatic"),
    structural=True,
    why="blocks start while the kernel before them ends",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that follow from a point, the dtype and the columns."""

    lanes: int
    packets: int
    iterations: int
    threads: int
    smem_bytes: int
    registers: int


def shape_of(point: Mapping[str, Value], dtype: str, columns: int) -> Shape:
    p: dict[str, Any] = {**INACTIVE, **point}
    lanes = max(1, p["vector_bytes"] // DTYPE_BYTES[dtype])
    shift = lanes - min(columns & -columns, lanes)  # elements by which a row may start past a vector
    packets = -(-(columns + shift) // lanes)
    iterations = -(-packets // p["threads_per_row"])
    threads = p["threads_per_row"] * p["rows_per_block"]
    words = max(1, p["vector_bytes"] // 4)
    held = {"registers": iterations * words, "registers_f32": iterations * lanes}.get(p["row_store"], 0)
    smem = threads * iterations * words * 4 if p["row_store"] == "shared" else 0
    return Shape(
        lanes=lanes,
        packets=packets,
        iterations=iterations,
        threads=threads,
        smem_bytes=smem,
        registers=24 + held,
    )


def _constraints(dtype: str, columns: int, limits: Limits) -> tuple[Constraint, ...]:
    rule = Derivation(lambda point: shape_of(point, dtype, columns), INACTIVE).constraint
    per_sm, smem_per_sm = limits.threads_per_multiprocessor, limits.smem_bytes_per_multiprocessor
    return (
        rule("vector_holds_element", lambda p, s: p["vector_bytes"] >= DTYPE_BYTES[dtype], "a vector holds an element"),
        rule("block_threads", lambda p, s: 32 <= s.threads <= 1024, "a block has 32 to 1024 threads"),
        rule(
            "named_barriers",
            lambda p, s: p["threads_per_row"] <= 32 or p["rows_per_block"] <= 16,
            "a block has 16 hardware barriers, one a row",
        ),
        rule(
            "threads_have_work",
            lambda p, s: p["threads_per_row"] <= max(32, s.packets),
            "beyond one warp, no more threads than vectors in a row",
        ),
        rule(
            "reduction_fits",
            lambda p, s: (p["reduction"] == "warp") == (p["threads_per_row"] <= 32),
            "the reduction is 'warp' exactly where a row has at most 32 threads",
        ),
        rule(
            "fused_is_float16",
            lambda p, s: p["exponent"] == "difference" or dtype == "float16",
            "a rounded product is off by more than an exponent can hold where values may be as large as a float's",
        ),
        rule(
            "packed_is_distinct",
            lambda p, s: p["row_store"] != "registers" or dtype != "float32",
            "packed float32 take the registers of floats, where exponentials can stay",
        ),
        rule(
            "registers_fit",
            lambda p, s: s.registers
            <= min(255, limits.registers_per_multiprocessor // max(32, s.threads * max(1, p["min_blocks"]))),
            "what is held in registers must fit those of a thread",
        ),
        rule(
            "unrolled_loops_are_short",
            lambda p, s: s.iterations <= 16 or p["row_store"] in ("shared", "reread"),
            "loops over registers are unrolled whole: at most 16 vectors a thread",
        ),
        rule("passes_are_short", lambda p, s: s.iterations <= 2048, "at most 2048 vectors a thread"),
        rule(
            "sums_are_short",
            lambda p, s: dtype != "float32" or s.iterations <= (128 if p["algorithm"] == "two_pass" else 16),
            "float32 results show what long running sums lose, and the exponentials that scale them",
        ),
        rule(
            "shared_memory",
            lambda p, s: s.smem_bytes + _REDUCTION_BYTES <= limits.smem_bytes_per_block,
            "rows must fit the shared memory of a block",
        ),
        rule(
            "resident_blocks",
            lambda p, s: p["grid"] == "rows"
            or (
                p["blocks_per_sm"] * s.threads <= per_sm
                and p["blocks_per_sm"] * (s.smem_bytes + limits.smem_bytes_reserved_per_block) <= smem_per_sm
            ),
            "blocks_per_sm blocks must fit the threads and the shared memory of an SM",
        ),
        rule(
            "min_blocks_resident",
            lambda p, s: p["min_blocks"] * s.threads <= per_sm,
            "min_blocks blocks must fit the threads of an SM",
        ),
    )


def space(workload: Workload, limits: Limits) -> Space:
    """The default holds the row in registers, about 32 elements a thread, in the widest vectors that divide it."""
    dtype, columns = workload.dtype, workload.dim("cols")
    element = DTYPE_BYTES[dtype]
    vector = min(columns & -columns, 16 // element) * element
    if columns * element // vector > 16 * 1024:  # odd and long: wide vectors that cross the edges of rows
        vector = 8
    packets = -(-columns * element // vector) + 1
    widths = (t for t in (32, 64, 128, 256, 512) if packets * vector <= t * 32 * element and packets <= 16 * t)
    threads = next(widths, 1024)
    fits = threads < 1024
    default: dict[str, Value] = {
        "vector_bytes": vector,
        "threads_per_row": threads if fits else 512,
        "rows_per_block": max(1, 128 // threads),
        "algorithm": "two_pass",
        "row_store": "registers_f32" if fits else "reread",
        "exponent": "fused" if dtype == "float16" else "difference",
        "grid": "rows",
        "reduction": "warp" if threads == 32 else "shuffle",
        "x_load": "nc" if fits else "default",
        "y_store": "default",
        "min_blocks": 0,
    }
    if not fits:
        default["unroll"] = 4
    parameters = _PARAMETERS
    if limits.capability >= _ARCH_HAS_EARLY_STARTS:
        parameters, default["launch"] = (*_PARAMETERS, _OF_HOPPER), "plain"
    return Space(parameters=parameters, constraints=_constraints(dtype, columns, limits), default=default)


def plan(point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    p: dict[str, Any] = {**INACTIVE, **point}
    shape = shape_of(point, workload.dtype, workload.dim("cols"))
    return LaunchPlan(
        threads=shape.threads,
        tiles=(("rows", p["rows_per_block"]),),
        blocks_per_multiprocessor=p["blocks_per_sm"] if p["grid"] == "persistent" else None,
        smem_bytes=shape.smem_bytes,
        alignment=p["vector_bytes"] if shape.lanes > 1 else 1,
        programmatic=p["launch"] == "programmatic",
    )
