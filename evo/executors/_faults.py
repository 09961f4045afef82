"""What broke: statuses for the ends of processes."""

from __future__ import annotations

import re
import signal
from contextlib import suppress

from evo.evaluation import Status
from evo.targets import classify

__all__ = ["exit_status", "exit_text", "ran_out_of_memory"]

_SIGNALS = {
    "SIGSEGV": Status.ILLEGAL_ADDRESS,
    "SIGBUS": Status.ILLEGAL_ADDRESS,
    "SIGABRT": Status.TRAP,
    "SIGILL": Status.TRAP,
    "SIGFPE": Status.TRAP,
    "SIGTRAP": Status.TRAP,
}


def ran_out_of_memory(words: str) -> bool:
    """Whether a compiler's or a process's last words are about memory."""
    killed = r"Killed signal terminated program|virtual memory exhausted|MemoryError"
    return re.search(killed, words) is not None or classify(words, Status.OK) is Status.OUT_OF_MEMORY


def exit_status(exitcode: int) -> Status:
    """The status that the end of the device process stands for. `exitcode`: negative for a signal."""
    return _SIGNALS.get(_signal_name(exitcode), Status.CRASH)


def exit_text(exitcode: int) -> str:
    """SIGSEGV, or exit code 3."""
    return _signal_name(exitcode) or f"exit code {exitcode}"


def _signal_name(exitcode: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-exitcode).name if exitcode < 0 else ""
    return f"signal {-exitcode}"
