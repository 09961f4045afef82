"""Whether other commands of evo's use the same device now: while one of them opens it or is thrown off it, nobody's
kernels run for a tenth of a second, and a launch that is well may look as if it hung.

It only makes limits wider: where it cannot be known (a container has folders of its own), there are no others.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["Presence"]

_MARK = "command-"
"""What marks begin with: nothing else in the folder is touched."""


class Presence:
    """A command's mark in a folder that all of this user's commands on a device share: a file that it holds locked, so
    that the mark of one that was killed does not count. Safe to use from several threads."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or Path(tempfile.gettempdir())
        self._folder: Path | None = None
        self._own: tuple[int, Path] | None = None
        self._lock = threading.Lock()

    def join(self, device: str) -> None:
        """From now on others on this device see this command. Done once; more often does nothing."""
        with self._lock, suppress(OSError):
            if self._folder is None:
                folder = self._parent / f"evo-{os.getuid()}-{device.replace(':', '-')}"
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = folder.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
                    self._own, self._folder = _leave_mark(folder), folder

    def others(self) -> bool:
        """Whether there are any; takes some microseconds for each."""
        found = False
        with self._lock, suppress(OSError):
            if self._folder is not None and self._own is not None:
                for mark in self._folder.iterdir():
                    if mark.name.startswith(_MARK) and mark != self._own[1]:
                        found |= _is_held(mark)
        return found

    def close(self) -> None:
        with self._lock, suppress(OSError):
            if self._own is not None:
                descriptor, mark = self._own
                self._own = None
                mark.unlink(missing_ok=True)
                os.close(descriptor)


def _leave_mark(folder: Path) -> tuple[int, Path]:
    while True:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=_MARK)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if Path(name).exists():  # before it was locked, others could have taken it for a dead one's
            return descriptor, Path(name)
        os.close(descriptor)


def _is_held(mark: Path) -> bool:
    try:
        descriptor = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mark.unlink(missing_ok=True)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
