"""What a run has lost with a damaged file: kept with the run from when it was salvaged, and told in a sentence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "LOST",
    "SALVAGED",
    "WORDS",
    "Losses",
    "Orphans",
    "counted",
    "kept_losses",
    "listed",
    "read_losses",
    "read_orphans",
    "read_standing",
    "without_losses",
]

SALVAGED = "salvaged"
"""Where it is kept, among a run's options."""
LOST = "lost with a damaged file"
"""What stands in for what was lost: as the log of a build, the name of a check, the end of a log."""
_ORPHANS = "orphans"
"""Among that: orders of the candidates of which some parents are lost, as first and last of each stretch."""
_STANDING = "standing"
"""Among that: of what the mended database still shows that it is lost, how much. It is not to be counted again."""

WORDS = {
    "candidate": "candidates", "parentage": "parents", "build": "builds", "check": "checks", "timing": "times",
    "final": "verdicts of the finals", "artefact": "sources or binaries", "task": "workloads", "run": "runs",
}  # fmt: skip
"""What the rows of a table are, told to people."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Numbers of what is known to be lost; what else there was cannot be told where `more` names it.

    finals: verdicts of the finals, of which the times may still be there. parents, builds, checks, times: the candidates
    that lack theirs. artefacts: sources and binaries. runs: others that were in the file. more: of what there may have been
    more than is counted, as words.
    """

    winners: int = 0
    finals: int = 0
    candidates: int = 0
    parents: int = 0
    builds: int = 0
    checks: int = 0
    times: int = 0
    artefacts: int = 0
    workloads: int = 0
    runs: int = 0
    more: tuple[str, ...] = ()

    @property
    def artefacts_may_be(self) -> bool:
        """Whether a source or a binary that is not there may be lost."""
        return bool(self.artefacts or WORDS["artefact"] in self.more)

    @property
    def finals_may_be(self) -> bool:
        """Whether a candidate without a final race may have had one."""
        return bool(self.winners or self.finals or self.times or {WORDS["final"], WORDS["timing"]} & set(self.more))

    def __bool__(self) -> bool:
        return self != Losses()

    def __add__(self, other: Losses) -> Losses:
        """What a file lost that had been salvaged before."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Losses) if f.name != "more"}
        return Losses(**sums, more=tuple(dict.fromkeys(self.more + other.more)))

    def __str__(self) -> str:
        """One sentence, without its end."""
        parts = [
            counted(self.winners, "winner"),
            counted(self.finals, "verdict of the finals", "verdicts of the finals"),
            counted(self.candidates, "candidate"),
            *(
                f"the {what} of {counted(number, 'candidate')}" if number else ""
                for what, number in (
                    ("parents", self.parents), ("builds", self.builds), ("checks", self.checks), ("times", self.times)
                )
            ),
            counted(self.artefacts, "source or binary", "sources or binaries"),
            counted(self.workloads, "workload"),
            counted(self.runs, "other run"),
        ]  # fmt: skip
        parts = [part for part in parts if part]
        if not parts:
            return f"salvaged from a damaged file: it may lack {listed(self.more)}"
        one = len(parts) == 1 and parts[0].startswith("1 ")
        rest = f"; there may have been more {listed(self.more)}" if self.more else ""
        return f"salvaged from a damaged file: {listed(parts)} {'was' if one else 'were'} lost{rest}"


def counted(number: int, one: str, many: str = "") -> str:
    """In words; nothing for none."""
    return f"{number:,} {one if number == 1 else many or one + 's'}" if number else ""


def listed(parts: Collection[str]) -> str:
    """In words; there must be some."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _kept(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands there of a salvaged run; nothing of another."""
    kept = options.get(SALVAGED)
    return kept if isinstance(kept, Mapping) else {}


def read_losses(options: Mapping[str, Any]) -> Losses | None:
    """Out of a run's options; None for one that was never salvaged, or lost nothing."""
    kept = _kept(options)
    # A database may come from anybody: numbers are numbers, and words are ours.
    numbers = {f.name: n for f in fields(Losses) if isinstance(n := kept.get(f.name), int) and n > 0}
    more = kept.get("more")
    known = tuple(word for word in WORDS.values() if word in more) if isinstance(more, list) else ()
    return Losses(**numbers, more=known) or None


def without_losses(options: Mapping[str, Any]) -> dict[str, Any]:
    """A run's options as it was set up with them."""
    return {name: value for name, value in options.items() if name != SALVAGED}


def kept_losses(losses: Losses, orphans: Orphans, standing: Mapping[str, int]) -> dict[str, Any]:
    """As they stand among a run's options: what there is of them. standing: by the name of a field of `Losses`."""
    kept: dict[str, Any] = {name: value for name, value in asdict(losses).items() if value}
    stretches = [list(stretch) for stretch in orphans.stretches]
    return kept | ({_ORPHANS: stretches} if stretches else {}) | ({_STANDING: dict(standing)} if standing else {})


def read_standing(options: Mapping[str, Any]) -> dict[str, int]:
    """Out of a run's options."""
    standing = _kept(options).get(_STANDING)
    return {k: n for k, n in standing.items() if type(n) is int and n > 0} if isinstance(standing, Mapping) else {}


@dataclass(frozen=True)
class Orphans:
    """Orders of the candidates that have lost parents: they are no roots. Of each stretch the first and the last, sorted."""

    stretches: tuple[tuple[int, int], ...] = ()

    def __contains__(self, order: int) -> bool:
        at = bisect_right(self.stretches, order, key=lambda stretch: stretch[0])
        return at > 0 and order <= self.stretches[at - 1][1]

    @classmethod
    def among(cls, orders: Iterable[int], orphans: Container[int]) -> Orphans:
        """orders: of all candidates that a run has, sorted. Numbers that none of them has do not end a stretch."""
        found: list[tuple[int, int]] = []
        before = False
        for order in orders:
            lost = order in orphans
            if lost:
                found.append((found.pop()[0] if before else order, order))
            before = lost
        return cls(tuple(found))


def read_orphans(options: Mapping[str, Any]) -> Orphans:
    """Out of a run's options."""
    stretches = _kept(options).get(_ORPHANS)
    if not isinstance(stretches, list):
        return Orphans()
    whole = [(s[0], s[1]) for s in stretches if isinstance(s, list) and len(s) == 2 and all(type(n) is int for n in s)]
    return Orphans(tuple(sorted(whole)))
