"""evo.search(KERNEL, OPTION=...) searches and returns the run: help(evo.api.search) has the options. As a package: what to
try next, and which candidate won: the loop, its samplers and operators, the finals."""

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Search(ModuleType):
    """The package and the function have one name: `evo.search` is either, in whatever order modules are imported."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("evo.api").search(*arguments, **options)

    @property
    def __signature__(self) -> Signature:
        """Notebooks show it."""
        return signature(import_module("evo.api").search)


sys.modules[__name__].__class__ = _Search
