"""Runs as Optuna's studies: one for each task, named RUN/WORKLOAD, that Optuna's own tools open.

Written to a journal file, the storage of Optuna's that takes a thousand trials a second on a disk (an RDBStorage on
SQLite takes some thirty). A trial's value is the candidate's score, its parameters are the genome's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from sqlalchemy import func, select
from sqlalchemy.orm import aliased

from evo.analysis import queries
from evo.errors import EvoError, UsageError
from evo.evaluation import PASSED
from evo.lineage import RunStatus, StoredRun
from evo.lineage import models as m
from evo.lineage.columns import ORDERS_PER_RUN, candidate_key, key_range, public_id
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value
from evo.report.parameters import read_problem
from evo.report.text import clean

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

__all__ = ["MOST_TRIALS", "TrialMirror", "check_journal", "study_name"]

MOST_TRIALS = 50_000
"""Of one run; more than that no browser shows."""
_AT_ONCE = 1_000
_c, _p = m.Candidate, m.Parentage


def study_name(run: str, workload: str) -> str:
    return f"{run}/{workload}"


def check_journal(path: Path) -> None:
    """Raises UsageError for a file that is something else than a journal of Optuna's."""
    if path.is_dir():
        raise UsageError(f"--optuna {path} is a folder; name a file in it, such as {path / 'optuna.log'}")
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open("rb") as file:
            known = "op_code" in json.loads(file.readline(1 << 20))
    except (OSError, ValueError, TypeError):
        known = False
    if not known:
        raise UsageError(
            f"{path} is there and is not a journal of Optuna's; it is left as it is: name another with --optuna"
        )


@dataclass
class _Mirrored:
    """A run that is being written. floor: every order below it is there."""

    run: StoredRun
    studies: dict[int, int]
    choices: dict[int, dict[str, CategoricalDistribution]]
    orders: set[int] = field(default_factory=set)
    floor: int = 0


class TrialMirror:
    """Keeps the studies of the runs that somebody looks at up to date. `start` it, `stop` it."""

    def __init__(self, db: str, journal: Path) -> None:
        """Raises UsageError for a journal that cannot be written, or that is none."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        check_journal(journal)
        self._db, self.journal = db, journal
        self._quiet(optuna)
        self._lock = FileLock(f"{journal}.writer")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self.writes = False  # another dashboard does
        except OSError as error:
            raise UsageError(
                f"cannot write {journal}: {error.strerror or error}; name another file with --optuna"
            ) from error
        else:
            self.writes = True
        self.storage: BaseStorage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        self._wanted: dict[str, None] = {}
        self._known: dict[str, _Mirrored] = {}
        self._stopping, self._awake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="trials", daemon=True)

    @staticmethod
    def _quiet(optuna: Any) -> None:
        import warnings

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

    def start(self) -> None:
        if self.writes:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._lock.release()

    def want(self, run: str) -> None:
        """From now on the run's trials are kept up to date, too."""
        if run not in self._wanted:
            self._wanted[run] = None
            self._awake.set()

    def study_ids(self, run: str, workloads: Iterable[str]) -> dict[str, int]:
        """Of the studies that are there, by workload."""
        known = {s.study_name: s._study_id for s in self.storage.get_all_studies()}
        return {w: known[study_name(run, w)] for w in workloads if study_name(run, w) in known}

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                more = self._catch_up()
            except (EvoError, OSError):  # a database that is being replaced, a disk that is full: later, perhaps
                more = False
            if not more:
                self._awake.wait(timeout=2.0)
                self._awake.clear()

    def _catch_up(self) -> bool:
        """Writes what is new; whether there is more."""
        with Store.open(self._db, write=False) as store:
            with store.reading() as connection:
                running = connection.scalars(select(m.Run.name).where(m.Run.status == RunStatus.RUNNING.value)).all()
                latest = connection.scalar(select(m.Run.name).order_by(m.Run.id.desc()).limit(1))
            names = dict.fromkeys([*running, *([latest] if latest else []), *list(self._wanted)])
            left = [self.copy(store, name) for name in names]  # each of them has its turn
            return any(left)

    def copy(self, store: Store, name: str) -> bool:
        """Writes the next candidates of a run; whether there may be more. Raises UnknownNameError."""
        if name not in self._known:
            self._known[name] = self._begin(store, name)
        known = self._known[name]
        if len(known.orders) >= MOST_TRIALS:
            return False
        rows, parents = _new_rows(store, known)
        for row in rows:
            if self._stopping.is_set():
                return False
            study = known.studies[row.task]
            self.storage.create_new_trial(study, template_trial=_trial(row, known, parents.get(row.id, [])))
            known.orders.add(row.id % ORDERS_PER_RUN)
        while known.floor in known.orders:
            known.floor += 1
        return len(rows) == _AT_ONCE

    def _begin(self, store: Store, name: str) -> _Mirrored:
        run = store.run(name)
        summary = queries.run(store, run.name)
        spaces = read_problem(summary).spaces
        known = _Mirrored(run=run, studies={}, choices={})
        for task in summary.tasks:
            known.studies[task.number], orders = self._open_study(run, task.workload)
            known.orders |= orders
            space = spaces.get(task.number)
            values: dict[str, tuple[Value, ...]] = {p.name: p.values for p in space.parameters} if space else {}
            known.choices[task.number] = _choices(values or _tried(store, run, task.number))
        return known

    def _open_study(self, run: StoredRun, workload: str) -> tuple[int, set[int]]:
        """The study, and the orders it has already. One of another run that had the name is replaced."""
        import optuna

        name = study_name(run.name, workload)
        if any(s.study_name == name for s in self.storage.get_all_studies()):
            key = self.storage.get_study_id_from_name(name)
            if self.storage.get_study_user_attrs(key).get("run_uid") == run.uid:
                trials = self.storage.get_all_trials(key, deepcopy=False)
                return key, {int(t.user_attrs["order"]) for t in trials if "order" in t.user_attrs}
            self.storage.delete_study(key)
        study = optuna.create_study(study_name=name, storage=self.storage, direction="minimize")
        study.set_metric_names(["time over the reference's"])
        facts = {
            "run_uid": run.uid, "run": run.name, "workload": workload, "kernel": run.spec.kernel,
            "device": run.environment.device, "sampler": run.spec.sampler, "seed": run.spec.seed,
        }  # fmt: skip
        for key_name, value in facts.items():
            study.set_user_attr(key_name, clean(value) if isinstance(value, str) else value)
        return study._study_id, set()


def _tried(store: Store, run: StoredRun, task: int) -> dict[str, tuple[Value, ...]]:
    """Values by parameter as far as they are known, where the kernel is not."""
    values: dict[str, dict[tuple[type, Value], Value]] = {}
    with store.reading() as connection:
        for text in connection.scalars(
            select(_c.genome).where(_c.id.between(*key_range(run.id)), _c.task == task).limit(MOST_TRIALS)
        ):
            for name, value in Genome.from_json(text).items:
                values.setdefault(name, {})[type(value), value] = value
    return {name: tuple(sorted(some.values(), key=str)) for name, some in values.items()}


def _choices(values: dict[str, tuple[Value, ...]]) -> dict[str, CategoricalDistribution]:
    from optuna.distributions import CategoricalDistribution

    return {clean(name): CategoricalDistribution(some) for name, some in values.items()}


def _new_rows(store: Store, known: _Mirrored) -> tuple[list[Any], dict[int, list[int]]]:
    """Candidates that are not written yet, and the orders of the parents of each, by key."""
    _, last = key_range(known.run.id)
    first = candidate_key(known.run.id, known.floor)
    original = aliased(_c)
    with store.reading() as connection:
        rows = connection.execute(
            select(_c.id, _c.task, _c.genome, _c.operator, _c.status, _c.created, _c.seconds)
            # One whose machine code was known has the score of that, as the sampler is told.
            .add_columns(func.coalesce(_c.score, original.score).label("score"))
            .join_from(_c, original, original.id == _c.same_code_as_id, isouter=True)
            .where(_c.id.between(first, last))
            .order_by(_c.id)
            .limit(_AT_ONCE + len(known.orders) - known.floor)
        ).all()
        new = [r for r in rows if r.id % ORDERS_PER_RUN not in known.orders][:_AT_ONCE]
        parents: dict[int, list[int]] = {}
        if new:
            for child, parent in connection.execute(
                select(_p.child_id, _p.parent_id)
                .where(_p.child_id.between(new[0].id, new[-1].id))
                .order_by(_p.child_id, _p.position)
            ):
                parents.setdefault(child, []).append(parent % ORDERS_PER_RUN)
    return list(new), parents


def _trial(row: Any, known: _Mirrored, parents: list[int]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    choices, order = known.choices[row.task], row.id % ORDERS_PER_RUN
    genome = Genome.from_json(row.genome)
    named = {clean(name): value for name, value in genome.items}
    fitting = {n: v for n, v in named.items() if n in choices and v in choices[n].choices}
    passed = row.status in PASSED and row.score is not None
    trial = create_trial(
        state=TrialState.COMPLETE if passed else TrialState.FAIL,
        value=row.score if passed else None,
        params=fitting,
        distributions={n: choices[n] for n in fitting},
        user_attrs={
            "candidate": public_id(known.run.uid, order),
            "order": order,
            "operator": clean(row.operator),
            "parents": [public_id(known.run.uid, p) for p in parents],
            "status": row.status,
            **({"speedup": round(1 / row.score, 4)} if passed else {}),
            **({"elsewhere": {n: v for n, v in named.items() if n not in fitting}} if fitting != named else {}),
        },
    )
    done = row.created.astimezone().replace(tzinfo=None)  # Optuna's times are local, and naive
    trial.datetime_start, trial.datetime_complete = done - timedelta(seconds=max(row.seconds, 0.0)), done
    return trial
