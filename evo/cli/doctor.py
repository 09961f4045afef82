"""evo doctor: the abilities of this machine, and the remedy for what it lacks."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from evo import __version__
from evo.cli.options import Db, Json, answer
from evo.environment import DEFAULT_DB
from evo.errors import EvoError
from evo.lineage.database import shown
from evo.lineage.store import Store
from evo.problem.loading import kernel_names
from evo.report.terminal import Terminal
from evo.targets import Target, find_language, find_target, targets_by_rank


@dataclass(frozen=True)
class _Finding:
    """A finding on one subject. level: ok, note (evo works without it), problem."""

    subject: str
    level: str
    text: str


def doctor(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Say what this machine can search on, and what is missing."""
    version = f"evo {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    kernels, devices = ", ".join(kernel_names()), [[*_target(find_target(name))] for name in targets_by_rank()]
    findings = [
        _Finding("Python", "ok", version),
        _torch(),
        *(finding for found in devices for finding in found),
        _database(db),
        _Finding("kernels", "ok" if kernels else "problem", kernels or "none found"),
    ]
    usable = any(found[-1].level == "ok" for found in devices)
    answer(json, {"usable": usable, "findings": findings}, _print_findings)
    if not usable:
        raise typer.Exit(1)


def _print_findings(console: Terminal, record: dict[str, Any]) -> None:
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    for f in record["findings"]:
        text = Text.assemble((f"{f.level:8}", colours[f.level]), (f.subject, "bold"), f": {f.text}")
        console.print(text, soft_wrap=True)


def _torch() -> _Finding:
    try:
        import torch
    except ImportError as error:
        return _Finding("PyTorch", "problem", f"cannot be imported ({error}): pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return _Finding("PyTorch", "ok", f"{torch.__version__} ({build})")


def _target(target: Target) -> Iterator[_Finding]:
    """The last finding says whether a search can run there."""
    subject, arch = f"{find_language(target.language).title} compiler", target.example_arch
    try:
        text = f"{target.compiler()}; compiles for {arch} and others without a GPU: evo check KERNEL --arch {arch}"
        if target.shares_cores:
            limits = target.limits(arch)
            cores = f"{limits.multiprocessors} cores, {limits.cache_bytes >> 20} MiB last-level cache"
            text = f"{target.compiler()}; {cores}"
        yield _Finding(subject, "ok", text)
    except EvoError as error:
        yield _Finding(subject, "note", str(error))
    if target.shares_cores:
        return
    try:
        device = target.device()
        yield _Finding("GPU", "ok", f"{device.name} ({device.arch}), driver {device.driver}")
    except EvoError as error:
        yield _Finding("GPU", "note", str(error))


def _database(db: str) -> _Finding:
    if "://" not in db and not Path(db).exists():
        return _Finding("database", "ok", f"{db} does not exist yet")
    try:
        Store.open(db, write=False).close()
    except EvoError as error:
        return _Finding("database", "problem", str(error))
    return _Finding("database", "ok", f"{shown(db)} opens")
