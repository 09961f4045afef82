"""How candidates are compiled by NVRTC (evo/runtime/nvrtc.py): with which headers and options, and what ptxas says of them.

The compiler and the headers come as wheels (nvidia-cuda-nvrtc, nvidia-cuda-runtime), or from an installed toolkit.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evo.errors import CompileError, DeviceError
from evo.runtime.nvrtc import Compiler, Refused
from evo.runtime.package import Unavailable

__all__ = [
    "NvrtcOutput",
    "PtxasFigures",
    "compiler_name",
    "nvrtc_version",
    "ptxas_figures",
    "run_nvrtc",
]

_REMEDY = "install it with: pip install 'evo-kernels[cu13]' (or [cu12], for drivers older than 580)"


@dataclass(frozen=True, kw_only=True)
class NvrtcOutput:
    """A cubin, or PTX text in UTF-8, and the log of both compilers (NVRTC, ptxas)."""

    code: bytes
    log: str


@cache
def _compiler() -> Compiler:
    """Raises DeviceError."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return Compiler(str(load_nvidia_dynamic_lib("nvrtc").abs_path))
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(f"the CUDA compiler NVRTC cannot be loaded ({reason}); {_REMEDY}") from error


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the CUDA release NVRTC belongs to. Raises DeviceError."""
    return _compiler().version


@cache
def compiler_name() -> str:
    """NVRTC's version with the patch level, and the CUDA headers': both shape the code. Raises DeviceError."""
    # nvrtcVersion leaves the patch level out; the head of any PTX has it.
    probe = run_nvrtc('extern "C" __global__ void probe() {}', "compute_80", ())
    found = re.search(rb"release [\d.]+, V([\d.]+)", probe.code)
    version = found.group(1).decode() if found else ".".join(map(str, nvrtc_version()))
    text = (_header_dirs()[0] / "cuda_runtime_api.h").read_text(errors="replace")
    headers = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return f"nvrtc {version}, headers {headers.group(1) if headers else 'unknown'}"


@cache
def _header_dirs() -> tuple[Path, ...]:
    """Where cuda_fp16.h is, then libcu++ (cuda/std) if there is one. Raises DeviceError."""
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


def run_nvrtc(text: str, arch: str, flags: Iterable[str], include_dirs: Iterable[str] = ()) -> NvrtcOutput:
    """Compiles `text` to a cubin for sm_XX, to PTX for compute_XX.

    Raises CompileError with the log, which names lines; DeviceError where the compiler is missing or does not
    know `arch`.
    """
    flags = tuple(flags)
    _check_arch(arch)
    options = [
        *(() if any(f.startswith(("--std", "-std")) for f in flags) else ("--std=c++17",)),
        *flags,
        "--ptxas-options=-v",
        # Where there is a driver, NVRTC takes machine code from the driver's cache, and ptxas then reports nothing.
        *(("--no-cache",) if nvrtc_version() >= (12, 9) else ()),
        *(f"--include-path={d}" for d in (*include_dirs, *map(str, _header_dirs()))),
    ]
    try:
        code, log = _compiler().compile(text.encode(), {}, options, arch)
    except Refused as error:
        raise CompileError(_steady(error.log)) from None
    except Unavailable as error:
        raise CompileError(str(error)) from None
    return NvrtcOutput(code=code, log=_steady(log))


def _steady(log: str) -> str:
    """Without ptxas's own time, which would have every compilation of one source differ."""
    return re.sub(r"\n?ptxas info +: Compile time = .*", "", log)


def _check_arch(arch: str) -> None:
    numbers = _compiler().architectures()
    found = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if found is None or int(found.group(1)) not in numbers:
        version = ".".join(map(str, nvrtc_version()))
        raise DeviceError(
            f"NVRTC {version} does not compile for {arch!r}; it knows sm_XX and compute_XX with XX one of "
            f"{', '.join(map(str, numbers))}"
        )


@dataclass(frozen=True, kw_only=True)
class PtxasFigures:
    """What ptxas -v says of one entry point."""

    registers: int
    spill_bytes: int
    """Bytes stored and bytes loaded, summed over the instructions that spill, a thread."""
    smem_static_bytes: int
    stack_bytes: int


def ptxas_figures(log: str, entry: str) -> PtxasFigures | None:
    """The figures of `entry` in a log of ptxas -v; None where it is not in it (PTX has no ptxas)."""
    _, compiled, rest = log.partition(f"Compiling entry function '{entry}'")
    if not compiled:
        return None
    # Functions that were not inlined report their own stack frames within the section of their entry.
    section = rest.partition("Compiling entry function")[0].partition(f"Function properties for {entry}\n")[2]

    def figure(pattern: str) -> int:
        found = re.search(pattern, section)
        return int(found.group(1)) if found else 0

    return PtxasFigures(
        registers=figure(r"Used (\d+) registers"),
        spill_bytes=figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads"),
        smem_static_bytes=figure(r"(\d+) bytes smem"),
        stack_bytes=figure(r"(\d+) bytes stack frame"),
    )
