"""Messages in Python's words. They are written for the command line, and this is the one place that turns them."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from evo.environment import DEFAULT_DB
from evo.errors import CompileError, EvoError
from evo.job.job import OPTIONS

_RENAMED = {"workload": "workloads", "sampler_option": "sampler_options"}
_LISTS = frozenset({"workloads", "cover", "fix", "start"})
_KNOWN = frozenset({*OPTIONS, "db", "out"})

_VALUE = r"""'[^']*'|\.\.\.|(?:[A-Z\d/.]|cpu\b|cuda\b|sm_|compute_)[^\s:;,)]*"""
"""What stands behind an option and is its value, not the next word of the sentence."""
_WORD = r"""(?: (?:'[^']*'|[^\s;,()'-][^\s;,()']*))"""
_SAID = re.compile(
    rf"\bevo (?P<verb>[a-z]+)(?P<words>{_WORD}?(?: --[a-z-]+{_WORD}?)*)|--(?P<option>[a-z][a-z-]*)(?: (?P<value>{_VALUE}))?"
)


def in_python(text: str, db: str) -> str:
    """A message in which the options of commands are arguments, and the commands that Python has are calls. db: the database
    that the calls are of."""

    def call(verb: str, words: str) -> str:
        name, *rest = shlex.split(words) or [""]
        given = dict(zip(rest[::2], rest[1::2], strict=False))
        if verb == "export" and "--out" in given:
            return f"run.export({given['--out']!r})"
        if verb != "resume" or not name:
            return f"evo {verb}{words}"
        more = {"db": db} if db != DEFAULT_DB else {}
        more |= {_argument(n.removeprefix("--")): v for n, v in given.items() if n != "--db"}
        return f"evo.resume({', '.join([repr(name), *(f'{n}={_value(n, v)}' for n, v in more.items())])})"

    def said(found: re.Match[str]) -> str:
        if found["verb"]:
            return call(found["verb"], found["words"])
        if (name := _argument(found["option"])) not in _KNOWN:
            return found[0]
        if OPTIONS.get(name) is bool:
            return f"{name}=True" + found[0].removeprefix(f"--{found['option']}")
        return f"{name}={_value(name, found['value'].strip(chr(39)))}" if found["value"] else name

    return _SAID.sub(said, text)


@contextmanager
def told_in_python(db: str) -> Iterator[None]:
    """What goes wrong inside is told in Python's words."""
    try:
        yield
    except EvoError as error:
        if not isinstance(error, CompileError):
            error.args = (in_python(str(error), db),)
        raise


def _argument(option: str) -> str:
    name = option.replace("-", "_")
    return _RENAMED.get(name, name)


def _value(name: str, text: str) -> str:
    """A value as it is written in Python."""
    if text == "..." or (text.isascii() and text.isdecimal() and name != "devices"):
        return text
    return f"[{text!r}]" if name in _LISTS else repr(text)
