"""The lineage database for Python programs: `evo.Lineage("runs/lineage.db")`.

Each question is a method, and answers with the frozen record that a command prints as `--json`: most are called as it is,
`evo show` is `finals` for a run, and `candidate` and `source` for a candidate. Lists of records, answers or their parts, are
`Records`, whose `df()` makes a pandas DataFrame.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from evo.analysis.candidates import read_candidate, read_source
from evo.analysis.descent import read_family
from evo.analysis.diff import diff
from evo.analysis.explanation import explain
from evo.analysis.failures import failure_totals, read_failures
from evo.analysis.finals import read_run_finals
from evo.analysis.frame import Record, Records, with_frames
from evo.analysis.importance import read_importance
from evo.analysis.operators import read_operators
from evo.analysis.pareto import read_pareto
from evo.analysis.runs import compare, find_best, list_runs, read_history
from evo.analysis.sql import select_sql
from evo.lineage.store import Store

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


@overload
def _asked(
    question: Callable[Concatenate[Store, _Arguments], list[Record] | tuple[Record, ...]],
) -> Callable[Concatenate[Lineage, _Arguments], Records[Record]]: ...
@overload
def _asked(
    question: Callable[Concatenate[Store, _Arguments], _Answer],
) -> Callable[Concatenate[Lineage, _Arguments], _Answer]: ...
def _asked(question: Callable[Concatenate[Store, _Arguments], Any]) -> Callable[Concatenate[Lineage, _Arguments], Any]:
    """A method that asks the lineage's store."""

    @wraps(question)
    def ask(self: Lineage, /, *arguments: _Arguments.args, **more: _Arguments.kwargs) -> Any:
        return with_frames(question(self._store, *arguments, **more))

    return ask


class Lineage:
    """A lineage database for reading, by path or by URL as `evo --db` takes it, also while a search writes to it.

    Use it with `with`, or call `close`. Runs and candidates are named by unique beginnings, the last run by "latest". An
    unknown name raises `evo.errors.UsageError` with one sentence that says what there is.
    """

    def __init__(self, where: str | Path = "runs/lineage.db") -> None:
        self._store = Store.open(where, write=False)

    def __enter__(self) -> Lineage:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<evo.Lineage: {self._store}>"

    def close(self) -> None:
        """Closes the database. A second call does nothing."""
        self._store.close()

    runs = _asked(list_runs)
    best = _asked(find_best)
    finals = _asked(read_run_finals)
    candidate = _asked(read_candidate)
    source = _asked(read_source)
    history = _asked(read_history)
    compare = _asked(compare)
    lineage = _asked(read_family)
    diff = _asked(diff)
    explain = _asked(explain)
    failures = _asked(read_failures)
    failure_totals = _asked(failure_totals)
    operators = _asked(read_operators)
    importance = _asked(read_importance)
    pareto = _asked(read_pareto)
    query = _asked(select_sql)
