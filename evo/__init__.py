"""evo: a search engine for compute kernels that needs no language model."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evo.analysis.lineage import Lineage


def _version_of_checkout() -> str:
    """What pyproject.toml beside the package says."""
    import re
    from pathlib import Path

    file = Path(__file__).parent.parent / "pyproject.toml"
    found = re.search(r'^name = "evo-kernels"\nversion = "(.+)"$', file.read_text() if file.is_file() else "", re.MULTILINE)
    return f"{found[1]}+checkout" if found else "0+unknown"


try:
    __version__ = version("evo-kernels")
except PackageNotFoundError:  # imported from a checkout that was never installed
    __version__ = _version_of_checkout()

__all__ = ["Lineage", "__version__"]


def __getattr__(name: str) -> object:
    """`evo.Lineage`, which brings a database library along, when it is first asked for."""
    if name == "Lineage":
        from evo.analysis.lineage import Lineage

        return Lineage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
