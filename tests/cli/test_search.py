"""evo search and evo resume: what they end with, what is asked of it afterwards; nothing that was finished is lost."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from evo import cli
from evo.cli import run as run_command
from evo.errors import DeviceError
from evo.targets import find_target
from tests.ended import Ended
from tests.toy_kernel import TEMPLATE, write_kernel

pytestmark = pytest.mark.slow

SMALL = "rows=64,cols=256,dtype=float32"
PATIENCE_S = 200.0


def evo_process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "evo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def evo(*arguments: str, **options: Any) -> Ended:
    """A command in a process of its own."""
    process = evo_process(*arguments, **options)
    out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


def test_a_misspelt_name_in_a_template_ends_the_search_with_file_and_line(here: Any, tmp_path: Path) -> None:
    broken = TEMPLATE.replace("{{ p.unroll }}", "{{ p.unrol }}")
    write_kernel(tmp_path / "toy", template=broken)
    line = 1 + broken[: broken.index("p.unrol ")].count("\n")
    ended = here("search", "./toy", "--target", "cpu", "--evaluations", "50")
    assert ended.code == 2
    assert f"toy/cpu.cpp.j2, line {line}: " in ended.sentence
    assert "unrol" in ended.sentence
    assert here("runs", "--json").document == []


def test_a_template_whose_default_does_not_compile_ends_the_search_with_the_compilers_word(
    here: Any, tmp_path: Path
) -> None:
    write_kernel(tmp_path / "toy", ("compile_error", "honest"))
    ended = here("search", "./toy", "--target", "cpu", "--evaluations", "50")
    assert ended.code == 1
    assert "the default genome of kernel 'toy' does not compile for 4096 float32" in ended.sentence
    assert "#error this candidate does not compile" in ended.sentence
    assert here("runs", "--json").document == []


def test_a_kernel_of_which_nothing_passes_is_a_failure(here: Any, tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy", ("wrong",))
    ended = here("search", "./toy", "--target", "cpu", "--evaluations", "2", "--json")
    assert ended.code == 1
    assert ended.document["workloads"][0]["winner"] is None
    assert ended.document["by_status"] == {"wrong": 2}
    assert here("best").code == 1


# -- machines and files -------------------------------------------------------------------------------------


def has_gpu() -> bool:
    try:
        find_target("cuda").device()
    except DeviceError:
        return False
    return True


@pytest.mark.skipif(has_gpu(), reason="a GPU answers here")
def test_without_a_gpu_the_cuda_target_says_what_works_without_one(here: Any) -> None:
    ended = here("search", "layernorm", "--target", "cuda")
    assert ended.code == 2
    assert "no CUDA GPU answers" in ended.sentence
    assert "evo check KERNEL --arch sm_89" in ended.sentence


def test_without_a_compiler_the_cpu_target_says_how_to_get_one(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PATH")} | {"PATH": str(tmp_path)}
    ended = evo("search", "layernorm", "--target", "cpu", env=environment)
    assert ended.code == 2
    assert "no C++ compiler found" in ended.sentence
    assert "apt install g++" in ended.sentence


def search_toy(here: Any, tmp_path: Path, *more: str) -> Ended:
    """A search of two candidates, of a kernel in this folder."""
    if not (tmp_path / "toy").exists():
        write_kernel(tmp_path / "toy")
    found: Ended = here("search", "./toy", "--target", "cpu", "--evaluations", "2", *more)
    return found


def test_a_database_that_cannot_be_made_is_named(here: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder.db").mkdir()
    for db in ("file/lineage.db", "folder.db"):
        ended = search_toy(here, tmp_path, "--db", db)
        assert ended.code == 2
        assert Path(db).parts[0] in ended.sentence


def test_a_database_that_is_a_text_file_is_left_as_it_is(here: Any, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("remember the milk\n" * 100)
    ended = search_toy(here, tmp_path, "--db", "note.txt")
    assert ended.code == 2
    assert "is not a SQLite database" in ended.sentence
    assert note.read_text() == "remember the milk\n" * 100


def test_another_programs_database_is_left_as_it_is(here: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table songs (title text)")
    connection.close()
    before = path.read_bytes()
    ended = search_toy(here, tmp_path, "--db", "other.db")
    assert ended.code == 2
    assert "other.db" in ended.sentence
    assert path.read_bytes() == before


def test_a_database_of_a_newer_evo_is_not_touched(here: Any, tmp_path: Path) -> None:
    assert search_toy(here, tmp_path).code == 0
    path = tmp_path / "runs" / "lineage.db"
    with sqlite3.connect(path) as connection:
        connection.execute("update alembic_version set version_num = '9999_from_the_future'")
    connection.close()
    ended = search_toy(here, tmp_path)
    assert ended.code == 2
    assert "newer" in ended.sentence
    assert here("runs").code == 2


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount a small disk")
def test_a_disk_that_fills_up_ends_the_search_in_one_sentence(here: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this root may not mount")
    try:
        write_kernel(tmp_path / "toy")
        (tmp_path / "cache").mkdir()
        ended = here("search", "layernorm", "--target", "cpu", "--workload", SMALL, "--evaluations", "300",
                     "--db", str(disk / "lineage.db"))  # fmt: skip
        assert ended.code == 2
        assert "disk" in ended.sentence or "space" in ended.sentence
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_export_folder_in_use_is_refused_before_the_search(here: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    ended = here("search", "layernorm", "--target", "cpu", "--budget", "10h", "--export", "mine")
    assert ended.code == 2
    assert "mine is not empty" in ended.sentence
    assert not (tmp_path / "runs" / "lineage.db").exists()
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


# -- a real search, and what is asked of it afterwards ------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("searched")
    arguments = ("--target", "cpu", "--workload", SMALL, "--evaluations", "12", "--seed", "3", "--name", "small")
    arguments = (*arguments, "--sampler-option", "population=7", "--sampler-option", "injection=0.25")
    return folder, evo("search", "layernorm", *arguments, "--json", cwd=folder)


def test_a_search_ends_with_one_document(searched: tuple[Path, Ended]) -> None:
    _, ended = searched
    assert ended.code == 0, ended.err
    assert ended.err == ""
    document = ended.document
    assert document["run"] == "small"
    assert document["candidates"] == 12
    assert sum(document["by_status"].values()) == 12
    assert document["stopped"] == "evaluations done"
    (workload,) = document["workloads"]
    assert workload["workload"].startswith(SMALL)
    assert workload["winner"]["speedup_low"] <= workload["winner"]["speedup"] <= workload["winner"]["speedup_high"]
    assert set(workload["baselines"]) >= {"torch", "copy"}


@pytest.fixture
def asked(searched: tuple[Path, Ended], here: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands in the folder of the real search."""
    monkeypatch.chdir(searched[0])
    return here


def test_runs_best_show_and_lineage_agree_with_the_search(asked: Any, searched: tuple[Path, Ended]) -> None:
    winner = searched[1].document["workloads"][0]["winner"]
    (run,) = asked("runs", "--json").document
    assert (run["name"], run["evaluations"], run["status"]) == ("small", 12, "finished")
    (best,) = asked("best", "--json").document
    assert best["candidate"] == winner["candidate"]
    assert best["median_us"] == pytest.approx(winner["median_us"], abs=0.01)
    shown = asked("show", winner["candidate"], "--json").document
    assert shown["parameters"] == winner["genome"]
    assert shown["winner"] is True
    assert "layernorm" in asked("show", winner["candidate"], "--source").out
    steps = asked("lineage", winner["candidate"], "--json").document
    assert [s["id"] for s in steps if s["relation"] == "self"] == [winner["candidate"]]
    assert all(p["order"] < s["order"] for s in steps for p in s["parents"])


@pytest.mark.parametrize("command", ["runs", "best", "show", "lineage"])
def test_tables_are_printed_for_people(asked: Any, searched: tuple[Path, Ended], command: str) -> None:
    winner = searched[1].document["workloads"][0]["winner"]["candidate"]
    ended = asked(command, *([winner[:10]] if command in ("show", "lineage") else []))
    assert ended.code == 0
    assert ended.err == ""
    assert ("small" if command == "runs" else winner[:10]) in ended.out


def test_a_finished_run_is_not_resumed_without_more_to_do(asked: Any) -> None:
    ended = asked("resume", "small")
    assert ended.code == 2
    assert "run 'small' is finished" in ended.sentence
    assert "larger --budget or --evaluations" in ended.sentence


def test_a_run_that_is_not_there_is_offered_the_ones_that_are(asked: Any) -> None:
    ended = asked("resume", "smal1")
    assert ended.code == 2
    assert "small" in ended.sentence


def test_a_name_is_given_to_one_run_only(asked: Any) -> None:
    arguments = ("--target", "cpu", "--evaluations", "2", "--workload", SMALL, "--name", "small")
    ended = asked("search", "layernorm", *arguments)
    assert ended.code == 2
    assert "small" in ended.sentence
    assert len(asked("runs", "--json").document) == 1


def test_options_of_the_sampler_are_kept_with_the_run(searched: tuple[Path, Ended]) -> None:
    with sqlite3.connect(searched[0] / "runs" / "lineage.db") as connection:
        (options,) = connection.execute("select json_extract(options, '$.sampler') from run where name = 'small'").fetchone()
    connection.close()
    assert json.loads(options) == {"population": 7, "injection": 0.25}


def test_a_finished_run_is_searched_on_when_given_more(asked: Any, searched: tuple[Path, Ended]) -> None:
    ended = asked("resume", "small", "--evaluations", "14", "--json")
    assert ended.code == 0, ended.err
    assert ended.document["candidates"] == 14
    since = ended.document["since_resumed"]
    assert since["candidates"] == 2
    assert 0 < since["search_s"] < ended.document["search_s"]
    assert 0 < sum(ended.document["evaluation_ms"].values()) < 1e3 * since["search_s"]
    assert asked("runs", "--json").document[0]["evaluations"] == 14
    told = asked("resume", "small", "--evaluations", "15").out
    assert re.match(r"run small is resumed: 14 candidates and [\d:]+ of searching are kept; ", told)
    assert "left: 1 candidate, then the finals" in told.splitlines()[0]
    assert re.search(r"since it was resumed: 1 candidate in [\d.]+ s; .*costs on average [\d.]+ ms building", told)
    better = [line for line in told.splitlines() if re.search(r"candidate \d+ is ", line)]
    assert [line for line in better if "kept from before: " in line] == better[:1], "old bests are not told as new ones"
    assert re.search(r"of a copy: its time over (copy|negate), the fastest baseline here that only moves the bytes", told)
    assert not re.search(r"reached .* from the start of the command", told) or len(better) > 1


def test_a_budget_that_is_used_already_is_refused_before_anything_starts(
    asked: Any, searched: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evo.cli.search.open_executor", None)
    with sqlite3.connect(searched[0] / "runs" / "lineage.db") as connection:
        (used,) = connection.execute("select elapsed_s from run where name = 'small'").fetchone()
    connection.close()
    before = asked("runs", "--json").document
    ended = asked("resume", "small", "--budget", f"{used / 2:.6f}")
    assert ended.code == 2
    assert re.search(r"run 'small' has used [\d.]+ s of searching already, and --budget .* is for the run", ended.sentence)
    assert ended.sentence.endswith("; give a larger one")
    assert asked("runs", "--json").document == before


def test_a_search_begins_with_what_it_is_to_start_from(asked: Any) -> None:
    (winner,) = asked("best", "--run", "small", "--json").document
    other = "rows=32,cols=512,dtype=float32"
    starts = ("--start", "small", "--start", "threads=1", "--start", winner["candidate"][:12])
    what = ("search", "layernorm", "--target", "cpu", "--workload", other, "--evaluations", "6")
    ended = asked(*what, *starts, "--name", "next")
    assert ended.code == 0, ended.err
    tried = {o["operator"]: o["trials"] for o in asked("operators", "next", "--json").document}
    assert tried["default"] == 1
    assert 1 <= tried["start"] <= 2  # a winner may be the default, or the default with one thread
    finals_only = asked("resume", "next", "--evaluations", "5")
    assert finals_only.code == 0
    told = r"(?m)^since it was resumed: 0 candidates in 0(\.\d+)? s; stopped: evaluations done\.$"
    assert re.search(told, finals_only.out)


def test_a_start_of_another_kernel_is_refused(asked: Any, tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy", ("honest",))
    ended = asked("search", str(tmp_path / "toy"), "--target", "cpu", "--evaluations", "3", "--start", "small")
    assert ended.code == 2
    assert "is of kernel 'layernorm' on cpu" in ended.err
    for mistaken in ("search", "layernorm", "--target", "cpu", "--start", "smal1"), ("export", "smal1", "--out", "x"):
        assert asked(*mistaken).err == "evo: unknown run or candidate 'smal1'; did you mean small?\n"


def test_a_search_in_another_database_names_it_in_what_comes_next(here: Any, tmp_path: Path) -> None:
    ended = search_toy(here, tmp_path, "--db", "else/where.db", "--name", "mine")
    assert ended.code == 0, ended.err
    following = ended.out.splitlines()[-1]
    assert following.startswith("next:  evo lineage ")
    assert following.endswith(" --db else/where.db   evo export mine --out my_toy --db else/where.db")


def test_finalists_that_were_refused_are_no_longer_counted_as_right(here: Any, tmp_path: Path) -> None:
    ended = search_late(here, tmp_path, "honest", "late")
    assert ended.code == 0, ended.err
    refused = [line for line in ended.out.splitlines() if "was refused by the finals: wrong: for 7 float32" in line]
    assert 1 <= len(refused) <= 4
    assert f" ok ({len(refused)} of them refused by the finals)" in ended.out


def test_a_search_whose_finals_refused_all_says_that_and_not_that_nothing_passed(here: Any, tmp_path: Path) -> None:
    ended = search_late(here, tmp_path, "late")
    assert ended.code == 1
    assert "no winner: the finals confirmed none of what passed the search for n=" in ended.out
    assert "no candidate passed" not in ended.out


def test_candidates_that_are_wrong_only_when_timed_are_not_said_to_have_failed_the_gate(here: Any, tmp_path: Path) -> None:
    timed = TEMPLATE.replace("y[i] = factor * x[i];", "y[i] = n == 4096 ? 0 : factor * x[i];")
    write_kernel(tmp_path / "toy", template=timed)
    ended = search_toy(here, tmp_path)
    assert ended.code == 1
    assert re.search(
        r"(?m)^no candidate passed the gate and its timed calls for n=4096,dtype=float32; most often: [12] wrong: timed: ",
        ended.out,
    )


def search_late(here: Any, tmp_path: Path, *modes: str) -> Ended:
    """Mode late is right for the sizes of the search, and wrong for a neighbour that only the finals look at."""
    late = "y[i] = n == {{ 7 if p.mode == 'late' else -1 }} ? 0 : factor * x[i];"
    template = TEMPLATE.replace("y[i] = factor * x[i];", late)
    folder = write_kernel(tmp_path / "toy", modes, template=template)
    code = (folder / "kernel.py").read_text()
    near = "neighbours=lambda target, workload: (Workload.of({'n': 7}, 'float32'),),"
    code = code.replace("neighbours=lambda target, workload: (),", near)
    (folder / "kernel.py").write_text(code.replace("[case(5),", "[case(workload.dim('n')), case(5),"))
    return here("search", "./toy", "--target", "cpu", "--evaluations", "8", "--sampler", "random")


# -- interruptions ------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A search of a hundred candidates some of which are stored, in a process group of its own."""
    write_kernel(tmp_path / "toy", ("honest", "wrong", *(f"like_honest_{i}" for i in range(40))))
    process = evo_process(
        "search", "./toy", "--target", "cpu", "--evaluations", "100", "--seed", "5", "--name", "long",
        "--sampler", "random", cwd=tmp_path, process_group=0,
    )  # fmt: skip
    wait_for_candidates(tmp_path, 3)
    yield process, tmp_path
    process.kill()
    process.communicate()


def stored(folder: Path) -> dict[int, str]:
    path = folder / "runs" / "lineage.db"
    if not path.exists():
        return {}
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows: Sequence[Any] = connection.execute('select "order", genome_digest, status from candidate').fetchall()
    except sqlite3.OperationalError:  # not yet made
        return {}
    finally:
        connection.close()
    return {order: f"{digest} {status}" for order, digest, status in rows}


def wait_for_candidates(folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(stored(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def resume_to_the_end(folder: Path, before: dict[int, str]) -> None:
    ended = evo("resume", "long", "--json", cwd=folder)
    assert ended.code == 0, ended.err
    assert ended.document["resumed_from"]["candidates"] == len(before)
    assert ended.document["candidates"] == 100
    after = stored(folder)
    assert len(after) == 100
    assert before.items() <= after.items()
    kinds = {verdict.split()[1] for verdict in after.values()}
    assert kinds <= {"ok", "wrong", "same_code"}, "no candidate is blamed for the interruption"


def test_an_interrupted_search_says_how_to_go_on_and_does(begun: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = begun
    os.killpg(process.pid, signal.SIGINT)  # as ^C does: to the command, its workers and their compilers
    out, err = process.communicate(timeout=PATIENCE_S)
    ended = Ended(process.returncode, out, err)
    assert ended.code == 130, err
    assert ended.sentence.endswith("Continue with: evo resume long")
    before = stored(folder)
    assert len(before) < 100
    resume_to_the_end(folder, before)


def test_a_killed_search_is_resumed_to_the_end(begun: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = begun
    process.kill()
    process.wait()
    resume_to_the_end(folder, stored(folder))


def test_one_search_at_a_time_writes_to_a_database(
    begun: tuple[subprocess.Popen[str], Path], here: Any, tmp_path: Path
) -> None:
    process, _ = begun
    ended = here("search", "./toy", "--target", "cpu", "--evaluations", "2")
    assert ended.code == 2
    assert f"another search (pid {process.pid}) writes to this database" in ended.sentence
    assert here("runs", "--json").document[0]["name"] == "long"


def test_every_command_is_found_without_the_modules_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([]) == 0
    assert "search engine for compute kernels" in capsys.readouterr().out
    for module, names in cli._COMMANDS.items():
        registered = typer.Typer()
        importlib.import_module(f"evo.cli.{module}").register(registered)
        assert tuple(c.name for c in registered.registered_commands) == names
        for name in names:
            assert run_command([name, "--help"]) == 0
            assert f"evo {name} " in capsys.readouterr().out
    modules = {p.stem for p in Path(cli.__file__).parent.glob("*.py") if "def register(" in p.read_text()}
    assert modules == set(cli._COMMANDS)
