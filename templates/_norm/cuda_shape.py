"""What follows from a point of the CUDA space, the dtype and the number of columns: sizes and launch geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evo.problem.kernel import DTYPE_BYTES, LaunchPlan, Workload
from evo.problem.space import Value

from .weights import element_bytes as weight_bytes

__all__ = ["INACTIVE", "Shape", "plan", "power_dividing", "shape_of"]

INACTIVE: dict[str, Value] = {
    "stages": 1,
    "blocks_per_sm": 1,
    "prefetch": 0,
    "accumulators": 1,
    "cluster": 1,
    "row_split": 1,
    "x_load": "default",
    "unroll": 1,
    "launch": "plain",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that follow from a point, the dtype and the columns."""

    element_bytes: int
    lanes: int
    weight_packet_bytes: int
    edges: bool
    packets: int
    iterations: int
    threads: int
    staged: bool
    smem_bytes: int
    registers: int


def power_dividing(columns: int, at_most: int) -> int:
    power = 1
    while power * 2 <= at_most and columns % (power * 2) == 0:
        power *= 2
    return power


def shape_of(point: Mapping[str, Value], workload: Workload) -> Shape:
    p: dict[str, Any] = {**INACTIVE, **point}
    element_bytes, columns = DTYPE_BYTES[workload.dtype], workload.dim("cols")
    wider = weight_bytes(workload) // element_bytes
    lanes = max(1, p["vector_bytes"] // element_bytes)
    edges = columns % lanes != 0
    shift = lanes - power_dividing(columns, lanes) if edges else 0
    packets = -(-(columns + shift) // lanes)
    iterations = -(-packets // (p["threads_per_row"] * p["cluster"]))
    staged = p["load_path"] != "direct"
    vectors = 1 if p["statistics"] == "squares" else 2  # weight, and bias where there is a mean
    smem, slot_bytes = 0, max(4, p["vector_bytes"])  # a vector takes at least a bank of shared memory
    if staged or p["row_store"] == "shared":
        stages = p["stages"] if staged else 1
        smem += p["rows_per_block"] * stages * iterations * p["threads_per_row"] * slot_bytes
    if p["affine_load"] == "shared":
        smem += vectors * packets * max(4, wider * p["vector_bytes"])
    packed = iterations * max(1, p["vector_bytes"] // 4)
    registers = 24 + (2 * lanes if p["statistics"] == "welford" else 0)
    if p["row_store"] in ("registers", "registers_f32"):
        registers += packed * (2 if p["prefetch"] else 1)
        if p["row_store"] == "registers_f32":
            registers += iterations * lanes - (0 if p["prefetch"] else packed)
    if p["affine_load"] in ("early", "late", "kept"):
        registers += vectors * -(-iterations * max(1, wider * p["vector_bytes"] // 4) // p["row_split"])
    return Shape(
        element_bytes=element_bytes,
        lanes=lanes,
        weight_packet_bytes=wider * p["vector_bytes"],
        edges=edges,
        packets=packets,
        iterations=iterations,
        threads=p["threads_per_row"] * p["rows_per_block"],
        staged=staged,
        smem_bytes=smem,
        registers=registers,
    )


def plan(point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    p: dict[str, Any] = {**INACTIVE, **point}
    shape = shape_of(point, workload)
    return LaunchPlan(
        threads=shape.threads,
        tiles=(("rows", p["rows_per_block"]),),
        blocks_per_tile=p["row_split"],
        blocks_per_multiprocessor=p["blocks_per_sm"] if p["grid"] == "persistent" else None,
        smem_bytes=shape.smem_bytes,
        cluster=p["cluster"],
        alignment=min(16, shape.weight_packet_bytes) if shape.lanes > 1 else 1,  # more is moved in halves
        programmatic=p["launch"] == "programmatic",
    )
