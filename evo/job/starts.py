"""What a search tries first: what its user names, or what earlier runs found for the like."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from evo.analysis.named import find_winners, is_of
from evo.analysis.runs import find_alike, find_nearly_as_fast
from evo.errors import UsageError
from evo.export import MANIFEST, read_manifest
from evo.export._earlier import folder_of
from evo.job.job import Job
from evo.job.values import parse_point
from evo.lineage.database import EmptyError
from evo.lineage.schema import OlderSchemaError
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.space import Space

_MOST_STARTS = 8
"""Most points that earlier runs found: a worthless one costs an evaluation for each workload. Ten emulated searches of two
spaces were 3% better at 100 to 200 candidates with eight that differ than with the fastest alone."""


def _parse_start(text: str, spaces: Sequence[Space]) -> Mapping[str, Any]:
    """The point of a text in the first space that has its names and values. Raises what the first of all says."""
    for space in spaces:
        with suppress(UsageError):
            return parse_point(text, space, "--start")
    return parse_point(text, spaces[0], "--start")


def read_starts(
    texts: Sequence[str], kernel: Kernel, target: str, spaces: Sequence[Space], db: str
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """The points that the texts of --start name, in their order, each behind what it is from: a candidate's id, or the text.

    A text is NAME=VALUE,... (the default with these values), the name of a run (its winners), a candidate, or the folder of
    an export or evo.ready.NAME (its variants).
    spaces: of the workloads. A point is tried where it is legal; of each text at least one point must be legal somewhere.

    Raises UsageError, UnknownNameError, SpaceError or StoreError.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for text in texts:
        if "=" in text:
            points = [(text, _parse_start(text, spaces))]
        elif (folder := folder_of(text)) is not None:
            points = [(text, point) for point in _exported_points(folder, target)]
        else:
            points = _recorded_points(text, kernel, target, db)
        fit = [(origin, point) for origin, point in points if _fits(point, spaces)]
        if not fit:
            broken = dict.fromkeys(v for _, p in points for space in spaces for v in space.violations(space.adapted(p)))
            raise UsageError(f"--start {text!r} is legal for none of the workloads: {'; '.join(broken) or points}")
        found += fit
    return tuple(found)


def _fits(point: Mapping[str, Any], spaces: Sequence[Space]) -> bool:
    """Whether a point is legal for one of the workloads."""
    return any(space.is_legal(space.adapted(point)) for space in spaces)


def _exported_points(folder: Path, target: str) -> list[Mapping[str, Any]]:
    """The points of an export, each once; also those of another kernel, or of what the kernel was before."""
    try:
        variants = read_manifest(folder)["variants"]
        genomes = dict.fromkeys(Genome.of(v["genome"]) for v in variants if v["target"] == target)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--start {str(folder)!r}: {MANIFEST} there cannot be read as an export's: {error!r}") from error
    if not genomes:
        raise UsageError(f"--start {str(folder)!r}: no variant there is for {target}")
    return [genome.parameters for genome in genomes]


def known_starts(
    job: Job, device: str, spaces: Sequence[Space], db: str, tell: Callable[[str], None]
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """What earlier runs found for the like, as far as it is legal for one of the workloads. Where there is but one, half of
    the starts are those that differ most: several workloads each try all of them.

    device: the name of the one that measures; tell: see `open_recorded`."""
    with open_recorded(db, tell) as store:
        if store is None:
            return ()
        every = -(-len(job.workloads) // _MOST_STARTS)
        alike = find_alike(store, job.kernel, job.target, device, job.workloads[::every])
        found = {Genome.of(best.parameters): best.id for best in alike if _fits(best.parameters, spaces)}
        if len(spaces) > 1:
            return tuple((origin, genome.parameters) for genome, origin in islice(found.items(), _MOST_STARTS))
        (space,) = spaces
        near = find_nearly_as_fast(store, islice(found.values(), _MOST_STARTS))
        known = dict[Genome, str]()
        for genome, origin in (*found.items(), *near.items()):
            known.setdefault(Genome.of(space.adapted(genome.parameters)), origin)
        default = Genome.of(space.complete(space.default))  # comes first anyway
        left = [genome for genome in known if genome != default and space.is_legal(genome.parameters)]
        starts = left[: _MOST_STARTS // 2]
        while len(starts) < _MOST_STARTS and (left := [genome for genome in left if genome not in starts]):
            starts.append(max(left, key=lambda genome: min(len(genome.difference(start)) for start in starts)))
        return tuple((known[genome], genome.parameters) for genome in starts)


@contextmanager
def open_recorded(db: str, tell: Callable[[str], None]) -> Iterator[Store | None]:
    """What a database has; None where there is none yet, or one that is to be brought up to date first, which is told.
    Raises StoreError for one that cannot be read."""
    store = None
    try:
        store = Store.open(db, write=False)
    except EmptyError:
        pass
    except OlderSchemaError as error:
        tell(f"earlier runs are not looked at: {error}")
    with store or nullcontext() as found:
        yield found


def _recorded_points(text: str, kernel: Kernel, target: str, db: str) -> list[tuple[str, Mapping[str, Any]]]:
    with Store.open(db, write=False) as store:
        records = find_winners(store, text, db)
        for r in records:
            if r.target != target or not is_of(store, r.kernel, r.run, kernel):
                raise UsageError(
                    f"--start {text!r} is of kernel {r.kernel!r} on {r.target}, and {kernel.name!r} as it is now on"
                    f" {target} is searched; to start there all the same, write its values: NAME=VALUE,..."
                )
    return [(r.id, r.parameters) for r in records]
