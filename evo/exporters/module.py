"""A Python package that stands alone: PyTorch's function, with tuned variants behind it where they apply.

What lies in it: __init__.py with the public names of the kernel's frontend.py; the frontend; the run time
(evo/exporters/_module, copied as it is); where the kernel has it, the source of the native launcher, frontend.cpp and
native/; manifest.json, the provenance; for each variant its readable source and its binary; the local headers that the
sources include.
"""

from __future__ import annotations

import ast
import json
import keyword
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from evo import __version__
from evo.errors import KernelError, UsageError
from evo.exporters import Exporter, ExportItem, ExportRequest
from evo.exporters._folder import MANIFEST, file_digests, publish
from evo.exporters._manifest import BuiltVariant, manifest_record, to_json
from evo.kernel import FRONTEND_FILE, Kernel, load_kernel
from evo.render import render
from evo.targets import Target, find_target

__all__ = ["EXPORTER", "ModuleExporter"]

_RUNTIME = Path(__file__).parent / "_module"
_SCALARS = ("int64", "int32", "float32", "float64")
_TAKEN = frozenset({"evo", "torch", *sys.stdlib_module_names})


class ModuleExporter:
    """The methods are those of `evo.exporters.Exporter`."""

    name = "module"

    def export(self, request: ExportRequest) -> list[Path]:
        """`out` becomes the package: its name is the one to import.

        An item's record may hold `source_digest`, the digest of the source that was measured: if another one is
        rendered now it is refused, because what is recorded would not be true of it. Raises UsageError for that,
        for a name that cannot be imported, for a kernel without frontend.py; what `publish` raises; TemplateError
        and CompileError.
        """
        out = request.out.absolute()
        _check_package_name(out.name)
        kernel, target = load_kernel(request.kernel), find_target(request.target)
        kernel.check_target(target.name)
        frontend = _frontend(kernel)
        names = _public_names(frontend)
        _check_items(kernel, request.items)
        with publish(out, self.name) as folder:
            variants = [_build(kernel, target, request.arch, i, item) for i, item in enumerate(request.items)]
            for path in sorted(p for p in _RUNTIME.glob("*.py") if p.name != "__init__.py"):
                (folder / path.name).write_bytes(path.read_bytes())
            _write_frontend(folder, frontend)
            for variant in variants:
                _write_variant(folder, variant)
            (folder / "__init__.py").write_text(_init(kernel, names, variants), encoding="utf-8")
            manifest = {**manifest_record(kernel, target, request, variants), "files": file_digests(folder)}
            (folder / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
        return sorted(p for p in out.rglob("*") if p.is_file())


def _check_package_name(name: str) -> None:
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UsageError(
            f"the folder's name becomes the module's, and {name!r} cannot be imported: use letters, digits and _"
        )
    if name in _TAKEN:
        raise UsageError(f"a module called {name!r} would hide the one of that name: choose another --out")


def _frontend(kernel: Kernel) -> Path:
    path = kernel.folder / FRONTEND_FILE
    if not path.is_file():
        raise UsageError(
            f"kernel {kernel.name!r} has no {FRONTEND_FILE} in {kernel.folder}, the function that PyTorch code would "
            f"call: write one, or choose another --format"
        )
    return path


def _public_names(frontend: Path) -> list[str]:
    """__all__ of the frontend, which is read and not run. Raises KernelError."""
    try:
        for node in ast.parse(frontend.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
                return [str(name) for name in ast.literal_eval(node.value)]  # type: ignore[attr-defined]
    except (SyntaxError, ValueError) as error:
        raise KernelError(f"{frontend} cannot be read ({error})") from error
    raise KernelError(f"{frontend} does not say what is public: define __all__ = [...]")


def _check_items(kernel: Kernel, items: Iterable[ExportItem]) -> None:
    seen: dict[str, str] = {}
    for item in items:
        key = item.workload.key
        if key in seen:
            raise UsageError(f"{seen[key]} and {item.candidate} are both for {key}: export one of them")
        seen[key] = item.candidate
    if not seen:
        raise UsageError("there is nothing to export: name a run that has a winner, or candidates")
    for argument in kernel.arguments:
        if argument.kind == "scalar" and argument.dtype not in _SCALARS:
            raise KernelError(
                f"kernel {kernel.name!r}: scalar argument {argument.name!r} has dtype {argument.dtype!r}, and "
                f"exported modules pass only {', '.join(_SCALARS)}"
            )


def _build(kernel: Kernel, target: Target, arch: str, index: int, item: ExportItem) -> BuiltVariant:
    source = render(kernel, target.name, item.genome, kernel.binding(target.name, item.workload), arch)
    measured = item.record.get("source_digest")
    if measured is not None and measured != source.digest:
        raise UsageError(
            f"{item.candidate} was measured with another source than kernel {kernel.name!r} gives today (its "
            f"template has changed since): search again, or go back to the templates it was found with"
        )
    with tempfile.TemporaryDirectory(prefix="evo-export-") as workdir:
        binary = target.compile(source, arch, Path(workdir))
    fixed = kernel.specialised[target.name]
    sizes = "x".join(str(n) for d, n in item.workload.dims if d in fixed or not fixed)
    stem = f"variant_{index}_{item.workload.dtype}_{sizes}"
    kind = "so" if target.name == "cpu" else "cubin" if binary.code.startswith(b"\x7fELF") else "ptx"
    return BuiltVariant(
        item=item,
        source=source,
        binary=binary,
        source_file=f"{stem}.{target.language}",
        binary_file=f"{stem}.{kind}",
    )


def _write_frontend(folder: Path, frontend: Path) -> None:
    """The Python function and, where the kernel has it, the native launcher: <kernel>/frontend.cpp, and what it includes."""
    (folder / FRONTEND_FILE).write_bytes(frontend.read_bytes())
    native = frontend.with_suffix(".cpp")
    if native.is_file():
        (folder / native.name).write_bytes(native.read_bytes())
        (folder / "native").mkdir()
        for header in sorted((_RUNTIME / "native").glob("*.h")):
            (folder / "native" / header.name).write_bytes(header.read_bytes())


def _write_variant(folder: Path, variant: BuiltVariant) -> None:
    (folder / variant.source_file).write_bytes(variant.source.text.encode())
    (folder / variant.binary_file).write_bytes(variant.binary.code)
    for name, text in variant.source.includes.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise KernelError(f"{variant.source_file} includes {name!r}, which is not below its include folders")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def _init(kernel: Kernel, names: list[str], variants: Sequence[BuiltVariant]) -> str:
    tuned = "\n".join(f"    {v.item.workload.key}  ({v.source_file})" for v in variants)
    return (
        f'"""{kernel.title} for PyTorch, in place of {kernel.replaces or "its own"}.\n\n'
        f"Tuned for {variants[0].source.target} and\n{tuned}\n"
        f"Everything else is left to PyTorch. Found and written by evo {__version__}; {MANIFEST} tells how.\n\n"
        f"    python -m PACKAGE build     build the native launcher: cheaper calls\n"
        f"    python -m PACKAGE check     compare with PyTorch and float64\n"
        f'    python -m PACKAGE bench     time beside PyTorch\n"""\n\n'
        f"from .frontend import {', '.join(names)}\n\n"
        f"__all__ = {json.dumps(names)}\n"
    )


EXPORTER: Exporter = ModuleExporter()
