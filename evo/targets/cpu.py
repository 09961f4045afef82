"""The machine's own cores: C++ with OpenMP, compiled by the system's compiler into shared libraries.

Architectures are what -march takes: native (this machine's), x86-64-v3, znver4, armv8-a, ...
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from evo.errors import DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.problem.render import Source
from evo.targets import DeviceInfo, Session, Target
from evo.targets._cpu_compiler import build_library, check_arch, compiler_path, compiler_version, extra_features
from evo.targets._machine_code import elf_code_hash

__all__ = ["TARGET", "CpuTarget"]

_CACHE_WHERE_UNKNOWN = 32 << 20
_VIRTUAL_CACHE_PER_CORE = 16 << 20
"""More than servers have: 2 to 12 MB of last-level cache a core."""


class CpuTarget:
    """The methods are those of `evo.targets.Target`. `compiler`: name or path; None takes the first of
    g++, c++, clang++."""

    name = "cpu"
    language = "cpp"
    shares_cores = True

    def __init__(self, compiler: str | None = None) -> None:
        self._compiler = compiler

    def device(self) -> DeviceInfo:
        limits = _machine("native")
        details = {"cores": str(limits.multiprocessors), "cache_bytes": str(limits.cache_bytes)}
        return DeviceInfo(name=_processor(), arch="native", driver=platform.release(), details=details)

    def limits(self, arch: str) -> Limits:
        """Cores this process may use, and their last-level cache. Raises DeviceError for an unknown arch."""
        check_arch(compiler_path(self._compiler), arch)
        return _machine(arch)

    def runs(self, arch: str) -> str:
        path = compiler_path(self._compiler)
        check_arch(path, arch)
        if not (extra := extra_features(path, arch)):
            return ""
        return f"this is {_processor()} without {', '.join(extra)}; code for {arch} does not run here"

    def compiler(self) -> str:
        """With the processor: what -march=native means depends on it."""
        return f"{compiler_version(compiler_path(self._compiler))}, on {_processor()} [{_features()}]"

    def compile(self, source: Source, arch: str, workdir: Path) -> Binary:
        """Raises CompileError; DeviceError for no compiler or an unknown arch; UsageError for a full disk."""
        path = compiler_path(self._compiler)
        check_arch(path, arch)
        code, log = build_library(source, arch, path, workdir)
        return Binary(code=code, code_hash=elf_code_hash(code), log=log)

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        return None

    def open(self, index: int = 0) -> Session:
        if index:
            raise DeviceError(f"target cpu has one device, 0; got {index}")
        from evo.targets._cpu_session import CpuSession

        return CpuSession(self.device(), _machine("native"))


@cache
def _machine(arch: str) -> Limits:
    cores = _usable_cores()
    return Limits(arch=arch, multiprocessors=len(cores), threads_per_block=1, cache_bytes=_cache_bytes(cores))


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cache_bytes(cores: frozenset[int]) -> int:
    """The last-level caches of `cores`, each counted once; on a virtual machine no more than its cores' likely share,
    for there the host's whole cache is reported, which others fill."""
    found = _reported_cache_bytes(cores) or _CACHE_WHERE_UNKNOWN
    virtual = re.search(r"^flags\s*:.*\bhypervisor\b", _cpuinfo(), re.MULTILINE)
    return min(found, _VIRTUAL_CACHE_PER_CORE * len(cores)) if virtual else found


def _reported_cache_bytes(cores: frozenset[int]) -> int:
    found: dict[tuple[int, str], int] = {}
    for core in cores:
        for folder in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            with suppress(OSError, ValueError, KeyError):
                if (folder / "type").read_text().strip() == "Instruction":
                    continue
                size = re.fullmatch(r"(\d+)([KMG]?)", (folder / "size").read_text().strip())
                if size is not None:
                    level = int((folder / "level").read_text())
                    sharers = (folder / "shared_cpu_list").read_text().strip()
                    found[level, sharers] = int(size.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[size.group(2)]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


@cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""


def _processor() -> str:
    found = re.search(r"^(?:model name|Model|Processor)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


@cache
def _features() -> str:
    """Eight hexadecimal digits that stand for the instruction set."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    flags = sorted(found.group(1).split()) if found else [platform.machine(), platform.processor()]
    return hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]


TARGET: Target = CpuTarget()
