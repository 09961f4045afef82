"""What a sampler proposes before it draws anything: the default, and points that it was given."""

from __future__ import annotations

from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Space

__all__ = ["first_proposals", "given_proposals"]


def first_proposals(space: Space) -> list[Proposal]:
    """The default, if it is legal, and what is given."""
    default = space.complete(space.default)
    if not space.is_legal(default):
        return given_proposals(space)
    first = Proposal(genome=Genome.of(default), operator="default")
    return [first, *(p for p in given_proposals(space) if p.genome != first.genome)]


def given_proposals(space: Space) -> list[Proposal]:
    """Each point once."""
    return [Proposal(genome=g, operator="start") for g in dict.fromkeys(Genome.of(p) for p in space.starts)]
