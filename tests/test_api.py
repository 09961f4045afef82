"""Searching from Python: what `evo.search` returns and refuses, and that it searches as the command does."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import sqlite3
import sys
import threading
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import evo
import evo.search.loop  # the package's name is the function's
from evo.analysis.runs import BUSY
from evo.api import Run
from evo.cli import run as run_command
from evo.errors import EvoError, StoreError, UsageError
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.testing.toy_kernel import write_kernel
from tests.ended import run_here, run_python

PATIENCE_S = 200.0


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel(tmp_path_factory.mktemp("api") / "toy", ("honest", *(f"like_honest_{i}" for i in range(20))))


@pytest.fixture(scope="module")
def searched(toy: Path) -> Run:
    where = toy.parent / "lineage.db"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("evo.search.finals._MOST_PATIENCE_S", 120.0)
        patched.setattr("evo.search.loop._DISTURBED_RETRIES", 3)
        return evo.search(
            load_kernel(str(toy)), target="cpu", evaluations=6, seed=3, finalists=1, name="mine", db=where, progress=False
        )


@pytest.mark.slow
def test_a_search_returns_its_run_with_the_winner(searched: Run) -> None:
    assert not searched.interrupted
    (best,) = searched.best()
    assert (best.run, best.finals) == ("mine", BUSY if best.disturbed else "confirmed")
    assert (best.speedup is None) is best.disturbed
    assert best.ratio_low is not None
    assert best.ratio_low <= best.ratio
    with pytest.raises(FrozenInstanceError):
        searched.name = "other"  # type: ignore[misc]


@pytest.mark.slow
def test_a_finished_run_is_not_resumed_without_a_larger_budget(searched: Run) -> None:
    if searched.best()[0].disturbed:
        pytest.skip("the machine was too busy to measure the winner, so that its finals may be held again")
    with pytest.raises(StoreError, match=r"run 'mine' is finished .*; to search on, give it a larger"):
        searched.resume()
    with pytest.raises(UsageError, match="did you mean mine"):
        evo.resume("mime", db=searched.db)


@pytest.mark.slow
def test_a_cell_is_run_twice(searched: Run, toy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    searched = replace(searched, db=shutil.copy(searched.db, tmp_path))
    capfd.readouterr()
    asked: dict[str, Any] = {"target": "cpu", "evaluations": 6, "seed": 3, "name": "mine", "db": searched.db}
    with pytest.raises(StoreError) as taken:
        evo.search(toy, **asked)
    assert str(taken.value) == (
        "there is a run 'mine' already; choose another name, or continue it with:"
        f" evo.resume('mine', db={searched.db!r}), or here with resume=True"
    )
    assert evo.search(toy, resume=True, **asked) == searched
    assert capfd.readouterr().err.startswith("evo: run mine is finished")
    assert evo.search(toy, resume=True, **asked, budget="9h") == searched, "another limit ended it"
    finished = "evo: run mine is finished (evaluations done); a larger budget or evaluations searches on\n"
    assert capfd.readouterr() == ("", finished)
    others = {"seed": (4, r"seed \(3\)"), "sampler": ("random", r"sampler \(evolution\)")}
    others |= {"workloads": (["n=5,dtype=float32"], "workloads"), "fix": ({"unroll": 4}, r"fix \(none\)")}
    others |= {"finalists": (2, r"finalists \(1\)"), "sampler_options": ({"population": 9}, r"sampler_options \(none\)")}
    for name, (value, told) in others.items():
        with pytest.raises(UsageError, match=f"has a run 'mine' with another value of {told}"):
            evo.search(toy, resume=True, **asked | {name: value})
    with pytest.raises(UsageError, match="has a run 'mine' of another kernel"):
        evo.search("layernorm", resume=True, **asked)
    again = evo.search(toy, resume=True, finalists=1, **asked | {"evaluations": 7})
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("run mine is resumed: 6 candidates")
    assert told[-1].startswith(f"next:  evo show mine --db {searched.db}") or "evo.resume('mine'" in told[-1]
    assert again == searched
    with evo.Lineage(searched.db) as lineage:
        assert len(lineage.history("mine")) == 7
    assert evo.search(toy, resume=True, progress=False, **asked | {"name": "new", "evaluations": 1}).name == "new"


@pytest.mark.slow
def test_the_documented_script_searches_and_exports_a_package_that_computes(tmp_path: Path) -> None:
    """It has no guard, and workers do not run it again."""
    text = (Path(__file__).parent.parent / "docs" / "lineage.md").read_text()
    (example,) = re.findall(r"^```python\n(import evo\n\nrun = .*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert 'budget="60s"' in example
    script = tmp_path / "script.py"
    script.write_text(
        "open('ran', 'a').write('.')\n"
        + example.replace('budget="60s"', "evaluations=2, finalists=1, builders=1, progress=False")
        + "import sys, torch\n"
        "sys.path.insert(0, 'exported')\n"
        "import layernorm\n"
        "x = torch.randn(64, 512)\n"
        "print(torch.allclose(layernorm.layer_norm(x, (512,)), torch.nn.functional.layer_norm(x, (512,)), atol=1e-4))\n"
    )
    done = run_python(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    told, right = done.stdout.splitlines()
    assert told.startswith("rows=64,cols=512,dtype=float32,")
    assert right == "True"
    assert (tmp_path / "ran").read_text() == "."


@pytest.mark.slow
def test_the_command_and_python_make_the_same_proposals(searched: Run, toy: Path, tmp_path: Path) -> None:
    db = str(tmp_path / "lineage.db")
    words = ("--target", "cpu", "--evaluations", "6", "--seed", "3", "--finalists", "1", "--name", "mine", "--db", db)
    assert run_command(["search", str(toy), *words, "--json"]) == 0
    with evo.Lineage(db) as one, evo.Lineage(searched.db) as other:
        ((theirs,), (own,)) = one.runs(), other.runs()
        assert theirs.options.keys() == own.options.keys()
        first = [one.candidate(p.id).parameters for p in one.history("mine")][:4]
        assert first == [other.candidate(p.id).parameters for p in other.history("mine")][:4]


@pytest.mark.slow
def test_an_interrupt_ends_a_search_in_order_and_the_run_goes_on(tmp_path: Path) -> None:
    db, toy = str(tmp_path / "lineage.db"), write_kernel(tmp_path / "toy")
    kernel = toy / "kernel.py"  # more points, so that the search lasts until it is interrupted
    kernel.write_text(kernel.read_text().replace("values=(1, 2, 4, 8)", "values=tuple(range(1, 33))"))

    def interrupt() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if Path(db).exists():
                try:
                    with evo.Lineage(db) as lineage:
                        if len(lineage.history("long")) >= 2:
                            break
                except UsageError:  # the run is not there yet
                    pass
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    waiting = threading.Thread(target=interrupt)
    waiting.start()
    run = evo.search(toy, target="cpu", budget=PATIENCE_S, finalists=1, name="long", db=db, progress=False)
    waiting.join()
    assert run.interrupted
    assert signal.getsignal(signal.SIGINT) is before
    with evo.Lineage(db) as lineage:
        kept = len(lineage.history("long"))
    assert kept >= 2
    again: list[Run] = []
    elsewhere = threading.Thread(target=lambda: again.append(run.resume(evaluations=kept + 1, progress=False)))
    elsewhere.start()  # not the main thread: no signal handler
    elsewhere.join()
    assert again == [replace(run, interrupted=False)]
    with sqlite3.connect(db) as connection:
        assert connection.execute("select count(*) from final").fetchone() == (1,), "as many finalists as it began with"


@pytest.mark.slow
def test_a_search_without_a_result_says_why(tmp_path: Path) -> None:
    wrong = write_kernel(tmp_path / "toy", ("wrong",))
    run = evo.search(wrong, target="cpu", evaluations=2, name="none", db=tmp_path / "lineage.db", progress=False)
    said = r"^run none has no result \(evaluations done\): of 2 candidates none passed, most often wrong: .*; search longer"
    with pytest.raises(EvoError, match=said):
        run.best()


OWN_SAMPLER = """
from evo.search.samplers import find_sampler
SAMPLER = lambda space, seed, options: find_sampler("evolution")(space, seed, {"operators": "mutation"} | options)
"""


@pytest.mark.slow
def test_a_sampler_of_ones_own_file_searches_and_is_found_again_by_resume(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own, db = tmp_path / "mine.py", str(tmp_path / "lineage.db")
    own.write_text(OWN_SAMPLER)
    run = evo.search(toy, target="cpu", sampler="./mine.py", evaluations=4, finalists=1, name="own", db=db, progress=False)
    with Store.open(db, write=False) as store:
        spec = store.run("own").spec
        assert (spec.sampler, spec.options["files"]) == (str(own), {str(own): hashlib.sha256(own.read_bytes()).hexdigest()})
    assert run_here(capsys, "merge", db, "--db", str(tmp_path / "merged.db")).code == 0
    monkeypatch.chdir(toy.parent)
    run.resume(evaluations=6, progress=False)
    with evo.Lineage(db) as lineage:
        assert len(lineage.history("own")) == 6
    own.write_text(OWN_SAMPLER + "# edited\n")
    with pytest.raises(UsageError, match=rf"^{own}, which the run was begun with, has changed: put it back as it was and"):
        run.resume(evaluations=8, progress=False)
    own.unlink()
    ended = run_here(capsys, "resume", "own", "--evaluations", "8", "--db", db)
    assert (ended.code, ended.sentence.startswith(f"evo: {own}, which the run was begun with, is gone")) == (2, True)
    with pytest.raises(UsageError, match=r"^cannot read the sampler's file .*mine\.py: No such file"):
        evo.search(toy, target="cpu", sampler=str(own), evaluations=4, db=db, progress=False)


NO_CONSOLE = """
import os, sys
for descriptor in (0, 1, 2):
    os.close(descriptor)
sys.stdin = sys.stdout = sys.stderr = None
import evo
evo.search("./toy", target="cpu", evaluations=2, finalists=1, db="lineage.db")
"""


@pytest.mark.slow
def test_a_program_without_a_console_searches(tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy")
    root = str(Path(__file__).parent.parent)
    assert run_python(tmp_path, "-c", NO_CONSOLE, PYTHONPATH=root).returncode == 0
    assert len(Run(name="latest", db=str(tmp_path / "lineage.db"), interrupted=False).best()) == 1


def test_what_cannot_be_searched_is_refused_in_one_sentence(tmp_path: Path) -> None:
    db = tmp_path / "lineage.db"
    toy = load_kernel(str(write_kernel(tmp_path / "toy")))
    stated = replace(toy)
    object.__setattr__(stated, "folder", Path())
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ("layernrm", {}, "did you mean layernorm"),
        (stated, {}, "was not loaded from a folder"),
        (toy, {"workloads": "n=5,dtype=float32"}, "workloads must be a list"),
        (toy, {"budget": "soon"}, "is not a duration"),
        (toy, {"evaluations": 0}, "leaves nothing to do"),
        (toy, {"builders": 0}, "builders must be at least 1"),
        (toy, {"name": ""}, "name is empty; leave it out, or give it a value"),
        (toy, {"sampler": ""}, "sampler is empty; leave it out, or give it a value"),
        (toy, {"name": "a/b"}, "'a/b' is not a name for a run"),
        (toy, {"evaluations": True}, "evaluations must be a whole number, got True"),
        (toy, {"patience": 2.5}, "patience must be a whole number, got 2.5"),
        (toy, {"seed": -1}, "seed must be"),
        (toy, {"fix": {"unrol": 4}}, "did you mean unroll"),
        (toy, {"target": "tpu"}, "unknown target"),
        (toy, {"scheduler": "tcp://h:1"}, "scheduler is no option any more; say where work runs with on: "),
        (toy, {"sed": 1}, "unknown option 'sed'; did you mean seed?"),
    ]
    for kernel, options, said in refused:
        with pytest.raises(UsageError, match=said) as raised:
            evo.search(kernel, db=db, **{"target": "cpu", **options})
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="cluster is no option any more"):
        evo.resume("mine", db=db, cluster="c.yaml")
    with pytest.raises(UsageError, match="unknown option 'seed'; known: budget, devices, evaluations, on"):
        evo.resume("mine", db=db, seed=3)
    assert not db.exists()


def test_the_names_for_stating_a_problem_are_there() -> None:
    from evo.problem.kernel import Kernel
    from evo.problem.space import Space

    assert (evo.Kernel, evo.Space) == (Kernel, Space)
    assert callable(evo.search)
    assert "evo.search.loop" in sys.modules
    with pytest.raises(AttributeError, match="no attribute 'Kernels'"):
        evo.Kernels  # noqa: B018
