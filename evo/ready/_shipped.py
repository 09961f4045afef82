"""What lies in the folder of shipped kernels. Nothing here imports any of it, or PyTorch."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ReadyKernel", "ReadyVariant", "claims", "kernel_root", "kernels"]

_MANIFEST = "manifest.json"
_OF_EVERY_PACKAGE = frozenset({"also_serve", "build", "explain", "patch", "variants"})
"""Public names by which a package is told what to do; the others are what it is for."""


@dataclass(frozen=True, kw_only=True)
class ReadyVariant:
    """One problem built for one architecture.

    standing: "measured" where it was timed on `arch`, "compiled" where what was found on another one was built for it.
    run, candidate, device: where it was found; None where that is not recorded. speedup: over PyTorch on that device, from
    the search's own race with cold caches; None unless it was measured. slower: all of that figure's interval lies below 1,
    and the package leaves such problems to PyTorch.
    """

    target: str
    arch: str
    standing: str
    dtype: str
    shape: dict[str, int]
    workload: str
    candidate: str
    run: str | None
    device: str | None
    speedup: float | None
    slower: bool


@dataclass(frozen=True, kw_only=True)
class ReadyKernel:
    """A shipped package: `import evo.ready.NAME`. replaces: the function of PyTorch that it stands in for."""

    name: str
    title: str
    replaces: str
    functions: tuple[str, ...]
    folder: Path
    exported_at: str
    evo_version: str
    variants: tuple[ReadyVariant, ...]

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(v.arch for v in self.variants))

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(v.dtype for v in self.variants))

    @property
    def shapes(self) -> tuple[dict[str, int], ...]:
        return tuple({tuple(v.shape.items()): v.shape for v in self.variants}.values())


def kernel_root() -> Path:
    """The folder of shipped kernels: beside the installed package, else in the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_assets" / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def claims() -> dict[str, list[Path]]:
    """The folders that lay claim to each name: packages to their own, and to those of their functions and modules. One that
    cannot be read claims its own alone, and keeps nobody from using the others."""
    found: dict[str, list[Path]] = {}
    for folder in _folders():
        names = [folder.name]
        with suppress(ImportError):
            names += _functions(folder)
        for name in names:
            found.setdefault(name, []).append(folder)
    return found


def kernels() -> tuple[ReadyKernel, ...]:
    """What is shipped, by name. Raises ImportError for a folder whose manifest cannot be read."""
    return tuple(_read(folder) for folder in _folders())


def _folders() -> list[Path]:
    found = (path.parent for path in kernel_root().glob(f"*/{_MANIFEST}"))
    return sorted(folder for folder in found if folder.name.isidentifier())


def _functions(folder: Path) -> tuple[str, ...]:
    """__all__ of its __init__.py, which is read and not run, less what every package has. Raises ImportError."""
    path = folder / "__init__.py"
    try:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
                return tuple(name for name in ast.literal_eval(node.value) if name not in _OF_EVERY_PACKAGE)
    except (OSError, SyntaxError, ValueError, TypeError) as error:
        raise ImportError(f"{path} cannot be read ({error}): export this kernel again") from error
    raise ImportError(f"{path} does not say what is public: export this kernel again")


def _read(folder: Path) -> ReadyKernel:
    path = folder / _MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kernel = manifest["kernel"]
        return ReadyKernel(
            name=folder.name,
            title=kernel["title"],
            replaces=kernel["replaces"],
            functions=_functions(folder),
            folder=folder,
            exported_at=manifest["exported_at"],
            evo_version=manifest["evo_version"],
            variants=tuple(map(_variant, manifest["variants"])),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(f"{path} is no manifest of an export ({type(error).__name__}: {error})") from error


def _variant(record: dict[str, Any]) -> ReadyVariant:
    origin, workload = record["record"], record["workload"]
    timing = _timing(origin)
    return ReadyVariant(
        target=record["target"],
        arch=record["arch"],
        standing=record["standing"],
        dtype=workload["dtype"],
        shape=workload["dims"],
        workload=workload["key"],
        candidate=record["candidate"],
        run=origin.get("run"),
        device=origin.get("device"),
        speedup=1 / timing["ratio"] if timing else None,
        slower=timing is not None and _is_slower(timing),
    )


def _is_slower(timing: dict[str, Any]) -> bool:
    return timing["stage"] == "final" and timing["ratio_low"] > 1.0 and not timing["clocks"].get("disturbed")


def _timing(record: dict[str, Any]) -> dict[str, Any] | None:
    cold = (t for t in record.get("timings", ()) if t["protocol"] != "hot" and t["contender"] == "candidate")
    return next((t for t in cold if t["ratio"]), None)
