"""Launch geometry, and the limits of architectures that it has to respect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from evo.runtime.package import LaunchPlan

__all__ = ["Launch", "LaunchPlan", "Limits"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """CUDA launch geometry and launch attributes of one launch; what they mean is told in LaunchPlan."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int = 0
    cluster: int = 1
    alignment: int = 1
    programmatic: bool = False

    @classmethod
    def of(cls, plan: LaunchPlan, sizes: Mapping[str, int], multiprocessors: int) -> Launch:
        return cls(
            grid=plan.grid(sizes, multiprocessors),
            block=(plan.threads, 1, 1),
            smem_bytes=plan.smem_bytes,
            cluster=plan.cluster,
            alignment=plan.alignment,
            programmatic=plan.programmatic,
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
