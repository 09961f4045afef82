"""What the server of workers does when it starts, by being imported there (`evo.executors._server`).

It says nothing on the terminal, and nor do the workers that are forked from it. It takes in the orphans of dead
workers. When it ends, because the command has ended however it did, everything below it ends too: even a stopped
process, which could not see to that itself.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from evo.executors._limits import SCRATCH, adopt_orphans, discard_output
from evo.executors._strays import end_descendants

__all__: list[str] = []


def _become_server() -> None:
    server, command = os.getpid(), os.getppid()
    discard_output()
    # A baseline that PyTorch compiles is compiled in its own process: others would be taken for a candidate's.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")  # an orphan has ended
    adopt_orphans()

    def end() -> None:
        if os.getpid() == server:  # and not one of the workers, who have this function too
            end_descendants()
            for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{command}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _become_server()
