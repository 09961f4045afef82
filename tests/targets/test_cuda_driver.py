"""Driver and compiler that do not fit each other are told of in a sentence with a remedy; who else is on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evo.runtime import driver
from evo.targets._cuda_session import strangers
from evo.targets.cuda import ATTRIBUTES, ptx_advice
from tests.runtime.test_native_driver import headers


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


def test_the_drivers_functions_are_called_as_its_own_header_says(tmp_path: Path) -> None:
    """By size: device addresses are as pointers. Names of cuda.h are macros for the symbols of today."""
    lines = ["#include <cuda.h>", "#include <type_traits>", "#define TEXT_OF(x) #x", "#define TEXT(x) TEXT_OF(x)"]
    lines += ["template <size_t...> struct Sizes;"]
    lines += ["template <class... P> Sizes<sizeof(P)...>* sizes_of(CUresult (*)(P...));"]
    for symbol, kinds in driver.FUNCTIONS.items():
        name, sizes = symbol.removesuffix("_v2"), ", ".join("4" if kind == "i" else "8" for kind in kinds)
        lines += [f"static_assert(std::is_same_v<decltype(sizes_of({name})), Sizes<{sizes}>*>);"]
        lines += [f'static_assert(!__builtin_strcmp(TEXT({name}), "{symbol}"));']
    lines += [f"static_assert(CU_DEVICE_ATTRIBUTE_{name} == {number});" for name, number in ATTRIBUTES.items()]
    names = ("SHARED_SIZE_BYTES", "NUM_REGS", "MAX_DYNAMIC_SHARED_SIZE_BYTES", "NON_PORTABLE_CLUSTER_SIZE_ALLOWED")
    numbers = (driver.STATIC_SMEM, driver.REGISTERS, driver.DYNAMIC_SMEM, driver.LARGE_CLUSTER)
    lines += [f"static_assert(CU_FUNC_ATTRIBUTE_{n} == {number});" for n, number in zip(names, numbers, strict=True)]
    (tmp_path / "check.cpp").write_text("\n".join([*lines, "static_assert(CU_EVENT_RECORD_EXTERNAL == 1);"]))
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{headers()}", str(tmp_path / "check.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SCRIPT = """
import struct
import numpy as np
from evo.errors import LaunchError
from evo.evaluation import Binary
from evo.problem.kernel import Launch
from evo.targets import Allocation, Structure, cuda
from evo.targets._cuda_loaded import BareGpu

print(sorted(cuda.TARGET.devices().items()))
print(cuda.device_arch(), cuda.driver_version(), cuda.pci_bus(), cuda.device_limits("sm_90").cache_bytes)
gpu = BareGpu()
where = Allocation(gpu.allocate(1 << 12))
gpu.write(where.address, bytes(1 << 12))
loaded = gpu.load(Binary(code=b"code of the test", code_hash=""), "entry")
place = Structure(layout="Pqi", size=128, alignment=64, fields=((0, 0), (-1, 1 << 40), (1, 0)))
launch = Launch(grid=(3, 1, 1), block=(64, 1, 1), smem_bytes=60000)
values = (where, np.int32(-5), place, 1 << 50, 0.5)
loaded(values, launch)
found = struct.unpack("=Qi128sqf", gpu.read(where.address, 152))
fields = struct.unpack("Pqi", found[2][:20])
print(found[0] == where.address, found[1], fields == (where.address, 1 << 40, -5), found[2][20:] == bytes(108), *found[3:])
for wrong in (values[:4], (*values[:4], 1), ((None, *values[1:]))):
    try:
        loaded(wrong, launch if wrong[0] else Launch(grid=(4, 1, 1), block=(64, 1, 1)))
    except LaunchError as error:
        print(error)
for code, entry in ((b"other", "entry"), (b"code of the test", "other")):
    try:
        gpu.load(Binary(code=code, code_hash=""), entry)
    except LaunchError as error:
        print(error)
"""


def test_a_launch_hands_over_numbers_addresses_and_structures_by_the_drivers_interface(tmp_path: Path) -> None:
    source = Path(__file__).with_name("driver_of_host.cpp")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{headers()}", str(source), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    devices, about, found, *errors = done.stdout.splitlines()
    assert devices.count("GPU-") == 2
    assert "'GPU 7'" in devices
    assert "GPU-07002737-4757-6777-8797-a7b7c7d7e7f7" in devices
    assert about == "sm_90 (13, 1) 0000:01:00.0 1038"
    assert found == f"True -5 True True {1 << 50} 0.5"
    of_test = "CUDA_ERROR_OF_THE_TEST"
    assert errors[:2] == [
        "'entry' takes 5 arguments, got 4", "parameter 4 of 'entry' has 4 bytes; an integer is passed as 8"
    ]  # fmt: skip
    assert errors[2].startswith("launch of 'entry' with grid (4, 1, 1)")
    assert errors[2].endswith(f"{of_test} (1): as asked for")
    assert errors[3].startswith(f"'entry' does not load: {of_test} (200): as asked for")
    assert errors[4] == f"looking up 'other': {of_test} (500): as asked for"
