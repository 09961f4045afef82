"""evo: a search engine for compute kernels that needs no language model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evo.analysis.lineage import Lineage

__version__ = "0.1.0"
__all__ = ["Lineage", "__version__"]


def __getattr__(name: str) -> object:
    """`evo.Lineage`, which brings a database library along, when it is first asked for."""
    if name == "Lineage":
        from evo.analysis.lineage import Lineage

        return Lineage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
