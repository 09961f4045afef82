"""Driver and compiler that do not fit each other, and machines without a GPU, are told in sentences with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evo.targets._cuda_driver import version_advice


@pytest.mark.parametrize(
    ("nvrtc", "driver"), [((13, 0), (13, 0)), ((12, 9), (13, 0)), ((12, 4), (12, 8)), ((13, 0), (13, 5))]
)
def test_a_compiler_no_newer_than_the_driver_needs_no_advice(nvrtc: tuple[int, int], driver: tuple[int, int]) -> None:
    assert version_advice(nvrtc, driver) is None


def test_a_compiler_of_a_newer_major_version_names_the_extra_to_install() -> None:
    advice = version_advice((13, 0), (12, 8))
    assert advice == (
        "NVRTC 13.0 writes code that this driver (CUDA 12.8) does not load: pip install 'evo-kernels[cu12]', or "
        "update the driver to one for CUDA 13"
    )


def test_a_compiler_of_a_newer_minor_version_runs_machine_code_but_no_ptx() -> None:
    advice = version_advice((13, 5), (13, 0))
    assert advice is not None
    assert "machine code (--arch sm_XX) runs, PTX (--arch compute_XX) does not" in advice
    assert "pip install 'nvidia-cuda-nvrtc==13.0.*'" in advice
    assert "pip install 'nvidia-cuda-nvrtc-cu12==12.4.*'" in (version_advice((12, 9), (12, 4)) or "")


def test_a_machine_without_a_gpu_says_what_to_do_instead() -> None:
    # CUDA_VISIBLE_DEVICES empty hides every GPU, so that this holds on a machine that has one, too.
    program = """
from evo.errors import DeviceError
from evo.targets import find_target
cuda = find_target("cuda")
for ask in (cuda.device, cuda.open):
    try:
        ask()
    except DeviceError as error:
        print(error)
print(cuda.limits("sm_89").multiprocessors)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *said, multiprocessors = done.stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert line.startswith("no CUDA GPU")
        assert line.endswith("run with --target cpu, or compile without one: evo check KERNEL --arch sm_89")
    assert multiprocessors == "58"
