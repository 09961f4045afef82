"""The machine's own cores, for shared libraries. Architectures are what the compiler's -march takes."""

import os
import platform
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from evo.problem.kernel import Limits
from evo.runtime.cpu import features, machine, model
from evo.targets import DeviceInfo, Sanitizer, Session, Target, find_language
from evo.targets.languages.cpp import check_arch, compiler_path, extra_features

_CACHE_WHERE_UNKNOWN = 32 << 20
_VIRTUAL_CACHE_PER_CORE = 16 << 20
"""More than servers have: 2 to 12 MB of last-level cache a core."""


class CpuTarget:
    """The methods are those of `evo.targets.Target`."""

    name = "cpu"
    language = "cpp"
    example_arch = "native"
    shares_cores = True
    summed_bytes = 32 << 20
    compared_elements = 1 << 18
    believed_share = 0.5

    def device(self) -> DeviceInfo:
        limits = _machine("native")
        details = {"cores": str(limits.multiprocessors), "cache_bytes": str(limits.cache_bytes)}
        return DeviceInfo(name=model(), arch="native", driver=platform.release(), details=details)

    def devices(self) -> dict[str, str]:
        return {"0": model()}

    def restrict(self, devices: Sequence[str]) -> None:
        """There is one: all cores together."""

    def limits(self, arch: str) -> Limits:
        """Cores this process may use, and their last-level cache. Raises DeviceError for an unknown arch."""
        check_arch(compiler_path(), arch)
        return _machine(arch)

    def runs(self, arch: str) -> str:
        path = compiler_path()
        check_arch(path, arch)
        if not (extra := extra_features(path, arch)):
            return ""
        return f"this is {model()} without {', '.join(extra)}; code for {arch} does not run here"

    def compiler(self) -> str:
        return find_language(self.language).compiler()

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def has_room(self, size: int) -> bool:
        return self.free_bytes() >= size

    def memory_bytes(self) -> int:
        return self.free_bytes()

    def machine_code(self, arch: str) -> str:
        return arch

    def owns(self, arch: str) -> bool:
        return re.match(r"(sm|compute)_", arch) is None

    def with_intermediate(self, archs: Sequence[str]) -> tuple[str, ...]:
        return tuple(archs)

    def torch_as_on(self, arch: str) -> AbstractContextManager[None]:
        return nullcontext()

    def needs(self, arch: str, flags: Sequence[str]) -> dict[str, Any]:
        """The machine, and the instruction sets that code for -march=`arch` may use; None in their place where they are not
        known, so that it is built anew."""
        found: list[str] | None = None
        if arch == "native":
            found = sorted(features()) or None
        elif arch in _PSABI and not any(f.startswith("-m") for f in flags):
            levels = list(_PSABI)[: list(_PSABI).index(arch) + 1]
            found = sorted(f for level in levels for f in _PSABI[level].split())
        return {"machine": machine(), "features": found}

    def sanitizer(self) -> Sanitizer:
        from evo.targets._sanitizers import Gcc

        return Gcc()

    def open(self) -> Session:
        from evo.targets._cpu_session import CpuSession

        return CpuSession(self.device(), _machine("native"))


_PSABI = {
    "x86-64": "sse sse2",
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
"""The instruction sets that each level adds, as Linux spells it and evo.runtime.cpu reports it. Source: x86-64 psABI, table
"Micro-Architecture Levels"."""


@cache
def _machine(arch: str) -> Limits:
    cores = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    return Limits(arch=arch, multiprocessors=len(cores), threads_per_block=1, cache_bytes=_cache_bytes(cores))


def _cache_bytes(cores: frozenset[int]) -> int:
    """The last-level caches of `cores`, each counted once; on a virtual machine at most its cores' likely share, because
    it reports the host's whole cache, which other machines use, too."""
    found = _reported_cache_bytes(cores) or _CACHE_WHERE_UNKNOWN
    return min(found, _VIRTUAL_CACHE_PER_CORE * len(cores)) if _is_virtual() else found


def _reported_cache_bytes(cores: frozenset[int]) -> int:
    found: dict[str, int] = {}
    for core in cores:
        with suppress(OSError, ValueError):
            last = max(Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"))
            found[(last / "shared_cpu_list").read_text()] = int((last / "size").read_text().strip().removesuffix("K")) << 10
    return sum(found.values())


def _is_virtual() -> bool:
    with suppress(OSError):
        return re.search(r"^flags\s*:.*\bhypervisor\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
    return False


TARGET: Target = CpuTarget()
