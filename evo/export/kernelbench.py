"""KernelBench's ModelNew: for each winner one file, which stands alone, and the problem in the same form.

NAME_new.py has the kernel's source for readers, its machine code, and a launcher that PyTorch builds when the file is
loaded. NAME.py is KernelBench's problem at the size that was tuned: the sizes of its own are beyond what these kernels
are for (LayerNorm over 4,194,304 columns, heads of 1024 channels). eval_kernel_against_ref takes the two texts. It
evaluates on GPUs only, so winners of other targets are refused.
Reference: https://github.com/ScalingIntelligence/KernelBench, src/kernelbench/eval.py and kernel_static_checker.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from pprint import pformat
from typing import Any

from evo import __version__
from evo.errors import UsageError
from evo.export import Exporter, ExportItem, ExportRequest
from evo.export._builds import BuiltVariant, build_variants, check_parts
from evo.export._folder import publish, write_manifest
from evo.export._manifest import manifest_record
from evo.problem.formats import check_fit, fill, format_table, values_of
from evo.problem.kernel import Kernel, load_kernel

__all__ = ["EXPORTER", "KernelBenchExporter"]

_MODEL_NEW = Path(__file__).with_name("_kernelbench.py.j2")
_WORDS = {"int64": "q", "int32": "i4x", "float32": "f4x", "float64": "d"}
_PRECISION = {"float16": "torch.float16", "bfloat16": "torch.bfloat16", "float32": "torch.float32"}


class KernelBenchExporter:
    """The methods are those of `evo.export.Exporter`."""

    name = "kernelbench"

    def export(self, request: ExportRequest) -> list[Path]:
        """Raises UsageError for a target that is no GPU, a workload that the convention has no place for, and a kernel
        that formats.toml does not describe; TemplateError and CompileError."""
        out = request.out.absolute()
        kernel = load_kernel(request.kernel)
        kernel.check_target(request.target)
        if request.target != "cuda":
            raise UsageError(
                f"KernelBench evaluates on GPUs only, and these are for {request.target}: export winners of --target cuda, "
                f"or choose another --format"
            )
        table = format_table(kernel, self.name)
        for item in request.items:
            check_fit(table, self.name, item.candidate, item.workload)
        check_parts(kernel, (request,))
        with publish(out, self.name) as folder:
            variants, left_out = build_variants(kernel, (request,))
            for variant in variants:
                item = variant.found.item
                stem = re.sub(r"\W+", "_", f"{kernel.name}_{item.workload.dtype}_{_sizes(item)}")
                for option, value in item.workload.options:
                    stem += f"_{option}" if value is True and not kernel.options[option] else ""
                _write(folder / f"{stem}.py", _model(kernel, table, item))
                _write(folder / f"{stem}_new.py", _model_new(kernel, table, variant, f"{stem}.py"))
            write_manifest(folder, self.name, manifest_record(kernel, (request,), variants, left_out))
        return sorted(p for p in out.rglob("*") if p.is_file())

    def advice(self, out: Path) -> str:
        return f"evaluate NAME_new.py in {out} against NAME.py:  kernelbench.eval.eval_kernel_against_ref"


def _sizes(item: ExportItem) -> str:
    return "x".join(str(size) for _, size in item.workload.dims)


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise UsageError(f"two of these winners are both called {path.name}: export them to folders of their own")
    path.write_text(text, encoding="utf-8")


def _model(kernel: Kernel, table: Mapping[str, Any], item: ExportItem) -> str:
    return (
        f'"""KernelBench\'s problem ({table["problem"]}) at {item.workload.key}.\n\n'
        f'Evaluate with precision={_PRECISION[item.workload.dtype]}.\n"""\n\n'
        f"import torch\nfrom torch import nn\n\n\n{fill(table['model'], values_of(item.workload))}"
    )


def _model_new(kernel: Kernel, table: Mapping[str, Any], variant: BuiltVariant, problem_file: str) -> str:
    item, source, cubin = variant.found.item, variant.found.source, variant.found.binary.code
    target, values = variant.target.name, values_of(item.workload)
    fixed = {name: size for name, size in item.workload.dims if name in kernel.compile_time_dims[target]}
    plan = kernel.plan(target, variant.found.genome.parameters, item.workload)
    body = {
        **values,
        "title": kernel.title,
        "problem": table["problem"],
        "problem_file": problem_file,
        "version": __version__,
        "workload": item.workload.key,
        "arch": variant.arch,
        "candidate": item.candidate,
        "fixed_text": ", ".join(f"{n}={s}" for n, s in fixed.items()) or "none",
        "fixed": repr(fixed),
        "source": _text(source.text),
        "headers": "{" + "".join(f"\n    {json.dumps(n)}: {_text(t)}," for n, t in sorted(source.includes.items())) + "\n}",
        "cubin": base64.encodebytes(cubin).decode(),
        "entry": json.dumps(kernel.entry),
        "geometry": pformat(asdict(plan), width=110, sort_dicts=False),
        "arguments": json.dumps(["Q" if a.kind != "scalar" else _WORDS[a.dtype] for a in kernel.arguments]),
        "name": json.dumps(f"evo_{kernel.entry}_{hashlib.sha256(cubin).hexdigest()[:16]}"),
        "model_new": fill(table["model_new"], values),
    }
    return fill(_MODEL_NEW.read_text(encoding="utf-8"), body)


def _text(text: str) -> str:
    """A Python literal that reads as the text itself where that is possible."""
    plain = "'''" not in text and not text.endswith(("'", "\\"))
    return f"r'''\n{text}'''" if plain and "\r" not in text else repr(text)


EXPORTER: Exporter = KernelBenchExporter()
