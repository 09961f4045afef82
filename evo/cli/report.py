"""evo report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from evo.cli.options import DEFAULT_DB, Db, Json, lasting_db, print_json
from evo.lineage.store import Store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    run: Annotated[str, typer.Argument(help="A run's name, a unique beginning of it, or 'latest'.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Also write each figure into this folder, as SVG and PNG.")
    ] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Write what a run found, and how, as one self-contained HTML file."""
    from evo.analysis.outcome import read_outcome
    from evo.report.page import check_replaceable, render_page, sections, write_figures, write_page
    from evo.report.sentences import run_headline
    from evo.report.text import clean

    started = time.monotonic()
    check_replaceable(out)
    with Store.open(db, write=False) as store:
        data = read_outcome(store, run, db=lasting_db(db))
    drawn = sections(data)
    page = render_page(data, drawn)
    write_page(out, page)
    written = write_figures(figures, drawn) if figures is not None else []
    title, size = clean(run_headline(data)), len(page.encode())
    if json:
        print_json(
            {
                "run": data.run.name,
                "headline": title,
                "report": str(out),
                "bytes": size,
                "figures": [str(p) for p in written],
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        return
    typer.echo(f"{data.run.name}: {title}")
    typer.echo(f"{out}: {size / 1e3:,.0f} kB, one file that needs no network")
    if figures is not None:
        typer.echo(f"{figures}: {len(written)} files of {sum(p.suffix == '.svg' for p in written)} figures")
