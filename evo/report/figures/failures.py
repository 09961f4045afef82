"""What broke, how often, and with which values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from evo.report.data import WorkloadData
from evo.report.svg import Figure, fitted, tag, text
from evo.report.text import counted, percent, value_text

__all__ = ["FailureKind", "draw_failures", "failure_kinds"]

_WIDTH, _ROW, _LEFT = 500, 26, 150
_REASONS = 3
_MOST_VALUES = 64
_LEAST = 3
"""Candidates that a value must have, to be held responsible for anything."""


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """reasons: the most frequent, each with how often and one candidate. suspect: the value that goes with it most."""

    status: str
    number: int
    share: float
    reasons: tuple[tuple[str, int, str], ...]
    suspect: str

    @property
    def name(self) -> str:
        return self.status.replace("_", " ")


def failure_kinds(data: WorkloadData) -> list[FailureKind]:
    """The most frequent first."""
    some = data.candidates
    if some is None:
        return []
    found = []
    for code, status in enumerate(some.statuses):
        members = (some.status == code) & ~some.passed
        if members.any():
            number = int(members.sum())
            found.append(
                FailureKind(
                    status=status,
                    number=number,
                    share=number / len(some),
                    reasons=_reasons(data, status),
                    suspect=_suspect(data, members),
                )
            )
    return sorted(found, key=lambda k: (-k.number, k.status))


def _reasons(data: WorkloadData, status: str) -> tuple[tuple[str, int, str], ...]:
    known = [f for f in data.failures if f.status == status]
    examples = {f.reason: f.id for f in reversed(known)}
    return tuple((reason, n, examples[reason]) for reason, n in Counter(f.reason for f in known).most_common(_REASONS))


def _suspect(data: WorkloadData, members: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> str:
    """The value among whose candidates the failure is the most frequent beyond what chance explains; or empty."""
    assert data.candidates is not None
    overall, worst, said = float(members.mean()), 3.0, ""
    for p in data.parameters if members.sum() >= _LEAST else ():
        if len(p.values) > _MOST_VALUES:
            continue
        indices = data.candidates.values[p.name]
        for i, value in enumerate(data.candidates.tried[p.name]):
            with_it = indices == i
            n = int(with_it.sum())
            if n == len(members) or members[with_it].sum() < _LEAST:
                continue
            share = float(members[with_it].mean())
            # How many standard deviations of a binomial share it is above that of all.
            excess = (share - overall) / np.sqrt(max(overall * (1 - overall), 1e-9) / n)
            if excess > worst:
                worst, rest = float(excess), float(members[~with_it].mean())
                number = int(members[with_it].sum())
                said = f"{p.name}={value_text(value)}: {number} of {n} ({percent(share)}); else {percent(rest)}"
    return said


def draw_failures(data: WorkloadData, kinds: list[FailureKind]) -> Figure | None:
    """None where nothing failed."""
    if not kinds:
        return None
    top, parts = max(k.number for k in kinds), []
    for i, kind in enumerate(kinds):
        y = 6 + i * _ROW
        width = max(1.5, (_WIDTH - _LEFT - 110) * kind.number / top)
        parts.append(text(_LEFT - 8, y + 14, fitted(kind.name, _LEFT - 12), "e"))
        tip = f"{kind.name}: {kind.number}" + (f"\n{kind.suspect}" if kind.suspect else "")
        box = {"x": float(_LEFT), "y": float(y), "width": width, "height": float(_ROW - 8)}
        parts.append(tag("rect", **box, class_="bad", data_tip=tip))
        parts.append(text(_LEFT + width + 6, y + 14, f"{kind.number:,} ({percent(kind.share, 1)})", "m sm"))
    failed = sum(k.number for k in kinds)
    return Figure(
        name="failures",
        title="What was refused",
        caption=f"{failed:,} of {counted(data.number, 'candidate')} were refused by the search, by kind.",
        alt=", ".join(f"{k.name} {k.number}" for k in kinds) + ".",
        width=_WIDTH,
        height=_ROW * len(kinds) + 8,
        body=Markup("").join(parts),
    )
