"""Concrete problems: what is timed, what the gate feeds a kernel, what a source is specialised for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evo.problem.space import Value

__all__ = ["Binding", "Case", "Workload"]


@dataclass(frozen=True)
class Workload:
    """A concrete problem: sizes, dtype and options such as weight=True or eps=1e-5. Hashable."""

    dims: tuple[tuple[str, int], ...]
    dtype: str
    options: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, dims: Mapping[str, int], dtype: str, options: Mapping[str, Value] | None = None) -> Workload:
        return cls(tuple(dims.items()), dtype, tuple(sorted((options or {}).items())))

    def dim(self, name: str) -> int:
        return dict(self.dims)[name]

    def option(self, name: str) -> Value:
        return dict(self.options)[name]

    @property
    def key(self) -> str:
        """Text that `Kernel.workload` parses back: rows=4096,cols=4096,dtype=float16[,option=...]"""
        parts = [*self.dims, ("dtype", self.dtype), *self.options]
        return ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in parts)

    def __str__(self) -> str:
        return f"{'x'.join(str(v) for _, v in self.dims)} {self.dtype}"


@dataclass(frozen=True)
class Case:
    """A gate input: a problem and how its data are drawn."""

    name: str
    workload: Workload
    data: str
    """A distribution that `Kernel.inputs` knows."""
    offset: int = 0
    """Elements by which every tensor starts past an aligned address."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a rendered source is specialised for: dtype, and the dimensions and options that are compile-time
    constants."""

    dtype: str
    dims: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        return ",".join([*(f"{k}={v}" for k, v in (*self.dims, *self.options)), self.dtype])
