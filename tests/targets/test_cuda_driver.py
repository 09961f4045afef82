"""Driver and compiler that do not fit each other are told of in a sentence with a remedy; who else is on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evo.targets._cuda_session import strangers
from evo.targets.cuda import ptx_advice


@pytest.mark.parametrize(
    ("nvrtc", "driver", "wheel"),
    [
        ((12, 9), (13, 0), ""),
        ((13, 0), (12, 8), "evo-kernels[cu12]"),
        ((13, 5), (13, 0), "nvidia-cuda-nvrtc==13.0.*"),
    ],
)
def test_a_compiler_newer_than_the_driver_is_told_of_with_the_remedy(
    nvrtc: tuple[int, int], driver: tuple[int, int], wheel: str
) -> None:
    advice = ptx_advice(nvrtc, driver)
    assert bool(advice) == bool(wheel)
    assert wheel in advice


def test_processes_of_the_same_command_are_no_strangers() -> None:
    """Children of this test's parent cannot be made here: a process asks about itself and its sibling instead."""
    script = (
        "import os, sys\n"
        "from evo.targets._cuda_session import strangers\n"
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
