"""The lineage database for Python programs: `evo.Lineage("runs/lineage.db")`.

Each question is a method with the name of its command, and answers with the frozen record that the command prints as
`--json`. `pandas.DataFrame(...)` takes the lists of records in it as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from evo.analysis.best import Best, find_best
from evo.analysis.candidates import CandidateRecord, read_candidate, read_source
from evo.analysis.comparison import Comparison, compare
from evo.analysis.descent import Family, read_family
from evo.analysis.diff import Difference, diff
from evo.analysis.explanation import Explanation, explain
from evo.analysis.failures import FailureReport, FailureTotal, failure_totals, read_failures
from evo.analysis.importance import Importance, read_importance
from evo.analysis.operators import OperatorCredit, read_operators
from evo.analysis.pareto import AXES, Nondominated, read_pareto
from evo.analysis.runs import ListedRun, Point, RunFinals, list_runs, read_history, read_run_finals
from evo.analysis.sql import Selection, select_sql
from evo.lineage import LATEST
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["Lineage"]


class Lineage:
    """A lineage database, for reading: by path, or by URL as `evo --db` takes it. Works beside a search that writes.

    Use it with `with`, or call `close`. Runs and candidates are named by unique beginnings, the last run by "latest". A name
    that is not there raises `evo.errors.UsageError` with one sentence that says what there is.
    """

    def __init__(self, where: str | Path = "runs/lineage.db") -> None:
        self._store = Store.open(where, write=False)

    def __enter__(self) -> Lineage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<evo.Lineage: {self._store}>"

    def close(self) -> None:
        """Closing twice does nothing."""
        self._store.close()

    def runs(self) -> tuple[ListedRun, ...]:
        """Every run, the latest first."""
        return list_runs(self._store)

    def best(self, kernel: str | None = None, **where: str | None) -> tuple[Best, ...]:
        """The fastest candidate for each kernel, target, device and workload over all runs.

        where: target, run, device, dtype, workload, as `evo best` has them.
        """
        return find_best(self._store, kernel, **where)

    def finals(self, run: str = LATEST) -> RunFinals:
        """A run, its finalists by workload, and which of them tie with the winner."""
        return read_run_finals(self._store, run)

    def candidate(self, candidate: str) -> CandidateRecord:
        """All there is of one."""
        return read_candidate(self._store, candidate)

    def source(self, candidate: str) -> str:
        """Its rendered source."""
        return read_source(self._store, candidate)

    def history(self, run: str = LATEST) -> tuple[Point, ...]:
        """Every candidate of a run, in order."""
        return read_history(self._store, run)

    def lineage(self, candidate: str, *, descendants: int = 100, diff: bool = False) -> Family:
        """Its ancestors, itself, and its first descendants, with the gain of each step and its interval."""
        return read_family(self._store, candidate, descendants=descendants, diff=diff)

    def diff(self, one: str, other: str) -> Difference:
        """Two candidates, thing by thing, with the gain and what differs in the source and the PTX."""
        return diff(self._store, one, other)

    def explain(
        self,
        candidate: str,
        base: str | Genome | Mapping[str, Value] | None = None,
        *,
        carriers: Mapping[str, Collection[str]] | None = None,
    ) -> Explanation:
        """Each change on the way from the run's default, or from `base`, and what it is worth as far as was measured."""
        start = Genome.of(base) if isinstance(base, Mapping) else base
        return explain(self._store, candidate, start, carriers=carriers)

    def failures(self, run: str = LATEST, *, template: bool = False) -> FailureReport:
        """What was refused in a run, by kind, reason and parameter value, and the rules that would have spared it.

        template: also what the kernel's template says now, which is loaded for that.
        """
        return read_failures(self._store, run, template=template)

    def failure_totals(self, kernel: str | None = None) -> list[FailureTotal]:
        """How the candidates of all runs ended."""
        return failure_totals(self._store, kernel)

    def operators(self, run: str = LATEST, *, windows: int = 5) -> list[OperatorCredit]:
        """What each operator was worth, in all of a run and window by window."""
        return read_operators(self._store, run, windows=windows)

    def importance(self, run: str = LATEST, *, quantile: float = 0.1) -> list[Importance]:
        """Which parameters matter, by workload."""
        return read_importance(self._store, run, quantile=quantile)

    def compare(self, *runs: str) -> Comparison:
        """Runs side by side, by workload, and what differs in how they were set up."""
        return compare(self._store, runs)

    def pareto(self, run: str = LATEST, axes: Sequence[str] = AXES) -> list[Nondominated]:
        """Candidates that no other beats on every axis, by workload."""
        return read_pareto(self._store, run, axes)

    def query(self, sql: str, *, limit: int | None = 1000, timeout_s: float | None = 30.0) -> Selection:
        """The rows of one statement that only reads."""
        return select_sql(self._store, sql, limit=limit, timeout_s=timeout_s)
