"""How the native launcher speaks to the CUDA driver, as far as that shows without one: beside cuda.h, to a driver that
records. What the real one answers is for tests/gpu."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from evo import runtime

RUNTIME = Path(runtime.__file__).parent


def headers() -> str:
    folder = pytest.importorskip("cuda.pathfinder").find_nvidia_header_directory("cudart")
    if folder is None or not (Path(folder) / "cuda.h").is_file():
        pytest.skip("CUDA's headers are not installed (the extras cu12 and cu13 bring them)")
    return folder


def test_launches_are_what_the_drivers_own_header_says(tmp_path: Path) -> None:
    source = Path(__file__).with_name("driver_program.cpp")
    command = ["g++", "-std=c++17", "-Wall", "-Werror", str(source), f"-I{RUNTIME}", f"-I{headers()}"]
    shared = ["-shared", "-fPIC"]
    driver, torch = tmp_path / "libcuda.so.1", tmp_path / "libtorch_cuda.so"
    subprocess.run([*command, *shared, "-DDRIVER", "-Wl,-soname,libcuda.so.1", "-o", driver], check=True)
    subprocess.run([*command, *shared, "-DTORCH", "-Wl,-soname,libtorch_cuda.so", "-o", torch], check=True)
    subprocess.run([*command, "-o", tmp_path / "program", "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [tmp_path / "program", torch], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
