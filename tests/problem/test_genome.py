from __future__ import annotations

import hashlib
import json
import pickle

import pytest

from evo.errors import SpaceError
from evo.problem.genome import Genome


def test_the_order_in_which_parameters_are_given_is_of_no_account() -> None:
    one, two = Genome.of({"b": 2, "a": 1}), Genome.of({"a": 1, "b": 2})
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest


def test_canonical_json_is_sorted_and_tight_and_comes_back_as_the_same_genome() -> None:
    genome = Genome.of({"vector": 4, "store": "shared", "pad": True, "scale": 0.5})
    text = genome.to_json()
    expected = {"parameters": {"pad": True, "scale": 0.5, "store": "shared", "vector": 4}}
    assert text == json.dumps(expected, sort_keys=True, separators=(",", ":"))
    assert Genome.from_json(text) == genome
    assert Genome.from_json(text).to_json() == text


def test_a_digest_is_that_of_the_canonical_json() -> None:
    assert Genome.of({"a": 1}).digest == hashlib.sha256(b'{"parameters":{"a":1}}').hexdigest()


def test_difference_names_what_varies_with_none_for_what_is_absent() -> None:
    one, two = Genome.of({"a": 1, "b": 2, "c": 3}), Genome.of({"a": 1, "b": 4, "d": 5})
    assert one.difference(two) == {"b": (2, 4), "c": (3, None), "d": (None, 5)}
    assert one.difference(one) == {}


def test_parameters_are_a_copy() -> None:
    genome = Genome.of({"a": 1})
    genome.parameters["a"] = 2
    assert genome == Genome.of({"a": 1})


def test_a_genome_crosses_processes() -> None:
    genome = Genome.of({"a": 1})
    assert pickle.loads(pickle.dumps(genome)) == genome


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"parameters": 3}', '{"parameters": [1, 2]}'])
def test_what_is_no_genome_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(SpaceError, match="not a genome"):
        Genome.from_json(text)
