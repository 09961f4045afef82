"""Beside other tests no machine gets quiet. A command that imports this first waits less for that, and so do its workers."""

from __future__ import annotations

from evo.executors._processes import _IMPORTED, WORKERS
from evo.search import finals, loop

setattr(finals, "_MOST_PATIENCE_S", 0.0)  # noqa: B010
"""Finals say at once that the machine is busy."""
setattr(loop, "_DISTURBED_RETRIES", 0)  # noqa: B010
"""What was disturbed is not measured a second time."""
WORKERS.set_forkserver_preload([*_IMPORTED, "tests.hurried_workers"])
