"""A search finds every loophole there is: each known way to cheat is refused, by name, on the path that a search takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evo.executors import ExecutorConfig
from tests.adversaries.cheats import ALL, Cheat, names_for
from tests.adversaries.trial import Verdict, verdicts_of, workload_for

TRIED = names_for("cpu", 0)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    config = ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache"))
    return verdicts_of("cpu", "native", workload_for("cpu", "float32"), TRIED, config)


@pytest.mark.parametrize("cheat", [c for c in TRIED if c.stage], ids=lambda c: c.name)
def test_a_search_on_the_cpu_refuses_a_candidate_that(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert verdicts[cheat.name].stage, f"{cheat.name} was accepted"
    assert verdicts[cheat.name].as_expected, verdicts[cheat.name]


@pytest.mark.parametrize("cheat", [c for c in TRIED if not c.stage], ids=lambda c: c.name)
def test_a_search_on_the_cpu_accepts_a_candidate_that_is(verdicts: dict[str, Verdict], cheat: Cheat) -> None:
    assert not verdicts[cheat.name].stage, verdicts[cheat.name]


def test_threads_are_counted_where_pytorch_computes_with_one(tmp_path: Path) -> None:
    """Also those that a candidate left; a team of the candidate's own is none of them."""
    tried = ["leaves_a_thread", "honest", "honest_with_a_team_of_its_own"]
    command = [sys.executable, "-m", "tests.test_adversaries", str(tmp_path), *tried]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    verdicts = json.loads(done.stdout)
    assert [stage for stage, _ in verdicts.values()] == ["launch", "", ""], verdicts
    assert "it left 1 thread running" in verdicts["leaves_a_thread"][1]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_cheat_is_tried_twice(target: str) -> None:
    names = [c.name for c in ALL if target in c.targets]
    assert len(names) == len(set(names))


def main(cache: Path, names: list[str]) -> None:
    """Prints (stage, reason) of the cheats named, as JSON."""
    config = ExecutorConfig(builders=1, cache_dir=cache)
    cheats = [c for c in TRIED if c.name in names]
    found = verdicts_of("cpu", "native", workload_for("cpu", "float32"), cheats, config)
    print(json.dumps({name: (found[name].stage, found[name].reason) for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
