"""Packages for the GPU that is here, and ways to import them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evo.export import ExportRequest, find_exporter
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.space import Value
from evo.targets import find_target
from tests.export.exports import near, request_for
from tests.runtime.conftest import _no_launcher_of_before, launchers, natively, use

__all__ = ["Launched", "_no_launcher_of_before", "agree", "export", "launched", "launchers", "natively", "use"]

Launched = Callable[[Path, str], ModuleType]
Items = Sequence[tuple[str, Mapping[str, Value]]]
"""Workloads, and what is wanted of a point."""
_serial = count()


def agree(own: torch.Tensor, torchs: torch.Tensor) -> None:
    tolerance = 1e-4 if own.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(own, torchs, rtol=tolerance, atol=tolerance, equal_nan=True)


def export(kernel: str, out: Path, items: Items, backward: Items = ()) -> Path:
    """A package of the default point of the space for each workload, or of one near it with what is wanted. backward: of
    the kernel of its gradients, for a package of both."""
    parts = [_request(kernel, out, items), *([_request(f"{kernel}_backward", out, backward)] if backward else [])]
    find_exporter("module").export(*parts)
    return out


def _request(kernel: str, out: Path, items: Items) -> ExportRequest:
    problem, target = load_kernel(kernel), find_target("cuda")
    arch = target.device().arch
    request = request_for("cuda", arch, out, *(text for text, _ in items), kernel=kernel)
    found = []
    for item, (_, wanted) in zip(request.items, items, strict=True):
        point = near(problem.space("cuda", item.workload, target.limits(arch)), wanted)
        found.append(replace(item, genome=Genome.of(point)))
    return replace(request, items=tuple(found))


@pytest.fixture(scope="session")
def launched(
    use: Callable[[Path], ModuleType], natively: Callable[[Path], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Launched:
    """Imports a copy of a package, of which nothing is loaded yet, with a launcher: "Python" or "native"."""

    def load(folder: Path, launcher: str) -> ModuleType:
        if launcher == "native":
            module = natively(folder)
        else:
            module = use(Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy") / f"copy_{next(_serial)}")))
        assert (module.frontend._call is not None) is (launcher == "native")
        module.also_serve(wait=True)
        return module

    return load
