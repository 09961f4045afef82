"""Workers end with the command that wanted them, and with what they started."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from contextlib import suppress

__all__ = ["end_with_children", "end_with_command"]


def end_with_command() -> None:
    """From now on this process ends when the command does. It gets a process group of its own, where ^C on the
    terminal reaches neither worker nor compiler: that would look like failures of the candidates they are at."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="evo-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        end_with_children()


def end_with_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)
