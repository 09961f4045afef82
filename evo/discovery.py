"""Plug-ins by name: a new sampler, operator, target, language, executor or export format is one file in its package, and no
registry is edited. Another package offers one by an entry point of a group such as `evo.samplers`: its name is the
plug-in's, its object what a file would define, such as `SAMPLER`. A name of evo's own stands for evo's own plug-in."""

import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
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

    Raises UnknownNameError if there is neither, UsageError if several packages offer it or the one that does is broken.
    """
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
