"""Kernels that were searched, measured and shipped, ready to call in place of PyTorch's functions.

    from evo.ready import layer_norm         the function, with PyTorch's signature; its modules, such as LayerNorm, too
    from evo.ready import layernorm          the package it is from: layernorm.explain, .patch, .build, .variants, ...
    evo.ready.kernels()                      what there is, for which devices, and where it comes from
    python -m evo.ready                      the same, for people
    python -m evo.ready.layernorm check      what every exported package can do

A package is imported when something of it is first asked for. On a machine that none of its variants is for, its functions
are PyTorch's, and its `explain` says so. Nothing of the search engine is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from evo.ready._shipped import ReadyKernel, ReadyVariant, claims, kernel_root, kernels

__all__ = ["ReadyKernel", "ReadyVariant", "kernels"]

__path__.append(str(kernel_root()))  # each folder there is a package that `import evo.ready.NAME` finds


def __getattr__(name: str) -> Any:
    """A shipped package, or a function or module of one. Raises ImportError where two of them claim the name."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owners = claims().get(name, [])
    if not owners:
        known = ", ".join(sorted(claims())) or "nothing yet"
        raise AttributeError(f"no kernel that is shipped with this evo is or has {name!r}; there are: {known}")
    folder = owners[0]
    if owners.count(folder) > 1:
        raise ImportError(f"{folder} is called like a function that is in it: give the folder another name")
    if len(owners) > 1:
        raise ImportError(
            f"{name!r} is in {' and in '.join(map(str, owners))}: keep one of them, or export both to one package, which "
            f"takes all dtypes and devices of a function"
        )
    package = import_module(f"{__name__}.{folder.name}")
    found = package if name == folder.name else getattr(package, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *claims()})
