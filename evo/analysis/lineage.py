"""The lineage database for Python programs: `evo.Lineage("runs/lineage.db")`.

Each question is a method of the name that its command has; each answers with a list of frozen records, or of plain
dicts, that `pandas.DataFrame(...)` takes as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from evo.analysis import queries
from evo.analysis.comparison import ComparedRun, Comparison, Setting, compare
from evo.analysis.credit import OperatorCredit, operators
from evo.analysis.descent import Family, Kin, family
from evo.analysis.diff import Difference, DifferenceRow, diff
from evo.analysis.explanation import EditCredit, Explanation, explain
from evo.analysis.failures import FailureReport, FailureTotal, failure_report, failure_totals
from evo.analysis.finalists import WorkloadFinals, finals
from evo.analysis.importance import Importance, importance
from evo.analysis.pareto import AXES, Nondominated, pareto
from evo.analysis.records import Best, CandidateRecord, Point, RunSummary, Selection
from evo.errors import EvoError, UnknownNameError
from evo.lineage import LATEST
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload, load_kernel
from evo.problem.space import Space, Value
from evo.targets import find_target

__all__ = ["Lineage", "present_space"]

FailureKey = Literal["kind", "reason", "value", "rule"]


class Lineage:
    """A lineage database, for reading: by path, or by URL as `evo --db` takes it. Works beside a search that writes.

    Use it with `with`, or call `close`. Runs and candidates are named by unique beginnings, the last run by "latest". What
    is named wrongly raises `evo.errors.UsageError` with one sentence that says what there is.
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

    @property
    def store(self) -> Store:
        """What `evo.analysis.queries` asks."""
        return self._store

    def runs(self) -> list[RunSummary]:
        """Every run, the latest first."""
        return list(queries.runs(self._store))

    def candidate(self, candidate: str) -> CandidateRecord:
        """All there is of one."""
        return queries.candidate(self._store, candidate)

    def source(self, candidate: str) -> str:
        """Its rendered source."""
        return queries.source(self._store, candidate)

    def history(self, run: str = LATEST) -> list[Point]:
        """Every candidate of a run, in order."""
        return list(queries.history(self._store, run))

    def best(self, kernel: str | None = None, **where: str | None) -> list[Best]:
        """The fastest candidate for each kernel, target, device and workload over all runs.

        where: target, run, device, dtype, workload, as `evo best` has them.
        """
        return list(queries.best(self._store, kernel, **where))

    def finals(self, run: str = LATEST) -> list[WorkloadFinals]:
        """The finalists of a run, workload by workload, and which of them tie with the winner."""
        return list(finals(self._store, run))

    def lineage(self, candidate: str, *, descendants: int = 100, diff: bool = False) -> list[Kin]:
        """Its ancestors, itself, and its first descendants, with the gain of each step and its interval."""
        return list(self.family(candidate, descendants=descendants, diff=diff).members)

    def family(self, candidate: str, *, descendants: int = 100, diff: bool = False) -> Family:
        """`lineage`, and whether there are more descendants than that."""
        return family(self._store, candidate, descendants=descendants, diff=diff)

    def diff(self, one: str, other: str) -> list[DifferenceRow]:
        """Two candidates, thing by thing."""
        return list(self.difference(one, other).rows)

    def difference(self, one: str, other: str) -> Difference:
        """`diff`, with the gain, and what differs in the source and the PTX."""
        return diff(self._store, one, other)

    def explain(self, candidate: str, base: str | Genome | Mapping[str, Value] | None = None) -> list[EditCredit]:
        """Each change on the way from the run's default, or from `base`, and what it is worth as far as was measured."""
        return list(self.explanation(candidate, base).edits)

    def explanation(
        self,
        candidate: str,
        base: str | Genome | Mapping[str, Value] | None = None,
        *,
        carriers: Mapping[str, Collection[str]] | None = None,
        base_from: str = "",
    ) -> Explanation:
        """`explain`, with the whole gain and what the edits leave of it."""
        start = Genome.of(base) if isinstance(base, Mapping) else base
        return explain(self._store, candidate, start, carriers=carriers, base_from=base_from)

    def failures(self, run: str = LATEST, by: FailureKey = "value") -> list[Any]:
        """What was refused in a run, by "kind", "reason" or parameter "value"; or each "rule" that would have spared it."""
        report = self.failure_report(run)
        lists = {"kind": report.kinds, "reason": report.reasons, "value": report.values, "rule": report.rules}
        if by not in lists:
            raise UnknownNameError("grouping of failures", by, lists)
        return list(lists[by])

    def failure_report(self, run: str = LATEST, *, template: bool = False) -> FailureReport:
        """All four of these. template: also what the kernel's template says now, which is loaded for that."""
        if not template:
            return failure_report(self._store, run)
        known = queries.run(self._store, run)
        spaces = {}
        for task in known.tasks:
            workload = Workload.of(task.dims, task.dtype, task.options)
            spaces[task.workload] = present_space(known.kernel, known.target, known.arch, workload)

        def violations(point: Mapping[str, Value], workload: str) -> list[str]:
            space = spaces[workload]
            if any(name not in space.by_name for name in point):
                return []  # of another space, of which nothing can be said
            return [c.name for c in space.constraints if _breaks(c.holds, point)]

        structural = frozenset(p.name for space in spaces.values() for p in space.parameters if p.structural)
        return failure_report(self._store, run, violations=violations, structural=structural)

    def failure_totals(self, kernel: str | None = None) -> list[FailureTotal]:
        """How the candidates of all runs ended."""
        return failure_totals(self._store, kernel)

    def operators(self, run: str = LATEST, *, windows: int = 5) -> list[OperatorCredit]:
        """What each operator was worth, in all of a run and window by window."""
        return operators(self._store, run, windows=windows)

    def importance(self, run: str = LATEST, *, quantile: float = 0.1) -> list[Importance]:
        """Which parameters matter, by workload."""
        return importance(self._store, run, quantile=quantile)

    def compare(self, *runs: str) -> list[ComparedRun]:
        """Runs side by side, by workload."""
        return list(self.comparison(*runs).rows)

    def settings(self, *runs: str) -> list[Setting]:
        """What differs in how runs were set up."""
        return list(self.comparison(*runs).settings)

    def comparison(self, *runs: str) -> Comparison:
        """Both of these."""
        return compare(self._store, runs)

    def pareto(self, run: str = LATEST, axes: Sequence[str] = AXES) -> list[Nondominated]:
        """Candidates that no other beats on every axis, by workload."""
        return pareto(self._store, run, axes)

    def query(self, sql: str, *, limit: int | None = 1000, timeout_s: float | None = 30.0) -> list[dict[str, Any]]:
        """The rows of one statement that only reads. Of columns of one name the last is kept; `selection` has all."""
        found = self.selection(sql, limit=limit, timeout_s=timeout_s)
        return [dict(zip(found.columns, row, strict=True)) for row in found.rows]

    def selection(self, sql: str, *, limit: int | None = 1000, timeout_s: float | None = 30.0) -> Selection:
        """`query` as columns and rows, and whether there were more."""
        return queries.select_sql(self._store, sql, limit=limit, timeout_s=timeout_s)


def present_space(kernel: str, target: str, arch: str, workload: Workload) -> Space:
    """The search space of a recorded run's workload as its kernel states it now.

    Raises UsageError where the kernel cannot be found or loaded any more.
    """
    problem = load_kernel(kernel)
    problem.check_target(target)
    return problem.space(target, workload, find_target(target).limits(arch))


def _breaks(holds: Any, point: Mapping[str, Value]) -> bool:
    """Whether a constraint does not hold; one that cannot be asked, because the space has changed, counts as holding."""
    try:
        return not holds(point)
    except (EvoError, LookupError, TypeError, ValueError, ArithmeticError):
        return False
