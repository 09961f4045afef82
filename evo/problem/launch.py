"""Launch geometry, and the limits of architectures that it has to respect."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from evo.errors import KernelError

__all__ = ["Launch", "LaunchPlan", "Limits"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """CUDA launch geometry and launch attributes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    """Bytes, a power of two, that every address passed must be a multiple of. Where one is not, the entry point
    NAME_unaligned of the same source is launched instead: same grid and block, no dynamic shared memory, no cluster."""
    programmatic: bool = False
    """Programmatic dependent launch (sm_90 on): blocks may start while the kernel before in the stream still runs. The
    source has to wait for it (griddepcontrol.wait) before it reads or writes global memory. CUDA C++ Programming
    Guide, "Programmatic Dependent Launch and Synchronization"."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Launch geometry as data, so that exported launchers can evaluate it without evo.

    One block (of `threads`) a tile, where the tiles cut the named dimensions; `blocks_per_tile` of them if several
    share one. The grid is a line of all tiles or, with `axes`, has an axis for each of at most three cut dimensions, the
    first of which varies fastest (CUDA allows 65,535 blocks along the others). A persistent grid has at most
    `blocks_per_multiprocessor` blocks for each SM. A cluster is `cluster` blocks where others have one. `alignment` and
    `programmatic` are those of a Launch.
    """

    threads: int
    tiles: tuple[tuple[str, int], ...] = ()
    blocks_per_tile: int = 1
    blocks_per_multiprocessor: int | None = None
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    programmatic: bool = False
    axes: bool = False

    def __post_init__(self) -> None:
        if self.axes and (len(self.tiles) > 3 or self.blocks_per_multiprocessor is not None):
            raise KernelError("a launch plan with axes cuts at most three dimensions, and its grid is not persistent")

    def at(self, dims: Mapping[str, int], multiprocessors: int) -> Launch:
        counts = [-(-dims[name] // size) for name, size in self.tiles]
        if self.axes:
            x, y, z = (*counts, 1, 1, 1)[:3]
        else:
            x, y, z = math.prod(counts), 1, 1
        x *= self.blocks_per_tile
        if self.blocks_per_multiprocessor is not None:
            x = min(x, max(1, multiprocessors * self.blocks_per_multiprocessor // self.cluster))
        return Launch(
            grid=(x * self.cluster, y, z),
            block=(self.threads, 1, 1),
            smem_bytes=self.smem_bytes,
            cluster=self.cluster,
            alignment=self.alignment,
            programmatic=self.programmatic,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an architecture or machine offers, as far as spaces and launches depend on it.

    For CUDA: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
    """

    arch: str
    multiprocessors: int = 1
    """SMs of the GPU, or usable cores of the CPU."""
    threads_per_block: int = 1024
    threads_per_multiprocessor: int = 1536
    registers_per_multiprocessor: int = 65536
    smem_bytes_per_block: int = 0
    """With opt-in, not the static 48 KB."""
    smem_bytes_per_multiprocessor: int = 0
    smem_bytes_reserved_per_block: int = 1024
    blocks_per_multiprocessor: int = 24
    cache_bytes: int = 0
    """L2 of the GPU, last-level cache of the CPU."""

    @property
    def capability(self) -> int:
        """89 for sm_89 and sm_89a; 0 where the architecture is no GPU."""
        found = re.match(r"(?:sm|compute)_(\d+)", self.arch)
        return int(found.group(1)) if found else 0
