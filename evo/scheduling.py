"""How long a process has waited for a core, as Linux tells it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["waited_s"]


def waited_s(process: int | str = "self") -> float | None:
    """Seconds that the threads of a process were ready to run and had no core, all together; None where the system does
    not tell, or the process is gone.

    Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".
    """
    waited_ns, told = 0, False
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            waited_ns += int(path.read_text().split()[1])
            told = True
    return waited_ns / 1e9 if told else None
