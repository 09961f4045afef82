"""A kernel in one function: `evo.kernel`."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, overload

from evo import __version__
from evo.adoption.own import Given, Own, PerTarget
from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.runs import find_best
from evo.api import Run, search
from evo.environment import DEFAULT_DB
from evo.errors import EvoError, UsageError
from evo.export import MANIFEST, ExportItem, ExportRequest, find_exporter
from evo.export._winners import requests_of
from evo.job.in_python import told_in_python
from evo.job.starts import open_recorded
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import decorated_root, load_kernel
from evo.problem.space import Value
from evo.report.terminal import notice
from evo.runtime.package import CACHE_VARIABLE, digest
from evo.targets import answers, find_target

__all__ = ["Decorated", "kernel"]

_DEFAULT = "default"
"""What stands for a candidate where a package has the default, which no search has measured."""
_number = itertools.count()


class Decorated(Protocol):
    """A function whose calls the kernel serves, if a variant is for them; its own body does the others.

    search: as `evo.search`, of this kernel. export: writes a package that stands alone to a folder. build: builds the native
    launcher, which makes calls cheaper. explain: which way a call of these arguments takes. also_serve: what else the kernel
    serves, as that of a package: with slower=True, also what PyTorch does faster. folder: that of the kernel, as commands
    take it. db: of each of these, the database whose winners are meant.
    """

    search: Callable[..., Run]
    export: Callable[..., list[Path]]
    build: Callable[[], Path]
    explain: Callable[..., str]
    also_serve: Callable[..., None]
    folder: Callable[[], Path]

    def __call__(self, *arguments: Any, **named: Any) -> Any: ...


@overload
def kernel(function: Callable[..., Any], /) -> Decorated: ...
@overload
def kernel(
    *,
    cpu: str = "",
    name: str = "",
    space: Mapping[str, Sequence[Value]] = ...,
    threads: int | str | Sequence[int | str] = ...,
    tiles: Sequence[tuple[str, int | str]] = ...,
    workloads: PerTarget = ...,
    dtypes: PerTarget = ...,
    db: str | Path = ...,
) -> Callable[[Callable[..., Any]], Decorated]: ...
def kernel(function: Callable[..., Any] | None = None, /, *, db: str | Path = DEFAULT_DB, **given: Any) -> Any:
    """Makes a kernel of a function: its docstring is the source, in CUDA C++ or, for the CPU, in C++, and its body is the
    same in PyTorch. Arguments without a default are tensors, annotated with the names of their dimensions unless it computes
    each element for itself; those with a float as default are options. What the source shows is read from it.

    cpu: a source for the CPU, beside one for CUDA. name: of the kernel. space: the values to try, by name of a macro, or of
    what `threads` or `tiles` use. threads: of a block. tiles: the dimension, and how much of it a block computes, along each
    axis of the grid. workloads, dtypes: what is searched, for all targets or by target. db: where a call looks for winners.

    Raises UsageError for a function that cannot be a kernel; what its source lacks is told when it is first used.
    """
    if function is None:
        return lambda decorated: kernel(decorated, db=db, **given)  # type: ignore[call-overload]
    return _Bound(Own(function, Given(**given)), str(db)).served


class _Bound:
    """A function, and the package that serves its calls once it is needed."""

    def __init__(self, own: Own, db: str) -> None:
        self._own, self._db, self._lock = own, db, threading.Lock()
        self._package: ModuleType | None = None
        self._also: dict[str, bool] = {}
        # Plain text, so that a call costs no more than one call of a function of Python's.
        self._names: dict[str, Any] = {"_serve": self._first}
        text = f"def {own.function.__name__}({own.declared}):\n    return _serve({own.passed})"
        exec(compile(text, f"<evo.kernel of {own.file}>", "exec"), self._names)
        self.served: Any = update_wrapper(self._names[own.function.__name__], own.function)
        for name in ("search", "export", "build", "explain", "also_serve", "folder"):
            setattr(self.served, name, getattr(self, name))

    def _first(self, *arguments: Any, **named: Any) -> Any:
        return self._bind()(*arguments, **named)

    def _bind(self) -> Callable[..., Any]:
        """The function that serves calls from now on: the package's or, for a reason that is told, the body's."""
        with self._lock:
            found: Callable[..., Any] = self._names["_serve"]
            if found == self._first:
                name, self._package = self._own.function.__name__, None
                try:
                    self._package = self._load()
                    found = getattr(self._package, name)
                except Exception as error:  # the body is right whatever it is
                    kind = "" if isinstance(error, EvoError | ImportError | OSError) else f"{type(error).__name__}: "
                    notice(f"{name} is left to its body in PyTorch: {kind}{error}")
                    found = self._own.function
                self._names["_serve"] = found
            return found

    def _load(self) -> ModuleType:
        """A package of what is known now, else of what was known before: the database may lie elsewhere."""
        kernel = load_kernel(str(self.folder()))
        wanted = self._requests(kernel, Path(), self._db)
        places = sorted({f"{part.target} {part.arch}" for part in wanted})
        candidates = sorted(f"{part.target} {i.workload.key} {i.candidate}" for part in wanted for i in part.items)
        known = kernel.folder / "packages" / digest(__version__, *places)[:12]
        folder = known / f"{kernel.name}_{digest(*candidates)[:12]}"
        if all(item.candidate == _DEFAULT for part in wanted for item in part.items):
            before = [path.parent for path in known.glob(f"*/{MANIFEST}")]
            folder = max(before, key=lambda path: path.stat().st_mtime, default=folder)
        if not (folder / MANIFEST).is_file():
            find_exporter("module").export(*(replace(part, out=folder) for part in wanted))
        name = f"_evo_own_{self._own.name}_{next(_number)}"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.also_serve(**self._also)
        return module

    def _requests(self, kernel: Kernel, out: Path, db: str) -> list[ExportRequest]:
        """What a package for the devices of this machine is to have: the fastest known variant of each workload, for the
        others the default. Raises UsageError where there is no such device."""
        found = list[ExportRequest]()
        with open_recorded(db, notice) as store:
            for target in filter(answers, kernel.dtypes):
                arch = find_target(target).device().arch
                chosen = self._known(store, kernel, target, arch) if store is not None else []
                found += requests_of(store, chosen, out) if store is not None and chosen else []
                limits, served = find_target(target).limits(arch), {c.workload for c in chosen}
                items = []
                for workload in (w for w in kernel.workloads[target] if w.key not in served):
                    space = kernel.space(target, workload, limits)
                    genome = Genome.of(space.complete(space.default))
                    items.append(ExportItem(workload=workload, genome=genome, candidate=_DEFAULT))
                if items:
                    folder = str(kernel.folder)
                    found.append(ExportRequest(kernel=folder, target=target, arch=arch, items=tuple(items), out=out))
        if not found:
            raise UsageError(f"no device here is for {kernel.name}: its sources are for {' and '.join(kernel.dtypes)}")
        return found

    def _known(self, store: Store, kernel: Kernel, target: str, arch: str) -> list[CandidateRecord]:
        best = find_best(store, str(kernel.folder), target=target)
        ids = {b.workload: b.id for b in reversed(best) if b.arch == arch and not b.unconfirmed}
        return [read_candidate(store, name) for name in ids.values()]

    # -- what the function offers -------------------------------------------------------------------------------------

    @cached_property
    def _files(self) -> dict[str, str]:
        return self._own.files()

    def folder(self) -> Path:
        """The folder of the kernel, which is written where it is missing. Raises UsageError."""
        files = self._files
        root = decorated_root(create=True)
        if root is None:
            raise UsageError(
                f"there is no folder of yours to keep kernel {self._own.name!r} in: name one in {CACHE_VARIABLE}"
            )
        folder = root / f"{self._own.name}_{digest(*itertools.chain(*files.items()))[:12]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in sorted(files.items(), key=lambda item: item[0] == "kernel.py"):  # that makes it a kernel's
                path = folder / name
                if not path.is_file() or path.read_text(encoding="utf-8") != text:
                    part = path.with_name(f".{name}.{threading.get_ident()}.part")
                    part.write_text(text, encoding="utf-8")
                    part.replace(path)
        except OSError as error:
            raise UsageError(f"{folder} cannot be written ({error.strerror}): name another in {CACHE_VARIABLE}") from error
        return folder

    def search(self, *, db: str | Path | None = None, **options: Any) -> Run:
        """As `evo.search`; calls from now on are served by what is known then."""
        run = search(str(self.folder()), db=self._db if db is None else db, **options)
        with self._lock:
            self._names["_serve"] = self._first
        return run

    def export(self, out: str | Path, *, db: str | Path | None = None) -> list[Path]:
        """The files of a package that stands alone, of the fastest variants known here, and the default where there is
        none. Raises UsageError."""
        kernel, known = load_kernel(str(self.folder())), self._db if db is None else str(db)
        with told_in_python(known):
            return find_exporter("module").export(*self._requests(kernel, Path(out), known))

    def build(self) -> Path:
        """Builds the native launcher, and has calls use it. Raises RuntimeError, UsageError."""
        self._bind()
        if self._package is None:
            raise UsageError(f"{self._own.name} is left to its body in PyTorch: there is no package to build a launcher of")
        found: Path = self._package.build()
        return found

    def explain(self, *arguments: Any, **named: Any) -> str:
        """Which way such a call takes here and now."""
        self._bind()
        if self._package is None:
            return "PyTorch: the body, since there is no package for this machine"
        found: str = self._package.explain(*arguments, **named)
        return found

    def also_serve(self, **which: bool) -> None:
        """As that of a package, and of those that later searches lead to."""
        self._bind()
        if self._package is not None:
            self._package.also_serve(**which)
        self._also |= which
