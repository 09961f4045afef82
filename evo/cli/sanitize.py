"""evo sanitize."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from evo.cli.options import DEFAULT_DB, Db, Json, check_seed, make_console, print_json
from evo.cli.recorded import Recorded, find_winners, source_remark
from evo.cli.tables import short_id
from evo.sanitize import Sanitized, choose_tools, sanitize

__all__ = ["register"]

_SHOWN = 3


def register(app: typer.Typer) -> None:
    app.command("sanitize")(sanitize_candidate)


def sanitize_candidate(
    candidate: Annotated[
        str, typer.Argument(metavar="CANDIDATE|RUN", help="A candidate's identifier, or a run for its winners.")
    ],
    tool: Annotated[
        str,
        typer.Option(
            help="cuda: memcheck, racecheck, initcheck, synccheck. cpu: address, undefined, initcheck. all: each of them."
        ),
    ] = "all",
    seed: Annotated[
        int | None,
        typer.Option(help="Draws the data; random if left out.", callback=check_seed),
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds that each tool may take.", min=1.0)] = 180.0,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Run a recorded candidate under sanitizers: accesses out of bounds, races, undefined behaviour, unset memory."""
    drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
    records = []
    for recorded in find_winners(db, candidate):
        tools = choose_tools(recorded.record.target, tool)
        found = sanitize(recorded.request, tools, seed=drawn, limit_s=limit, toolkits=_toolkits())
        records.append(_record(recorded, found, drawn))
        if not json:
            _print(make_console(), records[-1])
    if json:
        print_json(records)
    if not all(r["clean"] for r in records):
        raise typer.Exit(1)


def _toolkits() -> list[Path]:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]


def _record(recorded: Recorded, found: Sanitized, seed: int) -> dict[str, Any]:
    remark = source_remark(recorded, found.source_digest)
    return {
        "candidate": recorded.record.id,
        "kernel": recorded.record.kernel,
        "target": recorded.record.target,
        "arch": recorded.record.arch,
        "seed": seed,
        "clean": found.clean,
        "remarks": [remark] if remark else [],
        "cases": list(found.cases),
        "tools": [
            {
                "tool": r.tool,
                "clean": r.clean,
                "errors": r.errors,
                "messages": list(r.messages),
                "wrong": list(r.wrong),
                "seconds": round(r.seconds, 2),
                "command": r.command,
            }
            for r in found.reports
        ],
    }


def _print(console: Console, record: dict[str, Any]) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True)

    name = short_id(record["candidate"])
    say(f"candidate {name} of {record['kernel']} for {record['arch']}: {len(record['cases'])} calls, seed {record['seed']}")
    for remark in record["remarks"]:
        say(remark, "yellow")
    for t in record["tools"]:
        errors = f"{t['errors']} error{'' if t['errors'] == 1 else 's'}"
        verdict = "clean" if t["clean"] else errors if t["errors"] else "wrong outputs"
        say(f"{t['tool']:<10} {verdict}  ({t['seconds']:.1f} s)", "" if t["clean"] else "bold red")
        for message in [*t["messages"], *(f"refused by the gate: {w}" for w in t["wrong"])][:_SHOWN]:
            say(f"    {message}")
        if (more := len(t["messages"]) + len(t["wrong"]) - _SHOWN) > 0:
            say(f"    and {more} more", "dim")
    say("every message, and the command that was run for each tool: --json", "dim")
