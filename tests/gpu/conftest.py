"""Packages for the GPU that is here, and ways to import them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from evo.export import ExportItem, ExportRequest, find_exporter
from evo.problem.genome import Genome
from evo.problem.kernel import load_kernel
from evo.problem.space import Value
from evo.targets import find_target
from tests.runtime.conftest import _no_launcher_of_before, launchers, natively, use

__all__ = ["Launched", "_no_launcher_of_before", "export", "launched", "launchers", "natively", "use"]

Launched = Callable[[Path, str], ModuleType]
_serial = count()


def export(kernel: str, out: Path, items: Sequence[tuple[str, Mapping[str, Value]]], arch: str = "") -> Path:
    """A package of the default point of the space for each workload, or of one near it with what is wanted."""
    problem, target = load_kernel(kernel), find_target("cuda")
    arch, found = arch or target.device().arch, []
    for index, (text, wanted) in enumerate(items):
        workload = problem.workload("cuda", text)
        space = problem.space("cuda", workload, target.limits(arch))
        point = space.complete(space.default)
        for name, value in wanted.items():
            near = space.nearest(point, name, value)
            assert near is not None, f"no legal point has {name}={value}"
            point = near
        assert all(point[name] == value for name, value in wanted.items())
        found.append(ExportItem(workload=workload, genome=Genome.of(point), candidate=f"test/{index}"))
    find_exporter("module").export(
        ExportRequest(kernel=kernel, target="cuda", arch=arch, items=tuple(found), out=out)
    )
    return out


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
        return module

    return load
