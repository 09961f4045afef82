"""evo doctor: what this machine can do, and the remedy for what it cannot."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.text import Text

from evo import __version__
from evo.cli.options import DEFAULT_DB, Db, Json, make_console, print_json
from evo.errors import EvoError
from evo.problem.kernel import kernel_names
from evo.targets import find_target

__all__ = ["register"]

_LOW_DISK_BYTES = 1 << 30


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """One thing looked at. level: ok, note (works without), problem."""

    subject: str
    level: str
    text: str


def doctor(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Say what this machine can search on, and what is missing."""
    findings = [_python(), _torch(), *_cuda(), *_cpu(), _database(db), _kernels()]
    usable = [f.subject for f in findings if f.level == "ok" and f.subject in ("GPU", "C++ compiler")]
    if json:
        print_json({"usable": bool(usable), "findings": [asdict(f) for f in findings]})
    else:
        console = make_console()
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        for f in findings:
            head = Text.assemble((f"{f.level:8}", colours[f.level]), (f.subject, "bold"), ": ")
            console.print(head, end="")
            console.print(f.text, highlight=False, soft_wrap=True)
    if not usable:
        raise typer.Exit(1)


def _python() -> _Finding:
    fits = sys.version_info >= (3, 11)
    text = f"evo {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return _Finding(subject="Python", level="ok" if fits else "problem", text=text)


def _torch() -> _Finding:
    try:
        import torch
    except ImportError as error:
        return _Finding(subject="PyTorch", level="problem", text=f"cannot be imported ({error}): pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return _Finding(subject="PyTorch", level="ok", text=f"{torch.__version__} ({build})")


def _cuda() -> list[_Finding]:
    target = find_target("cuda")
    findings = []
    try:
        text = f"{target.compiler()}; compiles for sm_89 and others without a GPU: evo check KERNEL --arch sm_89"
        findings.append(_Finding(subject="CUDA compiler", level="ok", text=text))
    except EvoError as error:
        findings.append(_Finding(subject="CUDA compiler", level="note", text=str(error)))
    try:
        device = target.device()
    except EvoError as error:
        return [*findings, _Finding(subject="GPU", level="note", text=str(error))]
    findings.append(_Finding(subject="GPU", level="ok", text=f"{device.name} ({device.arch}), driver {device.driver}"))
    advice = getattr(target, "advice", lambda: None)()
    if advice:
        findings.append(_Finding(subject="NVRTC and driver", level="problem", text=advice))
    return findings


def _cpu() -> list[_Finding]:
    target = find_target("cpu")
    try:
        limits = target.limits("native")
        text = f"{target.compiler()}; {limits.multiprocessors} cores, {limits.cache_bytes >> 20} MiB last-level cache"
        return [_Finding(subject="C++ compiler", level="ok", text=text)]
    except EvoError as error:
        return [_Finding(subject="C++ compiler", level="note", text=str(error))]


def _database(db: str) -> _Finding:
    from evo.lineage.database import shown
    from evo.lineage.store import Store

    if "://" not in db and not Path(db).exists():
        folder = Path(db).absolute().parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        level = "ok" if free > _LOW_DISK_BYTES else "problem"
        return _Finding(subject="database", level=level, text=f"{db} does not exist yet; {free >> 30} GiB free there")
    try:
        Store.open(db, write=False).close()
    except EvoError as error:
        return _Finding(subject="database", level="problem", text=str(error))
    return _Finding(subject="database", level="ok", text=f"{shown(db)} opens")


def _kernels() -> _Finding:
    names = kernel_names()
    return _Finding(subject="kernels", level="ok" if names else "problem", text=", ".join(names) or "none found")
