"""evo renew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evo.cli.options import Json, print_json
from evo.exporters._renewal import renew

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("renew")(renew_packages)


def renew_packages(
    package: Annotated[list[Path], typer.Argument(help="Folders that evo export wrote, of format module.")],
    json: Json = False,
) -> None:
    """Give exported packages the launchers of this evo; their kernels and all that is recorded of them stay."""
    found = {str(folder): renew(folder) for folder in package}
    if json:
        print_json(found)
        return
    for folder, changed in found.items():
        typer.echo(f"{folder}: {', '.join(changed) or 'nothing has changed'}")
