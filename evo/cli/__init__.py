"""The command line: parsing and printing only. One module for each group of commands."""

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import typer

from evo.environment import fill_standard_files
from evo.errors import EvoError
from evo.problem.space import parse_number

_WORKING = frozenset({"search", "resume", "check", "bench", "kit"})
"""Commands that need worker processes, whose server starts before anything else is imported."""
_JUDGING = _WORKING | {"sanitize", "doctor"}
"""Commands whose exit code is a verdict, and that end with 0 only when they have come to it."""

_REPLACED = ("--executor", "--scheduler", "--cluster")

_COMMANDS = {
    "search": ("search", "resume"),
    "best": ("best", "runs", "watch", "compare", "show"),
    "analysis": ("lineage", "diff", "explain", "failures", "operators", "importance", "pareto"),
    "query": ("query",),
    "report": ("report", "dashboard"),
    "export": ("export", "import-workloads"),
    "tuned": ("rebuild",),
    "check": ("bench", "check", "sanitize"),
    "maintain": ("prune", "vacuum", "merge", "backup"),
    "replay": ("replay",),
    "doctor": ("doctor",),
    "kit": ("kit",),
    "new": ("new",),
}
"""The commands of each module, in the order of `evo --help`. Only the module of the command that runs is imported."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process with its exit code.

    Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted with the state saved; 141, as a shell tells of
    SIGPIPE, where the reader of a working command's output has ended before it (0 for a question, which is answered then).
    """
    fill_standard_files()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack a sign
    code = _run(arguments)
    gc.freeze()  # a last collection would take a sixth of the time of a short command
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. A user's mistake is one sentence on stderr, never a traceback."""
    if threading.current_thread() is not threading.main_thread():
        return _run(arguments)
    before = signal.getsignal(signal.SIGINT)
    try:
        return _run(arguments)
    finally:  # an interrupted command ignores further interrupts
        signal.signal(signal.SIGINT, before)


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return _answer(words)
    except BrokenPipeError as error:  # the reader of the output, such as `head`, has ended
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # else the rest would be written, and fail, when the process ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        unanswered = words[0] in _JUDGING or isinstance(error.__context__, EvoError | _USAGE_ERROR)
        return 128 + signal.SIGPIPE if unanswered else 0


def _answer(words: Sequence[str]) -> int:
    if words[0] in _WORKING or (words[0] == "explain" and "--measure" in words):
        from evo.executors._processes import start_server  # other commands do not need it

        start_server()
    if "evo.lineage.store" in sys.modules:
        sys.modules["evo.lineage.store"].OPENED.clear()
    try:
        named = tuple(module for module, names in _COMMANDS.items() if words[0] in names)
        group, code = _group(named or tuple(_COMMANDS)), 0
        try:
            with group.make_context("evo", list(words)) as context:  # group.main() takes a broken pipe for a failure
                group.invoke(context)
        except typer.Exit as ended:
            code = ended.exit_code
        sys.stdout.flush()
        return code
    except _USAGE_ERROR as error:
        where = f" (see: {error.ctx.command_path} --help)" if error.ctx else ""
        if getattr(error, "option_name", "") in _REPLACED:
            where = f"; where work runs is said with --on{where}"
        _complain(f"{error.format_message().rstrip('.')}{where}")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("evo: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        print(f"evo: what was to be written cannot be ({error.strerror})", file=sys.stderr)
        with suppress(OSError):  # else the process would try again at its end
            sys.stdout.close()
        return 1
    except Exception as error:
        explained: Exception | None = None
        if "evo.lineage.store" in sys.modules:
            from evo.lineage.faults import explain

            explained = explain(error, *sys.modules["evo.lineage.store"].OPENED)
        if not isinstance(told := explained or error, EvoError):
            raise
        _complain(str(told))
        return told.exit_code


def _complain(sentence: str) -> None:
    if not sentence.isprintable():  # it has several lines, or text from a file or database
        from evo.report.text import visible

        sentence = visible(sentence, lines=True)
    print(f"evo: {sentence}", file=sys.stderr)


@cache
def _group(modules: tuple[str, ...]) -> Any:
    """The group of these modules' commands."""
    app = typer.Typer(
        name="evo",
        help="A search engine for compute kernels that needs no language model.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(lambda: None)  # makes a group even of one command
    gc.disable()  # saves a tenth of a short command's time, as imports make no garbage
    try:
        for module in modules:
            found = import_module(f"evo.cli.{module}")
            for name in _COMMANDS[module]:
                app.command(name)(getattr(found, name.replace("-", "_")))
    finally:
        gc.enable()
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():  # typer would cut the sentences in the list of commands
        command.short_help = " ".join((command.help or "").partition("\n\n")[0].split())
        for parameter in command.params:
            parameter.type = copy(parameter.type)
            parameter.type.convert = partial(_read, parameter.type, parameter.type.convert)
    return group


def _read(kind: Any, convert: Callable[..., Any], value: Any, parameter: Any, context: Any) -> Any:
    """The value of an option or argument, by typer's own conversion; refuses empty options, which would be taken for ones
    left out, and spellings of numbers that only Python knows."""
    if isinstance(value, str):
        if not value and parameter.param_type_name == "option":
            kind.fail("it is empty; leave it out, or give it a value", parameter, context)
        try:
            for prefix, number in _NUMBERS:
                if kind.name.startswith(prefix):
                    parse_number(value, number)
        except ValueError as error:
            kind.fail(f"{error}", parameter, context)
    return convert(value, parameter, context)


_NUMBERS: Sequence[tuple[str, Any]] = (("int", int), ("float", float))
"""Beginnings of the names of typer's kinds of numbers, whose bounds make the names longer."""

# The class is click's, or that of the copy of click that newer versions of typer carry.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
