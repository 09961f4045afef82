"""evo search and evo resume: what they end with, what is asked of it afterwards; nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evo import cli
from evo.cli import run as run_command
from evo.errors import UsageError
from evo.testing.toy_kernel import TEMPLATE, write_kernel
from tests.ended import EVO, Ended
from tests.export.exports import manifest_of

pytestmark = pytest.mark.slow

PATIENCE_S = 200.0


def evo_process(*arguments: str, program: tuple[str, ...] = EVO, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def evo(*arguments: str, **options: Any) -> Ended:
    """A command in a process of its own."""
    process = evo_process(*arguments, **options)
    out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


def test_a_grid_is_covered_and_its_export_serves_each_point_by_what_won_it(here: Any, tmp_path: Path) -> None:
    words = ("--cover", "rows=16/64,cols=96,dtype=float32", "--evaluations", "4", "--finalists", "2", "--name", "few")
    found = here("search", "layernorm", "--target", "cpu", *words)
    assert found.code == 0, found.err
    assert re.search(r"\d variants? for 2 workloads: ", found.out)
    told = here("show", "few", "--json").document["cover"]
    assert {p["workload"].partition(",cols")[0] for p in told["points"]} == {"rows=16", "rows=64"}
    assert len(re.findall(r"^\w{10} \(layernorm, ", here("explain", "few").out, re.MULTILINE)) == 2, "each winner"
    out = tmp_path / "covered"
    assert here("export", "few", "--out", str(out)).code == 0
    variants = manifest_of(out)["variants"]
    assert len(variants) == told["variants"]
    code = (
        "import covered, torch; covered.also_serve(slower=True, measure=False)\n"
        "for rows in (16, 64): print(covered.explain(torch.randn(rows, 96), (96,)).split()[1])"
    )
    chosen = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    serving = {p["workload"]["dims"]["rows"]: str(i) for i, v in enumerate(variants) for p in (v, *v["points"])}
    assert chosen.stdout.split() == [serving[16], serving[64]]


def search_toy(here: Any, tmp_path: Path, *more: str) -> Ended:
    """A search of two candidates, of a kernel in this folder."""
    if not (tmp_path / "toy").exists():
        write_kernel(tmp_path / "toy")
    return here("search", "./toy", "--target", "cpu", "--evaluations", "2", *more)


MISSPELT = TEMPLATE.replace("{{ p.unroll }}", "{{ p.unrol }}")
MISSPELT_LINE = 1 + MISSPELT[: MISSPELT.index("p.unrol ")].count("\n")


@pytest.mark.parametrize(
    ("modes", "template", "code", "said"),
    [
        (("honest",), MISSPELT, 2, (f"toy/cpu.cpp.j2, line {MISSPELT_LINE}: ", "unrol")),
        (
            ("compile_error", "honest"),
            TEMPLATE,
            1,
            ("default genome of kernel 'toy' does not compile for 4096 float32", "#error this candidate does not compile"),
        ),
    ],
)
def test_a_default_that_is_not_rendered_or_compiled_ends_the_search_with_the_reason(
    here: Any, tmp_path: Path, modes: tuple[str, ...], template: str, code: int, said: tuple[str, ...]
) -> None:
    write_kernel(tmp_path / "toy", modes, template=template)
    ended = search_toy(here, tmp_path)
    assert ended.code == code
    assert all(part in ended.sentence for part in said)
    assert here("runs", "--json").document == []


def test_a_kernel_of_which_nothing_passes_is_a_failure(here: Any, tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy", ("wrong",))
    ended = search_toy(here, tmp_path, "--json")
    assert ended.code == 1
    assert ended.document["workloads"][0]["winner"] is None
    assert ended.document["by_status"] == {"wrong": 2}
    assert here("best").code == 1
    assert re.search(r"(?m)^next:  evo show \w+   evo failures \S+$", search_toy(here, tmp_path).out)


# -- a real search, and what is asked of it afterwards ------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("searched")
    write_kernel(folder / "toy", ("honest", "wrong", *(f"like_honest_{i}" for i in range(4))))
    arguments = ("--target", "cpu", "--evaluations", "12", "--seed", "3", "--name", "small", "--finalists", "2")
    arguments = (*arguments, "--sampler-option", "population=7", "--sampler-option", "tournament=2")
    return folder, evo("search", "./toy", *arguments, "--json", cwd=folder)


def test_a_search_ends_with_one_document(searched: tuple[Path, Ended]) -> None:
    folder, ended = searched
    assert ended.code == 0, ended.err
    assert ended.err == ""
    document = ended.document
    assert document["run"] == "small"
    assert document["candidates"] == 12
    assert sum(document["by_status"].values()) == 12
    assert document["stopped"] == "evaluations done"
    (workload,) = document["workloads"]
    assert workload["workload"] == "n=4096,dtype=float32"
    if not workload["winner"]["disturbed"]:  # other tests may run beside this one
        assert workload["winner"]["speedup_low"] <= workload["winner"]["speedup"] <= workload["winner"]["speedup_high"]
    assert set(workload["baselines"]) >= {"torch", "copy"}
    with sqlite3.connect(folder / "runs" / "lineage.db") as connection:
        (options,) = connection.execute("select json_extract(options, '$.sampler') from run where name = 'small'").fetchone()
    connection.close()
    assert json.loads(options) == {"population": 7, "tournament": 2}, "they are kept with the run"


@pytest.fixture
def asked(searched: tuple[Path, Ended], here: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands in the folder of the real search."""
    monkeypatch.chdir(searched[0])
    return here


def test_what_cannot_be_resumed_or_begun_is_refused_before_anything_starts(
    asked: Any, searched: tuple[Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asked("runs", "--json").document
    named = asked("search", "./toy", "--target", "cpu", "--evaluations", "2", "--name", "small")
    assert "small" in named.sentence
    write_kernel(tmp_path / "other")
    other = ("search", str(tmp_path / "other"), "--target", "cpu", "--evaluations", "3", "--start", "small")
    monkeypatch.setattr("evo.job.opening.open_workers", None)
    half = f"{before[0]['elapsed_s'] / 2:.6f}"
    busy = asked("best", "--run", "small", "--json").document[0]["disturbed"]
    refused = {
        ("resume", "small"): r"run 'small' is finished .* larger --budget or --evaluations",
        ("resume", "smal1"): "did you mean small",
        ("resume", "small", "--budget", half): r"run 'small' has used [\d.]+ s of searching already, .*; give a larger one$",
        other: "is of kernel './toy' on cpu",
        ("search", "./toy", "--target", "cpu", "--start", "smal1"): "unknown run or candidate 'smal1'; did you mean small",
        ("export", "smal1", "--out", "x"): r"unknown run or candidate 'smal1'; did you mean small\?$",
    }
    if busy:  # other tests run beside this one, and its finals may be held again
        del refused["resume", "small"]
    for words, sentence in refused.items():
        ended = asked(*words)
        assert ended.code == 2
        assert re.search(sentence, ended.sentence), words
    assert asked("runs", "--json").document == before


def test_a_finished_run_is_searched_on_when_given_more(asked: Any) -> None:
    ended = asked("resume", "small", "--evaluations", "14", "--json")
    assert ended.code == 0, ended.err
    assert ended.document["candidates"] == 14
    since = ended.document["since_resumed"]
    assert since["candidates"] == 2
    assert 0 <= since["search_s"] < ended.document["search_s"]
    assert 0 <= sum(ended.document["evaluation_ms"].values()) < 1e3 * (since["search_s"] + 0.005)  # rounded
    assert asked("runs", "--json").document[0]["evaluations"] == 14
    told = asked("resume", "small", "--evaluations", "15").out
    assert re.match(r"run small is resumed: 14 candidates and .+ of searching are kept\n", told)
    better = [line for line in told.splitlines() if re.search(r"candidate \d+ is ", line)]
    assert [line for line in better if "kept from before: " in line] == better[:1], "old bests are not told as new ones"
    ended, shown = told[told.index("winner ") :].splitlines(), asked("show", "small").out
    assert len(ended) <= 6
    assert re.match(r"winner \w{10} for 4096 float32: ([\d.,]+ [um]s|too busy to measure)$", ended[0])
    assert ended[0].split()[1] in shown
    assert ended[-1].startswith("next:  evo ")
    assert re.search(r"a candidate took on average \S+ m?s to build and \S+ m?s on the device \(gate ", shown)
    assert "of a copy: its time over copy, the fastest baseline here" in shown or "too busy" in shown


def test_a_search_begins_with_what_it_is_to_start_from(asked: Any) -> None:
    (winner,) = asked("best", "--run", "small", "--json").document
    starts = ("--start", "small", "--start", "unroll=4", "--start", winner["candidate"][:12])
    what = ("search", "./toy", "--target", "cpu", "--workload", "n=512,dtype=float32", "--evaluations", "5")
    ended = asked(*what, *starts, "--name", "next", "--finalists", "1")
    assert ended.code == 0, ended.err
    tried = {o["operator"]: o["trials"] for o in asked("operators", "next", "--json").document if o["window"] is None}
    assert 2 <= tried["start"] + tried.get("default", 0) <= 3  # a winner may be the default, or what is named
    assert tried["start"] >= 1


def test_what_is_named_to_start_from_comes_before_the_default(here: Any, tmp_path: Path) -> None:
    """Also where there is time for nothing else, and in a run that is resumed."""
    for sampler in ("evolution", "random"):
        given = ("--start", "unroll=4", "--start", "unroll=8", "--name", sampler, "--sampler", sampler, "--finalists", "1")
        ended = search_toy(here, tmp_path, *given, "--evaluations", "1")
        assert ended.code == 0, ended.err
        assert "first 2 given points;" in ended.out
        assert here("resume", sampler, "--evaluations", "3").code == 0
        of_run = f"SELECT c.genome FROM candidate c JOIN run r ON r.id = c.run_id AND r.name = '{sampler}' ORDER BY c.id"
        tried = here("query", of_run, "--json")
        unrolls = [json.loads(genome)["parameters"]["unroll"] for (genome,) in tried.document["rows"]]
        assert unrolls[:2] == [4, 8]
        assert unrolls[2] == 1 or sampler == "random"


def test_a_search_begins_with_what_earlier_ones_found_for_the_like(asked: Any) -> None:
    search = ("search", "./toy", "--target", "cpu", "--evaluations", "4", "--finalists", "1", "--workload")
    assert asked(*search, "n=290,dtype=float32", "--name", "narrow", "--fix", "unroll=4").code == 0
    for name, options in {"warm": (), "cold": ("--cold",)}.items():
        ended = asked(*search, "n=300,dtype=float32", *options, "--name", name)
        assert ended.code == 0, ended.err
        assert ("(--cold: none)" in ended.out) == (name == "warm")
    what = "SELECT r.name, c.public_id, c.operator FROM candidate c JOIN run r ON r.id = c.run_id ORDER BY c.id"
    made = asked("query", what, "--json")
    starts = [(name, candidate) for name, candidate, operator in made.document["rows"] if operator == "start"]
    assert "cold" not in dict(starts)
    tried = [asked("show", candidate, "--json").document for name, candidate in starts if name == "warm"]
    if asked("best", "--run", "narrow", "--json").document[0]["disturbed"]:  # figures that are sure come before the likest
        tried.sort(key=lambda start: start["parameters"]["unroll"] != 4)
    assert tried[0]["parameters"]["unroll"] == 4
    origin = asked("show", tried[0]["origin"], "--json").document
    assert (origin["run"], origin["dims"]) == ("narrow", {"n": 290})
    assert f"start of {origin['id']} (of run narrow, n=290" in asked("show", tried[0]["id"]).out


@pytest.mark.parametrize("modes", [("honest", "late"), ("late",)])
def test_finalists_that_were_refused_are_no_longer_counted_as_right(
    here: Any, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    """Mode late is right for the sizes of the search, and wrong for one that only the finals look at: a neighbour, and now
    and then a random case."""
    late = "y[i] = n == {{ 7 if p.mode == 'late' else -1 }} ? 0 : factor * x[i];"
    folder = write_kernel(tmp_path / "toy", modes, template=TEMPLATE.replace("y[i] = factor * x[i];", late))
    code = (folder / "kernel.py").read_text()
    near = "    neighbours=lambda target, workload: (Workload.of({'n': 7}, 'float32'),),\n    workloads="
    code = code.replace("    workloads=", near)
    (folder / "kernel.py").write_text(code.replace("[case(5),", "[case(workload.dim('n')), case(5),"))
    (folder / "frontend.py").touch()
    words = ("search", "./toy", "--target", "cpu", "--evaluations", "8", "--fix", "unroll=1", "--name", "mine")
    ended = here(*words, "--db", "else/where.db")
    assert ended.code == (0 if "honest" in modes else 1), ended.err
    shown = here("show", "mine", "--db", "else/where.db").out
    refused = [line for line in shown.splitlines() if " was refused: wrong: for " in line]
    assert len(refused) == 1
    assert " ok (1 of them refused by the finals)" in shown
    assert " passed the search, 1 of them refused by the finals: " in ended.out
    assert ("unconfirmed: the finals have no winner" in ended.out) is ("honest" not in modes)
    assert "no candidate passed" not in ended.out
    following = ended.out.splitlines()[-1]
    assert re.match("next:  .*evo show ", following)
    assert following.endswith(" --db else/where.db")
    assert ("   evo export mine --out my_toy --db" in following) is ("honest" in modes)


def test_an_export_that_fails_comes_after_the_result_and_says_what_exports_later(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise UsageError("cannot write to out (No space left on device)")

    (write_kernel(tmp_path / "toy") / "frontend.py").write_text("__all__ = []\n")
    monkeypatch.setattr("evo.export._winners.export_run", full)
    ended = search_toy(here, tmp_path, "--name", "mine", "--export", "out")
    assert ended.code == 1
    assert re.match("next:  .*evo show mine", ended.out.splitlines()[-1])
    later = "cannot write to out (No space left on device); to export the winners later: evo export mine --out out"
    assert f"evo: {later}" in ended.err.splitlines()
    assert here("best", "--run", "mine", "--json").document[0]["candidate"]


def test_candidates_that_are_wrong_only_when_timed_are_not_said_to_have_failed_the_gate(here: Any, tmp_path: Path) -> None:
    timed = TEMPLATE.replace("y[i] = factor * x[i];", "y[i] = n == 4096 ? 0 : factor * x[i];")
    write_kernel(tmp_path / "toy", template=timed)
    ended = search_toy(here, tmp_path)
    assert ended.code == 1
    assert re.search(
        r"(?m)^no winner for 4096 float32: no candidate passed the gate and its timed calls\nmost often: [12] wrong: n=",
        ended.out,
    )


# -- interruptions ------------------------------------------------------------------------------------------


QUEUE = """
[[search]]
name = "short"
kernel = "./toy"
target = "cpu"
cold = true
evaluations = 2
[[search]]
name = "long"
priority = 1
kernel = "./toy"
target = "cpu"
evaluations = 32
seed = 5
sampler = "random"
log = "night.jsonl"
"""


def stored(folder: Path) -> dict[int, str]:
    path = folder / "runs" / "lineage.db"
    if not path.exists():
        return {}
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        query = 'select "order", genome, candidate.status from candidate join run on run.id = run_id where name = ?'
        rows: Sequence[Any] = connection.execute(query, ("long",)).fetchall()
    except sqlite3.OperationalError:  # not yet made
        return {}
    finally:
        connection.close()
    return {order: f"{genome} {status}" for order, genome, status in rows}


def wait_for_candidates(folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(stored(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_queue_that_is_interrupted_or_killed_is_continued_to_its_end(here: Any, tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy", ("honest", "wrong", *(f"like_honest_{i}" for i in range(20))))
    (tmp_path / "job.toml").write_text(QUEUE)
    patient = {"program": ("-m", "evo"), "cwd": tmp_path}  # so that they last until they are ended
    process = evo_process("search", "job.toml", "--finalists", "4", process_group=0, **patient)
    try:
        wait_for_candidates(tmp_path, 3)
        os.killpg(process.pid, signal.SIGINT)  # as ^C does: to the command, its workers and their compilers
        out, err = process.communicate(timeout=PATIENCE_S)
        ended = Ended(process.returncode, out, err)
        assert ended.code == 130, err
        assert err.strip().endswith("Continue with: evo search job.toml --finalists 4")
        interrupted = stored(tmp_path)
        assert len(interrupted) < 32
        process = evo_process("resume", "long", **patient)
        wait_for_candidates(tmp_path, len(interrupted) + 1)
        second = here("search", "./toy", "--target", "cpu", "--evaluations", "2")
        assert second.code == 2
        assert f"another search (pid {process.pid}) writes to this database" in second.sentence
    finally:
        process.kill()
        process.communicate()
    killed = stored(tmp_path)
    assert interrupted.items() <= killed.items()
    ended = here("search", "job.toml", "--json")
    assert ended.code == 0, ended.err
    long, short = ended.document["searches"]
    assert (long["run"], short["run"], short["candidates"]) == ("long", "short", 2)
    assert long["resumed_from"]["candidates"] == len(killed)
    assert long["candidates"] == 32
    told = [json.loads(line) for line in (tmp_path / "night.jsonl").read_text().splitlines()]
    assert [t["event"] for t in told if t["event"] in ("begun", "ended")] == ["begun", "ended"] * 2
    assert [t["text"] for t in told if t["event"] == "ended"] == ["interrupted", "evaluations done"]
    assert {t["run"] for t in told} == {"long"}
    assert here("watch", "long").out.startswith("long: finished, 32 candidates (")
    again = here("search", "job.toml", "--evaluations", "2")
    assert again.code == 0
    for name, told in zip(("long", "short"), again.err.splitlines(), strict=True):
        assert told.startswith(f"evo: run {name} of job.toml is finished: evo show {name}; to search on: evo resume {name} ")
    (tmp_path / "job.toml").write_text(QUEUE.replace("./toy", "softmax"))
    assert "has a run 'long' of another kernel (./toy)" in here("search", "job.toml").sentence
    after = stored(tmp_path)
    assert len(after) == 32
    assert killed.items() <= after.items()
    kinds = {verdict.split()[-1] for verdict in after.values()}
    assert kinds <= {"ok", "wrong", "same_code"}, "no candidate is blamed for the interruption"


def test_every_command_is_found_without_the_modules_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([]) == 0
    assert "search engine for compute kernels" in capsys.readouterr().out
    for name in (name for names in cli._COMMANDS.values() for name in names):
        assert run_command([name, "--help"]) == 0
        assert f"evo {name} " in capsys.readouterr().out
