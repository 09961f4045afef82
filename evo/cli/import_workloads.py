"""evo import-workloads."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from evo.cli.options import Json, print_json
from evo.cli.search import read_job
from evo.errors import UsageError
from evo.export.flashinfer_bench import Refusal, Taken
from evo.export.flashinfer_bench import import_workloads as import_dataset
from evo.problem.kernel import Workload, kernel_names, load_kernel

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("import-workloads")(import_workloads)


def import_workloads(
    path: Annotated[Path, typer.Argument(help="A FlashInfer-Bench dataset: definitions/ and workloads/ below it.")],
    kernel: Annotated[list[str] | None, typer.Option(help="Only for these kernels.")] = None,
    target: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the job files.")] = Path("runs"),
    budget: Annotated[str, typer.Option(help="Of each search.")] = "10m",
    json: Json = False,
) -> None:
    """Write a job file for each kernel that computes something of a FlashInfer-Bench dataset."""
    if target not in ("cuda", "cpu"):
        raise UsageError(f"--target must be cuda or cpu, got {target!r}")
    kernels = [load_kernel(name) for name in dict.fromkeys(kernel or kernel_names())]
    taken, refused = import_dataset(path, kernels, target)
    if not taken:
        raise UsageError(
            f"nothing in {path} can be searched for here: {_shorten([_text(r) for r in refused])}; evo needs definitions of "
            f"{' or '.join(k.name for k in kernels)} that {target} serves"
        )
    written = {}
    name = path.resolve().name
    for key in dict.fromkeys(t.kernel for t in taken):
        of_kernel = [t for t in taken if t.kernel == key]
        file = out / f"{name}-{key}.toml"
        _write_job(file, _job(str(path), key, of_kernel, target, budget))
        written[str(file)] = [w.key for t in of_kernel for w in t.workloads]
    if json:
        print_json({"jobs": written, "taken": [_record(t) for t in taken], "refused": [asdict(r) for r in refused]})
        return
    for refusal in refused:
        typer.echo(f"left out: {_text(refusal)}", err=True)
    for file_name, workloads in written.items():
        typer.echo(f"{file_name}: {len(workloads)} workloads; search them with:  evo search {file_name}")


def _record(taken: Taken) -> dict[str, object]:
    return {"definition": taken.definition, "kernel": taken.kernel, "workloads": [w.key for w in taken.workloads]}


def _text(refusal: Refusal) -> str:
    return f"{refusal.definition}{f', workload {refusal.workload}' if refusal.workload else ''}: {refusal.reason}"


def _shorten(texts: list[str]) -> str:
    return texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "") if texts else "it is empty"


def _job(source: str, kernel: str, taken: list[Taken], target: str, budget: str) -> str:
    unique: dict[Workload, str] = {}
    for t in taken:
        for workload in t.workloads:
            unique.setdefault(workload, t.definition)
    quoted = json_format.dumps  # a JSON text is one in TOML, too
    lines = [f"    {quoted(workload.key)},  # {definition}" for workload, definition in unique.items()]
    return "\n".join(
        [
            f"# Workloads of FlashInfer-Bench definitions in {source!r}.".replace("\n", " "),
            "[search]",
            f"kernel = {quoted(kernel)}",
            f"target = {quoted(target)}",
            "workloads = [",
            *(line.replace("\n", " ") for line in lines),
            "]",
            f"budget = {quoted(budget)}",
            "",
        ]
    )


def _write_job(file: Path, text: str) -> None:
    """Raises UsageError if the file is there, or cannot be written, or would be none that `evo search` takes."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already; move it away, or choose another --out") from None
    except OSError as error:
        raise UsageError(f"cannot write {file} ({error.strerror}); choose another --out") from error
    try:
        read_job(file)
    except UsageError:
        file.unlink()
        raise
