"""How long something may take: some times what it has taken so far, so that a hang costs little."""

from __future__ import annotations

import statistics
import threading
from collections import deque

__all__ = ["Pace"]

_FACTOR = 20.0
"""A candidate that takes this many times the median of those that passed is not worth waiting for."""

_REMEMBERED = 64


class Pace:
    """Before anything is known the limit is `ceiling_s`; never is it less than `floor_s`, for the machine may be
    busy. Safe to use from several threads."""

    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        self._floor_s, self._ceiling_s = min(floor_s, ceiling_s), ceiling_s
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def note(self, seconds: float) -> None:
        """Of something that went well."""
        with self._lock:
            self._seconds.append(seconds)

    def limit_s(self) -> float:
        with self._lock:
            if not self._seconds:
                return self._ceiling_s
            return min(self._ceiling_s, max(self._floor_s, _FACTOR * statistics.median(self._seconds)))
