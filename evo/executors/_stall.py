"""A process that gives no answer: does it hang, or was it not given what it needs?

A limit of wall time is short where hangs are to cost little, and on a busy machine too short for honest work. So what
counts is what the threads of the process did meanwhile: computed, waited for a core, waited for the disk or the driver.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from evo.scheduling import waited_s

__all__ = ["Account", "Cause", "account", "cause_of"]

_NOTABLE_WAIT = 0.1
"""Share of the time; a thread that waited longer for a core may have been what the others wait for."""

_BUSY = 0.5


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a process has done up to a moment. Differences of two are meant."""

    at_s: float
    computed_s: float
    """Processor time of all its threads."""
    waited_s: float | None
    """How long its threads were ready to run and had no core, all together; None where the system does not tell."""
    state: str = psutil.STATUS_RUNNING


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why there was no answer. `starved`: perhaps for want of a core; more time may help. `certain`: whatever the
    machine was doing, it was not that."""

    starved: bool
    certain: bool


def cause_of(before: Account, after: Account, *, sleeps: bool) -> Cause:
    """`sleeps`: whether honest work of this process can sleep: in a driver that others keep busy."""
    if after.state == psutil.STATUS_STOPPED:
        return Cause(starved=False, certain=True)
    elapsed_s = max(after.at_s - before.at_s, 1e-9)
    computed = (after.computed_s - before.computed_s) / elapsed_s
    if before.waited_s is None or after.waited_s is None:
        return Cause(starved=computed <= _BUSY, certain=computed > _BUSY)
    if after.waited_s - before.waited_s > _NOTABLE_WAIT * elapsed_s:
        return Cause(starved=True, certain=computed > _BUSY)
    if computed > _BUSY:
        return Cause(starved=False, certain=True)
    elsewhere = sleeps or after.state == psutil.STATUS_DISK_SLEEP
    return Cause(starved=elsewhere, certain=not elsewhere)


def account(pid: int) -> Account:
    """Of a process that may be gone."""
    computed_s, state = 0.0, psutil.STATUS_DEAD
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        computed_s, state = float(times.user + times.system), str(process.status())
    return Account(at_s=time.monotonic(), computed_s=computed_s, waited_s=waited_s(pid), state=state)
