"""Puts the functions of this package in the place of PyTorch's, and takes them away again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

__all__ = ["Patch"]


class Patch:
    """In force from the moment it is made until `undo`, or until the end of the block that it opens with `with`.

    functions: what torch.nn.functional is to have under these names. For the whole process: modules of PyTorch and models
    that call torch.nn.functional.NAME meet them, in every thread; who has imported the function itself does not.
    classes: for the modules of `model` that are exactly of a class, the class they are to have.
    Raises TypeError for a model that is none.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        model: torch.nn.Module | None = None,
        classes: Mapping[type, type] | None = None,
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"a model is a torch.nn.Module, got {type(model).__name__}; without one, functions are patched")
        self._before = {name: getattr(torch.nn.functional, name) for name in functions or {}}
        self._after = dict(functions or {})
        for name, function in self._after.items():
            setattr(torch.nn.functional, name, function)
        self._modules: list[tuple[torch.nn.Module, type]] = []
        for module in model.modules() if model is not None else ():
            wanted = (classes or {}).get(type(module))
            if wanted is not None:
                self._modules.append((module, type(module)))
                module.__class__ = wanted

    def __len__(self) -> int:
        """How many functions and modules are replaced."""
        return len(self._before) + len(self._modules)

    def undo(self) -> None:
        """All as it was. What somebody else has replaced since then stays. Once is enough."""
        for name, function in self._before.items():
            if getattr(torch.nn.functional, name) is self._after[name]:
                setattr(torch.nn.functional, name, function)
        for module, kind in self._modules:
            module.__class__ = kind
        self._before, self._modules = {}, []

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
