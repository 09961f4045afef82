"""Whether other commands of evo's use the same device now: while one of them opens it or is thrown off it, nobody's
kernels run for a tenth of a second, and a launch that is well may look as if it hung."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["Presence"]


class Presence:
    """A command's mark in a folder that all of this user's commands on a device share: a file that it holds locked, so
    that the mark of one that was killed does not count."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"evo-{os.getuid()}-{device}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._descriptor, name = tempfile.mkstemp(dir=self._folder)
            self._own = Path(name)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self._own.exists():  # before it was locked, others could have taken it for a dead one's
                return
            os.close(self._descriptor)

    def others(self) -> bool:
        """Whether there are any; takes some microseconds for each."""
        found = False
        with suppress(OSError):
            for mark in self._folder.iterdir():
                found |= mark != self._own and self._held(mark)
        return found

    @staticmethod
    def _held(mark: Path) -> bool:
        try:
            descriptor = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mark.unlink(missing_ok=True)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._own.unlink(missing_ok=True)
        os.close(self._descriptor)
