"""What broke: statuses for the messages of a device and for the ends of processes."""

from __future__ import annotations

import re
import signal
from contextlib import suppress

from evo.evaluation import Status

__all__ = ["classify", "exit_status", "exit_text", "ran_out_of_memory"]

_CAUSES: tuple[tuple[Status, str], ...] = (
    (Status.OUT_OF_MEMORY, r"OUT_OF_MEMORY|OUT OF MEMORY|BAD_ALLOC|CAN'T ALLOCATE MEMORY|CANNOT ALLOCATE MEMORY"),
    (Status.MISALIGNED_ADDRESS, r"MISALIGNED_ADDRESS|MISALIGNED ADDRESS"),
    (Status.ILLEGAL_ADDRESS, r"ILLEGAL_ADDRESS|ILLEGAL MEMORY ACCESS|INVALID_ADDRESS_SPACE"),
    (
        Status.TRAP,
        r"ILLEGAL_INSTRUCTION|ILLEGAL INSTRUCTION|CUDA_ERROR_ASSERT|DEVICE-SIDE ASSERT|HARDWARE_STACK_ERROR|INVALID_PC"
        r"|LAUNCH_FAILED|UNSPECIFIED LAUNCH FAILURE|HARDWARE STACK ERROR",
    ),
    (Status.TIMEOUT, r"LAUNCH_TIMEOUT|LAUNCH TIMED OUT"),
)
"""Names of the CUDA driver's errors, and their texts as PyTorch repeats them. LAUNCH_FAILED is what a trap
instruction is reported as. What cannot be launched (LAUNCH_OUT_OF_RESOURCES, INVALID_VALUE) is left to the default.
Source: CUDA driver API, "Data types used by CUDA driver", CUresult."""

_SIGNALS = {
    "SIGSEGV": Status.ILLEGAL_ADDRESS,
    "SIGBUS": Status.ILLEGAL_ADDRESS,
    "SIGABRT": Status.TRAP,
    "SIGILL": Status.TRAP,
    "SIGFPE": Status.TRAP,
    "SIGTRAP": Status.TRAP,
}


def classify(message: str, default: Status) -> Status:
    """The status that a device's error message stands for."""
    text = message.upper()
    return next((status for status, pattern in _CAUSES if re.search(pattern, text)), default)


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
