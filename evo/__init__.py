"""evo: a search engine for compute kernels that needs no language model."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evo.lineage import Lineage

try:
    __version__ = version("evo-kernels")
except PackageNotFoundError:  # imported from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["Lineage", "__version__"]


def __getattr__(name: str) -> object:
    """`evo.Lineage`, which brings a database library along, when it is first asked for."""
    if name == "Lineage":
        from evo.lineage import Lineage

        return Lineage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
