"""KernelBench's ModelNew: for each winner one file, which stands alone, and the problem in the same form.

NAME_new.py has the kernel's source for readers, its machine code, and a launcher that PyTorch builds when the file is
loaded. NAME.py is KernelBench's problem at the size that was tuned: the sizes of its own are beyond what these kernels
are for (LayerNorm over 4,194,304 columns, heads of 1024 channels). eval_kernel_against_ref takes the two texts. It
evaluates on GPUs only, so winners of other targets are refused.
Reference: https://github.com/ScalingIntelligence/KernelBench, src/kernelbench/eval.py and kernel_static_checker.py.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from inspect import getsource
from pathlib import Path
from typing import Any

from evo import __version__, runtime
from evo.errors import UsageError
from evo.export import Contents, Exporter, ExportRequest
from evo.export._package import build_package
from evo.problem.formats import check_fit, fill, format_table, values_of
from evo.problem.kernel import Kernel, Workload, load_kernel
from evo.runtime.package import LaunchPlan

__all__ = ["EXPORTER"]

_MODEL_NEW = Path(__file__).with_name("_kernelbench.py.j2")
_WORDS = {"int64": "q", "int32": "i4x", "float32": "f4x", "float64": "d"}


def _contents(request: ExportRequest) -> Contents:
    """Raises UsageError for a target that is no GPU, a workload that the convention has no place for, and a kernel that
    formats.toml does not describe; TemplateError and CompileError."""
    kernel = load_kernel(request.kernel)
    if request.target != "cuda":
        raise UsageError(
            f"KernelBench evaluates on GPUs only, and these are for {request.target}: export winners of --target cuda, "
            f"or choose another --format"
        )
    table = format_table(kernel, "kernelbench")
    for item in request.items:
        check_fit(table, "kernelbench", item.candidate, item.workload)
    manifest, built = build_package(kernel, (request,))
    headers = {name: built[name].decode() for name in sorted(manifest["headers"])}
    files: dict[str, bytes] = {}
    for v in manifest["variants"]:
        workload = kernel.workload(request.target, v["workload"]["key"])
        sizes = "x".join(str(size) for _, size in workload.dims)
        stem = re.sub(r"\W+", "_", f"{kernel.name}_{workload.dtype}_{sizes}")
        for option, value in workload.options:
            stem += f"_{option}" if value is True and not kernel.options[option] else ""
        if f"{stem}.py" in files:
            raise UsageError(f"two of these winners are both called {stem}.py: export them to folders of their own")
        code = {"source": built[v["source"]].decode(), "headers": headers, "cubin": built[v["binary"]]}
        files[f"{stem}.py"] = _model(table, workload).encode()
        files[f"{stem}_new.py"] = _model_new(kernel, table, workload, v, code, f"{stem}.py").encode()
    return manifest, files


def _advice(out: Path) -> list[str]:
    return [f"evaluate NAME_new.py in {out} against NAME.py:  kernelbench.eval.eval_kernel_against_ref"]


def _model(table: Mapping[str, Any], workload: Workload) -> str:
    return (
        f'"""KernelBench\'s problem ({table["problem"]}) at {workload.key}.\n\n'
        f'Evaluate with precision=torch.{workload.dtype}.\n"""\n\n'
        f"import torch\nfrom torch import nn\n\n\n{fill(table['model'], values_of(workload))}"
    )


def _model_new(
    kernel: Kernel,
    table: Mapping[str, Any],
    workload: Workload,
    variant: Mapping[str, Any],
    code: Mapping[str, Any],
    problem_file: str,
) -> str:
    values = values_of(workload)
    headers = "".join(f"\n    {json.dumps(name)}: {_text(text)}," for name, text in code["headers"].items())
    body = {
        **values,
        "title": kernel.title,
        "problem": table["problem"],
        "problem_file": problem_file,
        "version": __version__,
        "workload": workload.key,
        "arch": variant["arch"],
        "candidate": variant["candidate"],
        "fixed": repr({name: size for name, size in workload.dims if name in variant["fixed"]}),
        "source": _text(code["source"]),
        "headers": f"{{{headers}\n}}",
        "cubin": base64.encodebytes(code["cubin"]).decode(),
        "entry": json.dumps(kernel.entry),
        "driver": (Path(runtime.__file__).parent / "driver.h").read_text(encoding="utf-8"),
        "launch_plan": getsource(LaunchPlan),
        "plan": LaunchPlan(**variant["launch"]),
        "arguments": json.dumps(["Q" if a.kind != "scalar" else _WORDS[a.dtype] for a in kernel.arguments]),
        "name": json.dumps(f"evo_{kernel.entry}_{variant['binary_sha256'][:16]}"),
        "model_new": fill(table["model_new"], values),
    }
    return fill(_MODEL_NEW.read_text(encoding="utf-8"), body)


def _text(text: str) -> str:
    """A Python literal that reads as the text itself where that is possible."""
    plain = "'''" not in text and not text.endswith(("'", "\\"))
    return f"r'''\n{text}'''" if plain and "\r" not in text else repr(text)


EXPORTER = Exporter(name="kernelbench", contents=_contents, advice=_advice)
