"""A process without an answer: one that hangs is told from one that was not given a core."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evo.executors._server import start_server, worker_context
from evo.executors._stall import Account, Cause, account, cause_of
from evo.executors._worker import Worker, WorkerStalled

BEFORE = Account(at_s=100.0, computed_s=3.0, waited_s=2.0)


def after(computed_s: float, waited_s: float | None, state: str = psutil.STATUS_SLEEPING) -> Account:
    """Two seconds later."""
    waited_s = None if waited_s is None else 2.0 + waited_s
    return Account(at_s=102.0, computed_s=3.0 + computed_s, waited_s=waited_s, state=state)


@pytest.mark.parametrize(
    ("found", "sleeps", "cause"),
    [
        (after(1.98, 0.01), False, Cause(starved=False, certain=True)),
        (after(1.98, 0.01), True, Cause(starved=False, certain=True)),
        (after(0.00, 0.00), False, Cause(starved=False, certain=True)),
        (after(0.00, 0.00), True, Cause(starved=True, certain=False)),
        (after(0.00, 0.00, psutil.STATUS_DISK_SLEEP), False, Cause(starved=True, certain=False)),
        (after(0.60, 1.40), False, Cause(starved=True, certain=False)),
        (after(1.70, 0.30), False, Cause(starved=True, certain=True)),
        (after(7.00, 0.90), False, Cause(starved=True, certain=True)),
        (after(0.00, 0.00, psutil.STATUS_STOPPED), True, Cause(starved=False, certain=True)),
        (after(1.90, None), False, Cause(starved=False, certain=True)),
        (after(0.20, None), False, Cause(starved=True, certain=False)),
    ],
    ids=[
        "a spinner with a core of its own",
        "a spinner where others may sleep",
        "a sleeper",
        "a sleeper that may wait for the driver",
        "one that waits for the disk",
        "one that mostly waited for a core",
        "a spinner that lost its core at times",
        "a team of threads of which one waited",
        "one that was stopped",
        "a spinner where nothing tells who waited",
        "a sleeper where nothing tells who waited",
    ],
)
def test_the_cause_of_a_stall_follows_from_what_the_process_did(found: Account, sleeps: bool, cause: Cause) -> None:
    assert cause_of(BEFORE, found, sleeps=sleeps) == cause


def test_a_process_that_is_gone_has_an_account_too() -> None:
    assert account(2**22 + 1).state == psutil.STATUS_DEAD


def nothing() -> int:
    return 0


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    start_server()
    started = Worker(worker_context(), tmp_path, nothing, ())
    started.call(nothing, limit_s=60)
    yield started
    started.end()


def test_a_worker_that_sleeps_is_given_up_after_its_first_limit(worker: Worker) -> None:
    worker.post(time.sleep, 600.0)
    with pytest.raises(WorkerStalled) as stalled:
        worker.collect(0.4, patience=1000)
    assert stalled.value.certain


def test_a_worker_that_spins_computes_or_waits_for_a_core(worker: Worker) -> None:
    before = account(worker.pid)
    worker.call(spin, 2.0, limit_s=200)
    found = account(worker.pid)
    assert before.waited_s is not None
    assert found.waited_s is not None
    spent_s = found.computed_s - before.computed_s + found.waited_s - before.waited_s
    assert spent_s > 0.5 * (found.at_s - before.at_s)
    worker.post(spin, 600.0)
    with pytest.raises(WorkerStalled, match=r"no answer within 0.4 s"):
        worker.collect(0.4, patience=3)


def test_answers_come_in_the_order_of_the_tasks(worker: Worker) -> None:
    worker.post(divmod, 7, 2)
    worker.post(divmod, 9, 2)
    assert [worker.collect(60), worker.collect(60)] == [(3, 1), (4, 1)]
