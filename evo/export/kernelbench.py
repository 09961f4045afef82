"""KernelBench's ModelNew: for each winner one file, which stands alone, and the problem in the same form.

NAME_new.py has the kernel's source for readers, its machine code, and a launcher that PyTorch builds when the file is
loaded. NAME.py is KernelBench's problem at the size that was tuned: the sizes of its own are beyond what these kernels
are for (LayerNorm over 4,194,304 columns, heads of 1024 channels). eval_kernel_against_ref takes the two texts. It
evaluates on GPUs only, so winners of other targets are refused.
Reference: https://github.com/ScalingIntelligence/KernelBench, src/kernelbench/eval.py and kernel_static_checker.py.
"""

import base64
import re
from collections.abc import Mapping
from inspect import getsource
from pathlib import Path
from typing import Any

from evo import __version__, runtime
from evo.errors import UsageError
from evo.export import Contents, Exporter, ExportRequest, sha256_of
from evo.export._package import build_package
from evo.problem.formats import check_fit, fill, format_table, values_of
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.runtime.manifest import LaunchPlan
from evo.targets import find_target

_MODEL_NEW = Path(__file__).with_name("_kernelbench.py.j2")
_WORDS = {"int64": "q", "int32": "i4x", "float32": "f4x", "float64": "d"}
"""How struct writes an argument into 8 bytes."""


def _contents(request: ExportRequest) -> Contents:
    """Raises UsageError for a target that is no GPU, a workload or a candidate that the convention has no place for, and a
    kernel that formats.toml does not describe; TemplateError and CompileError."""
    kernel = load_kernel(request.kernel)
    if find_target(request.target).shares_cores:
        raise UsageError(
            f"KernelBench evaluates on GPUs only, and these are for {request.target}: export winners of --target cuda, "
            f"or choose another --format"
        )
    table = format_table(kernel, "kernelbench")
    for item in request.items:
        check_fit(table, "kernelbench", item.candidate, item.workload)
        plans = kernel.plans(request.target, item.genome.parameters, item.workload)
        if len(plans) > 1 or any(a.kind in ("workspace", "structure") or a.initial for a in kernel.arguments):
            raise UsageError(
                f"{item.candidate} is {len(plans)} launches of {kernel.name} over workspace or with structures, and"
                " KernelBench's form has one launch without: export a candidate of one launch, or choose another --format"
            )
    manifest, built = build_package(kernel, (request,))
    headers = sorted(built.keys() - {v[file] for v in manifest["variants"] for file in ("source", "binary")})
    files: dict[str, bytes] = {}
    for v in manifest["variants"]:
        workload = kernel.workload(request.target, v["workload"]["key"])
        sizes = "x".join(str(size) for _, size in workload.dims)
        stem = re.sub(r"\W+", "_", f"{kernel.name}_{workload.dtype}_{sizes}")
        for option, value in workload.options:
            if value != kernel.options[option] and (value is True or option in kernel.choices):
                stem += f"_{option if value is True else value}"
        if f"{stem}.py" in files:
            raise UsageError(f"two of these winners are both called {stem}.py: export them to folders of their own")
        files[f"{stem}.py"] = _model(table, workload).encode()
        values = {
            **values_of(workload),
            "kernel": kernel,
            "table": table,
            "workload": workload,
            "variant": v,
            "problem_file": f"{stem}.py",
            "version": __version__,
            "fixed": {name: size for name, size in workload.dims if name in v["fixed"]},
            "source": _literal(built[v["source"]]),
            "headers": {name: _literal(built[name]) for name in headers},
            "digest": sha256_of(built[v["binary"]])[:16],
            "cubin": base64.encodebytes(built[v["binary"]]).decode(),
            "driver": (Path(runtime.__file__).parent / "driver.h").read_text(encoding="utf-8"),
            "launch_plan": getsource(LaunchPlan),
            "plan": LaunchPlan(**v["launch"]),
            "words": "".join("Q" if a.kind != "scalar" else _WORDS[a.dtype_of(workload)] for a in kernel.arguments),
            "dtypes": [a.dtype_of(workload) if a.kind != "scalar" else "" for a in kernel.arguments],
            "model_new": fill(table["model_new"], values_of(workload)),
        }
        files[f"{stem}_new.py"] = fill(_MODEL_NEW.read_text(encoding="utf-8"), values).encode()
    return manifest, files


def _model(table: Mapping[str, Any], workload: Workload) -> str:
    return (
        f'"""KernelBench\'s problem ({table["problem"]}) at {workload.key}.\n\n'
        f'Evaluate with precision=torch.{workload.dtype}.\n"""\n\n'
        f"import torch\nfrom torch import nn\n\n\n{fill(table['model'], values_of(workload))}"
    )


def _literal(data: bytes) -> str:
    """A Python literal that reads as the text itself where that is possible."""
    text = data.decode()
    plain = "'''" not in text and not text.endswith(("'", "\\"))
    return f"r'''\n{text}'''" if plain and "\r" not in text else repr(text)


EXPORTER = Exporter(
    name="kernelbench",
    contents=_contents,
    advice=lambda out: [f"evaluate NAME_new.py in {out} against NAME.py:  kernelbench.eval.eval_kernel_against_ref"],
)
