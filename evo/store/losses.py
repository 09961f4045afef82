"""What a run has lost with a damaged file: kept with the run from when it was salvaged, and told in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["PARENTS_LOST", "SALVAGED", "WORDS", "Losses", "counted", "kept_losses", "listed", "read_losses", "without_losses"]

SALVAGED = "salvaged"
"""Where it is kept, among a run's options."""
PARENTS_LOST = "its parents were lost with a damaged file"
"""The last line of the log of a candidate of which that is so: it is no root."""

WORDS = {
    "candidate": "candidates", "parentage": "parents", "build": "builds", "check": "checks", "timing": "times",
    "final": "verdicts of the finals", "artefact": "sources or binaries", "island": "workloads", "run": "runs",
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


def read_losses(options: Mapping[str, Any]) -> Losses | None:
    """Out of a run's options; None for one that was never salvaged, or lost nothing."""
    kept = options.get(SALVAGED)
    if not isinstance(kept, Mapping):
        return None
    # A database may come from anybody: numbers are numbers, and words are ours.
    numbers = {f.name: n for f in fields(Losses) if isinstance(n := kept.get(f.name), int) and n > 0}
    more = kept.get("more")
    known = tuple(word for word in WORDS.values() if word in more) if isinstance(more, list) else ()
    return Losses(**numbers, more=known) or None


def without_losses(options: Mapping[str, Any]) -> dict[str, Any]:
    """A run's options as it was set up with them."""
    return {name: value for name, value in options.items() if name != SALVAGED}


def kept_losses(losses: Losses) -> dict[str, Any]:
    """As they stand among a run's options: what there is of them."""
    return {name: value for name, value in asdict(losses).items() if value}
