"""What a command that builds and runs candidates begins with: the kernel, the target, the architecture, the workers."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass

from evo.cli.options import cache_dir, choose_arch, choose_target
from evo.executors import Executor
from evo.problem.kernel import Kernel, load_kernel
from evo.search.run import RunSettings, default_builders, open_executor
from evo.targets import find_target

__all__ = ["Setup", "set_up", "worker_settings"]

_CUDA_ARCH = re.compile(r"(sm|compute)_")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A kernel, and where its candidates are built and run."""

    kernel: Kernel
    target: str
    arch: str
    workers: RunSettings

    def open_executor(self) -> AbstractContextManager[Executor]:
        return open_executor(self.target, self.workers)


def set_up(kernel: str, target: str | None, arch: str | None, db: str) -> Setup:
    """What was named, else the best target present, the device's own architecture.

    Raises UsageError for what is unknown, and for a kernel that has no template for the target; DeviceError if nothing
    was named and nothing is present.
    """
    problem = load_kernel(kernel)
    chosen = choose_target("cuda" if target is None and arch and _CUDA_ARCH.match(arch) else target)
    problem.check_target(chosen)
    return Setup(kernel=problem, target=chosen, arch=choose_arch(chosen, arch), workers=worker_settings(chosen, db))


def worker_settings(target: str, db: str) -> RunSettings:
    """As many builders as the target leaves cores for, and the cache beside the database."""
    return RunSettings(cache_dir=cache_dir(db), builders=default_builders(find_target(target)))
