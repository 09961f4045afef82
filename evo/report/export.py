"""Reports and figures as files. A file is there whole or not at all, and nothing that is not a report is replaced."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from evo.errors import UsageError
from evo.report.page import GENERATOR, Section, figures_of

__all__ = ["NO_RASTERISER", "check_replaceable", "find_rasteriser", "write_figures", "write_page"]

NO_RASTERISER = (
    "PNG is left out: it needs the package resvg-py, which is not installed: pip install 'evo-kernels[figures]'"
)

_ZOOM = 3
"""Pixels of a PNG for each unit of its figure: 300 dots an inch where that is a third of a column wide."""
_HEAD_BYTES = 400


def check_replaceable(out: Path) -> None:
    """Raises UsageError unless `out` can become a report: it is not there, or is one."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, such as {out / 'report.html'}")
    if not out.is_file():  # nothing, or a pipe or device such as /dev/stdout
        return
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read --out {out}: {error.strerror or error}") from error
    if head and f'content="{GENERATOR}"'.encode() not in head:
        raise UsageError(f"--out {out} is there and is not a report of evo's; it is left as it is: name another file")


def write_page(out: Path, page: str) -> None:
    """Raises UsageError where the file cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error


def _write(out: Path, content: bytes) -> None:
    if out.exists() and not out.is_file():  # never to be replaced: what it is lies in its name
        with out.open("wb") as file:
            file.write(content)
        return
    out = out.resolve()
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(out)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def find_rasteriser() -> Any | None:
    """The library that makes PNG of SVG; None where it is not installed."""
    try:
        return importlib.import_module("resvg_py")
    except ImportError:
        return None


def write_figures(folder: Path, drawn: list[Section], rasteriser: Any | None) -> list[Path]:
    """Every figure as SVG, and with a rasteriser as PNG. Raises UsageError where the folder cannot be written."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in drawn:
            for figure in figures_of(section, several=len(drawn) > 1):
                document = figure.document()
                path = folder / f"{figure.name}.svg"
                _write(path, document.encode())
                written.append(path)
                if rasteriser is not None:
                    pixels = rasteriser.svg_to_bytes(svg_string=document, zoom=_ZOOM, background="#ffffff")
                    _write(path.with_suffix(".png"), bytes(pixels))
                    written.append(path.with_suffix(".png"))
    except OSError as error:
        raise UsageError(f"cannot write the figures to {folder}: {error.strerror or error}") from error
    return written
