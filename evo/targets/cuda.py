"""NVIDIA GPUs: compiled by NVRTC, with or without a GPU present, and run through the CUDA driver.

Architectures: sm_89 (also sm_90a and the like) is machine code for one kind of GPU; compute_89 is PTX that
the driver compiles when it loads it, for any GPU at least as new.
"""

from __future__ import annotations

import importlib.util
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path

from evo.errors import CompileError, DeviceError
from evo.evaluation import Binary
from evo.problem.kernel import Launch, Limits
from evo.problem.render import Source
from evo.targets import DeviceInfo, Session, Target
from evo.targets._cuda_arch import arch_limits, parse_arch, resident_share, runs_on
from evo.targets._cuda_driver import device_arch, device_limits, device_record, driver_version, version_advice
from evo.targets._machine_code import (
    elf_code_hash,
    elf_triggers_dependents,
    ptx_code_hash,
    ptx_triggers_dependents,
)
from evo.targets._nvrtc import compiler_name, nvrtc_version, ptxas_figures, run_nvrtc

__all__ = ["TARGET", "CudaTarget"]


class CudaTarget:
    """The methods are those of `evo.targets.Target`, and `advice` for `evo doctor`."""

    name = "cuda"
    language = "cu"
    shares_cores = False

    def device(self) -> DeviceInfo:
        """GPU 0 of those that CUDA_VISIBLE_DEVICES leaves. Raises DeviceError if it or PyTorch cannot be
        used."""
        return device_info(0)

    def limits(self, arch: str) -> Limits:
        """The GPU's own figures where `arch` runs on it, else those of the architecture's table.

        PTX may run on a GPU with more shared memory than its architecture promises: only what is promised
        counts.
        """
        return _limits(arch)

    def runs(self, arch: str) -> str:
        parse_arch(arch)
        info = self.device()
        if runs_on(arch, info.arch):
            return ""
        return f"this is {info.name} ({info.arch}); code for {arch} does not run here"

    def compiler(self) -> str:
        return compiler_name()

    def compile(self, source: Source, arch: str, workdir: Path) -> Binary:
        """In memory: nothing is written to `workdir`. Registers, spills and the rest are None for compute_XX."""
        kind, _ = parse_arch(arch)
        output = run_nvrtc(source.text, arch, source.flags, source.include_dirs)
        missing = CompileError(
            f'the source has no entry point {source.entry!r}: declare extern "C" __global__ void {source.entry}(...)'
        )
        if kind == "compute":
            ptx = output.code.decode()
            if f".entry {source.entry}(" not in ptx:
                raise missing
            return Binary(
                code=output.code,
                code_hash=ptx_code_hash(ptx),
                log=output.log,
                triggers_dependents=ptx_triggers_dependents(ptx),
            )
        figures = ptxas_figures(output.log, source.entry)
        if figures is None:
            raise missing
        return Binary(
            code=output.code,
            code_hash=elf_code_hash(output.code),
            triggers_dependents=elf_triggers_dependents(output.code),
            log=output.log,
            registers=figures.registers,
            spill_bytes=figures.spill_bytes,
            smem_static_bytes=figures.smem_static_bytes,
            stack_bytes=figures.stack_bytes,
        )

    def occupancy(self, binary: Binary, launch: Launch, limits: Limits) -> float | None:
        return resident_share(binary, launch, limits)

    def open(self, index: int = 0) -> Session:
        """Takes the GPU's primary context, which PyTorch shares. Raises DeviceError."""
        info = device_info(index)
        from evo.targets._cuda_session import CudaSession

        return CudaSession(index, info, device_limits(index, info.arch))

    def advice(self) -> str | None:
        """What this compiler and this driver cannot do together, and the remedy; None if nothing.
        DeviceError."""
        return version_advice(nvrtc_version(), driver_version())


def device_info(index: int) -> DeviceInfo:
    """Raises DeviceError if the GPU does not answer or this PyTorch cannot use it."""
    name, version, details = device_record(index)
    import torch  # slow to import, and only needed where there is a GPU

    if torch.version.cuda is None:
        raise DeviceError(
            f"{name} answers, but this PyTorch ({torch.__version__}) is built without CUDA: install a CUDA "
            f"build (https://pytorch.org/get-started/locally/), or run with --target cpu"
        )
    return DeviceInfo(name=name, arch=device_arch(index), driver=version, details=details)


@cache
def _torch_build() -> tuple[str, str | None]:
    """(version, CUDA version it is built for) of PyTorch, without its import, which takes seconds.

    Raises DeviceError where it is not installed.
    """
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise DeviceError("PyTorch is not installed: pip install torch")
    names = runpy.run_path(str(Path(found.submodule_search_locations[0]) / "version.py"))
    return str(names["__version__"]), names["cuda"]


@cache
def _limits(arch: str) -> Limits:
    kind, number = parse_arch(arch)
    try:
        present = parse_arch(device_arch(0))[1]
    except DeviceError:
        return arch_limits(arch)
    if kind == "sm" and number == present:
        return device_limits(0, arch)
    promised = arch_limits(arch)
    if kind == "compute" and number <= present:
        own = device_limits(0, arch)
        return replace(own, smem_bytes_per_block=min(own.smem_bytes_per_block, promised.smem_bytes_per_block))
    return promised


TARGET: Target = CudaTarget()
