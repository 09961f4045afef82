"""Kernels by name or path: which there are, the files that decide what a search of one finds, and how one is loaded."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import importlib.util
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import product
from pathlib import Path
from types import CodeType, ModuleType
from typing import Protocol

from evo.discovery import find_plugin, own_names, plugin_names
from evo.errors import EvoError, KernelError, UnknownNameError, UsageError
from evo.problem.kernel import FUNCTION_FILES, Kernel
from evo.problem.stated import check_statement, told
from evo.runtime.package import cache_folder
from evo.runtime.statement import Bound, Function

UNFILLED = "# FILL IN: "
"""Mark, in a kernel.py that `evo new` has written, of what only its user knows."""


def template_root() -> Path:
    """The folder of kernels: beside the installed package, else in the checkout."""
    here = Path(__file__).resolve().parent.parent
    installed = here / "_assets" / "templates"
    return installed if installed.is_dir() else here.parent / "templates"


def kernel_names() -> list[str]:
    return sorted(p.parent.name for p in template_root().glob("*/kernel.py"))


def names_near(name: str) -> list[str]:
    """Kernels that may be meant: the shipped ones, and the folders beside the one that is named."""
    return [*kernel_names(), *(str(p.parent) for p in Path(name).parent.glob("*/kernel.py"))]


def find_kernel(name: str) -> Path:
    """The folder of a kernel, by its name or by a path to it.

    Raises UnknownNameError if there is none, KernelError for a folder that is no kernel's.
    """
    try:
        if name and (Path(name) / "kernel.py").is_file():
            return Path(name).resolve()
    except (OSError, ValueError):  # no file can be called so
        raise UnknownNameError("kernel", name[:80], kernel_names()) from None
    if name in kernel_names():
        return template_root() / name
    if name and Path(name).is_dir():
        raise KernelError(
            f"{name} is a folder, but no kernel's: it has no kernel.py; a kernel is a folder with kernel.py, which states"
            " the problem, and a template for each target, such as cuda.cu.j2 or cpu.cpp.j2 (docs/writing-a-kernel.md)"
        )
    raise UnknownNameError("kernel", name, names_near(name))


def unfilled(path: Path) -> list[tuple[int, str]]:
    """(line, what) of all that a kernel.py or function.py still lacks."""
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    return [(number, line.partition(UNFILLED)[2].strip()) for number, line in lines if UNFILLED in line]


# -- the files that decide a search -------------------------------------------------------------------------------

class Notation(Protocol):
    """What reading and rendering a kernel has to know of a language (`evo.targets.Language`)."""

    name: str
    targets: tuple[str, ...]
    """The devices that its templates are for."""
    suffix: str
    """The end of a rendered source's name, such as .cpp. A template is called TARGET, then this, then .j2."""
    headers: tuple[str, ...]
    """The suffixes of what its sources may include."""
    plain: bool
    """Whether a source without Jinja, whose parameters are macros, may be a template. Of another package's languages only
    one with a suffix that evo's own have, too."""
    types: Mapping[str, str]
    """The types of elements and numbers, by dtype, which templates are told; a dtype may be missing."""
    declares_kernels: bool
    """Whether an entry point is declared __global__; if not, any function may be one."""


def own_notations() -> list[Notation]:
    """The notations of evo's own languages."""
    return [find_plugin("language", name) for name in own_names("language")]


@cache
def _sources() -> frozenset[str]:
    """The suffixes of what a template may include by a name that it computes."""
    return frozenset({".j2"}.union(*((notation.suffix, *notation.headers) for notation in own_notations())))


_COMPUTED = r"(?>\{\{.*?\}\})|(?>\{%.*%\})"
_QUOTED = re.compile(rf"""["'<]((?:{_COMPUTED}|[\w./+-])+)(?=["'>])""")
"""What may be the name of a file: _shared/row.cuh, or _shared/mma{{ "_half" if p.half }}.cuh."""
_INCLUDE = re.compile(rf"""#\s*include\s*["<]((?:{_COMPUTED}|[^">\n])+)""")
_TAG = re.compile(r"\{%[-+]?\s*(?:include|import|extends|from)\s+(.*?)%\}", re.DOTALL)
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n;]*)|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)


def kernel_files(folder: Path) -> dict[str, bytes]:
    """The content of each file that decides what a search of this kernel finds, by its place below the kernel's folder or,
    if it lies there, below that of all kernels. These are kernel.py and the templates beside it, and what these name: the
    modules that they import, the files that they include, and others whose names are quoted in them. Whatever else lies in
    the folder is not looked at. The kernel is not loaded for that, and may lie anywhere. Raises KernelError for a file that
    cannot be read.
    """
    listed, found, roots = cache(_listed), dict[str, bytes](), (str(folder), str(template_root()))
    plain, targets = {n.suffix for n in own_notations() if n.plain}, plugin_names("target")
    own = (name for name in listed(roots[0]) if Path(name).suffix in {".j2", *plain} and name.partition(".")[0] in targets)
    waiting = dict.fromkeys(("kernel.py", *own), roots[0])
    while waiting:
        name, root = waiting.popitem()
        try:
            found[name] = Path(root, name).read_bytes()
        except OSError as error:
            raise KernelError(f"{root}/{name} cannot be read ({error.strerror}): kernels consist of files") from error
        for root, parts in product(reversed(roots), _named_in(name, found[name])):
            waiting |= {other: root for other in _files_at(root, parts, listed) if other not in found}
    return found


def _listed(folder: str) -> dict[str, os.DirEntry[str]]:
    """What lies in a folder, by its name; nothing where there is no folder that may be looked into."""
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        return {entry.name: entry for entry in entries}
    return {}


def _files_at(folder: str, parts: Sequence[str], listed: Callable[[str], dict[str, os.DirEntry[str]]]) -> Iterator[str]:
    """The files at a place below a folder. A `*` in it stands for what a template computes, and then only for sources that
    are not hidden."""
    (first, *rest), entries = parts, listed(folder)
    computed = "*" in first
    for name in fnmatch.filter(entries, first) if computed else {first} & entries.keys():
        if computed and (name[0] == "." or not (rest or Path(name).suffix in _sources())):
            continue
        if rest:
            yield from (f"{name}/{below}" for below in _files_at(f"{folder}/{name}", rest, listed))
        with suppress(OSError):  # a link to itself
            if not rest and entries[name].is_file():
                yield name


@lru_cache(256)
def _named_in(name: str, content: bytes) -> frozenset[tuple[str, ...]]:
    """The places, in parts, of the files that a file asks for or may ask for: what it names counts if there is such one."""
    text, own = content.decode(errors="replace"), name.split("/")[:-1]
    named = {quoted for found in _QUOTED.findall(text) if re.search(r"[./]", quoted := re.sub(_COMPUTED, "*", found))}
    named |= {f"{quoted}*" for quoted in named if "/" in quoted}  # "parts/" ~ p.part
    named |= {re.sub(_COMPUTED, "*", included) for included in _INCLUDE.findall(text)}
    for asked in _TAG.findall(text):
        literals = re.findall(r"""["']([^"'\n]+)["']""", asked)
        named |= {*literals, *(f"{part.partition('%')[0]}*" for part in literals)}
        if asked.lstrip("([ ")[:1] not in "\"'":
            named.add("*")
    places = [*named, *("/".join([*own, part]) for part in named)]
    for dots, module, names, plain in _IMPORT.findall(re.sub(r"#[^\n]*|\\\n", "", text)) if name.endswith(".py") else ():
        package = [*(own[: len(own) + 1 - len(dots)] if dots else ()), *filter(None, module.split("."))]
        imported = [[*package, each] for each in re.findall(r"\w+", names)]
        for parts in (package, *imported, *(part.split()[0].split(".") for part in plain.split(",") if part.strip())):
            for module in ("/".join(parts[:i]) for i in range(1, len(parts) + 1) if dots or parts[0] != "evo"):
                places += [f"{module}.py", f"{module}/__init__.py"]
    parted = (tuple(posixpath.normpath(re.sub(r"\*+", "*", place)).split("/")) for place in places if place)
    return frozenset(parts for parts in parted if parts[0] not in ("", ".", ".."))


def digest_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(os.fsencode(name) + b"\0" + content + b"\0")
    return digest.hexdigest()


def kernel_digest(folder: Path) -> str:
    """The sha256 over `kernel_files`."""
    return digest_of(kernel_files(folder))


# -- loading ------------------------------------------------------------------------------------------------------

_PACKAGE = "_evo_kernel_"
_LOADS = 3
"""Number of attempts to load a kernel whose files change meanwhile."""
_loaded: dict[Path, Kernel] = {}
"""The kernels of this process, by folder."""


def load_kernel(name: str, digest: str = "") -> Kernel:
    """The `KERNEL` of templates/<name>/kernel.py, or of the folder that `name` is a path to; loaded once, and again when one
    of `kernel_files` has changed. Its `digest` is that of the files that were loaded.

    digest: what it must have, as it was recorded; empty if anything will do.
    Raises UnknownNameError; KernelError if there is no such file, it does not state a problem, or its digest is another.
    """
    try:
        folder = find_kernel(name)
        now = digest_of(files := kernel_files(folder))
    except EvoError:
        now = ""
        if not digest:
            raise
    if digest and now != digest:
        raise KernelError(
            f"the files of kernel {name!r} were changed or deleted while they were in use: what was recorded before is kept;"
            " put them back and resume, or start a new run"
        )
    for _ in range(_LOADS):
        if (kernel := _loaded.get(folder)) is not None and kernel.digest == now:
            return kernel
        _loaded[folder] = _import_kernel(folder, files)
        now = digest_of(files := kernel_files(folder))
    raise KernelError(f"the files of kernel {name!r} change while they are loaded: let nothing write to {folder} meanwhile")


def recorded_kernel(name: str, digest: str | None) -> Kernel:
    """The kernel that a record names. A database may come from anybody, and a kernel.py is a program: it is run only if evo
    brings it along, if it lies below the current folder or among the user's decorated functions and its files have the
    recorded digest (None: whatever they are now), or if this process has loaded it before because its user named it.

    Raises what `load_kernel` raises, and UsageError for one that must not be run.
    """
    folder = find_kernel(name)
    if folder not in _loaded and not folder.is_relative_to(template_root()):
        reason = ""
        if not folder.is_relative_to(Path.cwd().resolve()) and not is_decorated(folder):
            reason = f"its folder {folder} is not below the current one"
        elif digest not in (None, kernel_digest(folder)):
            reason = f"what lies in {folder} has changed since"
        if reason:
            raise UsageError(f"kernel {name} is not here as it was recorded: {reason}; add --trust to run its kernel.py")
    return load_kernel(name)


def decorated_root(create: bool = False) -> Path | None:
    """Where the folders of kernels lie that `evo.kernel` made of functions; None without a folder of the user's alone.
    create: makes that folder where there is none."""
    cache = cache_folder(create)
    return cache / "own" if cache is not None else None


def is_decorated(folder: Path) -> bool:
    """Whether `evo.kernel` has written a kernel's folder."""
    root = decorated_root()
    return root is not None and folder.is_relative_to(root.resolve())


def _import_kernel(folder: Path, files: Mapping[str, bytes]) -> Kernel:
    """The folder is imported as a package of a private name, so that kernel.py can be split: from .space import ... It holds
    the folders that kernels of a family share, too: from ._norm import ... Modules beside kernel.py that it imports by
    their own names are loaded anew, also where this process has them."""
    path = folder / "kernel.py"
    beside = folder / "function.py"
    if missing := [(p, line, what) for p in (path, beside) if p is path or p.is_file() for line, what in unfilled(p)]:
        places = "; ".join(f"{p.name}, line {line}, {what}" for p, line, what in missing)
        raise KernelError(f"{folder} is not complete: {places} (write each, and delete its comment {UNFILLED.strip()!r})")
    package = _package_of(folder)
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_of(folder, package, name)}
    importlib.invalidate_caches()
    loader, within = _FromSource(package, str(path)), [str(folder), str(template_root())]
    spec = importlib.util.spec_from_file_location(package, path, loader=loader, submodule_search_locations=within)
    assert spec is not None
    module = sys.modules[package] = importlib.util.module_from_spec(spec)
    outer, _finder.folder = _finder.folder, folder
    try:
        loader.exec_module(module)
        own = [name for name in sys.modules if name != package and _is_of(folder, package, name)]
    except KernelError:
        raise
    except (Exception, SystemExit) as error:
        raise told(folder, "fails on import:", error) from error
    finally:
        _finder.folder = outer
        sys.modules.update({n: m for n, m in before.items() if n not in sys.modules and not n.startswith(package)})
    for name in own:
        place = name.removeprefix(f"{package}.").replace(".", "/")
        if getattr(sys.modules[name], "__file__", None) and not {f"{place}.py", f"{place}/__init__.py"} & {*files}:
            raise KernelError(f"{path} imports {place}.py by a name that it computes: write from .MODULE import NAME")
    kernel = getattr(module, "KERNEL", None)
    if not isinstance(kernel, Kernel):
        raise KernelError(f"{path} must define KERNEL = evo.problem.kernel.Kernel(...)")
    object.__setattr__(kernel, "folder", folder)
    object.__setattr__(kernel, "digest", digest_of(files))
    check_statement(kernel)
    return kernel


def load_function(kernel: Kernel) -> Function | None:
    """The `FUNCTION` of function.py beside a kernel.py; None if there is none. Raises KernelError for one that fails or does
    not fit the kernel."""
    path = kernel.folder / FUNCTION_FILES[0]
    if not path.is_file():
        return None
    loader = _FromSource(f"{_package_of(kernel.folder)}.{path.stem}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise told(kernel.folder, "fails on import:", error) from error
    function = getattr(module, "FUNCTION", None)
    if not isinstance(function, Function):
        raise KernelError(f"{path} must define FUNCTION = evo.problem.function.Function(...)")
    if fault := next(Bound(function, kernel).faults(), ""):
        raise KernelError(f"{path}: {fault}")
    return function


def _package_of(folder: Path) -> str:
    """The private name by which a kernel's folder is imported."""
    return f"{_PACKAGE}{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def _is_of(folder: Path, package: str, name: str) -> bool:
    """Whether a module is a kernel's own, or one beside it that was imported because its folder is in sys.path."""
    place = getattr(sys.modules[name], "__dict__", {}).get("__file__")
    ends = (".py", "/__init__.py") if not name.startswith("evo.") and name != "evo" else ()
    beside = place in [f"{folder}/{name.replace('.', '/')}{end}" for end in ends]
    return beside or name == package or name.startswith(f"{package}.")


class _FromSource(SourceFileLoader):
    """Compiles a module from its source. What Python keeps in __pycache__ counts as current after an edit that leaves size
    and second as they were."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder:
    """Has `_FromSource` load what belongs to kernels: modules of their packages, and those beside the one that is loaded."""

    folder: Path | None = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(_PACKAGE) and self.folder is None:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or type(spec.loader) is not SourceFileLoader:
            return None
        if not name.startswith(_PACKAGE) and self.folder not in Path(spec.origin).parents:
            return None
        spec.loader = _FromSource(name, spec.origin)
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)
