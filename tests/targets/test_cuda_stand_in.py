"""Code for a GPU that is not here: what a newer one, which measures it, loads in its place, within what limits, and beside
what of PyTorch. The newer one is feigned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from elftools.elf.elffile import ELFFile

from evo.errors import CompileError
from evo.evaluation import Evaluation, Status
from evo.executors import _device, device_arch, device_name, local
from evo.measure import Request
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.search.run import describe_environment
from evo.targets import DeviceInfo, _nvjitlink, cuda, find_target
from evo.targets.languages.cuda_cpp import CudaCpp

CUDA: Any = find_target("cuda")
KERNEL = load_kernel("layernorm")
WORKLOAD = KERNEL.workload("cuda", "rows=1024,cols=2048,dtype=float16")
NVJITLINK = pytest.mark.skipif(not CudaCpp.linker(), reason="nvJitLink is not installed: pip install 'evo-kernels[cu13]'")


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = replace(cuda.arch_limits("sm_90"), multiprocessors=132)
    monkeypatch.setattr(cuda, "device_arch", lambda: "sm_90")
    monkeypatch.setattr(cuda, "device_limits", lambda arch: replace(own, arch=arch, capability=cuda.parse_arch(arch)[1]))
    monkeypatch.setattr(cuda, "device_info", lambda: DeviceInfo(name="NVIDIA H200", arch="sm_90"))
    CUDA.limits.cache_clear()
    yield
    CUDA.limits.cache_clear()


def request(arch: str, device: str = "sm_90") -> Request:
    space = KERNEL.space("cuda", WORKLOAD, CUDA.limits(arch))
    point = Genome.of(space.complete(space.default))
    return Request(
        kernel="layernorm", target="cuda", workload=WORKLOAD, arch=arch, device_arch=device, genome=point
    )


def made_for(code: bytes) -> int:
    """The compute capability, times ten, of a cubin."""
    flags = int(ELFFile(BytesIO(code)).header["e_flags"])
    return flags >> 8 & 0xFF if flags & 0xFF < 50 else flags & 0xFF


@NVJITLINK
@pytest.mark.parametrize("arch", ["sm_89", "compute_89"])
def test_a_build_for_an_older_gpu_holds_machine_code_for_the_one_that_measures(arch: str, tmp_path: Path) -> None:
    first, again, alone = (local.build(request(arch, to), str(tmp_path)) for to in ("sm_90", "sm_90", ""))
    assert (first.status, first.cached, again.cached, alone.cached) == (Status.OK, False, True, False), first.log
    assert first.binary is not None
    assert alone.binary is not None
    assert again.binary == first.binary
    assert made_for(first.binary.loadable) == 90
    assert replace(first.binary, stand_in=b"") == alone.binary  # its code, figures and hash are those of the older one
    assert (first.occupancy, first.smem_dynamic_bytes) == (alone.occupancy, alone.smem_dynamic_bytes)
    if arch == "sm_89":
        assert made_for(first.binary.code) == 89
        assert first.binary.registers


def test_without_a_linker_the_driver_gets_the_ptx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_nvjitlink, "places", lambda name: iter(()))
    _nvjitlink.linker.cache_clear()
    built = local.build(request("sm_89"), str(tmp_path))
    _nvjitlink.linker.cache_clear()
    assert built.binary is not None
    assert made_for(built.binary.code) == 89
    assert b".target sm_89" in built.binary.loadable


@NVJITLINK
def test_ptx_that_does_not_link_is_a_compile_error_with_the_linkers_words() -> None:
    found = _nvjitlink.linker((0, 0))
    with pytest.raises(CompileError, match=r"nvjitlink \d+\.\d+ does not link its PTX: .*nonsense"):
        found.link(b".version 8.0\n.target sm_89\n.address_size 64\nnonsense", "sm_90", ())


@pytest.mark.parametrize("arch", ["sm_89", "compute_89"])
def test_what_the_older_gpu_does_not_hold_is_no_build(arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def plan(*given: Any) -> Any:
        found = KERNEL.plan(*given)
        return replace(found, smem_bytes=100 << 10)

    monkeypatch.setattr(local, "load_kernel", lambda name, digest: replace(KERNEL, plan=plan))
    built = local.build(request(arch), str(tmp_path))
    assert built.status is Status.COMPILE_ERROR
    assert f"fits no multiprocessor of {arch}" in built.log
    assert local.build(request("sm_90", ""), str(tmp_path)).status is Status.OK


@pytest.mark.parametrize("arch", ["sm_89", "compute_89"])
def test_limits_are_the_older_gpus_with_the_multiprocessors_that_are_here(arch: str) -> None:
    limits = CUDA.limits(arch)
    assert (limits.smem_bytes_per_block, limits.threads_per_multiprocessor) == (99 << 10, 1536)
    assert (limits.blocks_per_multiprocessor, limits.multiprocessors, limits.capability) == (24, 132, 89)
    assert CUDA.limits("sm_90").smem_bytes_per_block == 227 << 10


def test_code_for_older_gpus_runs_here_and_its_times_have_a_name_of_their_own() -> None:
    assert [CUDA.runs(arch) for arch in ("sm_80", "sm_89", "compute_89", "sm_90", "sm_90a")] == [""] * 5
    assert all("does not run here" in CUDA.runs(arch) for arch in ("sm_100", "compute_100", "sm_80a"))
    names = {arch: device_name(CUDA, arch) for arch in ("sm_89", "sm_90", "sm_90a", "compute_90")}
    assert names == dict.fromkeys(names, "NVIDIA H200") | {"sm_89": "NVIDIA H200 as sm_89"}
    assert describe_environment(CUDA, "sm_89").device == "NVIDIA H200 as sm_89"
    assert [device_arch(CUDA, arch) for arch in ("sm_89", "sm_90")] == ["sm_90", ""]


def test_pytorch_is_without_cudnns_attention_where_code_for_an_older_gpu_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    class Harness:
        def measure(self, *given: object) -> Evaluation:
            seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
            return Evaluation(status=Status.OK)

    monkeypatch.setattr(_device, "_harness", lambda data: Harness())
    monkeypatch.setattr(_device, "_make_ready", lambda data, needed: Harness().measure())
    for arch in ("sm_89", "compute_89", "sm_90", "sm_90a"):
        _device.judge(request(arch))
    assert seen == [(False, True)] * 4 + [(True, True)] * 4
    assert torch.backends.cuda.cudnn_sdp_enabled()
    attention = load_kernel("attention")
    with CUDA.torch_as_on("sm_89"), pytest.raises(RuntimeError, match="cuDNN's attention is switched off"):
        attention.baseline("cudnn").call({}, attention.workloads["cuda"][0])
