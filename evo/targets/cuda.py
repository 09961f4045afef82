"""NVIDIA GPUs, through the CUDA driver.

Architectures: sm_89 is machine code for GPUs of compute capability 8.9 and later ones of that generation, sm_90a for 9.0
alone; compute_89 is PTX, for any GPU at least as new. Where candidates are measured, those run code for sm_89, too: what is
linked from its PTX, within the limits of sm_89 and beside what PyTorch has there.
"""

import ctypes
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from evo.errors import DeviceError, LaunchError
from evo.problem.kernel import Launch, Limits
from evo.runtime.driver import answer, ask, load_driver
from evo.runtime.package import Unavailable
from evo.targets import DeviceInfo, Sanitizer, Session, Target, find_language


class CudaTarget:
    """The methods are those of `evo.targets.Target`."""

    name = "cuda"
    language = "cuda_cpp"
    example_arch = "sm_89"
    shares_cores = False
    summed_bytes = 256 << 20
    compared_elements = 1 << 62
    believed_share = 0.9

    def device(self) -> DeviceInfo:
        """GPU 0 of those that CUDA_VISIBLE_DEVICES leaves. Raises DeviceError if it or PyTorch cannot be
        used."""
        return device_info()

    def devices(self) -> dict[str, str]:
        count = _ask(ctypes.c_int, "cuDeviceGetCount", "how many GPUs there are")
        found = [_ask(ctypes.c_int, "cuDeviceGet", f"GPU {i}", i) for i in range(count)]
        return {_identity(device): _name(device) for device in found}

    def restrict(self, devices: Sequence[str]) -> None:
        """The driver reads the variable when it is initialised, and numbers what it finds there anew."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    @staticmethod
    @cache
    def limits(arch: str) -> Limits:
        """The GPU's own properties if `arch` is its architecture, else those of the architecture's table; of a newer GPU,
        which runs its code, the number of multiprocessors and the cache.

        PTX may run on a GPU with less shared memory than the architecture's own has.
        """
        kind, number = parse_arch(arch)
        try:
            present = parse_arch(device_arch())[1]
        except DeviceError:
            return arch_limits(arch)
        if number == present:
            return device_limits(arch)
        promised = arch_limits(arch)
        if number > present:
            return promised
        own, smem = device_limits(arch), promised.smem_bytes_per_block
        if kind == "compute":
            smem = min(own.smem_bytes_per_block, smem)
        promised = replace(promised, multiprocessors=own.multiprocessors, cache_bytes=own.cache_bytes)
        return replace(promised, smem_bytes_per_block=smem)

    def runs(self, arch: str) -> str:
        parse_arch(arch)
        info = self.device()
        from evo.runtime.choice import rank_on_gpu  # imports PyTorch

        through_ptx = arch.replace("sm_", "compute_")
        if rank_on_gpu(through_ptx, divmod(parse_arch(info.arch)[1], 10)) is not None:
            return ""
        return f"this is {info.name} ({info.arch}); code for {arch} does not run here"

    def compiler(self) -> str:
        return find_language(self.language).compiler()

    def free_bytes(self) -> int:
        import torch

        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + kept

    def has_room(self, size: int) -> bool:
        """Gives back the memory that PyTorch's allocator keeps where it is needed, since the recording of a graph cannot
        use that."""
        import torch

        if torch.cuda.mem_get_info()[0] < size:
            torch.cuda.empty_cache()
        return bool(torch.cuda.mem_get_info()[0] >= size)

    def memory_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info()[1])

    def machine_code(self, arch: str) -> str:
        return arch.replace("compute_", "sm_")

    def owns(self, arch: str) -> bool:
        return _ARCH.fullmatch(arch) is not None

    def with_intermediate(self, archs: Sequence[str]) -> tuple[str, ...]:
        """Architectures with PTX for GPUs newer than these: PTX of the lowest, so that every GPU at least as new as that
        runs something. Code that uses a GPU's own instructions (sm_90a) has no newer PTX."""
        found = [_ARCH.fullmatch(arch) for arch in archs]
        plain = [int(m[2]) for m in found if m and m[1] == "sm" and not m[3]]
        if not plain or any(m and m[1] == "compute" for m in found):
            return tuple(archs)
        return (*archs, f"compute_{min(plain)}")

    def torch_as_on(self, arch: str) -> AbstractContextManager[None]:
        """Attention of cuDNN is not PyTorch's choice before 9.0, and on a GPU of 9.0 uses what only that has."""
        if not arch or parse_arch(arch)[1] >= _CUDNN or parse_arch(device_arch())[1] < _CUDNN:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

    def needs(self, arch: str, flags: Sequence[str]) -> None:
        return None

    def sanitizer(self) -> Sanitizer:
        from evo.targets._sanitizers import ComputeSanitizer

        return ComputeSanitizer()

    def open(self) -> Session:
        """Takes the GPU's primary context, which PyTorch shares. Raises DeviceError."""
        info = device_info()
        from evo.targets._cuda_session import CudaSession

        return CudaSession(info, device_limits(info.arch))




# The driver's answers. Nothing here creates a context, so that a query costs no device memory. But a process that has
# initialised the driver cannot fork a child that uses the GPU.

_WITHOUT_GPU = "run with --target cpu if the kernel has a template for it; to compile only: evo check KERNEL --arch sm_89"


def do(function: str, doing: str, *arguments: Any) -> None:
    """Calls a function of the driver. Raises LaunchError: `doing` and CUDA's message."""
    try:
        ask(function, doing, *arguments)
    except Unavailable as error:
        raise LaunchError(str(error)) from None


def get(kind: Any, function: str, doing: str, *arguments: Any) -> Any:
    """The value of a ctypes kind that a function of the driver writes to where its first parameter points. Raises
    LaunchError."""
    found = kind()
    do(function, doing, ctypes.byref(found), *arguments)
    return found.value


def _ask(kind: Any, function: str, what: str, *arguments: Any) -> Any:
    """Like `get`, for queries about the device. Raises DeviceError, also where no GPU can be used."""
    try:
        load_driver()
    except Unavailable as reason:
        raise DeviceError(f"no CUDA GPU answers ({reason})", _WITHOUT_GPU) from reason
    try:
        return answer(kind, function, f"the CUDA driver does not report {what}", *arguments)
    except Unavailable as error:
        raise DeviceError(str(error), _WITHOUT_GPU) from error


def driver_version() -> tuple[int, int]:
    """(major, minor) of the newest CUDA the driver supports. Raises DeviceError."""
    number = int(_ask(ctypes.c_int, "cuDriverGetVersion", "its version"))
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


def first_device() -> int:
    """GPU 0 of those that CUDA_VISIBLE_DEVICES leaves. Raises DeviceError if there is none."""
    return int(_ask(ctypes.c_int, "cuDeviceGet", "a GPU", 0))


def _name(device: int) -> str:
    return str(_ask(ctypes.c_char * 128, "cuDeviceGetName", "the device's name", 128, device).decode())


def _identity(device: int) -> str:
    found = ctypes.create_string_buffer(16)
    _ask(lambda: found, "cuDeviceGetUuid", "an identity", device)
    return f"GPU-{uuid.UUID(bytes=found.raw)}"


ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1, "MULTIPROCESSOR_COUNT": 16, "L2_CACHE_SIZE": 38, "MAX_THREADS_PER_MULTIPROCESSOR": 39,
    "COMPUTE_CAPABILITY_MAJOR": 75, "COMPUTE_CAPABILITY_MINOR": 76, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 81,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 82, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97, "MAX_BLOCKS_PER_MULTIPROCESSOR": 106,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 111,
}  # fmt: skip
"""Numbers of cuda.h's CU_DEVICE_ATTRIBUTE_NAME."""


def _attribute(name: str) -> int:
    return int(_ask(ctypes.c_int, "cuDeviceGetAttribute", name, ATTRIBUTES[name], first_device()))


def device_arch() -> str:
    """sm_89."""
    return f"sm_{_attribute('COMPUTE_CAPABILITY_MAJOR')}{_attribute('COMPUTE_CAPABILITY_MINOR')}"


def device_limits(arch: str) -> Limits:
    """The device's own properties, under the name `arch`. Raises DeviceError."""
    return Limits(
        arch=arch,
        capability=parse_arch(arch)[1],
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
    device = first_device()
    name = _name(device)
    memory = _ask(ctypes.c_size_t, "cuDeviceTotalMem", "the device's memory", device)
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
    return str(_ask(ctypes.c_char * 32, "cuDeviceGetPCIBusId", "the PCI bus", 32, first_device()).decode())


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


_CUDNN = 90
"""The capability from which on PyTorch prefers cuDNN for attention."""


_ARCH = re.compile(r"(sm|compute)_(\d{2,3})([af]?)")


def parse_arch(arch: str) -> tuple[str, int]:
    """("sm", 89) of sm_89, ("compute", 89) of compute_89, ("sm", 90) of sm_90a. Raises DeviceError."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise DeviceError(
            f"{arch!r} is not a CUDA architecture; write sm_89 for machine code, compute_89 for PTX that the "
            f"driver compiles"
        )
    return found.group(1), int(found.group(2))


def runs_through_ptx(arch: str, device_arch: str) -> bool:
    """Whether a device runs code for `arch` as what is made of its PTX: a newer one of another generation. CUDA C++
    Programming Guide, "Binary Compatibility"."""
    (kind, number), (_, own) = parse_arch(arch), parse_arch(device_arch)
    return number <= own and (kind == "compute" or number // 10 != own // 10)


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
        capability=number,
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
