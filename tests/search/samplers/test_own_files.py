"""Samplers and operators from files of one's own, and operators that are weighed or switched off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evo.errors import EvoError, UsageError
from evo.search.samplers import find_sampler
from evo.testing.spaces import play, tiled_space

MINE = """
from dataclasses import dataclass
from evo.search.samplers import find_sampler

@dataclass
class Mine:
    space: object
    seed: int
    options: object

    def __post_init__(self):
        self.inner = find_sampler("random")(self.space, self.seed, {})
        self.adopt, self.tell = self.inner.adopt, self.inner.tell

    def adopt(self, order, migrant): ...
    def tell(self, order, score, duplicate_of=None): ...

    def ask(self, order):
        return self.inner.ask(order)

SAMPLER = Mine
"""
OPERATOR = """
from evo.search.operators import Operator
OPERATOR = Operator(name="restart", arity=1, weight=1.0, draw=lambda rng, space, parents: (space.draw(rng), ()))
"""


def operators_of(**options: Any) -> Counter[str]:
    options = {key.replace("__", "."): value for key, value in options.items()}
    made = find_sampler("evolution")(tiled_space(), 1, options)
    proposals, _ = play(made, lambda genome: float(len(genome.to_json())), 120)
    return Counter(proposal.operator for proposal in proposals)


def test_a_sampler_of_a_file_proposes_what_it_says_and_an_edit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    made, random = (find_sampler(name)(tiled_space(), 3, {}) for name in (str(path), "random"))
    assert [made.ask(i).genome for i in range(5)] == [random.ask(i).genome for i in range(5)]
    path.write_text(MINE.replace("return self.inner", "raise ValueError('not yet')  #"))
    with pytest.raises(UsageError, match=rf"^{path}, line 19: ValueError: not yet; mend it"):
        find_sampler(str(path))(tiled_space(), 3, {}).ask(0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def (:\n", ", line 1: SyntaxError: invalid syntax"),
        ("import nothing_here\n", ", line 1: ModuleNotFoundError: No module named 'nothing_here'"),
        ("X = 1\n", r" defines no sampler: end it with SAMPLER = \.\.\."),
        ("A = B = print\nSAMPLER = A\nSAMPLER = B\n", " defines SAMPLER in lines 2 and 3: a file defines one sampler"),
        ("class SAMPLER: ...\n", ": SAMPLER must be a class with the methods ask, adopt, tell, got "),
        ("SAMPLER = 3\n", ": SAMPLER must be a class with the methods ask, adopt, tell, got 3"),
        ("SAMPLER = lambda space, seed: 1\n", r", line 1|: TypeError: <lambda>\(\) takes 2 positional arguments"),
        ("SAMPLER = lambda *given: 1\n", ": SAMPLER makes 1, which has no ask"),
        (MINE.replace("return self.inner.ask(order)", "return 1"), ": ask must return a Proposal, got 1"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"^{path}({told})") as raised:
        find_sampler(str(path))(tiled_space(), 3, {}).ask(0)
    assert "\n" not in str(raised.value)


def test_a_sampler_that_proposes_a_genome_twice_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("self.inner.ask(order)", "vars(self).setdefault('one', self.inner.ask(0))"))
    made = find_sampler(str(path))(tiled_space(), 3, {})
    made.ask(0)
    with pytest.raises(UsageError, match=rf"^{path}: ask proposed .* again; it must propose a genome once only"):
        made.ask(1)


def test_a_weight_is_known_by_its_name() -> None:
    said = r"unknown option of sampler evolution 'mutation'; did you mean weights\.mutation or"
    with pytest.raises(UsageError, match=said):
        operators_of(mutation=0)


def test_whole_numbers_are_floats_where_options_are_such() -> None:
    assert operators_of(weights__mutation=1) == operators_of(weights__mutation=1.0)


def test_a_file_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^cannot read the sampler's file {tmp_path}/no.py: No such file"):
        find_sampler(f"{tmp_path}/no.py")


def test_operators_are_chosen_switched_off_weighed_and_come_from_files(tmp_path: Path) -> None:
    usual = operators_of()
    assert {"mutation", "crossover", "jump"} <= usual.keys()
    assert operators_of(operators="all") == usual
    assert "crossover" not in operators_of(weights__crossover=0)
    made = {"mutation", "crossover", "jump", "structural"}
    assert operators_of(operators="mutation,crossover", weights__crossover=0.0).keys() & made == {"mutation"}
    assert operators_of(weights__jump=50.0)["jump"] > usual["jump"]
    own = tmp_path / "restart.py"
    own.write_text(OPERATOR)
    found = operators_of(operators=f"crossover,{own}", weights__restart=5)
    assert found["restart"] > 0
    assert found.keys() & made <= {"crossover"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"operators": "mutation,swap"}, r"^unknown operator 'swap'; known: crossover, jump, mutation, structural$"),
        ({"operators": ""}, r"^unknown operator ''; known: crossover, jump, mutation, structural$"),
        ({"weights.swap": 1}, r"^unknown operator to weigh 'swap'; known: crossover, jump, mutation, structural$"),
        ({"operators": "jump", "weights.mutation": 1}, r"^unknown operator to weigh 'mutation'; known: jump$"),
        ({"weights.jump": -1}, r"^option 'weights\.jump' must be a number of at least 0, got -1$"),
        ({"weights.jump": "much"}, r"^option 'weights\.jump' must be a number of at least 0, got 'much'$"),
        ({"operators": "jump", "weights.jump": 0}, r"^all operators \(jump\) have the weight 0: leave one on$"),
    ],
)
def test_wrong_operators_are_one_sentence_that_lists_the_known_ones(options: dict[str, object], told: str) -> None:
    with pytest.raises(EvoError, match=told):
        find_sampler("evolution")(tiled_space(), 0, options)
