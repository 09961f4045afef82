"""What `evo export` does for a format that holds a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evo.analysis.runs import find_run, list_runs
from evo.errors import UnknownNameError, UsageError
from evo.export import RunExporter
from evo.lineage.store import Store

__all__ = ["export_all_candidates"]


def export_all_candidates(store: Store, what: Sequence[str], exporter: RunExporter, out: Path) -> list[Path]:
    """The files written. Raises UsageError unless `what` is one run, and what the exporter raises."""
    if len(what) != 1:
        raise UsageError(f"{exporter.name} holds one run; name one, not {len(what)}, and export each to a folder of its own")
    try:
        name = find_run(store, what[0]).name
    except UnknownNameError:
        known = [r.name for r in list_runs(store)]
        raise UnknownNameError("run", what[0], known) from None
    run = store.run(name)
    return exporter.export_run(run, store.evaluations(run), out)
