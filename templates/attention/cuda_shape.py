"""What follows from a point of the CUDA space and the head dimension: sizes and launch geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evo.problem.kernel import LaunchPlan, Workload
from evo.problem.space import Value

__all__ = ["INACTIVE", "Shape", "plan", "shape_of"]

INACTIVE: dict[str, Value] = {
    "launch": "plain",
    "epilogue": "direct",
    "grid": "tiles",
    "order": "rows",
    "rows": "together",
    "merge": "over",
    "barrier": "block",
    "v_wait": "early",
    "first_copies": "few",
    "k_parts": 1,
    "split_kv": 1,
    "heads_a_tile": 1,
    "shared_base": "asked",
    "copies": "unrolled",
    "stagger": "none",
    "mask": "inside",
    "mask_tiles": "all",
    "l2": "plain",
    "scores": "float",
    "values": "float",
    "unroll": 0,
}

_FLOAT, _ELEMENT = 4, 2
"""Bytes."""

_TILE_LIST = 1024 // 8 + 1024 * 2
"""Bytes, for a bit and a number of so many tiles."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that follow from a point and the head dimension."""

    threads: int
    block_m: int
    keys: int
    """Of a warp in a step."""
    smem_bytes: int
    registers: int
    """What a thread holds at least while a step is computed; what addresses and loops need is not in it."""


def shape_of(point: Mapping[str, Value], head_dim: int) -> Shape:
    p: dict[str, Any] = {**INACTIVE, **point}
    rows = 16 * p["m_tiles"]
    block_m, keys = rows * p["warps_m"], p["block_n"] // p["warps_n"]
    pitch = head_dim * _ELEMENT + (16 if p["layout"] == "padding" else 0)
    smem = (block_m + p["block_n"] * (p["k_stages"] + p["v_stages"])) * pitch
    if p["warps_n"] > 1:
        merged = p["warps_n"] * block_m * (head_dim + 2) * _FLOAT
        smem = smem + merged if p["merge"] == "beside" else max(smem, merged)
    if p["split_kv"] > 1:  # what the other blocks of a cluster send each warp: maxima, sums and a share of its rows
        others, share = p["split_kv"] - 1, max(8, head_dim // p["warps_n"] // p["split_kv"])
        smem += others * block_m * p["warps_n"] * (share + 2) * _FLOAT
    if p["mask_tiles"] == "seen":
        smem += _TILE_LIST
    scores = keys // 2  # a tile of 16 rows takes so many registers
    registers = p["m_tiles"] * (head_dim // 2 + scores * (1 + p["ahead"]) + 4)
    if p["q_store"] == "registers":
        registers += p["m_tiles"] * head_dim // 4
    if p["values"] == "half":
        registers += p["m_tiles"] * head_dim // 4
    return Shape(
        threads=32 * p["warps_m"] * p["warps_n"], block_m=block_m, keys=keys, smem_bytes=smem, registers=registers
    )


def plan(point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    p: dict[str, Any] = {**INACTIVE, **point}
    shape = shape_of(point, workload.dim("head_dim"))
    rows = ("q_len", shape.block_m // p["heads_a_tile"])
    heads = ("heads" if p["heads_a_tile"] == 1 else "kv_heads", 1)
    tiles = (rows, heads, ("batch", 1)) if p["order"] == "rows" else (heads, ("batch", 1), rows)
    persistent = p["grid"] == "persistent"
    return LaunchPlan(
        threads=shape.threads,
        tiles=tiles,
        axes=not persistent,
        blocks_per_multiprocessor=p["min_blocks"] if persistent else None,
        smem_bytes=shape.smem_bytes,
        cluster=p["split_kv"],
        alignment=16,
        programmatic=p["launch"] == "programmatic",
    )
