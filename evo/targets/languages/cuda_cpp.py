"""CUDA C++, compiled by NVRTC, with or without a GPU present."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from evo.errors import CompileError, DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.runtime.nvrtc import Compiled, Compiler, Refused, compiler, own_arch
from evo.runtime.package import Unavailable
from evo.targets import Language
from evo.targets._nvjitlink import linker

if TYPE_CHECKING:
    from evo.problem.render import Source


class CudaCpp:
    """The methods are those of `evo.targets.Language`."""

    name = "cuda_cpp"
    title = "CUDA"
    targets: tuple[str, ...] = ("cuda",)
    suffix = ".cu"
    headers: tuple[str, ...] = (".cuh", ".h")
    plain = True
    types: Mapping[str, str] = {
        "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
        "float8_e4m3fn": "__nv_fp8_e4m3", "float8_e5m2": "__nv_fp8_e5m2", "bool": "bool", "uint8": "unsigned char",
        "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    }  # fmt: skip
    declares_kernels = True

    @staticmethod
    @cache
    def compiler() -> str:
        """NVRTC's version with the patch level, and the CUDA headers': both shape the code."""
        # nvrtcVersion leaves the patch level out; the head of any PTX has it.
        ptx = run_nvrtc('extern "C" __global__ void probe() {}', "compute_80", ()).ptx
        found = re.search(rb"release [\d.]+, V([\d.]+)", ptx)
        version = found.group(1).decode() if found else ".".join(map(str, nvrtc_version()))
        text = (_header_dirs()[0] / "cuda_runtime_api.h").read_text(errors="replace")
        headers = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        return f"nvrtc {version}, headers {headers.group(1) if headers else 'unknown'}"

    @staticmethod
    def linker() -> str:
        try:
            return str(linker(nvrtc_version()))
        except Unavailable:
            return ""

    def compile(self, source: Source, arch: str, workdir: Path, device_arch: str = "") -> Binary:
        """Writes nothing to `workdir`. Registers, spills and the like are None for compute_XX. A source with a line
        `// needs sm_90a` is compiled for that where code for sm_90 is wanted."""
        from evo.targets._machine_code import code_hash, triggers_dependents
        from evo.targets.cuda import parse_arch, runs_through_ptx

        is_ptx = parse_arch(arch)[0] == "compute"
        try:
            arch = own_arch(source.text, arch)
        except Unavailable as error:
            raise CompileError(str(error)) from None
        code, log, ptx = run_nvrtc(source.text, arch, source.flags, source.include_dirs)
        figures = ptxas_figures(log, source.entry)
        if f".entry {source.entry}(".encode() not in code if is_ptx else figures is None:
            raise _no_entry(source.entry)
        return Binary(
            code=code,
            code_hash=code_hash(code),
            log=log,
            triggers_dependents=triggers_dependents(code),
            stand_in=_linked(ptx, device_arch, source.flags) if device_arch and runs_through_ptx(arch, device_arch) else b"",
            **(figures or {}),  # type: ignore[arg-type]
        )

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        """Occupancy of a launch; None while registers are unknown (PTX). Raises CompileError if there is no such entry
        point."""
        from evo.targets.cuda import resident_blocks

        if binary.registers is None:
            return None
        own = ptxas_figures(binary.log, launch.entry) if launch.entry else vars(binary)
        if own is None:
            raise _no_entry(launch.entry)
        # bar.sync with a number that the compiler does not know reserves all 16 barriers: on 9.0 that allows four blocks.
        barriers = max((int(n) for n in re.findall(r"used (\d+) barriers", binary.log)), default=0)
        blocks = resident_blocks(own["registers"], own["smem_static_bytes"] or 0, launch, limits, barriers)
        return blocks * prod(launch.block) / limits.threads_per_multiprocessor

    def recipe(self, flags: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {"flags": with_standard(flags)}


def _linked(ptx: bytes, arch: str, flags: Sequence[str]) -> bytes:
    """Machine code of PTX for the device that runs it; without a linker the PTX, which the driver compiles there. Raises
    CompileError."""
    try:
        found = linker(nvrtc_version())
    except Unavailable:
        return ptx
    return found.link(ptx, arch, [f.replace("--", "-", 1) for f in flags if f.lstrip("-").startswith(_LINKED)])


_LINKED = ("lineinfo", "maxrregcount")
"""Flags that say something of machine code, and that PTX does not keep."""


def _no_entry(entry: str) -> CompileError:
    return CompileError(f'the source has no entry point {entry!r}: declare extern "C" __global__ void {entry}(...)')


# The compiler and the headers come as wheels (nvidia-cuda-nvrtc, nvidia-cuda-runtime), or from an installed toolkit.

_REMEDY = "install it with: pip install 'evo-kernels[cu13]' (or [cu12], for drivers older than 580)"


def _compiler() -> Compiler:
    """Raises DeviceError."""
    try:
        return compiler()
    except Unavailable as error:
        raise DeviceError(f"{error}; {_REMEDY}") from error


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the CUDA release NVRTC belongs to. Raises DeviceError."""
    return _compiler().version


@cache
def _header_dirs() -> tuple[Path, ...]:
    """Folders of cuda_fp16.h and, if there is one, of libcu++ (cuda/std). Raises DeviceError."""
    from cuda.pathfinder import find_nvidia_header_directory

    # Wheels of both CUDA 12 and 13 can lie side by side: headers must be of the compiler's own major version.
    major = nvrtc_version()[0]
    wheels = [f"cu{major}/include"] if major >= 13 else ["cuda_runtime/include"]
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    beside = next((root / w for root in roots for w in wheels if (root / w / "cuda_fp16.h").is_file()), None)
    found = beside or find_nvidia_header_directory("cudart")
    if found is None:
        raise DeviceError(f"the CUDA headers (cuda_fp16.h) were not found beside NVRTC; {_REMEDY}")
    extra = beside / "cccl" if beside else find_nvidia_header_directory("cccl")
    return (Path(found), Path(extra)) if extra and Path(extra).is_dir() else (Path(found),)


def run_nvrtc(text: str, arch: str, flags: Iterable[str], include_dirs: Iterable[str] = ()) -> Compiled:
    """What NVRTC makes of a source, without what differs from one compilation to the next in its log.

    Raises CompileError with the log, which names lines; DeviceError where the compiler is missing or does not
    know `arch`.
    """
    from evo.targets.cuda import parse_arch

    numbers = _compiler().architectures()
    if parse_arch(arch)[1] not in numbers:
        raise DeviceError(
            f"{_compiler()} does not compile for {arch!r}; it knows sm_XX and compute_XX with XX one of"
            f" {', '.join(map(str, numbers))}"
        )
    options = [
        *with_standard(flags),
        "--ptxas-options=-v",
        # Where there is a driver, NVRTC takes machine code from the driver's cache, and ptxas then reports nothing.
        *(("--no-cache",) if nvrtc_version() >= (12, 9) else ()),
        *(f"--include-path={d}" for d in (*include_dirs, *map(str, _header_dirs()))),
    ]
    try:
        found = _compiler().compile(text.encode(), {}, options, arch)
    except Refused as error:
        raise CompileError(_steady(error.log)) from None
    except Unavailable as error:
        raise CompileError(str(error)) from None
    return found._replace(log=_steady(found.log))


def with_standard(flags: Iterable[str]) -> list[str]:
    """The flags, behind that of a standard where they name none."""
    found = [*flags]
    return found if any(f.startswith(("--std", "-std")) for f in found) else ["--std=c++17", *found]


def _steady(log: str) -> str:
    """Without ptxas's own time, which would have every compilation of one source differ."""
    return re.sub(r"\n?ptxas info +: Compile time = .*", "", log)


def ptxas_figures(log: str, entry: str) -> dict[str, int] | None:
    """Figures of ptxas -v for an entry point, as fields of `Binary`; None where the log has none (PTX has no ptxas)."""
    _, compiled, rest = log.partition(f"Compiling entry function '{entry}'")
    if not compiled:
        return None
    # Functions that were not inlined report their own stack frames within the section of their entry.
    section = rest.partition("Compiling entry function")[0].partition(f"Function properties for {entry}\n")[2]

    def figure(pattern: str) -> int:
        found = re.search(pattern, section)
        return int(found.group(1)) if found else 0

    return {
        "registers": figure(r"Used (\d+) registers"),
        "spill_bytes": figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads"),
        "smem_static_bytes": figure(r"(\d+) bytes smem"),
        "stack_bytes": figure(r"(\d+) bytes stack frame"),
    }


LANGUAGE: Language = CudaCpp()
