"""What is written for the command line is told to Python in its words."""

from __future__ import annotations

from pathlib import Path

import pytest

import evo
from evo.environment import DEFAULT_DB
from evo.errors import UsageError
from evo.job.in_python import in_python
from evo.testing.toy_kernel import write_kernel

SAID = {
    "give it a larger --budget or --evaluations": "give it a larger budget or evaluations",
    "continue it with: evo resume quick --db /a/l.db": "continue it with: evo.resume('quick', db='l.db')",
    "longer: evo resume q --budget 10m --db 'a b'": "longer: evo.resume('q', db='l.db', budget='10m')",
    "again: evo resume q --evaluations 9": "again: evo.resume('q', db='l.db', evaluations=9)",
    "next:  evo show it   evo export it --out my_k --db l.db": "next:  evo show it   run.export('my_k')",
    "check it with: evo check k --arch sm_90 --target cuda": "check it with: evo check k --arch sm_90 --target cuda",
    "run with --target cpu, or: evo check KERNEL --arch sm_89": "run with target='cpu', or: evo check KERNEL --arch sm_89",
    "--workload 'n=1' is empty": "workloads=['n=1'] is empty",
    "--fix 'unrol' is not NAME=VALUE": "fix=['unrol'] is not NAME=VALUE",
    "--devices '0,9': there is no device 9": "devices='0,9': there is no device 9",
    "--builders 300: this machine": "builders=300: this machine",
    "first 3 known points (--cold: none); starting": "first 3 known points (cold=True: none); starting",
    "dask worker tcp://h:1 --nthreads 8 --resources d=1": "dask worker tcp://h:1 --nthreads 8 --resources d=1",
    "choose another --out": "choose another out",
}


@pytest.mark.parametrize("text", SAID)
def test_options_are_arguments_and_commands_are_calls_where_python_has_them(text: str) -> None:
    assert in_python(text, "l.db") == SAID[text]
    assert in_python(SAID[text], "l.db") == SAID[text], "what is told once is not turned again"


def test_the_default_database_is_not_named() -> None:
    assert in_python("evo resume quick --db /x/runs/lineage.db", DEFAULT_DB) == "evo.resume('quick')"


def test_a_search_from_python_is_refused_in_its_words(tmp_path: Path) -> None:
    toy = write_kernel(tmp_path / "toy")
    refused = {
        "budget='soon' is not a duration; write e.g. 60s, 10m or 2h": {"budget": "soon"},
        "seed must be a whole number from 0": {"seed": -1},
        "on='dask' names no cluster": {"on": "dask"},
        "fix=['unroll'] is not NAME=VALUE": {"fix": ["unroll"]},
        "resume=True continues the run of a name; give name, too": {"resume": True},
    }
    for said, options in refused.items():
        with pytest.raises(UsageError) as raised:
            evo.search(toy, db=tmp_path / "lineage.db", **{"target": "cpu", **options})  # type: ignore[arg-type]
        assert str(raised.value).startswith(said)
