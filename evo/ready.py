"""Kernels that were searched, measured and shipped, ready to call in place of PyTorch's functions.

    from evo.ready import layer_norm         the function, with PyTorch's signature; its modules, such as LayerNorm, too
    from evo.ready import layernorm          the package it is from: layernorm.explain, .patch, .build, .variants, ...
    evo.ready.kernels()                      what there is, for which devices, and where it comes from
    python -m evo.ready                      the same, for people
    evo.ready.patch(model)                   has a model, or without one the whole process, use all of them
    python -m evo.ready.layernorm check      what every exported package can do

What is shipped is a manifest and sources, compiled for a device when they are first used on it. A package is imported when
something of it is first asked for; it takes its function, by the statement in evo.problem's terms, and headers from the
templates, and evo.runtime runs it. On a machine that none of its variants is for, its functions are PyTorch's, and its
`explain` says so. Nothing that searches, measures or exports is imported.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from evo.runtime.manifest import MANIFEST, read_manifest
from evo.runtime.package import BACKWARD, INIT, MAIN, slower

__all__ = ["ReadyKernel", "ReadyVariant", "kernels", "packages", "patch"]

_NAME = "evo.ready"
_OF_EVERY_PACKAGE = frozenset({"also_serve", "build", "explain", "patch", "variants"})
"""Public names by which a package is told what to do; the others are what it is for."""


@dataclass(frozen=True, kw_only=True)
class ReadyVariant:
    """One problem built for one architecture.

    standing: "measured" where it was timed on `arch`, "compiled" where what was found on another one was built for it.
    run, candidate, device: where it was found; None where that is not recorded. speedup: over PyTorch on that device, from
    the search's own race with cold caches; None unless it was measured, undisturbed. slower: all of that figure's interval
    lies below 1, and the package leaves such problems to PyTorch.
    """

    target: str
    arch: str
    standing: str
    dtype: str
    shape: dict[str, int]
    workload: str
    candidate: str
    run: str | None
    device: str | None
    speedup: float | None
    slower: bool


@dataclass(frozen=True, kw_only=True)
class ReadyKernel:
    """A shipped package: `import evo.ready.NAME`. replaces: the function of PyTorch that it stands in for."""

    name: str
    title: str
    replaces: str
    functions: tuple[str, ...]
    folder: Path
    exported_at: str
    evo_version: str
    variants: tuple[ReadyVariant, ...]


def kernels() -> tuple[ReadyKernel, ...]:
    """Shipped kernels, by name. Raises ImportError for a folder whose manifest cannot be read."""
    return tuple(map(_read, _folders().values()))


def packages() -> dict[str, Path]:
    """Folders of the shipped packages, also of those for backward passes, by the name that each is imported by."""
    parts = ((name, folder / part, part) for name, folder in _folders().items() for part in ("", BACKWARD))
    found = ((".".join(filter(None, (_NAME, name, part))), folder) for name, folder, part in parts)
    return {module: folder for module, folder in found if (folder / MANIFEST).is_file()}


def patch(model: Any = None) -> Any:
    """Has a model use the modules that are shipped, such as LayerNorm, in place of PyTorch's; without one, the whole process
    all functions. What packages' own `patch` return, as one. Raises TypeError for a model that is none."""
    patch = import_module("evo.runtime").Patch()
    for package in (import_module(f"{_NAME}.{name}") for name in _folders()):
        if model is None:
            patch.add(package.patch())
        elif signature(package.patch).parameters:
            patch.add(package.patch(model))
    if model is not None and "transformers" in sys.modules:
        patch.add(import_module("evo.transformers").patch(model))
    return patch


def _assets(name: str) -> Path:
    """A folder of files that are no code: in the installed package, else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_assets" / name
    return installed if installed.is_dir() else package.parent / name


def _folders() -> dict[str, Path]:
    found = sorted(path.parent for path in _assets("kernels").glob(f"*/{MANIFEST}"))
    return {folder.name: folder for folder in found if folder.name.isidentifier()}


@cache
def _manifest(folder: Path) -> dict[str, Any]:
    """Raises ImportError."""
    return read_manifest(folder / MANIFEST)


def _template(folder: Path) -> Path:
    """The folder of the kernel. Raises ImportError."""
    return _assets("templates") / str(_manifest(folder)["kernel"]["name"])


def _functions(folder: Path) -> tuple[str, ...]:
    """Functions of a shipped package, as `functions_of` finds them. Raises ImportError."""
    return functions_of(_template(folder))


def functions_of(folder: Path) -> tuple[str, ...]:
    """The function and the modules that a kernel's folder offers, by its statement or the __all__ of its frontend, which
    are read and not run. Raises ImportError."""
    path = folder / "function.py"
    stated = path.is_file()
    path = path if stated else path.with_name("frontend.py")
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        wanted = "FUNCTION" if stated else "__all__"
        (found,) = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == wanted]
        if not isinstance(found, ast.Call):
            return tuple(name for name in ast.literal_eval(found) if name not in _OF_EVERY_PACKAGE)
        given = {k.arg: k.value for k in found.keywords}
        modules = ast.literal_eval(given["modules"]) if "modules" in given else {}
        return tuple(sorted([str(ast.literal_eval(given["signature"])).strip().partition("(")[0], *modules]))
    except (OSError, SyntaxError, ValueError, TypeError, KeyError) as error:
        raise ImportError(f"{path} cannot be read, or does not say what is public ({error})") from error


def _read(folder: Path) -> ReadyKernel:
    manifest = _manifest(folder)
    return ReadyKernel(
        name=folder.name,
        title=manifest["kernel"]["title"],
        replaces=manifest["kernel"]["replaces"],
        functions=_functions(folder),
        folder=folder,
        exported_at=manifest["exported_at"],
        evo_version=manifest["evo_version"],
        variants=tuple(map(_variant, manifest["variants"])),
    )


def _variant(record: dict[str, Any]) -> ReadyVariant:
    origin, workload, timing = record["record"], record["workload"], record["timing"]
    return ReadyVariant(
        target=record["target"],
        arch=record["arch"],
        standing=record["standing"],
        dtype=workload["dtype"],
        shape=workload["dims"],
        workload=workload["key"],
        candidate=record["candidate"],
        run=origin.get("run"),
        device=origin.get("device"),
        speedup=1 / timing["ratio"] if timing and not timing["disturbed"] else None,
        slower=bool(slower(record)),
    )


class _Shipped(MetaPathFinder, InspectLoader):
    """Imports each folder of shipped kernels as a package: its own files, those of its template, and the run time."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = fullname.removesuffix(".__main__")
        name, _, within = package.removeprefix(f"{_NAME}.").partition(".")
        folder = _folders().get(name) if package.startswith(f"{_NAME}.") and within in ("", BACKWARD) else None
        if folder is None and package == f"{_NAME}.{name}" and not name.startswith("_"):
            raise ModuleNotFoundError(_unknown(name, _owners()), name=fullname)
        if folder is None or not (folder / within / MANIFEST).is_file():
            return None
        folder /= within
        spec = ModuleSpec(fullname, self, origin=str(folder), is_package=package == fullname)
        if package == fullname:
            spec.submodule_search_locations = [str(p) for p in (folder, _template(folder), _assets("templates"))]
        return spec

    def get_source(self, fullname: str) -> str:
        return MAIN if fullname.endswith(".__main__") else INIT

    def exec_module(self, module: ModuleType) -> None:
        # One run time for all of them, under the name by which an exported package knows its own.
        sys.modules.setdefault(f"{module.__name__}.runtime", import_module("evo.runtime"))
        super().exec_module(module)


def _owners() -> dict[str, list[Path]]:
    """Folders that claim a name: the package's, or one of its functions and modules. A folder that cannot be read claims its
    own name alone, and keeps nobody from using the others."""
    owners: dict[str, list[Path]] = {}
    for name, folder in _folders().items():
        owners.setdefault(name, []).append(folder)
        with suppress(ImportError):
            for function in _functions(folder):
                owners.setdefault(function, []).append(folder)
    return owners


def _unknown(name: str, known: Iterable[str]) -> str:
    names = ", ".join(sorted(known)) or "nothing yet"
    return f"no kernel that is shipped with this evo is or has {name!r}; there are: {names}"


def __getattr__(name: str) -> Any:
    """A shipped package, or a function or module of one. Raises ImportError where two of them claim the name."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    claimed = _owners()
    if name not in claimed:
        raise AttributeError(_unknown(name, claimed))
    if len(claimed[name]) > 1:
        folders = " and in ".join(map(str, claimed[name]))
        raise ImportError(
            f"{name!r} is in {folders}: give folders other names than functions, and export "
            f"one function to one package, which takes all its dtypes and devices"
        )
    owner = claimed[name][0].name
    package = import_module(f"{_NAME}.{owner}")
    found = globals()[name] = package if name == owner else getattr(package, name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_owners()})


def main() -> int:
    """Exit code 0; 1 where something that is shipped cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m evo.ready", description="Kernels that are shipped, ready to call.")
    parser.add_argument("--all", action="store_true", help="every variant, with its problem")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    try:
        found = kernels()
    except ImportError as error:
        print(f"evo: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in found], indent=1, default=str))
        return 0
    for kernel in found:
        variants, gains = kernel.variants, sorted(v.speedup for v in kernel.variants if v.speedup)
        speed = f", {gains[0]:.2f} to {gains[-1]:.2f} times PyTorch's speed where measured" if gains else ""
        archs = ", ".join(sorted({v.arch for v in variants}))
        print(f"{kernel.name}: {', '.join(kernel.functions)}: {len(variants)} variants ({archs}){speed}")
        if options.all:
            _print_variants(kernel)
    if found:
        print(f"to use one: from evo.ready import {found[0].functions[0]}; every variant: python -m evo.ready --all")
        print(f"what of it runs on this machine: python -m evo.ready.{found[0].name} check")
    else:
        print("no kernel is shipped with this evo")
    return 0


def _print_variants(kernel: ReadyKernel) -> None:
    """Prints a line a variant; options that all of them have once."""
    parts = [v.workload.split(",") for v in kernel.variants]
    options = [p for p in parts[0] if not p.startswith("dtype=") and not p.partition("=")[2].isdecimal()]
    same = [p for p in options if all(p in own for own in parts)]
    print(f"  in place of {kernel.replaces}{'; all with ' if same else ''}{','.join(same)}")
    names = [",".join(p for p in own if p not in same) for own in parts]
    for name, v in zip(names, kernel.variants, strict=True):
        print(f"  {name.ljust(max(map(len, names)))}  {v.arch:8}  {_figure(v)}")


def _figure(variant: ReadyVariant) -> str:
    if variant.standing == "compiled":
        return "found on another architecture, built for this one and never timed on it"
    if variant.speedup is None:
        return "right; its time is not known"
    left = ", so left to it" if variant.slower else ""
    return f"{variant.speedup:.2f} times PyTorch's speed on {variant.device}{left}"


if __name__ == "__main__":
    sys.exit(main())
else:
    __path__: list[str] = []  # a package, too: `import evo.ready.NAME`
    sys.meta_path.insert(0, _Shipped())
