"""What a run's data were drawn with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evo.lineage import Stage

__all__ = ["gate_seeds"]

_FINAL_STEP = 7_919
"""Finals draw their data with the seed of the search's gate plus this."""


def gate_seeds(options: Mapping[str, Any], seed: int) -> dict[Stage, int]:
    """What a run's data are drawn with, by stage: a verdict is replayed with `evo check CANDIDATE --seed` of these.

    options, seed: the run's own. Runs of an evo that kept no such seed drew their data with `seed`.
    """
    drawn = int(options.get("gate_seed", seed))
    return {Stage.SEARCH: drawn, Stage.FINAL: drawn + _FINAL_STEP}
