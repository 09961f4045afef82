"""evo: a search engine for compute kernels that needs no language model."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evo.analysis.lineage import Lineage
    from evo.api import resume, search
    from evo.decorated import kernel
    from evo.job.replays import replay
    from evo.problem.kernel import Kernel
    from evo.problem.space import Space

__version__ = "0.1.0"
__all__ = ["Kernel", "Lineage", "Space", "__version__", "kernel", "replay", "resume", "search"]

_PLACES = {
    "Kernel": "evo.problem.kernel",
    "Lineage": "evo.analysis.lineage",
    "Space": "evo.problem.space",
    "kernel": "evo.decorated",
    "replay": "evo.job.replays",
    "resume": "evo.api",
}


def __getattr__(name: str) -> object:
    """Names that import libraries when they are first asked for. `evo.search` is a package that can be called."""
    if name == "search":
        return import_module("evo.search")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
