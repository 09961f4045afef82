"""Driver and compiler that do not fit each other, and machines without a GPU, are told in sentences with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evo.targets._cuda_driver import strangers, version_advice

ADVICE = [
    ((12, 9), (13, 0), None),
    ((12, 4), (12, 8), None),
    (
        (13, 0),
        (12, 8),
        "NVRTC 13.0 writes code that this driver (CUDA 12.8) does not load: pip install 'evo-kernels[cu12]', or update the"
        " driver to one for CUDA 13",
    ),
    (
        (13, 5),
        (13, 0),
        "NVRTC 13.5 is newer than this driver (CUDA 13.0): machine code (--arch sm_XX) runs, PTX (--arch compute_XX) does"
        " not; for PTX pip install 'nvidia-cuda-nvrtc==13.0.*', or update the driver",
    ),
]


@pytest.mark.parametrize(("nvrtc", "driver", "advice"), ADVICE)
def test_a_compiler_newer_than_the_driver_is_told_of_with_the_remedy(
    nvrtc: tuple[int, int], driver: tuple[int, int], advice: str | None
) -> None:
    assert version_advice(nvrtc, driver) == advice


def test_processes_of_the_same_command_are_no_strangers() -> None:
    """Children of this test's parent cannot be made here: a process asks about itself and its sibling instead."""
    script = (
        "import os, sys\n"
        "from evo.targets._cuda_driver import strangers\n"
        "print(strangers([os.getpid(), int(sys.argv[1]), 1]))\n"  # 1 is the first process of all
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sibling:
        command = [sys.executable, "-c", script, str(sibling.pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        sibling.communicate(b"\n")
    assert found.stdout.split() == ["1"]
    assert strangers([]) == strangers([os.getpid()]) == 0
    with pytest.raises(LookupError):  # numbers of another namespace
        strangers([1])


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
