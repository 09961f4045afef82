"""Runs as studies for Optuna's own tools: one study for each workload, named RUN/WORKLOAD.

They are written to a journal file, the storage of Optuna's that takes a thousand trials a second. A trial's value is the
candidate's score, and its parameters are the genome's; its user attributes have the rest.
"""

import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import func, select
from sqlalchemy.orm import aliased

from evo.analysis.operators import parents_by_child
from evo.analysis.outcome import read_problem
from evo.analysis.runs import RunSummary, TaskSummary, find_run
from evo.errors import EvoError, UsageError
from evo.evaluation import PASSED
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN, key_range, public_id
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.report.text import visible

_MOST_TRIALS = 50_000
"""Largest number of trials that is copied of a run; no browser shows more."""
_PAUSE_S = 2.0
_JOURNAL_BEGINS = b'{"op_code":'
_c = m.Candidate


def study_name(run: str, workload: str) -> str:
    return f"{run}/{workload}"


class TrialMirror:
    """A thread, from `start` to `stop`, that keeps the studies of running, the latest and asked-for runs up to date.

    Only one dashboard writes a journal; another one shows what is in it. asked_for: names of runs.
    """

    def __init__(self, db: str, journal: Path) -> None:
        """Raises UsageError for a journal that cannot be written, or a file that is none."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self._db, self.journal, self.writes = db, journal, True
        self._lock = FileLock(f"{journal}.writer")
        try:
            if journal.exists() and not _is_journal(journal):
                raise UsageError(
                    f"{journal} is there and is not a journal of Optuna's; it is left as it is: name another with --optuna"
                )
            self._lock.acquire(timeout=0)
        except Timeout:
            self.writes = False
        except OSError as error:
            raise UsageError(
                f"cannot write {journal}: {error.strerror or error}; name another file with --optuna"
            ) from error
        self.storage = JournalStorage(JournalFileBackend(str(journal)))
        self.asked_for: set[str] = set()
        self._choices: dict[int, dict[str, CategoricalDistribution]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trials", daemon=True)

    def start(self) -> None:
        if self.writes:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._lock.release()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                with Store.open(self._db, write=False) as store:
                    for name in self._names(store):
                        self.copy(store, name)
            except (EvoError, OSError):  # the database may be being replaced, or the disk full; the next time may succeed
                pass
            self._stopping.wait(_PAUSE_S)

    def _names(self, store: Store) -> set[str]:
        with store.reading() as connection:
            running = connection.scalars(select(m.Run.name).where(m.Run.status == RunStatus.RUNNING.value)).all()
            latest = connection.scalars(select(m.Run.name).order_by(m.Run.id.desc()).limit(1)).all()
        return {*running, *latest, *self.asked_for}

    def copy(self, store: Store, name: str) -> None:
        """Writes the candidates of a run that are not written yet. Raises UnknownNameError."""
        run, summary = store.run(name), find_run(store, name)
        studies = {task.number: self._open_study(summary, task, run.uid) for task in summary.tasks}
        if not self._choices.keys() >= set(studies.values()):
            spaces = read_problem(summary).spaces  # empty where the kernel is not known any more
            for number, study in studies.items():
                parameters = spaces[number].parameters if number in spaces else ()
                self._choices[study] = {visible(p.name): CategoricalDistribution(p.values) for p in parameters}
        written = {
            trial.user_attrs["order"]
            for study in studies.values()
            for trial in self.storage.get_all_trials(study, deepcopy=False)
        }
        if len(written) >= min(summary.evaluations, _MOST_TRIALS):
            return
        original = aliased(_c)
        with store.reading() as connection:
            parents = parents_by_child(connection, run.id)
            rows = connection.execute(
                select(_c.id, _c.task, _c.genome, _c.operator, _c.status, _c.created, _c.seconds)
                # A candidate of known machine code has the known score, as the sampler is told.
                .add_columns(func.coalesce(_c.score, original.score).label("score"))
                .join_from(_c, original, original.id == _c.same_code_as_id, isouter=True)
                .where(_c.id.between(*key_range(run.id)))
                .order_by(_c.id)
                .limit(_MOST_TRIALS)
            ).all()
        for row in rows:
            order = row.id % ORDERS_PER_RUN
            if order not in written and not self._stopping.is_set():
                ids = [public_id(run.uid, parent % ORDERS_PER_RUN) for parent in parents.get(row.id, ())]
                about = {"candidate": public_id(run.uid, order), "order": order, "parents": ids}
                study = studies[row.task]
                self.storage.create_new_trial(study, template_trial=_trial(row, about, self._choices[study]))

    def _open_study(self, run: RunSummary, task: TaskSummary, uid: str) -> int:
        """The key of a task's study. A study of another run that had the name is replaced."""
        name = study_name(run.name, task.workload)
        for known in self.storage.get_all_studies():
            if known.study_name == name:
                if known.user_attrs.get("run_uid") == uid:
                    return known._study_id
                self.storage.delete_study(known._study_id)
        study = optuna.create_study(study_name=name, storage=self.storage, direction="minimize")
        study.set_metric_names(["time over the reference's"])
        study.set_user_attr("run_uid", uid)
        return study._study_id


def _is_journal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_JOURNAL_BEGINS)) in (_JOURNAL_BEGINS, b"")


def _trial(row: Any, about: dict[str, Any], choices: dict[str, CategoricalDistribution]) -> FrozenTrial:
    """A candidate as a trial. Values that the study's parameters do not have, because the kernel has changed, are in its
    attribute `elsewhere`."""
    named = {visible(name): value for name, value in Genome.from_json(row.genome).items}
    fitting = {n: v for n, v in named.items() if n in choices and v in choices[n].choices}
    passed = row.status in PASSED and row.score is not None
    trial = create_trial(
        state=TrialState.COMPLETE if passed else TrialState.FAIL,
        value=row.score if passed else None,
        params=fitting,
        distributions={n: choices[n] for n in fitting},
        user_attrs={
            **about,
            "operator": visible(row.operator),
            "status": row.status,
            **({"speedup": round(1 / row.score, 4)} if passed else {}),
            **({"elsewhere": {n: v for n, v in named.items() if n not in fitting}} if fitting != named else {}),
        },
    )
    done = row.created.astimezone().replace(tzinfo=None)  # Optuna's times are local, and naive
    trial.datetime_start, trial.datetime_complete = done - timedelta(seconds=max(row.seconds, 0.0)), done
    return trial
