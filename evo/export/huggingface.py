"""A kernel for Hugging Face's `kernels`: a folder that get_local_kernel loads, with layers for kernelize. Uploaded to the
Hub, it is loaded by get_kernel.

build/torch-cuda/ (or torch-cpu/) is the variant that works with any PyTorch: metadata.json, layers.py with modules
without state, and the package of `module`, which does the work.
Reference: https://huggingface.co/docs/kernels, "Kernel requirements"; kernels 0.17.2.
"""

import json
import re
from pathlib import Path
from typing import Any

from evo.errors import UsageError
from evo.export import Contents, Exporter, ExportRequest, sha256_of, with_manifest
from evo.export.module import make_package
from evo.problem.formats import fill, format_table, values_of
from evo.problem.kernel import Kernel
from evo.problem.loading import load_function, load_kernel
from evo.runtime.manifest import compiled_when_loaded
from evo.runtime.statement import Function
from evo.targets import find_target

_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
"""Names that `kernels` accepts for a kernel."""


def _contents(request: ExportRequest) -> Contents:
    """The content of an export. Raises UsageError for a kernel without layers or a name that `kernels` does not take, and
    what `make_package` raises."""
    kernel = load_kernel(request.kernel)
    function = load_function(kernel)
    table = _layers_of(function) if function is not None else format_table(kernel, "huggingface")
    folder_name = request.out.absolute().name
    name = folder_name.lower().replace("_", "-")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the folder's name becomes the kernel's, and `kernels` does not accept {folder_name!r}: use two or more "
            f"letters, digits and -, starting with a letter"
        )
    package = kernel.name if kernel.name.isidentifier() else "kernel"
    manifest, own = make_package(request)
    values = values_of(request.items[0].workload) | {"package": package}
    variant = {f"{package}/{n}": data for n, data in with_manifest("module", manifest, own).items()}
    variant |= {"__init__.py": _init(kernel, package).encode(), "layers.py": fill(table["layers"], values).encode()}
    metadata = json.dumps(_metadata(name, request, variant), indent=2)
    files = {f"build/torch-{request.target}/{n}": data for n, data in variant.items()}
    files[f"build/torch-{request.target}/metadata.json"] = f"{metadata}\n".encode()
    return manifest, files | {"README.md": _card(kernel, name, request, table["layer"]).encode()}


def _layers_of(function: Function) -> dict[str, str]:
    """The table [huggingface] of formats.toml as it follows from a statement: a layer for each of its modules, else one for
    the function itself, which `kernels` puts in the place of a function."""
    own = "".join(word.capitalize() for word in function.name.split("_"))
    layers = function.forwards or {own: (function.declared, f"{function.name}({function.passed})")}
    text = "".join(
        f"\n\nclass {name}(nn.Module):\n    can_torch_compile = True\n    has_backward = True\n\n"
        f"    def forward(self, {arguments}):\n        return {call}\n"
        for name, (arguments, call) in layers.items()
    )
    introduction = '"""Layers for `kernels` and its kernelize, without state of their own."""\n\nfrom torch import nn\n'
    return {"layer": next(iter(layers)), "layers": f"{introduction}\nfrom .{{{{ package }}}} import {function.name}\n{text}"}


def _advice(out: Path) -> list[str]:
    return [f"load it:  kernels.get_local_kernel(Path({str(out)!r}))   or upload the folder to a repository of the Hub"]


def _metadata(name: str, request: ExportRequest, files: dict[str, bytes]) -> dict[str, Any]:
    """id is the module's name in sys.modules: other content must have another id."""
    digest = sha256_of("".join(f"{n}{sha256_of(files[n])}" for n in sorted(files)))[:12]
    backend: dict[str, Any] = {"type": request.target}
    if capability := find_target(request.target).limits(request.arch).capability:
        kind = "+PTX" if compiled_when_loaded(request.arch) else request.arch[-1].strip("0123456789")  # a of sm_90a
        backend["archs"] = [f"{capability // 10}.{capability % 10}{kind}"]
    return {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{request.target}_{digest}",
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": backend,
    }


def _init(kernel: Kernel, package: str) -> str:
    return (
        f'"""{kernel.title}, in place of {kernel.replaces}: the functions of .{package}, and layers for kernelize."""\n\n'
        f"from . import {package}, layers\n"
        f"from .{package} import *\n\n"
        f'__all__ = [*{package}.__all__, "layers"]\n'
    )


def _card(kernel: Kernel, name: str, request: ExportRequest, layer: str) -> str:
    tuned = "\n".join(f"- {item.workload.key} (candidate {item.candidate})" for item in request.items)
    return (
        f"---\nlicense: mit\ntags:\n- kernels\n---\n\n"
        f"# {name}\n\n{kernel.title}, in place of `{kernel.replaces}`. Found by evo; `manifest.json` has its provenance.\n\n"
        f"Tuned for {request.target} {request.arch}:\n\n{tuned}\n\nWhat these do not serve is left to PyTorch.\n\n"
        f"```python\nfrom pathlib import Path\nfrom kernels import LocalLayerRepository, Mode, get_local_kernel\n\n"
        f'kernel = get_local_kernel(Path("{name}"))\n'
        f'mapping = {{"{layer}": {{"{request.target}": {{Mode.INFERENCE: LocalLayerRepository(Path("{name}"), '
        f'layer_name="{layer}")}}}}}}\n```\n'
    )


EXPORTER = Exporter(name="huggingface", contents=_contents, advice=_advice)
