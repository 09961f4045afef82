"""How long something may take: some times what it has taken so far, so that a hang costs little."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Pace"]

_FACTOR = 20.0
"""A candidate that takes this many times the median of those that passed is not worth waiting for."""

_CROWDED = 10.0
"""So many times its usual floor the least limit is where others are in the way."""

_REMEMBERED = 64


class Pace:
    """Before anything is known the limit is `ceiling_s`; never is it less than `floor_s`, for the machine may be
    busy, or less than a multiple of that while it is `crowded`. Safe to use from several threads."""

    def __init__(self, *, floor_s: float, ceiling_s: float, crowded: Callable[[], bool] | None = None) -> None:
        self._floor_s, self._ceiling_s, self._crowded = floor_s, ceiling_s, crowded
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
            usual_s = statistics.median(self._seconds)
        floor_s = self._floor_s * (_CROWDED if self._crowded is not None and self._crowded() else 1.0)
        return min(self._ceiling_s, max(floor_s, _FACTOR * usual_s))
