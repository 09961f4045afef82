"""evo: a search engine for compute kernels that needs no language model."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("evo-kernels")
except PackageNotFoundError:  # imported from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
