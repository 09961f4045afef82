"""The command line: parsing and printing only. One module for each group of commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from evo.errors import EvoError
from evo.executors._server import start_server

__all__ = ["app", "main"]

_WORKING = frozenset({"search", "resume", "check", "bench"})
"""Commands that need worker processes; these start to get ready before anything else is imported."""

app = typer.Typer(
    name="evo",
    help="A search engine for compute kernels that needs no language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process with its exit code.

    0 done, 1 the work failed, 2 bad usage, 130 interrupted with the state saved.
    """
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit code. A user's mistake is one sentence on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and (words[0] in _WORKING or (words[0] == "explain" and "--measure" in words)):
        start_server()
    _register()
    command = typer.main.get_command(app)
    try:
        code = command.main(args=words, prog_name="evo", standalone_mode=False)
        return int(code or 0)
    except _USAGE_ERROR as error:
        where = f" (see: {error.ctx.command_path} --help)" if error.ctx else ""
        print(f"evo: {error.format_message()}{where}" if error.message else error.format_message(), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("evo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except EvoError as error:
        print(f"evo: {error}", file=sys.stderr)
        return error.exit_code


def _register() -> None:
    """The commands, in the order in which help lists them; once for all runs in one process."""
    if app.registered_commands:
        return
    from evo.cli import (
        analysis,
        check,
        dashboard,
        doctor,
        explain,
        export,
        failures,
        import_workloads,
        lineage,
        maintain,
        measure,
        overview,
        query,
        report,
        sanitize,
        search,
        show,
    )

    commands = (
        search, overview, show, lineage, explain, failures, analysis, query, report, dashboard, export,
        import_workloads, measure, check, sanitize, maintain, doctor,
    )  # fmt: skip
    for module in commands:
        module.register(app)


# click's class, or that of the copy of click that newer versions of typer carry
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
