"""Exported and shipped packages in benchmarks: loading them, and racing their calls in one process."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch

from evo.runtime import nvrtc
from evo.runtime.manifest import MANIFEST, read_manifest
from evo.runtime.package import Unavailable
from evo.runtime.timing import Sample, Timing, by_wall_clock, race, watch
from evo.runtime.trial import rounds_on_gpu

__all__ = [
    "Package",
    "Sample",
    "Timing",
    "add_packages",
    "gpu_times",
    "load",
    "load_all",
    "machine",
    "pretend",
    "race",
    "timed_within",
    "watch",
]


@dataclass(frozen=True)
class Package:
    """A folder that `evo export --format module` wrote, or a folder of kernels/. `name`: the name of its module; `function`:
    the name of the function there and in torch.nn.functional, if it is one of these."""

    folder: Path
    name: str
    module: ModuleType
    frontend: Any
    manifest: Mapping[str, Any]
    function: str

    def serve_all(self) -> None:
        """Variants serve what they can, whether or not PyTorch was measured to be faster."""
        self.frontend.DISPATCH.also_serve(slower=True)

    def explain(self, *args: Any, **options: Any) -> str:
        said: str = self.module.explain(*args, **options)
        return said

    @property
    def launcher(self) -> str:
        return "native" if self.frontend._call is not None else f"Python ({self.frontend.NATIVE.reason})"

    @property
    def is_shipped(self) -> bool:
        """Whether it holds sources only, which are compiled where they run."""
        return bool(self.manifest["format"] == "shipped")

    @contextmanager
    def launched_from_python(self) -> Iterator[None]:
        """Disables the native launcher."""
        before = self.frontend._call, self.frontend.NATIVE.explain
        self.frontend._call = self.frontend.NATIVE.explain = None
        try:
            yield
        finally:
            self.frontend._call, self.frontend.NATIVE.explain = before


def add_packages(parser: argparse.ArgumentParser) -> None:
    told = "a folder that `evo export --format module` wrote, or one of kernels/"
    parser.add_argument("--package", action="append", type=Path, required=True, help=told)


def load(folder: Path, stand_in: bool = True) -> Package:
    """stand_in: for a function of PyTorch's. Ends the program, with the reason, if it is no such folder."""
    folder = folder.resolve()
    try:
        manifest = read_manifest(folder / MANIFEST)
        replaced = manifest["kernel"]["replaces"] or ""
        is_stand_in = replaced.startswith("torch.nn.functional.")
        if manifest["format"] not in ("module", "shipped") or (stand_in and not is_stand_in):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"{folder} is no package that `evo export` wrote, of format module or shipped") from None
    name = folder.name
    if manifest["format"] == "shipped":
        name = f"evo.ready.{folder.name}"
    else:
        there = sys.modules.get(name)
        if there is not None and Path(there.__file__ or "").parent != folder:
            raise SystemExit(f"{folder} cannot be imported beside another {name}: export it under another name")
        sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(name)
    if module.PACKAGE.folders[0] != folder:
        raise SystemExit(f"{folder} is not what is shipped: {name} is {module.PACKAGE.folders[0]}")
    frontend = importlib.import_module(f"{name}.frontend")
    return Package(folder, name, module, frontend, manifest, replaced.rpartition(".")[2])


def load_all(folders: Sequence[Path]) -> list[Package]:
    """Each once."""
    return [load(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)]


def pretend(arch: str) -> None:
    """Has this process run what it would on a GPU of an older architecture, such as sm_89: variants for that, through PTX,
    which the driver compiles; what was measured for it on this GPU counts; and PyTorch's attention without cuDNN. Registers,
    caches and clocks are this GPU's, so that a time is none of the older one."""
    digits, name = int(arch.removeprefix("sm_")), torch.cuda.get_device_name()
    torch.cuda.get_device_capability = lambda device=None: divmod(digits, 10)
    torch.cuda.get_device_name = lambda device=None: f"{name} as {arch}"
    nvrtc.Compiler.arch_for = lambda self, capability, recorded="": f"compute_{digits}"
    torch.backends.cuda.enable_cudnn_sdp(False)


def timed_within(
    during: Callable[[], AbstractContextManager[object]], run: Callable[[], object], place: torch.device
) -> Sample:
    """A sample by the wall clock until the device has finished, within `during`, of a run that was done once there."""
    inner = by_wall_clock(run, (lambda: torch.cuda.synchronize(place)) if place.type == "cuda" else (lambda: None))

    def seconds(repeats: int) -> tuple[float, ...]:
        with during():
            run()
            return inner(repeats)

    return seconds


def machine(place: torch.device) -> str:
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, PyTorch {torch.__version__}"


def gpu_times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of the GPU's own time of each, with none of its data in the second-level cache: the median of at least so
    many rounds in which they take turns."""
    place = torch.device("cuda", torch.cuda.current_device())
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(3 * rounds):
        with suppress(Unavailable):
            for of_call, more in zip(found, rounds_on_gpu(list(calls.values()), place), strict=True):
                of_call += more
        if len(found[0]) >= rounds:
            return {name: 1e3 * median(of_call) for name, of_call in zip(calls, found, strict=True)}
    raise SystemExit("this machine's CPU is too busy to keep the GPU at work: measure when it is not")
