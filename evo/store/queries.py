"""Questions to the lineage, over runs. For one candidate and its family see `evo.store.candidates`; the names
there can be had from here too."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, ScalarSelect, and_, case, func, literal, or_, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import aliased

from evo.errors import StoreError, UsageError
from evo.evaluation import Status
from evo.store import Stage
from evo.store import models as m
from evo.store.candidates import ancestry, artefact, binary, candidate, source
from evo.store.faults import first_line
from evo.store.records import Best, Failure, IslandSummary, Point, RunSummary, Selection, TimingRecord
from evo.store.rows import TIMING_COLUMNS
from evo.store.runs import iso, resolve_run
from evo.store.store import Store

__all__ = [
    "ancestry",
    "artefact",
    "baselines",
    "best",
    "binary",
    "candidate",
    "counts",
    "failures",
    "history",
    "run",
    "runs",
    "select_sql",
    "source",
]

_PASSED = tuple(s.value for s in Status if s.passed)
_c = m.Candidate
