"""Plug-ins by name: a new sampler, operator, target, language, executor or export format is one file in its package, and no
registry is edited. Another package offers one by an entry point of a group such as `evo.samplers`: its name is the
plug-in's, its object what a file would define, such as `SAMPLER`. A name of evo's own stands for evo's own plug-in. A name
that ends in .py is a path: the file defines the plug-in, and imports nothing that lies beside it."""

import ast
import hashlib
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from evo.errors import EngineError, UnknownNameError, UsageError

PACKAGES = {
    "sampler": "evo.search.samplers",
    "operator": "evo.search.operators",
    "target": "evo.targets",
    "language": "evo.targets.languages",
    "executor": "evo.executors",
    "exporter": "evo.export",
}
"""Package whose `__init__.py` says what a plug-in has to define, by kind of plug-in. Entry points' group: evo.KINDs."""


def plugin_names(kind: str) -> list[str]:
    """Names of the plug-ins of a kind: the public modules of its package, and what other packages offer, not imported."""
    return sorted({*own_names(kind), *_offered(kind)})


def find_plugin(kind: str, name: str) -> Any:
    """The constant KIND (upper case) of module `name`, e.g. SAMPLER of evo.search.samplers.random; or what another package
    offers by that name.

    Raises UnknownNameError if there is neither, UsageError if several packages offer it or what does is broken.
    """
    if is_file(name):
        return _load_file(kind, full_path(name), _read(kind, name))
    if name not in own_names(kind):
        return _load(kind, name)
    module = importlib.import_module(f"{PACKAGES[kind]}.{name}")
    try:
        return getattr(module, kind.upper())
    except AttributeError as error:
        raise EngineError(f"{module.__name__} defines no {kind.upper()}") from error


@cache
def own_names(kind: str) -> tuple[str, ...]:
    """Names of evo's own plug-ins of a kind, without a look at what is installed, which takes longer."""
    modules = pkgutil.iter_modules(importlib.import_module(PACKAGES[kind]).__path__)
    return tuple(sorted(m.name for m in modules if not m.name.startswith("_") and not m.ispkg))


@cache
def _offered(kind: str) -> dict[str, list[EntryPoint]]:
    """What installed packages offer, by name."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"evo.{kind}s"):
        found.setdefault(point.name.replace("-", "_"), []).append(point)
    return found


@cache
def _load(kind: str, name: str) -> Any:
    points = _offered(kind).get(name)
    if points is None:
        raise UnknownNameError(kind, name, plugin_names(kind))
    packages = sorted({point.dist.name if point.dist else point.module for point in points})
    if len(packages) > 1:
        raise UsageError(f"{kind} {name!r} is offered by several packages, {' and '.join(packages)}: uninstall all but one")
    try:
        return points[0].load()
    except Exception as error:
        told = f"{kind} {name!r} of package {packages[0]} cannot be loaded ({type(error).__name__}: {error})"
        raise UsageError(f"{told}: update or uninstall it") from error


# -- plug-ins from files of one's own -----------------------------------------------------------------------------


def is_file(name: str) -> bool:
    return name.endswith(".py")


def full_path(name: str) -> str:
    """A plug-in's name; if it is a file, its absolute path."""
    return str(Path(name).resolve()) if is_file(name) else name


def file_digests(kind: str, names: Iterable[str]) -> dict[str, str]:
    """The sha256 of those plug-ins that are files, by path. Raises UsageError for one that cannot be read."""
    return {name: hashlib.sha256(_read(kind, name)).hexdigest() for name in names if is_file(name)}


def check_files(recorded: Mapping[str, str]) -> None:
    """Raises UsageError if a file with one of these digests, by path, is gone or has changed."""
    for path, digest in recorded.items():
        gone = not Path(path).is_file()
        if gone or file_digests("plug-in", [path])[path] != digest:
            told = f"{path}, which the run was begun with, {'is gone' if gone else 'has changed'}"
            raise UsageError(f"{told}: put it back as it was and resume, or start a new run")


def fault(name: str, error: BaseException) -> UsageError:
    """The error for what the code of a plug-in's file has raised, with where it was."""
    frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == full_path(name)]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    raised = f"{type(error).__name__}: {text}".rstrip(": ").replace("\n", " ")
    return UsageError(f"{name}{f', line {line}' if line else ''}: {raised}; mend it, or leave it out")


def _read(kind: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the {kind}'s file {name}: {getattr(error, 'strerror', error)}") from error


@cache
def _load_file(kind: str, path: str, content: bytes) -> Any:
    """What the file defines, loaded once, and again when its content has changed."""
    constant, module = kind.upper(), ModuleType(f"_evo_{kind}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look there
    try:
        tree = ast.parse(content, path)
        exec(compile(tree, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise fault(path, error) from error
    lines = [
        str(node.lineno)
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else ())
        if isinstance(target, ast.Name) and target.id == constant
    ]
    if len(lines) > 1:
        raise UsageError(f"{path} defines {constant} in lines {' and '.join(lines)}: a file defines one {kind}")
    if not hasattr(module, constant):
        raise UsageError(f"{path} defines no {kind}: end it with {constant} = ... (as do the modules of {PACKAGES[kind]})")
    return getattr(module, constant)
