"""Commands do not wait for what they do not need: it is told by what they import, not by a clock."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from evo.cli import _COMMANDS
from evo.lineage.store import Store
from evo.testing.toy_kernel import write_kernel
from tests.ended import run_python
from tests.lineage import landscapes as land

HEAVY = {
    "torch",
    "numpy",
    "optuna",
    "cuda",
    "psycopg",
    "sqlalchemy.dialects.postgresql",
    "jinja2",
    "elftools",
    "filelock",
    "psutil",
    "pynvml",
    "multiprocessing.forkserver",
    "pygments",
    "evo.search.run",
    "evo.search.loop",
    "evo.measure.clock",
    "evo.executors",
    "evo.search.samplers",
    "evo.export",
    "evo.targets.cuda",
}
ASKED = {
    "runs": ["runs"],
    "best": ["best"],
    "show": ["show", "{start}"],
    "lineage": ["lineage", "{end}"],
    "diff": ["diff", "{start}", "{end}"],
    "explain": ["explain", "{end}"],
    "failures": ["failures", "first"],
    "operators": ["operators", "first"],
    "importance": ["importance", "first"],
    "compare": ["compare", "first", "walk"],
    "watch": ["watch", "first"],
    "pareto": ["pareto", "first"],
    "query": ["query", "SELECT 1"],
    "prune": ["prune", "first", "--dry-run"],
}
PROGRAM = """
import json, sys
from evo.cli import run
for words in json.loads(sys.argv[1]):
    code = run(words)
    print(json.dumps([words, code, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A database of two runs, and the ends of a lineage in it."""
    path = tmp_path_factory.mktemp("start") / "lineage.db"
    with Store.open(path, write=True) as store:
        land.searched(store, "first", 60)
        start, end = land.walked(store, [land.START, land.END], "walk")
    return {"db": str(path), "start": start, "end": end}


def test_commands_that_ask_import_nothing_that_they_do_not_need(names: dict[str, str]) -> None:
    """One after another in a process: what one of them has imported is found after it."""
    asked = [[word.format(**names) for word in words] + ["--db", names["db"]] for words in ASKED.values()]
    asked += [[*words, "--json"] for words in asked]
    done = run_python(Path(), "-c", PROGRAM, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert [words for words, _, _ in told] == asked
    for words, code, modules in told:
        assert (code, HEAVY & set(modules)) == (0, set()), words


def test_a_search_leaves_pytorch_to_its_workers(tmp_path: Path) -> None:
    """Their server imports it meanwhile; and before that server starts, as little as possible is imported."""
    asked = ["search", str(write_kernel(tmp_path / "toy")), "--target", "cpu", "--evaluations", "1", "--json"]
    asked += ["--db", str(tmp_path / "lineage.db")]
    done = run_python(Path(), "-c", f"import tests.hurried{PROGRAM}", json.dumps([asked]))
    assert done.returncode == 0, done.stderr
    _, code, modules = json.loads(done.stdout.splitlines()[-1])
    assert (code, "torch" in modules) == (0, False)
    started = run_python(Path(), "-c", "import sys, evo.executors._processes; print(*sys.modules)")
    heavy = {"evo.sanitize", "evo.measure", "evo.targets", "jinja2", "numpy", "torch"}
    assert heavy & {*started.stdout.split()} == set()


def test_every_name_of_a_heavy_module_is_one() -> None:
    """A misspelt one would never be found among those imported."""
    optional = {"psycopg", "cuda"}
    assert [name for name in HEAVY - optional if importlib.util.find_spec(name) is None] == []


def test_every_command_that_asks_is_asked_here() -> None:
    working = {"search", "resume", "bench", "check", "sanitize", "new", "export", "import-workloads", "doctor", "replay"}
    working |= {"kit"}
    writing = {"vacuum", "merge", "backup", "rebuild"}
    pages = {"report", "dashboard"}
    assert {name for names in _COMMANDS.values() for name in names} - working - writing - pages == set(ASKED)
