"""Points that a search begins with, beside the default: `evo search --start`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evo.cli.options import parse_values
from evo.cli.recorded import find_winners, is_of, may_have_been
from evo.errors import UsageError
from evo.lineage.store import Store
from evo.problem.kernel import Kernel
from evo.problem.space import Space

__all__ = ["read_starts"]


def read_starts(
    texts: Sequence[str], kernel: Kernel, target: str, spaces: Sequence[Space], db: str
) -> tuple[Mapping[str, Any], ...]:
    """The points that the texts name, in their order.

    A text is NAME=VALUE,..., which is the default with these values, a run's name, whose winners are meant, or a candidate.
    spaces: of the workloads; points are tried where they are legal, which of every text one at least must be somewhere.

    Raises UsageError, UnknownNameError, SpaceError or StoreError.
    """
    found: list[Mapping[str, Any]] = []
    for text in texts:
        points = [_written(text, spaces[0])] if "=" in text else _recorded(text, kernel, target, db)
        fit = [point for point in points if any(space.with_initial_points([point]).initial_points for space in spaces)]
        if not fit:
            broken = [v for p in points for space in spaces for v in space.violations(space.complete(_known(p, space)))]
            raise UsageError(
                f"--start {text!r} is legal for none of the workloads: {'; '.join(dict.fromkeys(broken)) or points}"
            )
        found += fit
    return tuple(found)


def _written(text: str, space: Space) -> Mapping[str, Any]:
    parts = [part for part in text.split(",") if part]
    values = parse_values(parts, space, "--start")
    if len(values) < len(parts):
        raise UsageError(f"--start {text!r} names a parameter twice")
    point = space.complete({**space.default, **values})
    if idle := [name for name in values if name not in point]:
        raise UsageError(f"--start {text!r}: with these values {' and '.join(idle)} has no effect; leave it out")
    return point


def _recorded(text: str, kernel: Kernel, target: str, db: str) -> list[Mapping[str, Any]]:
    records = [one.record for one in find_winners(db, text)]
    with Store.open(db, write=False) as store:
        for r in records:
            if r.target != target or not is_of(store, r.kernel, r.run, kernel):
                changed = r.target == target and may_have_been(r.kernel, kernel)
                raise UsageError(
                    f"--start {text!r} is of kernel {r.kernel!r} on {r.target}, and {kernel.name!r} on {target} is searched"
                    + ("; it was found with other files: write its values (NAME=VALUE,...)" if changed else "")
                )
    return [r.parameters for r in records]


def _known(point: Mapping[str, Any], space: Space) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name in space.by_name}
