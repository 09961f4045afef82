"""One candidate: its whole record, where it came from, its source and code."""

from __future__ import annotations

import string
import zlib
from collections import defaultdict
from typing import Any

from sqlalchemy import CTE, Connection, and_, select

from evo.errors import EngineError, StoreError, UnknownNameError
from evo.evaluation import Binary, Build, Parent
from evo.genome import Genome
from evo.store import models as m
from evo.store.columns import ORDERS_PER_RUN
from evo.store.records import (
    BuildRecord,
    CandidateRecord,
    Change,
    CheckRecord,
    FinalRecord,
    Relative,
    Step,
    TimingRecord,
)
from evo.store.rows import BUILD_COLUMNS, CHECK_COLUMNS, TIMING_COLUMNS, read_build
from evo.store.runs import iso
from evo.store.store import Store

__all__ = ["ancestry", "artefact", "binary", "candidate", "source"]
