"""The search space of cuda.cu.j2, and what follows from one of its points: sizes and launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from evo.problem.kernel import DTYPE_BYTES, LaunchPlan, Limits, Workload
from evo.problem.space import Categorical, Constraint, Derivation, Ordinal, Parameter, Point, Space, Value, When

from .._norm.weights import element_bytes as weight_bytes

__all__ = ["INACTIVE", "plan", "space", "sums"]

INACTIVE: dict[str, Value] = {
    "prefetch": 0, "sums_store": "registers", "finish": "none", "launch": "plain", "finish_cols": 32, "finish_splits": 1,
}  # fmt: skip

_ARCH_HAS_EARLY_LAUNCHES = 90
_BLOCKS = tuple(sorted({sms * n for sms in (58, 128, 132, 142) for n in (1, 2, 3, 4, 6, 8, 12, 16)}))
"""Whole waves on L4, RTX 4090, H100 and L40S. The same everywhere, so that a point found on one GPU is legal on another."""
_THREADS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    packets: int
    weight_packet_bytes: int
    iterations: int
    threads: int
    whole: bool
    smem_bytes: int
    registers: int


def sums(workload: Workload) -> int:
    """How many sums over the rows a column has."""
    asked = dict(workload.options)
    return int(bool(asked["dweight"])) + int(bool(asked.get("dbias")))


def plan(point: Mapping[str, Value], workload: Workload, finish: str) -> tuple[LaunchPlan, ...]:
    p: dict[str, Any] = {**INACTIVE, **point}
    shape = _shape(point, workload)
    rows = LaunchPlan(
        threads=shape.threads,
        tiles=(("rows", p["rows_per_block"]),),
        blocks=p["blocks"],
        smem_bytes=shape.smem_bytes,
        alignment=min(16, shape.weight_packet_bytes) if p["vector_bytes"] > DTYPE_BYTES[workload.dtype] else 1,
        programmatic=p["launch"] == "all",
    )
    if p["finish"] != "launch":
        return (rows,)
    cols = LaunchPlan(
        threads=p["finish_cols"] * p["finish_splits"],
        tiles=(("cols", p["finish_cols"]),),
        blocks_per_tile=sums(workload),
        programmatic=p["launch"] != "plain",
        entry=finish,
    )
    return rows, cols


def _shape(point: Mapping[str, Value], workload: Workload) -> _Shape:
    p: dict[str, Any] = {**INACTIVE, **point}
    element_bytes, cols, options = DTYPE_BYTES[workload.dtype], workload.dim("cols"), dict(workload.options)
    lanes = max(1, p["vector_bytes"] // element_bytes)
    packets = -(-cols // lanes)
    iterations = -(-packets // p["threads_per_row"])
    packed = iterations * max(1, p["vector_bytes"] // 4)
    weight_packet_bytes = p["vector_bytes"] * weight_bytes(workload) // element_bytes
    shared_sums = p["sums_store"] == "shared"
    registers = 26 + (8 if shared_sums else sums(workload) * iterations * lanes)
    if p["row_store"] == "registers":
        registers += packed * (4 if p["prefetch"] else 2) + (packed if options["dresidual"] else 0)
    if p["weight_load"] == "kept":
        registers += iterations * max(1, weight_packet_bytes // 4)
    return _Shape(
        packets=packets,
        weight_packet_bytes=weight_packet_bytes,
        iterations=iterations,
        threads=p["threads_per_row"] * p["rows_per_block"],
        whole=p["vector_bytes"] >= element_bytes and cols % lanes == 0,
        smem_bytes=4 * sums(workload) * (iterations * lanes * p["threads_per_row"] if shared_sums else cols)
        if shared_sums or p["rows_per_block"] > 1
        else 0,
        registers=registers,
    )


def _parameters(workload: Workload, limits: Limits) -> tuple[Parameter, ...]:
    early = limits.capability >= _ARCH_HAS_EARLY_LAUNCHES
    launches = When(parameter="finish", values=("launch",))
    found: list[Parameter] = [
        Ordinal(name="vector_bytes", values=(2, 4, 8, 16), why="wider accesses need fewer instructions"),
        Ordinal(
            name="threads_per_row",
            values=_THREADS,
            why="more threads hold fewer sums each, and wait longer for each other",
        ),
        Ordinal(name="rows_per_block", values=(1, 2, 4, 8, 16), why="fills a block where rows are short"),
        Ordinal(
            name="blocks",
            values=_BLOCKS,
            why="each starts once and leaves one slice of sums: few slices against rows in flight",
        ),
        Categorical(
            name="row_store",
            values=("registers", "reread"),
            structural=True,
            why="where dy and x wait for the row's means: registers, or the caches they came through",
        ),
        Ordinal(
            name="prefetch",
            values=(0, 1),
            structural=True,
            when=(When(parameter="row_store", values=("registers",)),),
            why="the next row travels while this one is reduced",
        ),
        Categorical(
            name="weight_load",
            values=("kept", "stream"),
            structural=True,
            why="registers, or a read in each pass of each row",
        ),
        Categorical(
            name="reduction",
            values=("warp", "shuffle", "broadcast", "leader"),
            structural=True,
            why="barriers against redundant work",
        ),
        Categorical(
            name="load",
            values=("default", "nc", "no_allocate", "evict_first"),
            why="dy and x pass once and need not displace what is used again",
        ),
        Categorical(name="store", values=("default", "cs", "no_allocate"), why="as for load, of dx"),
        Ordinal(name="min_blocks", values=(0, 1, 2, 3, 4, 6, 8), why="caps registers so that so many blocks fit an SM"),
    ]
    if sums(workload):
        found += [
            Categorical(
                name="sums_store",
                values=("registers", "shared"),
                structural=True,
                why="of long rows the sums of a thread's columns leave registers no room for rows in flight",
            ),
            Categorical(
                name="finish",
                values=("launch", "last_block"),
                structural=True,
                why="a second launch adds the slices on all SMs; the last block does it alone, and no launch is paid",
            ),
            Ordinal(
                name="finish_cols",
                values=(32, 64, 128),
                when=(launches,),
                why="columns of a block of the second launch: wide reads against blocks for all SMs",
            ),
            Ordinal(
                name="finish_splits",
                values=(1, 2, 4, 8, 16),
                when=(launches,),
                why="threads that share a column's slices: reads in flight",
            ),
        ]
        if early:
            found.append(
                Categorical(
                    name="launch",
                    values=("plain", "programmatic", "all"),
                    structural=True,
                    why="the second launch, or the first, too, may start while what is before it ends",
                )
            )
    return tuple(found)


def _constraints(workload: Workload, limits: Limits) -> tuple[Constraint, ...]:
    rule = Derivation(lambda point: _shape(point, workload), INACTIVE).constraint
    threads_per_sm, registers_per_sm = limits.threads_per_multiprocessor, limits.registers_per_multiprocessor
    return (
        rule("whole_vectors", lambda p, s: s.whole, "a vector holds an element, and a row whole vectors"),
        rule("block_threads", lambda p, s: s.threads <= 1024, "a block has at most 1024 threads"),
        rule(
            "named_barriers",
            lambda p, s: p["threads_per_row"] == 32 or p["rows_per_block"] <= 8,
            "a block has 16 hardware barriers: one a row, and one of all its rows",
        ),
        rule(
            "threads_have_work",
            lambda p, s: p["threads_per_row"] <= max(32, s.packets),
            "beyond one warp, no more threads than vectors in a row",
        ),
        rule(
            "reduction_fits",
            lambda p, s: (p["reduction"] == "warp") == (p["threads_per_row"] == 32),
            "the reduction is 'warp' exactly where a row has one warp",
        ),
        rule(
            "registers_fit",
            lambda p, s: s.registers <= min(255, registers_per_sm // (s.threads * max(1, p["min_blocks"]))),
            "what is held in registers must fit those of a thread",
        ),
        rule(
            "shared_sums_of_one_row",
            lambda p, s: p["sums_store"] == "registers" or p["rows_per_block"] == 1,
            "sums in shared memory are those of a block that works on one row at once",
        ),
        rule(
            "unrolled_loops_are_short",
            lambda p, s: s.iterations <= 32,
            "loops are unrolled whole: at most 32 vectors a thread",
        ),
        rule(
            "shared_memory",
            lambda p, s: s.smem_bytes <= limits.smem_bytes_per_block - 4096,
            "the sums of a block's rows must fit its shared memory",
        ),
        rule(
            "min_blocks_resident",
            lambda p, s: p["min_blocks"] * s.threads <= threads_per_sm,
            "min_blocks blocks must fit the threads of an SM",
        ),
        rule(
            "weight_is_there",
            lambda p, s: bool(workload.option("weight")) or p["weight_load"] == "stream",
            "a weight that is not there is not kept",
        ),
        rule(
            "finish_threads",
            lambda p, s: p["finish_cols"] * p["finish_splits"] <= 1024,
            "a block of the second launch has at most 1024 threads",
        ),
        rule(
            "second_launch_is_there",
            lambda p, s: p["launch"] != "programmatic" or p["finish"] == "launch",
            "only a second launch can start early by itself",
        ),
    )


def _default(workload: Workload, limits: Limits, constraints: tuple[Constraint, ...]) -> Point:
    """Few elements a thread, so that all it needs stays in registers: the first legal one of what is tried in this order."""
    cols, element_bytes = workload.dim("cols"), DTYPE_BYTES[workload.dtype]
    vector = element_bytes
    while vector < 16 and cols * element_bytes % (2 * vector) == 0:
        vector *= 2
    vectors = [v for v in (16, 8, 4, 2) if element_bytes <= v <= vector]
    stored = (("registers", 1, "kept"), ("registers", 0, "kept"), ("registers", 0, "stream"))
    few, many = product(("registers",), (16, 8, 32), stored), product(("shared",), (32, 16), stored)
    choices = [*few, *(many if sums(workload) else ()), *product(("registers",), (32, 16, 8), (("reread", None, "stream"),))]
    for (sums_store, elements, (store, prefetch, weight)), v in product(choices, vectors):
        packets = cols * element_bytes // v
        most = max(32, min(packets, next((t for t in _THREADS if t * elements >= cols), 1024)))
        threads = max(t for t in _THREADS if t <= most)
        rows_per_block = max(1, 128 // threads)
        resident = max(n for n in (1, 2, 4, 8) if n * threads * rows_per_block <= 1024)
        point: Point = {
            "vector_bytes": v,
            "threads_per_row": threads,
            "rows_per_block": rows_per_block,
            "blocks": min(_BLOCKS, key=lambda n: abs(n - limits.multiprocessors * resident)),
            "row_store": store,
            **({} if prefetch is None else {"prefetch": prefetch}),
            "weight_load": weight if workload.option("weight") else "stream",
            "reduction": "warp" if threads == 32 else "shuffle",
            "load": "default" if store == "reread" else "nc",
            "store": "default",
            "min_blocks": 0,
            **({"sums_store": sums_store} if sums(workload) else {}),
            **({"finish": "launch", "finish_cols": 32, "finish_splits": 8} if sums(workload) else {}),
            **({"launch": "plain"} if sums(workload) and limits.capability >= _ARCH_HAS_EARLY_LAUNCHES else {}),
        }
        if all(c.holds(point) for c in constraints):
            return point
    raise AssertionError(workload.key)


def space(workload: Workload, limits: Limits) -> Space:
    constraints = _constraints(workload, limits)
    return Space(
        parameters=_parameters(workload, limits),
        constraints=constraints,
        default=_default(workload, limits, constraints),
    )
