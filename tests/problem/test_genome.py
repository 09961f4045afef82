from __future__ import annotations

import hashlib
import json
import pickle

import pytest

from evo.errors import SpaceError
from evo.problem.genome import Genome


def test_a_genome_is_its_canonical_json_whatever_the_order_of_its_parameters() -> None:
    genome = Genome.of({"vector": 4, "store": "shared", "pad": True, "scale": 0.5})
    text = genome.to_json()
    expected = {"parameters": {"pad": True, "scale": 0.5, "store": "shared", "vector": 4}}
    assert text == json.dumps(expected, sort_keys=True, separators=(",", ":"))
    assert genome.digest == hashlib.sha256(text.encode()).hexdigest()
    for same in (Genome.from_json(text), Genome.of(expected["parameters"]), pickle.loads(pickle.dumps(genome))):
        assert (same, hash(same), same.to_json()) == (genome, hash(genome), text)


def test_difference_names_what_varies_with_none_for_what_is_absent() -> None:
    one, two = Genome.of({"a": 1, "b": 2, "c": 3}), Genome.of({"a": 1, "b": 4, "d": 5})
    assert one.difference(two) == {"b": (2, 4), "c": (3, None), "d": (None, 5)}
    assert one.difference(one) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"parameters": 3}', '{"parameters": [1, 2]}'])
def test_what_is_no_genome_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(SpaceError, match="not a genome"):
        Genome.from_json(text)
