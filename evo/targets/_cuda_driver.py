"""Queries to the CUDA driver and to NVML: errors by name, the device's properties, its clocks.

Nothing here creates a context, so that a query costs no device memory. But a process that has initialised the driver
cannot fork a child that uses the GPU: device processes must be spawned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import psutil

from evo.errors import DeviceError, LaunchError
from evo.problem.kernel import Limits
from evo.targets import DeviceInfo

__all__ = [
    "device_arch",
    "device_info",
    "device_limits",
    "driver",
    "driver_version",
    "error_text",
    "expect",
    "ptx_advice",
    "read_clocks",
    "strangers",
    "throttling",
]

_REMEDY = "run with --target cpu, or compile without one: evo check KERNEL --arch sm_89"


@cache
def driver() -> Any:
    """The driver API's bindings, initialised. Raises DeviceError if no GPU can be used."""
    try:
        from cuda.bindings import driver as api

        (error,) = api.cuInit(0)
    except (ImportError, RuntimeError, OSError) as reason:
        missing = "libcuda.so, the NVIDIA driver's library, is not installed"
        text = missing if "DynamicLib" in type(reason).__name__ else str(reason).strip().partition("\n")[0]
        raise DeviceError(f"no CUDA GPU answers ({text}): {_REMEDY}") from reason
    if error:
        raise DeviceError(f"no CUDA GPU answers ({error_text(api, error)}): {_REMEDY}")
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
    """As `expect`, for queries about the device. Raises DeviceError."""
    try:
        return expect(result, f"the CUDA driver does not report {what}")
    except LaunchError as error:
        raise DeviceError(f"{error}; {_REMEDY}") from error


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
    name = _ask(api.cuDeviceGetName(128, device), "the device's name").split(b"\0")[0].decode()
    memory = _ask(api.cuDeviceTotalMem(device), "the device's memory")
    cuda = ".".join(map(str, driver_version()))
    details = {
        "cuda_driver": cuda,
        "multiprocessors": str(_attribute("MULTIPROCESSOR_COUNT")),
        "memory_bytes": str(int(memory)),
        "l2_bytes": str(_attribute("L2_CACHE_SIZE")),
        "pci_bus": _pci_bus(),
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


def _pci_bus() -> str:
    found = _ask(driver().cuDeviceGetPCIBusId(32, _device()), "the PCI bus")
    return str(found.split(b"\0")[0].decode())


_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's reasons for lower clocks that spoil a measurement (nvmlClocksThrottleReasons). A power cap is not among them:
for some cards it is the normal state."""


def strangers(processes: Sequence[int]) -> int:
    """How many of the processes belong to other commands: those of this command have the same parent as this process.
    Raises LookupError if the identifiers are of another namespace."""
    if processes and os.getpid() not in processes:
        raise LookupError
    own = psutil.Process().parent()
    return len(set(processes) - {p.pid for p in (own.children() if own else ())} - {os.getpid()})


@cache
def _nvml() -> tuple[Any, Any]:
    """NVML, and its handle of the device; None where it is missing or refuses, as in many containers."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        # NVML counts devices that CUDA_VISIBLE_DEVICES hides; the bus is the same to both.
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(_pci_bus().encode())
    return None, None


def read_clocks() -> dict[str, float]:
    """sm_mhz, memory_mhz, temperature_c, power_w, other_processes that have a context on the GPU (not in a container with
    its own process identifiers), and throttle_reasons: NVML's bits, 0 for none. Without NVML nothing."""
    nvml, device = _nvml()
    if nvml is None:
        return {}
    readings: dict[str, Callable[[], float]] = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device),
        "other_processes": lambda: strangers([p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)]),
    }
    found = {}
    for name, reading in readings.items():
        with suppress(nvml.NVMLError, LookupError):
            found[name] = float(reading())
    return found


def throttling() -> str:
    """Why the clocks are lower now, except for an idle GPU or a limit that a user has set; empty if they are not."""
    nvml, device = _nvml()
    if nvml is not None:
        with suppress(nvml.NVMLError):
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
            return ", ".join(name for bit, name in _THROTTLES.items() if bits & bit)
    return ""
