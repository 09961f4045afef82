"""The parameters of a run's search space, as far as they can still be known.

The database has values, not spaces. A kernel that can be loaded says in which order its values come and which
parameters are structural; where it cannot, or has changed, that is inferred from what was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evo.analysis.records import RunSummary, TaskSummary
from evo.errors import EvoError
from evo.problem.kernel import find_kernel, kernel_digest, load_kernel, template_root
from evo.problem.space import Space, Value
from evo.targets import find_target

__all__ = ["KnownParameter", "Problem", "known_parameters", "read_problem"]

ABSENT = -1
"""Index of the value of a parameter that has no part in a genome."""


@dataclass(frozen=True, kw_only=True)
class KnownParameter:
    """values: those that were tried, in their order. structural: selects another algorithm or code shape."""

    name: str
    values: tuple[Value, ...]
    structural: bool
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is still known of the problem that a run was about.

    spaces: by number of the task. roles: of baselines. changed: why what the kernel says now may not be what it said
    to the run; empty if it says the same.
    """

    spaces: Mapping[int, Space]
    roles: Mapping[str, str]
    changed: str = ""


def read_problem(run: RunSummary) -> Problem:
    """Of the kernel as it is now, if there is one of that name.

    A kernel.py is a program, and a database may come from anybody: one that is not evo's own is only run if it is, byte
    for byte, what the run was about.
    """
    try:
        folder = find_kernel(run.kernel)
        if not folder.is_relative_to(template_root()) and kernel_digest(folder) != run.kernel_digest:
            return Problem(spaces={}, roles={}, changed="the kernel has changed since this run")
        kernel = load_kernel(run.kernel)
        limits = find_target(run.target).limits(run.arch)
        spaces = {
            i.number: kernel.space(run.target, kernel.workload(run.target, i.workload), limits) for i in run.tasks
        }
        roles = {b.name: b.role for b in kernel.baselines}
    except (EvoError, OSError):
        return Problem(spaces={}, roles={}, changed="the kernel cannot be found here any more")
    except Exception as error:  # a kernel.py is somebody's program: whatever ails it, the record can be shown
        return Problem(spaces={}, roles={}, changed=f"the kernel cannot be loaded any more ({type(error).__name__})")
    changed = "" if kernel.digest == run.kernel_digest else "the kernel has changed since this run"
    return Problem(spaces=spaces, roles=roles, changed=changed)


def known_parameters(
    problem: Problem, task: TaskSummary, tried: Mapping[str, set[Value]]
) -> tuple[KnownParameter, ...]:
    """In the order in which the kernel declares them, then those that it does not have any more."""
    space = problem.spaces.get(task.number)
    declared = space.by_name if space else {}
    names = [n for n in declared if n in tried] + sorted(n for n in tried if n not in declared)
    found = []
    for name in names:
        values, known = tried[name], declared.get(name)
        if known is None:
            structural = all(isinstance(v, str) for v in values)
            found.append(KnownParameter(name=name, values=tuple(sorted(values, key=_order)), structural=structural))
            continue
        place = {_key(v): i for i, v in enumerate(known.values)}
        ordered = sorted(values, key=lambda v: (place.get(_key(v), len(place)), _order(v)))
        found.append(KnownParameter(name=name, values=tuple(ordered), structural=known.structural, why=known.why))
    return tuple(found)


def _key(value: Value) -> tuple[str, Value]:
    """True is not 1 here."""
    return type(value).__name__, value


def _order(value: Value) -> tuple[int, float, str]:
    """Numbers by size before words by letter."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
