"""The search space of forward.cu.j2: parameters, constraints and default."""

from __future__ import annotations

from evo.problem.kernel import DTYPE_BYTES, Limits, Workload
from evo.problem.space import Categorical, Constraint, Derivation, Ordinal, Parameter, Point, Space, Value, When

from .cuda_shape import INACTIVE, power_dividing, shape_of

__all__ = ["space"]

_ARCH_HAS_CLUSTERS = 90
_CENTRED: tuple[Value, ...] = ("two_pass", "chan", "welford", "shifted", "sums")
"""Statistics of a mean and a variance."""

_SMEM_STATIC_BYTES = 4096
"""Room left for the static shared memory of the reductions."""


def _parameters(limits: Limits, statistics: tuple[Value, ...], residual: bool) -> tuple[Parameter, ...]:
    hopper = limits.capability >= _ARCH_HAS_CLUSTERS
    persistent = When(parameter="grid", values=("persistent",))
    direct = When(parameter="load_path", values=("direct",))
    paths: tuple[Value, ...] = ("direct", "cp_async", "bulk") if hopper else ("direct", "cp_async")
    paths = paths[:1] if residual else paths  # what is added arrives in registers
    found: list[Parameter] = [
        Ordinal(name="vector_bytes", values=(2, 4, 8, 16), why="wider accesses need fewer instructions"),
        Ordinal(
            name="threads_per_row",
            values=(8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
            why="more threads shorten a row's latency, fewer make its reduction cheaper",
        ),
        Ordinal(name="rows_per_block", values=(1, 2, 4, 8, 16, 32), why="fills a block where rows are short"),
        Categorical(
            name="row_store",
            values=("registers", "registers_f32", "shared", "reread"),
            structural=True,
            why="where the row waits between the statistics and the result",
        ),
        Categorical(name="load_path", values=paths, structural=True, why="asynchronous copies need no registers"),
        Ordinal(
            name="stages",
            values=(1, 2, 3, 4),
            when=(When(parameter="load_path", values=("cp_async", "bulk")),),
            why="rows in flight ahead of the one being worked on",
        ),
        Categorical(
            name="grid", values=("rows", "persistent"), structural=True, why="a persistent block starts only once"
        ),
        Ordinal(
            name="blocks_per_sm",
            values=(1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
            when=(persistent,),
            why="resident blocks hide each other's latency",
        ),
        Ordinal(
            name="prefetch",
            values=(0, 1),
            structural=True,
            when=(persistent, direct, When(parameter="row_store", values=("registers", "registers_f32"))),
            why="the next row travels while this one is reduced",
        ),
        Categorical(
            name="statistics",
            values=statistics,
            structural=True,
            why="one reduction instead of two, at the price of more arithmetic or of a check",
        ),
        Ordinal(
            name="accumulators",
            values=(1, 2, 4),
            when=(When(parameter="statistics", values=tuple(s for s in statistics if s != "welford")),),
            why="independent sums shorten the chain of additions",
        ),
        Categorical(
            name="reduction",
            values=("warp", "shuffle", "broadcast", "leader"),
            structural=True,
            why="barriers against redundant work",
        ),
    ]
    if hopper:
        found.append(
            Ordinal(name="cluster", values=(1, 2, 4, 8), structural=True, why="several SMs share a row")
        )
        found.append(
            Categorical(
                name="launch",
                values=("plain", "programmatic"),
                structural=True,
                why="blocks start while the kernel before them ends",
            )
        )
    found += [
        Ordinal(
            name="row_split",
            values=(1, 2, 4, 8, 16),
            structural=True,
            when=(When(parameter="grid", values=("rows",)),),
            why="several blocks read the whole row and write a part each, where rows are few",
        ),
        Categorical(
            name="affine_load",
            values=("early", "late", "stream", "kept", "shared"),
            structural=True,
            why="weight and bias: hide their latency, or save their registers",
        ),
        Categorical(
            name="x_load",
            values=("default", "nc", "no_allocate", "no_allocate_256B", "cs", "lu", "evict_first"),
            when=(direct,),
            why="data used once need not displace what is used again",
        ),
        Categorical(
            name="y_store", values=("default", "cg", "cs", "wt", "no_allocate", "evict_first"), why="as for x_load"
        ),
        Categorical(name="affine_hint", values=("nc", "evict_last"), why="weight and bias are used by every row"),
        Ordinal(
            name="unroll",
            values=(1, 2, 4, 8),
            when=(
                When(parameter="row_store", values=("shared", "reread")),
                When(parameter="affine_load", values=("stream", "shared")),
            ),
            why="loads in flight against registers",
        ),
        Ordinal(
            name="min_blocks",
            values=(0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
            why="caps registers so that so many blocks fit an SM",
        ),
    ]
    return tuple(found)


def _constraints(workload: Workload, limits: Limits) -> tuple[Constraint, ...]:
    rule, columns = Derivation(lambda point: shape_of(point, workload), INACTIVE).constraint, workload.dim("cols")

    threads_per_sm = limits.threads_per_multiprocessor
    smem_per_sm = limits.smem_bytes_per_multiprocessor
    return (
        rule("vector_holds_element", lambda p, s: p["vector_bytes"] >= s.element_bytes, "a vector holds an element"),
        rule("block_threads", lambda p, s: 32 <= s.threads <= 1024, "a block has 32 to 1024 threads"),
        rule(
            "named_barriers",
            lambda p, s: p["threads_per_row"] <= 32 or p["rows_per_block"] <= 16,
            "a block has 16 hardware barriers, one a row",
        ),
        rule(
            "threads_have_work",
            lambda p, s: p["threads_per_row"] * p["cluster"] <= max(32, s.packets),
            "beyond one warp, no more threads than vectors in a row",
        ),
        rule(
            "reduction_fits",
            lambda p, s: (p["reduction"] == "warp") == (p["threads_per_row"] <= 32 and p["cluster"] == 1)
            and (p["cluster"] == 1 or p["reduction"] == "shuffle"),
            "the reduction is 'warp' exactly where a row has at most 32 threads; a cluster reduces by 'shuffle'",
        ),
        rule(
            "f32_row_is_distinct",
            lambda p, s: p["row_store"] != "registers_f32" or s.element_bytes == 2,
            "registers_f32 differs from registers only for 16-bit dtypes",
        ),
        rule(
            "registers_fit",
            lambda p, s: s.registers
            <= min(255, limits.registers_per_multiprocessor // max(32, s.threads * max(1, p["min_blocks"]))),
            "what is held in registers must fit those of a thread",
        ),
        rule(
            "unrolled_loops_are_short",
            lambda p, s: s.iterations <= 16
            or not (
                p["row_store"] in ("registers", "registers_f32") or p["affine_load"] in ("early", "late", "kept")
            ),
            "loops over registers are unrolled whole: at most 16 vectors a thread",
        ),
        rule("passes_are_short", lambda p, s: s.iterations <= 2048, "at most 2048 vectors a thread"),
        rule(
            "staged_rows_are_aligned",
            lambda p, s: not s.staged or (not s.edges and p["vector_bytes"] >= 4),
            "asynchronous copies move whole vectors of at least 4 bytes",
        ),
        rule(
            "cp_async_is_unrolled",
            lambda p, s: p["load_path"] != "cp_async" or s.iterations <= 32,
            "cp_async issues at most 32 vectors a thread and row",
        ),
        rule(
            "bulk_rows",
            lambda p, s: p["load_path"] != "bulk"
            or (columns * s.element_bytes % 16 == 0 and p["vector_bytes"] == 16 and p["cluster"] == 1),
            "bulk copies need rows of a multiple of 16 bytes, 16-byte vectors and no cluster",
        ),
        rule(
            "stages_need_rows",
            lambda p, s: not s.staged or p["stages"] == 1 or p["grid"] == "persistent",
            "more than one stage needs a persistent grid",
        ),
        rule(
            "shared_memory",
            lambda p, s: s.smem_bytes <= limits.smem_bytes_per_block - _SMEM_STATIC_BYTES,
            "stages and shared weight and bias must fit the shared memory of a block",
        ),
        rule(
            "shared_occupancy",
            lambda p, s: p["grid"] != "persistent"
            or (s.smem_bytes + limits.smem_bytes_reserved_per_block) * p["blocks_per_sm"] <= smem_per_sm,
            "blocks_per_sm blocks must fit the shared memory of an SM",
        ),
        rule(
            "resident_threads",
            lambda p, s: p["grid"] != "persistent" or p["blocks_per_sm"] * s.threads <= threads_per_sm,
            "blocks_per_sm blocks must fit the threads of an SM",
        ),
        rule(
            "min_blocks_resident",
            lambda p, s: p["min_blocks"] * s.threads <= threads_per_sm,
            "min_blocks blocks must fit the threads of an SM",
        ),
        rule(
            "kept_needs_persistence",
            lambda p, s: p["affine_load"] not in ("kept", "shared") or (p["grid"] == "persistent" and not s.edges),
            "kept and shared weight and bias need a persistent grid and aligned rows",
        ),
        rule(
            "reread_is_direct",
            lambda p, s: p["row_store"] != "reread" or p["load_path"] == "direct",
            "a row that is read again is loaded directly",
        ),
        rule(
            "whole_packets",
            lambda p, s: p["statistics"] not in ("welford", "shifted") or not s.edges,
            "welford and shifted count whole vectors",
        ),
        rule(
            "sums_are_16_bit",
            lambda p, s: p["statistics"] not in ("shifted", "sums") or s.element_bytes == 2,
            "shifted and plain sums are exact enough for 16-bit results only",
        ),
        rule(
            "welford_is_short",
            lambda p, s: p["statistics"] != "welford" or s.element_bytes == 2 or s.iterations <= 32,
            "a running mean over more than 32 vectors loses digits that float32 results show",
        ),
        rule(
            "chains_are_short",
            lambda p, s: s.element_bytes == 2
            or p["statistics"] == "welford"
            or s.iterations * s.lanes // min(p["accumulators"], s.lanes) <= 64,
            "one running float32 sum over more than 64 elements loses the small ones beside an outlier, and all roundings"
            " of equal ones go one way",
        ),
        rule(
            "shifted_is_short",
            lambda p, s: p["statistics"] != "shifted" or s.iterations * s.lanes <= 256,
            "sums about a thread's first element lose digits over more than 256 elements, should that be an outlier",
        ),
        rule(
            "cluster_shape",
            lambda p, s: p["cluster"] == 1
            or (
                p["rows_per_block"] == 1
                and p["threads_per_row"] >= 32
                and p["threads_per_row"] * p["cluster"] <= 1024
                and p["row_split"] == 1
            ),
            "a cluster works on one row with at most 32 warps in all",
        ),
        rule(
            "row_split_parts",
            lambda p, s: p["row_split"] == 1
            or (
                p["load_path"] == "direct"
                and p["row_store"] in ("registers", "registers_f32")
                and not s.edges
                and s.packets % p["threads_per_row"] == 0
                and s.packets % p["row_split"] == 0
            ),
            "row_split divides the vectors of a row, of which every thread has as many, held in registers",
        ),
    )


_DEFAULT_THREADS = (64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)


def _default(workload: Workload) -> Point:
    """A good point, legal on every architecture for every number of columns: the row in registers while it fits.

    Found by sweeps on an H200: about 32 elements a thread for 16-bit dtypes and 8 for float32, in the number of
    warps that leaves the fewest lanes idle, read in the widest vectors that divide the row.
    """
    element_bytes, columns = DTYPE_BYTES[workload.dtype], workload.dim("cols")
    half = element_bytes == 2
    whole_bytes = power_dividing(columns, 16 // element_bytes) * element_bytes
    vector = min(whole_bytes, 8) if half and columns * element_bytes >= 4096 else whole_bytes
    if columns * element_bytes // vector > 16 * 1024:  # odd and long: wide vectors with edges
        vector = 8
    lanes = vector // element_bytes
    packets = -(-columns // lanes)
    threads = _default_threads(packets, (8 if not half else 32 if columns <= 8192 else 43) / lanes)
    point: Point = {
        "vector_bytes": vector,
        "threads_per_row": threads,
        "rows_per_block": max(1, 128 // threads),
        "row_store": "registers",
        "load_path": "direct",
        "grid": "rows",
        "statistics": "shifted" if half else "chan",
        "accumulators": 4,
        "reduction": "warp" if threads == 32 else "broadcast" if threads <= 160 else "shuffle",
        "row_split": 1,
        "affine_load": "early",
        "x_load": "nc",
        "y_store": "default",
        "affine_hint": "nc",
        "min_blocks": 0,
    }
    shape = shape_of(point, workload)
    if shape.iterations * max(1, vector // 4) > 16 or shape.threads > 192:
        point["affine_load"] = "late"
    if shape.edges:
        point["statistics"] = "two_pass"
    if shape.edges or shape.threads > 256:
        point["affine_load"] = "stream"
    shape = shape_of(point, workload)
    if shape.iterations > 16 or shape.registers + 12 > 65536 // shape.threads:
        return point | {
            "row_store": "reread",
            "threads_per_row": 512,
            "rows_per_block": 1,
            "affine_load": "stream",
            "reduction": "shuffle",
            "unroll": 4,
        }
    if not shape.edges and shape.registers <= 52 and shape.threads <= 512:
        point["min_blocks"] = 1024 // shape.threads  # 64 registers a thread, half the threads an SM can hold
    return point


def _default_threads(packets: int, vectors_a_thread: float) -> int:
    aim = min(max(1.0, vectors_a_thread), 16.0)
    if packets <= 32 * min(16.0, aim * 1.5):
        return 32
    options = [t for t in _DEFAULT_THREADS if t <= packets <= 16 * t] or [512]
    return min(options, key=lambda t: (-(-packets // t) * t / packets > 1.07, abs(packets / t - aim)))


def space(workload: Workload, limits: Limits) -> Space:
    options = dict(workload.options)
    statistics = _CENTRED if "bias" in options else ("squares",)
    default = _default(workload)
    if default["statistics"] not in statistics:
        default["statistics"] = statistics[0]
    if limits.capability >= _ARCH_HAS_CLUSTERS:
        default |= {"cluster": 1, "launch": "plain"}
    return Space(
        parameters=_parameters(limits, statistics, residual=bool(options.get("residual", True))),
        constraints=_constraints(workload, limits),
        default=default,
    )
