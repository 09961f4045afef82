"""What every sampler must do."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest

from evo.errors import UnknownNameError
from evo.problem.genome import Genome
from evo.search.samplers import Exhausted, SamplerFactory, find_sampler
from evo.testing import Suite
from evo.testing.spaces import outcome, play, tight_space, tiled_space, tiny_space

COUNT = 60
TRACE = """
import json, sys
from evo.testing.spaces import outcome, play, tiled_space
from evo.search.samplers import find_sampler
proposals, _ = play(find_sampler(sys.argv[1])(tiled_space(), 7, {}), outcome, 60, window=4, same_code=["ignored"])
print(json.dumps([[p.genome.to_json(), p.operator, [[q.order, q.role] for q in p.parents]] for p in proposals]))
"""


class SamplerSuite(Suite):
    """What every sampler promises."""

    @pytest.fixture
    def make(self, name: str) -> SamplerFactory:
        return find_sampler(name)

    @pytest.mark.parametrize("window", [1, 8])
    def test_proposals_are_legal_never_repeated_and_of_parents_that_were_told_and_passed(
        self, make: SamplerFactory, window: int
    ) -> None:
        space = tiled_space()
        proposals, results = play(make(space, 1, {}), outcome, COUNT, window=window)
        assert len(proposals) == len({p.genome for p in proposals}) == COUNT
        for order, proposal in enumerate(proposals):
            assert space.violations(proposal.genome.parameters) == []
            for parent in proposal.parents:
                assert parent.order <= order - window  # later ones were still outstanding
                assert results[parent.order].score is not None
            assert tuple(p.role for p in proposal.parents) in ((), ("parent",), ("first", "second"))
            assert len({p.order for p in proposal.parents}) == len(proposal.parents)
            assert proposal.operator

    @pytest.mark.parametrize("window", [1, 5])
    def test_a_small_space_is_proposed_whole_and_then_exhausted(self, make: SamplerFactory, window: int) -> None:
        space = tiny_space()
        sampler = make(space, 2, {})
        proposals, _ = play(sampler, lambda g: float(len(g.to_json())), 100, window=window)
        assert {p.genome for p in proposals} == {Genome.of(p) for p in space.points()}
        assert len(proposals) == 13
        for _ in range(2):
            with pytest.raises(Exhausted, match="13 legal points"):
                sampler.ask(13)

    def test_another_seed_gives_other_proposals(self, make: SamplerFactory) -> None:
        first, _ = play(make(tiled_space(), 3, {}), outcome, 40)
        other, _ = play(make(tiled_space(), 4, {}), outcome, 40)
        assert len({p.genome for p in first} & {p.genome for p in other}) < 20

    def test_the_same_results_give_the_same_proposals_so_that_a_recorded_search_goes_on(
        self, make: SamplerFactory
    ) -> None:
        whole, results = play(make(tiled_space(), 5, {}), outcome, COUNT, window=4)
        resumed = make(tiled_space(), 5, {})
        proposals = []
        for order in range(COUNT):  # as the search replays its record: a window of asks, tells in order
            proposals.append(resumed.ask(order))
            if order >= 3:
                told = results[order - 3]
                resumed.tell(told.order, told.score, told.duplicate_of)
        assert proposals == whole

    def test_the_order_in_which_python_hashes_strings_does_not_matter(self, name: str) -> None:
        traces = []
        for seed in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-c", TRACE, name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
            assert done.stderr == ""
            traces.append(json.loads(done.stdout))
        assert len(traces[0]) == 60
        assert traces[0] == traces[1]

    @pytest.mark.parametrize("score", [None, 1.0])
    def test_a_search_goes_on_in_which_nothing_passes_or_all_is_equal(
        self, make: SamplerFactory, score: float | None
    ) -> None:
        proposals, _ = play(make(tiled_space(), 7, {}), lambda g: score, COUNT, window=3)
        assert len({p.genome for p in proposals}) == COUNT
        assert score is not None or not any(p.parents for p in proposals)

    def test_a_legal_point_that_chance_never_hits_is_still_found(self, make: SamplerFactory) -> None:
        space = tight_space()
        assert space.is_legal(make(space, 9, {}).ask(0).genome.parameters)

    def test_an_option_that_does_not_exist_is_named(self, name: str) -> None:
        with pytest.raises(UnknownNameError, match=f"unknown option of sampler {name} 'colour'"):
            find_sampler(name)(tiled_space(), 0, {"colour": 3})

    def test_nothing_outside_the_sampler_is_touched(
        self, make: SamplerFactory, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        logger = logging.getLogger("optuna")

        def state() -> list[object]:
            return [random.getstate(), pickle.dumps(np.random.get_state()), list(warnings.filters), logger.level]

        before = state()
        play(make(tiled_space(), 10, {}), outcome, 40)
        assert state() == before
        assert capfd.readouterr() == ("", "")
        assert not caplog.records
