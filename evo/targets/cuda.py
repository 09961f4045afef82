"""NVIDIA GPUs: compiled by NVRTC, with or without a GPU present, and run through the CUDA driver.

Architectures: sm_89 (also sm_90a and the like) is machine code for one kind of GPU; compute_89 is PTX that
the driver compiles when it loads it, for any GPU at least as new.
"""

import importlib.util
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from evo.errors import CompileError, DeviceError, LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.problem.render import Source
from evo.runtime.nvrtc import Compiler, Refused
from evo.runtime.package import Unavailable
from evo.targets import DeviceInfo, Session, Target
from evo.targets._machine_code import code_hash, triggers_dependents


class CudaTarget:
    """The methods are those of `evo.targets.Target`."""

    name = "cuda"
    language = "cu"
    shares_cores = False

    def device(self) -> DeviceInfo:
        """GPU 0 of those that CUDA_VISIBLE_DEVICES leaves. Raises DeviceError if it or PyTorch cannot be
        used."""
        return device_info()

    def devices(self) -> dict[str, str]:
        api = driver()
        count = _ask(api.cuDeviceGetCount(), "how many GPUs there are")
        found = [_ask(api.cuDeviceGet(i), f"GPU {i}") for i in range(count)]
        return {_identity(device): _name(device) for device in found}

    def restrict(self, devices: Sequence[str]) -> None:
        """The driver reads the variable when it is initialised, and numbers what it finds there anew."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    @staticmethod
    @cache
    def limits(arch: str) -> Limits:
        """The GPU's own properties if `arch` runs on it, else those of the architecture's table.

        PTX may run on a GPU with more shared memory than its architecture guarantees: only the guaranteed size
        counts.
        """
        kind, number = parse_arch(arch)
        try:
            present = parse_arch(device_arch())[1]
        except DeviceError:
            return arch_limits(arch)
        if kind == "sm" and number == present:
            return device_limits(arch)
        promised = arch_limits(arch)
        if kind == "compute" and number <= present:
            own = device_limits(arch)
            return replace(own, smem_bytes_per_block=min(own.smem_bytes_per_block, promised.smem_bytes_per_block))
        return promised

    def runs(self, arch: str) -> str:
        parse_arch(arch)
        info = self.device()
        from evo.runtime.choice import rank_on_gpu  # imports PyTorch

        if rank_on_gpu(arch, divmod(parse_arch(info.arch)[1], 10)) is not None:
            return ""
        return f"this is {info.name} ({info.arch}); code for {arch} does not run here"

    @staticmethod
    @cache
    def compiler() -> str:
        """NVRTC's version with the patch level, and the CUDA headers': both shape the code."""
        # nvrtcVersion leaves the patch level out; the head of any PTX has it.
        ptx, _ = run_nvrtc('extern "C" __global__ void probe() {}', "compute_80", ())
        found = re.search(rb"release [\d.]+, V([\d.]+)", ptx)
        version = found.group(1).decode() if found else ".".join(map(str, nvrtc_version()))
        text = (_header_dirs()[0] / "cuda_runtime_api.h").read_text(errors="replace")
        headers = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        return f"nvrtc {version}, headers {headers.group(1) if headers else 'unknown'}"

    def compile(self, source: Source, arch: str, workdir: Path) -> Binary:
        """Writes nothing to `workdir`. Registers, spills and the like are None for compute_XX."""
        is_ptx = parse_arch(arch)[0] == "compute"
        code, log = run_nvrtc(source.text, arch, source.flags, source.include_dirs)
        figures = ptxas_figures(log, source.entry)
        if f".entry {source.entry}(".encode() not in code if is_ptx else figures is None:
            raise _no_entry(source.entry)
        return Binary(
            code=code,
            code_hash=code_hash(code),
            log=log,
            triggers_dependents=triggers_dependents(code),
            **(figures or {}),
        )

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        """Occupancy of a launch; None while registers are unknown (PTX). Raises CompileError if there is no such entry
        point."""
        if binary.registers is None:
            return None
        own = ptxas_figures(binary.log, launch.entry) if launch.entry else vars(binary)
        if own is None:
            raise _no_entry(launch.entry)
        # bar.sync with a number that the compiler does not know reserves all 16 barriers: on 9.0 that allows four blocks.
        barriers = max((int(n) for n in re.findall(r"used (\d+) barriers", binary.log)), default=0)
        blocks = resident_blocks(own["registers"], own["smem_static_bytes"] or 0, launch, limits, barriers)
        return blocks * prod(launch.block) / limits.threads_per_multiprocessor

    def open(self) -> Session:
        """Takes the GPU's primary context, which PyTorch shares. Raises DeviceError."""
        info = device_info()
        from evo.targets._cuda_session import CudaSession

        return CudaSession(info, device_limits(info.arch))


def _no_entry(entry: str) -> CompileError:
    return CompileError(f'the source has no entry point {entry!r}: declare extern "C" __global__ void {entry}(...)')


# The driver's answers. Nothing here creates a context, so that a query costs no device memory. But a process that has
# initialised the driver cannot fork a child that uses the GPU.

_WITHOUT_GPU = "run with --target cpu, or compile without one: evo check KERNEL --arch sm_89"


@cache
def driver() -> Any:
    """The driver API's bindings, initialised. Raises DeviceError if no GPU can be used."""
    try:
        from cuda.bindings import driver as api

        (error,) = api.cuInit(0)
    except (ImportError, RuntimeError, OSError) as reason:
        missing = "libcuda.so, the NVIDIA driver's library, is not installed"
        text = missing if "DynamicLib" in type(reason).__name__ else str(reason).strip().partition("\n")[0]
        raise DeviceError(f"no CUDA GPU answers ({text}): {_WITHOUT_GPU}") from reason
    if error:
        raise DeviceError(f"no CUDA GPU answers ({error_text(api, error)}): {_WITHOUT_GPU}")
    return api


def error_text(api: Any, error: Any) -> str:
    """CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered."""
    _, name = api.cuGetErrorName(error)
    _, text = api.cuGetErrorString(error)
    known = (name or b"").decode() or getattr(error, "name", "CUDA_ERROR_UNKNOWN")
    return f"{known} ({int(error)}): {(text or b'unknown error').decode()}"


def expect(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call's result, which begins with a status. Raises LaunchError: `doing` and CUDA's message."""
    error, *values = result
    if error:
        raise LaunchError(f"{doing}: {error_text(driver(), error)}")
    return values[0] if values else None


def _ask(result: tuple[Any, ...], what: str) -> Any:
    """Like `expect`, for queries about the device. Raises DeviceError."""
    try:
        return expect(result, f"the CUDA driver does not report {what}")
    except LaunchError as error:
        raise DeviceError(f"{error}; {_WITHOUT_GPU}") from error


def driver_version() -> tuple[int, int]:
    """(major, minor) of the newest CUDA the driver supports. Raises DeviceError."""
    number = int(_ask(driver().cuDriverGetVersion(), "its version"))
    return number // 1000, number % 1000 // 10


def ptx_advice(nvrtc: tuple[int, int], supported: tuple[int, int]) -> str:
    """Why this compiler's PTX does not load on a driver that supports CUDA up to `supported`, and the remedy; empty if it
    does. Source: CUDA Compatibility, "Minor Version Compatibility" and its limits for PTX."""
    if nvrtc <= supported:
        return ""
    have, can = (".".join(map(str, version)) for version in (nvrtc, supported))
    wheel = f"nvidia-cuda-nvrtc{'' if nvrtc[0] >= 13 else f'-cu{nvrtc[0]}'}=={can}.*"
    if nvrtc[0] != supported[0]:
        wheel = f"evo-kernels[cu{supported[0]}]"
    return (
        f"NVRTC {have} writes PTX (--arch compute_XX) that this driver (CUDA {can}) does not load: pip install '{wheel}', or"
        " update the driver"
    )


def _device() -> Any:
    """GPU 0 of those that CUDA_VISIBLE_DEVICES leaves. Raises DeviceError if there is none."""
    return _ask(driver().cuDeviceGet(0), "a GPU")


def _name(device: Any) -> str:
    found = _ask(driver().cuDeviceGetName(128, device), "the device's name")
    return str(found.split(b"\0")[0].decode())


def _identity(device: Any) -> str:
    return f"GPU-{uuid.UUID(bytes=bytes(_ask(driver().cuDeviceGetUuid(device), 'an identity').bytes))}"


def _attribute(name: str) -> int:
    api = driver()
    attribute = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_ask(api.cuDeviceGetAttribute(attribute, _device()), name))


def device_arch() -> str:
    """sm_89."""
    return f"sm_{_attribute('COMPUTE_CAPABILITY_MAJOR')}{_attribute('COMPUTE_CAPABILITY_MINOR')}"


def device_limits(arch: str) -> Limits:
    """The device's own properties, under the name `arch`. Raises DeviceError."""
    return Limits(
        arch=arch,
        multiprocessors=_attribute("MULTIPROCESSOR_COUNT"),
        threads_per_block=_attribute("MAX_THREADS_PER_BLOCK"),
        threads_per_multiprocessor=_attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        registers_per_multiprocessor=_attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        smem_bytes_per_block=_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_bytes_per_multiprocessor=_attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        smem_bytes_reserved_per_block=_attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        blocks_per_multiprocessor=_attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        cache_bytes=_attribute("L2_CACHE_SIZE"),
    )


def device_info() -> DeviceInfo:
    """Raises DeviceError if the GPU does not answer or this PyTorch cannot use it."""
    api, device = driver(), _device()
    name = _name(device)
    memory = _ask(api.cuDeviceTotalMem(device), "the device's memory")
    cuda = ".".join(map(str, driver_version()))
    details = {
        "cuda_driver": cuda,
        "multiprocessors": str(_attribute("MULTIPROCESSOR_COUNT")),
        "memory_bytes": str(int(memory)),
        "l2_bytes": str(_attribute("L2_CACHE_SIZE")),
        "pci_bus": pci_bus(),
    }
    version = f"CUDA {cuda}"
    with suppress(Exception):  # NVML is a courtesy: containers often lack it
        import pynvml

        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
    import torch  # slow to import, and only needed where there is a GPU

    if torch.version.cuda is None:
        raise DeviceError(
            f"{name} answers, but this PyTorch ({torch.__version__}) is built without CUDA: install a CUDA "
            f"build (https://pytorch.org/get-started/locally/), or run with --target cpu"
        )
    return DeviceInfo(name=name, arch=device_arch(), driver=version, details=details)


def pci_bus() -> str:
    found = _ask(driver().cuDeviceGetPCIBusId(32, _device()), "the PCI bus")
    return str(found.split(b"\0")[0].decode())


# How candidates are compiled: with which headers and options, and what ptxas says of them. The compiler and the headers come
# as wheels (nvidia-cuda-nvrtc, nvidia-cuda-runtime), or from an installed toolkit.

_REMEDY = "install it with: pip install 'evo-kernels[cu13]' (or [cu12], for drivers older than 580)"


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


def run_nvrtc(text: str, arch: str, flags: Iterable[str], include_dirs: Iterable[str] = ()) -> tuple[bytes, str]:
    """(a cubin for sm_XX, PTX text in UTF-8 for compute_XX; the log of NVRTC and ptxas).

    Raises CompileError with the log, which names lines; DeviceError where the compiler is missing or does not
    know `arch`.
    """
    flags = tuple(flags)
    numbers = _compiler().architectures()
    if parse_arch(arch)[1] not in numbers:
        raise DeviceError(
            f"{_compiler()} does not compile for {arch!r}; it knows sm_XX and compute_XX with XX one of"
            f" {', '.join(map(str, numbers))}"
        )
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
    return code, _steady(log)


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


# What architectures offer, and how much of a kernel fits on a multiprocessor. Pure arithmetic.

_KB = 1024

# capability: (threads an SM, blocks an SM, KB of shared memory an SM, SMs, MB of L2, the GPU those two are
# of). Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; SMs and L2
# from the data sheet of the named GPU. On every one: 64 K registers an SM, 1,024 threads a block, 1 KB of
# shared memory reserved a block, so that a block can have all but 1 KB of an SM's.
_TABLE = {
    80: (2048, 32, 164, 108, 40, "A100"),
    86: (1536, 16, 100, 72, 6, "A10"),
    87: (1536, 16, 164, 16, 4, "Jetson AGX Orin"),
    89: (1536, 24, 100, 58, 48, "L4"),
    90: (2048, 32, 228, 132, 50, "H100 SXM"),
    100: (2048, 32, 228, 148, 126, "B200"),
    120: (1536, 24, 100, 170, 96, "RTX 5090"),
}


def parse_arch(arch: str) -> tuple[str, int]:
    """("sm", 89) of sm_89, ("compute", 89) of compute_89, ("sm", 90) of sm_90a. Raises DeviceError."""
    found = re.fullmatch(r"(sm|compute)_(\d{2,3})([af]?)", arch)
    if found is None:
        raise DeviceError(
            f"{arch!r} is not a CUDA architecture; write sm_89 for machine code, compute_89 for PTX that the "
            f"driver compiles"
        )
    return found.group(1), int(found.group(2))


def arch_limits(arch: str) -> Limits:
    """Limits of `arch`, with the multiprocessors and cache of one named GPU of it. Raises DeviceError."""
    number = parse_arch(arch)[1]
    if number not in _TABLE:
        known = ", ".join(f"sm_{n} ({row[-1]})" for n, row in _TABLE.items())
        raise DeviceError(
            f"the limits of {arch!r} are not known without a GPU of that kind here; known anywhere: {known}"
        )
    threads, blocks, smem_kb, multiprocessors, cache_mb, _ = _TABLE[number]
    return Limits(
        arch=arch,
        multiprocessors=multiprocessors,
        threads_per_multiprocessor=threads,
        smem_bytes_per_block=(smem_kb - 1) * _KB,
        smem_bytes_per_multiprocessor=smem_kb * _KB,
        blocks_per_multiprocessor=blocks,
        cache_bytes=cache_mb * _KB * _KB,
    )


_WARP = 32
_REGISTERS_PER_THREAD = 255
_REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this."""
_SMEM_UNIT = 128
_PARTITIONS = 4
"""Number of partitions of a multiprocessor. Each holds a quarter of the registers; a warp's registers lie in one of them."""


def resident_blocks(registers: int, smem_static_bytes: int, launch: Launch, limits: Limits, barriers: int = 0) -> int:
    """Blocks that a multiprocessor holds at once; 0 if not even one fits. `barriers`: named ones, bar.sync's.

    The calculation of NVIDIA's cuda_occupancy.h for compute capability 8.0 and later, shared memory at its
    largest carve-out.
    """
    threads = prod(launch.block)
    smem = launch.smem_bytes + smem_static_bytes
    if threads > limits.threads_per_block or smem > limits.smem_bytes_per_block or registers > _REGISTERS_PER_THREAD:
        return 0
    warps = -(-threads // _WARP)
    per_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    # The hardware checks a block as if its warps were spread over all partitions evenly.
    if per_warp * -(-warps // _PARTITIONS) * _PARTITIONS > limits.registers_per_multiprocessor:
        return 0
    by_registers = limits.registers_per_multiprocessor // _PARTITIONS // per_warp * _PARTITIONS // warps
    reserved = -(-(smem + limits.smem_bytes_reserved_per_block) // _SMEM_UNIT) * _SMEM_UNIT
    by_smem = limits.smem_bytes_per_multiprocessor // reserved
    by_threads = limits.threads_per_multiprocessor // _WARP // warps
    by_barriers = _barriers(limits) // max(barriers, 1)
    return min(by_registers, by_smem, by_threads, by_barriers, limits.blocks_per_multiprocessor)


def _barriers(limits: Limits) -> int:
    """Named barriers that the blocks of a multiprocessor share; before 9.0 every block has its own 16."""
    if limits.capability < 90:
        return 16 * limits.blocks_per_multiprocessor
    return limits.blocks_per_multiprocessor * (2 if limits.capability in (90, 100) else 1)


TARGET: Target = CudaTarget()
