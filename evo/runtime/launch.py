"""Launch geometry as data, and the grid it gives: one rule for the engine and for exported launchers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LaunchPlan"]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to launch a kernel at any size.

    One block (of `threads`) a tile, where the tiles cut the named dimensions; `blocks_per_tile` of them if several
    share one. The grid is a line of all tiles or, with `axes`, has an axis for each of at most three cut dimensions, the
    first of which varies fastest (CUDA allows 65,535 blocks along the others). A persistent grid has at most
    `blocks_per_multiprocessor` blocks for each SM. A cluster is `cluster` blocks where others have one.

    alignment: bytes, a power of two, that every address passed must be a multiple of. Where one is not, the entry point
    NAME_unaligned of the same source is launched instead: same grid and block, no dynamic shared memory, no cluster.
    programmatic: programmatic dependent launch (sm_90 on): blocks may start while the kernel before in the stream still
    runs. The source has to wait for it (griddepcontrol.wait) before it reads or writes global memory. CUDA C++
    Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """

    threads: int
    tiles: Sequence[tuple[str, int]] = ()
    blocks_per_tile: int = 1
    blocks_per_multiprocessor: int | None = None
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    programmatic: bool = False
    axes: bool = False

    def __post_init__(self) -> None:
        if self.axes and (len(self.tiles) > 3 or self.blocks_per_multiprocessor is not None):
            raise ValueError("a launch plan with axes cuts at most three dimensions, and its grid is not persistent")

    def grid(self, sizes: Mapping[str, int], multiprocessors: int) -> tuple[int, int, int]:
        """Blocks for a problem of these sizes."""
        counts = [-(-sizes[name] // size) for name, size in self.tiles]
        x, y, z = (*counts, 1, 1, 1)[:3] if self.axes else (math.prod(counts), 1, 1)
        x *= self.blocks_per_tile
        if self.blocks_per_multiprocessor is not None:
            x = min(x, max(1, multiprocessors * self.blocks_per_multiprocessor // self.cluster))
        return x * self.cluster, y, z
