"""A Python package that stands alone: PyTorch's function, with tuned variants behind it where they apply.

What lies in it: __init__.py with the public names of the kernel's frontend.py; the frontend; the run time (evo/runtime, as
it is); where the kernel has it, the source of the native launcher, frontend.cpp; manifest.json, the provenance; for each
variant, a winner built for one architecture, its readable source and its binary; sources for sizes that nothing was tuned
for; the local headers that the sources include.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evo import __version__, runtime
from evo.errors import KernelError, UsageError
from evo.export import Combining, ExportRequest
from evo.export._folder import MANIFEST, Contents, publish, read_manifest
from evo.export._jit import add_fallbacks
from evo.export._package import build_package
from evo.problem.kernel import FRONTEND_FILE, Kernel, load_kernel
from evo.runtime.package import INIT, MAIN, slower

__all__ = ["EXPORTER", "ModuleExporter", "make_package"]

_RUNTIME = Path(runtime.__file__).parent
_NATIVE_FRONTEND = "frontend.cpp"
_TAKEN = frozenset({"evo", "torch", *sys.stdlib_module_names})


class ModuleExporter:
    """The methods are those of `evo.export.Combining`."""

    name = "module"

    def export(self, request: ExportRequest) -> list[Path]:
        """`out` becomes the package: its name is the one to import.

        An item's record may hold `source_digest`, the digest of the source that was measured: if another one is
        rendered now it is refused, because what is recorded would not be true of it. Raises UsageError for that,
        for a name that cannot be imported, for a kernel without frontend.py, for an architecture that nothing can be
        built for; what `publish` raises; TemplateError and CompileError.
        """
        return self.export_together((request,))

    def export_together(self, parts: Sequence[ExportRequest]) -> list[Path]:
        """One package of several requests for one kernel, which differ in target, architecture or environment."""
        _check_package_name(parts[0].out.absolute().name)
        return publish(parts[0].out, self.name, lambda: make_package(parts))

    def advice(self, out: Path) -> list[str]:
        number = Counter((v["arch"], v["standing"]) for v in read_manifest(out)["variants"])
        run = f"python -m {out.name}"
        lines = [f"built for {'; '.join(f'{arch}: {n} {standing}' for (arch, standing), n in number.items())}"]
        lines.append(f"try it:  {run} check   and   {run} bench   in {out.resolve().parent}")
        if (out / _NATIVE_FRONTEND).is_file():
            lines.append(f"build its native launcher, once a machine, which makes calls cheaper:  {run} build")
        return lines

    def remarks(self, out: Path) -> list[str]:
        manifest = read_manifest(out)
        archs: dict[str, list[str]] = {}
        for v in manifest["variants"]:
            if instead := v["instead_of"]:
                told = f"is {v['candidate']}, because {instead['candidate']} cannot be built for it ({instead['reason']})"
                archs.setdefault(f"{v['workload']['key']}: what is built for ARCHS {told}", []).append(v["arch"])
        for m in manifest["left_out"]:
            told = f"neither {m['candidate']} nor another candidate of its run can be ({m['reason']})"
            archs.setdefault(f"{m['workload']}: nothing is built for ARCHS, {told}", []).append(m["arch"])
        for v in manifest["variants"]:
            if reason := slower(v):
                archs.setdefault(f"{v['workload']['key']}: left to PyTorch on ARCHS ({reason})", []).append(v["arch"])
        return [remark.replace("ARCHS", " and ".join(among)) for remark, among in archs.items()]


def make_package(parts: Sequence[ExportRequest]) -> Contents:
    """The package, for other formats, too. Raises what `ModuleExporter.export` raises."""
    kernel = load_kernel(parts[0].kernel)
    frontend = _frontend_of(kernel)
    manifest, files = build_package(kernel, parts)
    add_fallbacks(kernel, manifest, files)
    files["__init__.py"] = f'"""{_introduction(manifest)}"""\n\n{INIT}'.encode()
    files["__main__.py"] = MAIN.encode()
    files |= {f"runtime/{path.name}": path.read_bytes() for path in _RUNTIME.iterdir() if path.suffix in (".py", ".h")}
    own = (frontend, frontend.with_name(_NATIVE_FRONTEND))
    return manifest, files | {path.name: path.read_bytes() for path in own if path.is_file()}


def _check_package_name(name: str) -> None:
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UsageError(
            f"the folder's name becomes the module's, and {name!r} cannot be imported: use letters, digits and _"
        )
    if name in _TAKEN:
        raise UsageError(f"a module called {name!r} would hide the one of that name: choose another --out")


def _frontend_of(kernel: Kernel) -> Path:
    """Raises UsageError if it has none, KernelError if it does not say what is public (__all__; it is not run)."""
    path = kernel.folder / FRONTEND_FILE
    if not path.is_file():
        raise UsageError(
            f"kernel {kernel.name!r} has no {FRONTEND_FILE} in {kernel.folder}, the function that PyTorch code would "
            f"call: write one, or choose another --format"
        )
    if not re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), re.MULTILINE):
        raise KernelError(f"{path} does not say what is public: define __all__ = [...]")
    return path


def _introduction(manifest: dict[str, Any]) -> str:
    tuned: dict[str, list[str]] = {}
    for v in manifest["variants"]:
        arch = v["arch"] if v["standing"] == "measured" else f"{v['arch']} (compiled)"
        tuned.setdefault(v["workload"]["key"], []).append(arch)
    lines = "\n".join(f"    {key}:  {', '.join(archs)}" for key, archs in tuned.items())
    kernel = manifest["kernel"]
    return (
        f"{kernel['title']} for PyTorch, in place of {kernel['replaces'] or 'its own'}.\n\n"
        f"Tuned for\n{lines}\n"
        f"Everything else is left to PyTorch. Found and written by evo {__version__}; {MANIFEST} tells how.\n\n"
        f"    python -m PACKAGE build     build the native launcher: cheaper calls\n"
        f"    python -m PACKAGE check     compare with PyTorch and float64\n"
        f"    python -m PACKAGE bench     time beside PyTorch\n"
    )


EXPORTER: Combining = ModuleExporter()
