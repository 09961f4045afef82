"""evo renew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evo.cli.options import Json, print_json
from evo.export._renewal import renew

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("renew")(renew_packages)


def renew_packages(
    package: Annotated[list[Path], typer.Argument(help="Folders that evo export wrote, of format module.")],
    kernel: Annotated[str | None, typer.Option(help="Name or folder of their kernel, if it is one of your own.")] = None,
    json: Json = False,
) -> None:
    """Give exported packages the launchers of this evo; their kernels and all that is recorded of them stay."""
    found = {}
    for folder in package:
        found[str(folder)] = changed = renew(folder, kernel)
        if not json:
            typer.echo(f"{folder}: {', '.join(changed) or 'nothing has changed'}")
    if json:
        print_json(found)
