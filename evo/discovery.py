"""Plug-ins by file name: a new sampler, operator, target or exporter is one file, and no registry is edited."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from evo.errors import EngineError, UnknownNameError


def plugin_names(package: ModuleType) -> list[str]:
    """Names of the public modules of a package: the plug-ins it offers. Nothing is imported."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def find_plugin(package: ModuleType, kind: str, name: str) -> Any:
    """The constant KIND (upper case) of module `name`, e.g. SAMPLER of evo.search.samplers.random.

    Raises UnknownNameError if the package has no such module.
    """
    names = plugin_names(package)
    if name not in names:
        raise UnknownNameError(kind, name, names)
    module = importlib.import_module(f"{package.__name__}.{name}")
    try:
        return getattr(module, kind.upper())
    except AttributeError as error:
        raise EngineError(f"{module.__name__} defines no {kind.upper()}") from error
