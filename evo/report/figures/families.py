"""What the population was made of as the search went on: families, by the structural choices that mattered most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from evo.report.data import WorkloadData
from evo.report.palette import SERIES
from evo.report.svg import Figure, Scale, fitted, path, tag, text, ticks
from evo.report.text import counted, percent, times, value_text

__all__ = ["Family", "draw_families", "group_families"]

_CHOICES = 3
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 500, 40, 20, 32, 200
_BINS = 24
_LINE = 19


@dataclass(frozen=True, kw_only=True)
class Family:
    """Candidates that made the same structural choices. best: the lowest ratio; rows: theirs, in the columns."""

    name: str
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    best: float | None


def group_families(data: WorkloadData) -> list[Family]:
    """The largest families and the rest as one, by number of candidates; the leader's is always among them.

    Empty where no structural choice was varied.
    """
    some = data.candidates
    varied = {p.name: p for p in data.parameters if p.structural and len(p.values) > 1}
    if some is None or not varied:
        return []
    important = data.importance.names
    ranked = [n for n in important if n in varied] + [n for n in varied if n not in important]
    names = ranked[:_CHOICES]
    choices = np.stack([some.values[n] for n in names], axis=1)
    kinds, member = np.unique(choices, axis=0, return_inverse=True)
    member = member.reshape(-1)
    sizes = np.bincount(member, minlength=len(kinds))
    order = np.argsort(-sizes, kind="stable")
    kept = list(order[: SERIES - 1] if len(kinds) > SERIES else order)
    best = int(np.nanargmin(some.score)) if np.isfinite(some.score).any() else None
    if best is not None and member[best] not in kept:
        kept[-1] = member[best]
    found = [_family(data, _named(data, names, kinds[k]), np.flatnonzero(member == k)) for k in kept]
    rest = np.flatnonzero(~np.isin(member, kept))
    if len(rest):
        found.append(_family(data, f"{counted(len(kinds) - len(kept), 'other family', 'other families')}", rest))
    return found


def _named(data: WorkloadData, names: list[str], kind: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
    assert data.candidates is not None
    tried = data.candidates.tried
    return (
        " ".join(f"{n}={value_text(tried[n][i])}" for n, i in zip(names, kind, strict=True) if i >= 0) or "none of them"
    )


def _family(data: WorkloadData, name: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Family:
    assert data.candidates is not None
    scores = data.candidates.score[rows]
    known = scores[np.isfinite(scores)]
    return Family(name=name, rows=rows, best=float(known.min()) if len(known) else None)


def draw_families(data: WorkloadData, families: list[Family]) -> Figure | None:
    """None where there is nothing to tell apart."""
    if not families or data.number < 2:
        return None
    bins = min(_BINS, data.number)
    edges = np.linspace(0, data.number, bins + 1)
    counts = np.stack([np.histogram(f.rows, edges)[0] for f in families]).astype(float)
    shares = counts / np.maximum(counts.sum(axis=0), 1)
    x = Scale(low=0, high=data.number, start=_LEFT, end=_WIDTH - _RIGHT)
    y = Scale(low=0, high=1, start=_BOTTOM, end=_TOP)
    parts = [text(0, 14, "share of the candidates tried", "m sm")]
    parts += [text(_LEFT - 7, y(v) + 4, percent(v), "m sm e") for v in (0.0, 0.5, 1.0)]
    base = np.zeros(bins)
    for i, family in enumerate(families):
        colour = _colour(i, family, families)
        for b in range(bins):
            if shares[i, b] > 0:
                parts.append(
                    tag(
                        "rect", x=x(edges[b]), y=y(base[b] + shares[i, b]), width=x(edges[b + 1]) - x(edges[b]),
                        height=y(base[b]) - y(base[b] + shares[i, b]), class_=f"{colour} gap",
                        data_tip=f"{family.name}\n{counts[i, b]:.0f} of {counts[:, b].sum():.0f} candidates from"
                        f" {int(edges[b]) + 1} on",
                    )
                )  # fmt: skip
        base += shares[i]
    for value in ticks(0, data.number):
        parts.append(text(x(value), _BOTTOM + 17, f"{value:,g}", "m sm c"))
    parts.append(path([(x.start, _BOTTOM), (x.end, _BOTTOM)], "axis"))
    parts.append(text(x.end, _BOTTOM + 34, "candidates evaluated", "m sm e"))
    for i, family in enumerate(families):
        top = _BOTTOM + 50 + i * _LINE
        parts.append(tag("rect", x=0.0, y=float(top), width=11.0, height=11.0, class_=_colour(i, family, families)))
        parts.append(text(18, top + 10, fitted(family.name, _WIDTH - 190), "sm"))
        parts.append(text(_WIDTH, top + 10, f"{len(family.rows):,} tried, best {times(family.best)}", "m sm e"))
    return Figure(
        name="families",
        title="Population over time",
        caption=(
            f"Families share the structural choices that mattered most (at most {_CHOICES}). A family that spreads is one"
            " that the sampler found worth trying."
        ),
        alt="; ".join(f"{f.name}: {len(f.rows)} tried, best {times(f.best)}" for f in families) + ".",
        width=_WIDTH,
        height=_BOTTOM + 58 + _LINE * len(families),
        body=Markup("").join(parts),
    )


def _colour(i: int, family: Family, families: list[Family]) -> str:
    """The rest of many families is grey."""
    rest = family is families[-1] and "other famil" in family.name
    return f"s{SERIES - 1 if rest else i}"
