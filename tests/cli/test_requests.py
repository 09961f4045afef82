"""Bad input gives one clear sentence and exit code 2, before anything is spent on it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import evo
from evo.cli.jobs import read_jobs
from evo.cli.search import search
from evo.discovery import plugin_names
from evo.errors import DeviceError
from evo.job.job import OPTIONS, check_workloads
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.report.text import parse_duration
from evo.targets import find_target
from evo.testing.toy_kernel import WORKLOAD, write_kernel
from tests.ended import run_python
from tests.lineage.samples import ENVIRONMENT, SPEC, new_run, passed, ref

NUMBERS = "/".join(map(str, range(1, 20)))
SMALL = "rows=64,cols=256,dtype=float32"

BAD = {
    "kernel": (["search", "layernrm"], "unknown kernel 'layernrm'; did you mean layernorm or add_layernorm or"),
    "target": (["search", "layernorm", "--target", "cpx"], "unknown target 'cpx'"),
    "arch": (["search", "layernorm", "--target", "cpu", "--arch", "z80"], "knows no CPU architecture 'z80'"),
    "sampler": (["search", "layernorm", "--sampler", "luck"], "unknown sampler 'luck'; known: evolution, random, tpe"),
    "sampler option": (["search", "layernorm", "--sampler-option", "popluation=9"], "did you mean population?"),
    "sampler value": (
        ["search", "layernorm", "--sampler-option", "population=few"],
        "of type int, such as 20; got 'few'",
    ),
    "sampler range": (["search", "layernorm", "--sampler-option", "population=1"], "'population' must be"),
    "sampler pair": (["search", "layernorm", "--sampler-option", "few"], "--sampler-option 'few' is not NAME=VALUE"),
    "option": (["search", "layernorm", "--bugdet", "1m"], "(see: evo search --help)"),
    "option of before": (["search", "layernorm", "--cluster", "c.yaml"], "where work runs is said with --on (see: "),
    "parameter": (["search", "layernorm", "--fix", "treads=1"], "unknown parameter 'treads'; did you mean threads"),
    "value": (["search", "layernorm", "--fix", "simd_bits=7"], "no value '7'; choose one of 128, 256, 512"),
    "fix": (["search", "layernorm", "--fix", "threads"], "--fix 'threads' is not NAME=VALUE"),
    "start value": (["search", "layernorm", "--start", "threads=1,unroll=3"], "unroll has no value '3'"),
    "start name": (["search", "layernorm", "--start", "treads=1"], "unknown parameter 'treads'"),
    "start twice": (["search", "layernorm", "--start", "threads=1,threads=2"], "names a parameter twice"),
    "start idle": (
        ["search", "layernorm", "--start", "threads=1,schedule=dynamic"],
        "schedule has no effect; leave it out",
    ),
    "start": (["search", "layernorm", "--start", "nobody"], "there is no database"),
    "start of no such target": (
        ["search", "layernorm", "--start", str(Path(__file__).parents[2] / "kernels" / "layernorm")],
        "no variant there is for cpu",
    ),
    "many": (
        ["search", "layernorm", "--cover", f"rows={NUMBERS},cols={NUMBERS},dtype=float32"],
        "one search has at most 256 workloads, and more are asked for: name a smaller grid",
    ),
    "start and fix": (
        ["search", "layernorm", "--start", "simd_bits=128", "--fix", "simd_bits=256"],
        "simd_bits has no value '128'",
    ),
    "part": (["search", "layernorm", "--workload", "row=1,cols=2,dtype=float32"], "'row'; did you mean rows?"),
    "dtype": (["search", "layernorm", "--workload", "rows=1,cols=2,dtype=int8"], "'int8'; known: bfloat16, float32"),
    "no dtype": (["search", "layernorm", "--workload", "rows=1,cols=2"], "lacks dtype; e.g. rows="),
    "range": (["search", "layernorm", "--workload", "rows=1,cols=99999999,dtype=float32"], "cols must be 1 to 65,536"),
    "number": (["search", "layernorm", "--workload", "rows=1,cols=x,dtype=float32"], "cols must be a whole number"),
    "twice": (["search", "layernorm", "--workload", "rows=1,rows=2,cols=2,dtype=float32"], "gives 'rows' twice"),
    "same": (["search", "layernorm", "--workload", SMALL, "--workload", SMALL], "a workload is named twice"),
    "empty": (["search", "layernorm", "--workload", "rows=0,cols=2,dtype=float32"], "is empty: there is nothing"),
    "eps": (["search", "layernorm", "--workload", f"{SMALL},eps=much"], "eps must be a float such as 1e-05"),
    "no budget": (["search", "layernorm", "--budget", "0"], "a budget of 0 seconds leaves nothing to do"),
    "minus": (["search", "layernorm", "--budget", "-5"], "--budget '-5' is not a duration; write e.g. 60s"),
    "evaluations": (["search", "layernorm", "--evaluations", "0"], "a budget of 0 evaluations leaves nothing to do"),
    "builders": (["search", "layernorm", "--builders", "0"], "'--builders'"),
    "too many builders": (["search", "layernorm", "--builders", "100000"], "would only wait for each other"),
    "no end": (["search", "layernorm", "--budget", "9" * 400], "a budget of more than 1e+12 seconds has no end"),
    "no end of evaluations": (["search", "layernorm", "--evaluations", "9" * 400], "1e+12 evaluations has no end"),
    "job": (["search", "missing.toml"], "job file missing.toml does not exist"),
    "check": (
        ["check", "layernrm"],
        "unknown kernel or candidate 'layernrm'; did you mean layernorm or add_layernorm or layernorm_backward?",
    ),
    "run": (["resume", "nobody"], "there is no database"),
    "candidate": (["show", "abcdef"], ""),
    "format": (["export", "x", "--format", "fortran", "--out", "x"], "unknown export format 'fortran'"),
    "command": (["serach"], "serach"),
    "genome value": (["bench", "layernorm", "--genome", "threads=1,unroll=3"], "unroll has no value '3'"),
    "genome": (["bench", "layernorm", "--genome", "threads"], "--genome 'threads' is not NAME=VALUE"),
    "archs": (["bench", "layernorm", "--arch", "native", "--arch", "z80"], "knows no CPU architecture 'z80'"),
    "seed search": (
        ["search", "layernorm", "--seed", "-1"],
        f"seed must be a whole number from 0 to {2**63 - 1}, got -1",
    ),
    "seed check": (
        ["check", "layernorm", "--seed", str(2**63)],
        f"seed must be a whole number from 0 to {2**63 - 1}",
    ),
    "fix that cannot be active": (
        ["search", "layernorm", "--fix", "threads=1", "--fix", "schedule=dynamic"],
        "parameter schedule cannot be held at dynamic: it has an effect only with threads=",
    ),
    "fix of nothing": (["search", "layernorm", "--fix", "threads="], "--fix 'threads=' is not NAME=VALUE"),
    "arabic size": (
        ["search", "layernorm", "--workload", "rows=\u0663,cols=2,dtype=float32"],
        "in digits 0 to 9, got '\u0663'",
    ),
    "size with an underscore": (["search", "layernorm", "--workload", "rows=1_0,cols=2,dtype=float32"], "got '1_0'"),
    "size with a plus": (["search", "layernorm", "--workload", "rows=+5,cols=2,dtype=float32"], "got '+5'"),
    "size with a point": (["search", "layernorm", "--workload", "rows=5.0,cols=2,dtype=float32"], "got '5.0'"),
    "wide size": (["search", "layernorm", "--workload", "rows=\uff15,cols=2,dtype=float32"], "in digits 0 to 9"),
    "option with an underscore": (
        ["search", "layernorm", "--workload", f"{SMALL},eps=1_0.0"],
        "eps must be a float such as 1e-05, in",
    ),
    "eps that is no number": (
        ["search", "layernorm", "--workload", f"{SMALL},eps=nan"],
        "eps must be a float such as 1e-05, in",
    ),
    "infinite eps": (["search", "layernorm", "--workload", f"{SMALL},eps=1e999"], "eps must be finite"),
    "arabic evaluations": (
        ["search", "layernorm", "--evaluations", "\u0663"],
        "'--evaluations': '\u0663' is no number in digits 0 to 9",
    ),
    "evaluations with a space": (["search", "layernorm", "--evaluations", " 3"], "' 3' is no number in digits 0 to 9"),
    "evaluations with an underscore": (["resume", "x", "--evaluations", "1_000"], "'1_000' is no number"),
    "builders with a plus": (["search", "layernorm", "--builders", "+1"], "'+1' is no number in digits 0 to 9"),
    "arabic seed": (["check", "layernorm", "--seed", "\u0663"], "is no number in digits 0 to 9"),
    "arabic seconds": (["search", "layernorm", "--budget", "\u0661\u0660s"], "is not a duration; write e.g. 60s"),
    "long s": (["search", "layernorm", "--budget", "10\u017f"], "is not a duration; write e.g. 60s"),
    "arabic devices": (
        ["search", "layernorm", "--target", "cpu", "--devices", "\u0660"],
        "is neither all nor different numbers",
    ),
    "quantile": (["importance", "x", "--quantile", "nan"], "'nan' is no number in digits 0 to 9"),
    "arabic sampler option": (
        ["search", "layernorm", "--sampler-option", "population=\u0663\u0660"],
        "of type int, such as 20; got '\u0663\u0660'",
    ),
    "underscored sampler option": (["search", "layernorm", "--sampler-option", "population=3_0"], "got '3_0'"),
    "arabic offset": (
        ["check", "layernorm", "--target", "cpu", "--case", f"{SMALL},data=normal,offset=\u0663"],
        "is neither a number of elements nor several as 0.3.1",
    ),
    "case": (["check", "layernorm", "--target", "cpu", "--case", f"{SMALL},data=norml"], "did you mean normal"),
    "no budget for jobs": (["import-workloads", ".", "--budget", "soon"], "--budget 'soon' is not a duration"),
    "baseline": (["bench", "layernorm", "--against", "tensorflow"], "unknown baseline 'tensorflow'"),
}


EMPTY = (
    "name", "db", "sampler", "target", "arch", "workload", "cover", "budget", "start", "fix", "devices", "on",
    "log", "export", "evaluations", "patience", "seed", "builders", "finalists", "sampler-option",
)  # fmt: skip


@pytest.mark.parametrize("option", EMPTY)
def test_an_empty_text_is_no_value_of_an_option(here: Any, tmp_path: Path, option: str) -> None:
    """It is not taken for one that is left out."""
    ended = here("search", "layernorm", f"--{option}", "")
    assert ended.code == 2
    assert "it is empty; leave it out, or give it a value" in ended.sentence
    assert list(tmp_path.iterdir()) == []


def test_an_empty_name_is_no_kernel_also_beside_a_kernel_py(here: Any, tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy")
    (tmp_path / "toy" / "kernel.py").rename(tmp_path / "kernel.py")
    assert "unknown kernel ''" in here("search", "").sentence


UNWRITABLE = "/proc/nowhere"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search", "KERNEL", "--name", "a/b"), "'a/b' is not a name for a run"),
        (("search", "KERNEL", "--name", "latest"), "'latest' is not a name for a run"),
        (("search", "KERNEL", "--name", "taken"), "there is a run 'taken' already; choose another name"),
        (("search", "KERNEL", "--db", f"{UNWRITABLE}/x.db"), f"cannot write in the folder {UNWRITABLE}"),
        (("search", "KERNEL", "--db", "other.db"), "is not a SQLite database"),
        (("search", "KERNEL", "--db", "mysql://a/b"), "evo does not work with"),
        (("search", "KERNEL", "--db", "folder"), "is a folder or a device"),
        (("search", "KERNEL", "--sampler", "luck"), "unknown sampler 'luck'"),
        (("search", "KERNEL", "--budget", "soon"), "'soon' is not a duration"),
        (("search", "KERNEL", "--patience", "0"), "a budget of 0 patience leaves nothing to do"),
        (("search", "KERNEL", "--log", f"{UNWRITABLE}/x"), f"--log '{UNWRITABLE}/x' cannot be written"),
        (("search", "KERNEL", "--export", f"{UNWRITABLE}/x"), f"cannot write to {UNWRITABLE}/x: "),
        (("resume", "taken", "--log", f"{UNWRITABLE}/x"), f"--log '{UNWRITABLE}/x' cannot be written"),
        (("resume", "taken", "--export", f"{UNWRITABLE}/x"), f"cannot write to {UNWRITABLE}/x: "),
        (("resume", "nobody"), "unknown run 'nobody'"),
        (("export", "taken", "--out", f"{UNWRITABLE}/x"), f"cannot write to {UNWRITABLE}/x: "),
        (("report", "taken", "--out", f"{UNWRITABLE}/x"), f"cannot write {UNWRITABLE}/x: "),
        (("check", "KERNEL", "--case", "nonsense"), "'nonsense' is not name=value"),
        (("check", "KERNEL", "--case", "n=5,dtype=float32,data=odd"), "unknown distribution of kernel toy 'odd'"),
        (("check", "KERNEL", "--workload", "n=x,dtype=float32"), "n must be a whole number"),
        (("bench", "KERNEL", "--genome", "unroll=3"), "unroll has no value '3'"),
    ],
)
def test_what_needs_no_worker_is_refused_before_one_is_opened(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    """And before a database is made, or a kernel is compiled."""
    write_kernel(tmp_path / "toy")
    (tmp_path / "other.db").write_text("no database at all" * 100)
    (tmp_path / "folder").mkdir()
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        new_run(store, "taken")
    monkeypatch.setattr("evo.job.opening.open_workers", None)
    monkeypatch.setattr("evo.cli.check.open_workers", None)
    words = tuple("./toy" if word == "KERNEL" else word for word in words)
    ended = here(*words, *(() if "--db" in words else ("--db", "lineage.db")))
    assert ended.code == 2
    assert said in ended.sentence
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"toy", "folder", "other.db", *(f"lineage.db{end}" for end in ("", ".lock", "-shm", "-wal"))}
    assert not (tmp_path / "toy" / "log.txt").exists()


def test_command_job_file_and_python_have_the_same_options() -> None:
    own = {"context", "kernel", "export", "db", "json"}
    assert {*signature(search).parameters} - own == {*OPTIONS}
    assert {*signature(evo.search).parameters} - {"kernel", "resume", "db", "progress"} == {*OPTIONS}


def test_a_cache_that_cannot_be_written_is_told_at_once(here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kernel(tmp_path / "toy")
    monkeypatch.setenv("EVO_CACHE", f"{UNWRITABLE}/cache")
    monkeypatch.setattr("evo.job.opening.open_workers", None)
    ended = here("search", "./toy", "--target", "cpu")
    assert f"cannot write in the folder {UNWRITABLE}/cache: " in ended.sentence
    assert "choose another with EVO_CACHE" in ended.sentence


def test_a_database_that_another_search_writes_to_is_refused_at_once(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kernel(tmp_path / "toy")
    monkeypatch.setattr("evo.job.opening.open_workers", None)
    with Store.open(tmp_path / "lineage.db", write=True):
        ended = here("search", "./toy", "--target", "cpu", "--db", "lineage.db")
    assert "writes to this database" in ended.sentence


def test_only_where_there_is_no_database_yet_a_search_starts_from_nothing_without_a_word(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evo.job.opening.open_workers", None)
    write_kernel(tmp_path / "toy")
    search = ("search", "./toy", "--target", "cpu", "--db", "lineage.db")
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        workload = WORKLOAD.key
        spec = replace(SPEC, kernel=str(tmp_path / "toy"), target="cpu", workloads=(WORKLOAD,), name="mine")
        run = store.create_run(spec, ENVIRONMENT)
        timings = tuple(replace(t, workload=workload) for t in passed(0).timings)
        store.add(run, ref(0, point={"mode": "honest", "unroll": 2}), replace(passed(0), timings=timings), elapsed_s=1.0)
    with sqlite3.connect(tmp_path / "lineage.db") as connection:
        connection.execute("UPDATE candidate SET genome = '{'")
    connection.close()
    assert "not a genome: '{'" in here(*search).sentence
    with sqlite3.connect(tmp_path / "lineage.db") as connection:
        connection.execute("DROP TABLE timing")
    connection.close()
    assert "cannot be used" in here(*search).sentence


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_one_sentence_and_exit_code_2(here: Any, tmp_path: Path, name: str) -> None:
    arguments, sentence = BAD[name]
    arguments = list(arguments)
    if arguments[0] in ("search", "bench", "check") and "--target" not in arguments and "missing.toml" not in arguments:
        arguments += ["--target", "cpu"]
    ended = here(*arguments)
    assert ended.code == 2
    assert sentence in ended.sentence
    assert ended.out == ""
    assert not (tmp_path / "runs" / "lineage.db").exists() or arguments[0] == "resume"


def test_a_misspelt_folder_is_offered_the_kernel_beside_it(here: Any, tmp_path: Path) -> None:
    (tmp_path / "mine" / "silu").mkdir(parents=True)
    (tmp_path / "mine" / "silu" / "kernel.py").touch()
    for command in ("search", "check"):
        assert here(command, "mine/slu", "--target", "cpu").sentence.endswith("did you mean mine/silu?")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, more: tuple[str, ...]) -> None:
    with Store.open(tmp_path / "lineage.db", write=True):
        pass
    command = f"{sys.executable} -m evo query 'SELECT 1' --db lineage.db {' '.join(more)} > /dev/full"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (1, "evo: what was to be written cannot be (No space left on device)\n")


def test_a_job_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('# \u00fc\n[search]\nkernel = "l\u00e4yernorm"\n', encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run_python(tmp_path, "-m", "evo", "search", "job.toml", **ascii_only)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert r"unknown kernel 'l\xe4yernorm'; did you mean layernorm" in ended.stderr


JOB = '[search]\nkernel = "layernorm"\n'
ONE_OF = '[[search]]\nkernel = "layernorm"\n'
JOBS = {
    "not TOML": ("[search\n", "cannot be read"),
    "nested": (f"search = {'[' * 5000}{']' * 5000}\n", "cannot be read"),
    "no table": ('kernel = "layernorm"\n', "needs a table [search]"),
    "no kernel": ("[search]\nseed = 1\n", "[[search]], each with at least: kernel"),
    "unknown key": (f"{JOB}sed = 1\n", "job.toml, line 3: unknown option 'sed'; did you mean seed?"),
    "flag": (f"{JOB}cold = 1\n", "job.toml, line 3: cold must be true or false, got 1"),
    "not of a job": (f'{JOB}db = "x"\n', "unknown option 'db'"),
    "kernel": ("[search]\nkernel = 7\n", "line 2: kernel must be a kernel's name or folder, got 7"),
    "seed": (f'{JOB}seed = "x"\n', "job.toml, line 3: seed must be a whole number, got 'x'"),
    "outside": (f'budget = "8h"\n{JOB}', "job.toml, line 1: 'budget' stands outside of [search]"),
    "value": (f'{JOB}name = "a"\nbudget = "25x"\n', "job.toml, search 'a': --budget '25x' is not a duration"),
    "of two": (f'{ONE_OF}name = "a"\n[[search]]\nname = "b"\n', "job.toml, line 4: it needs a table [search]"),
    "nameless": (ONE_OF * 2, "line 1: of several searches each needs a name"),
    "one name": (f'{ONE_OF}name = "a"\n' * 2, "line 6: the search that begins on line 1 is called 'a', too"),
    "priority": (f'{JOB}priority = "high"\n', "line 3: priority must be a number, got 'high'"),
    "negative": (f"{JOB}seed = -1\n", "seed must be a whole number from 0 to 9223372036854775807, got -1"),
    "true": (f"{JOB}seed = true\n", "line 3: seed must be a whole number, got True"),
    "workloads": (f'{JOB}workloads = "abc"\n', "workloads must be a list of texts, got 'abc'"),
    "workload": (f"{JOB}workloads = [7]\n", "'7'"),
    "evaluations": (f"{JOB}evaluations = 1.5\n", "line 3: evaluations must be a whole number, got 1.5"),
    "budget": (f"{JOB}budget = []\n", "line 3: budget is empty; leave it out"),
    "no time": (f'{JOB}budget = "soon"\n', "'soon' is not a duration"),
    "fix": (f"{JOB}fix = 3\n", "line 3: fix must be a list of texts, got 3"),
    "builders": (f"{JOB}builders = 0\n", "builders must be at least 1, got 0"),
    "sampler options": (f"{JOB}sampler_options = 3\n", "sampler_options must be a table, got 3"),
    "sampler option": (f"{JOB}[search.sampler_options]\nsize = 3\n", "unknown option of sampler"),
    "target": (f"{JOB}target = 1\n", "unknown target '1'"),
    "a kernel that is true": (
        "[search]\nkernel = true\n",
        "line 2: kernel must be a kernel's name or folder, got True",
    ),
    "an empty kernel": ('[search]\nkernel = ""\n', "line 2: kernel must be a kernel's name or folder, got ''"),
    **{
        f"an empty {key}": (f'{JOB}{key} = ""\n', f"line 3: {key} is empty; leave it out")
        for key in ("sampler", "name", "target", "arch", "budget", "devices", "on", "seed")
    },
    **{
        f"no {key}": (f"{JOB}{key} = []\n", f"line 3: {key} is empty; leave it out")
        for key in ("workloads", "cover", "start", "fix")
    },
    "an empty workload": (f'{JOB}workloads = ["{SMALL}", ""]\n', "line 3: workloads holds an empty text; leave it out"),
    "no sampler options": (f"{JOB}sampler_options = {{}}\n", "line 3: sampler_options is empty"),
    **{
        f"a {key} that is true": (f"{JOB}{key} = true\n", f"line 3: {key} must be a single value, got True")
        for key in ("budget", "name", "sampler", "target", "devices", "on")
    },
    **{
        f"a {key} that is true": (f"{JOB}{key} = true\n", f"line 3: {key} must be a whole number, got True")
        for key in ("evaluations", "patience", "builders", "finalists")
    },
    **{
        f"a {key} of before": (f'{JOB}{key} = "dask"\n', f"line 3: {key} is no option any more; say where work runs with on")
        for key in ("executor", "scheduler", "cluster")
    },
    "on no cluster": (f'{JOB}on = "dask"\n', "--on 'dask' names no cluster: write the address of its scheduler"),
    "on an unknown place": (f'{JOB}on = "dusk"\n', "unknown executor 'dusk'; did you mean dask?"),
    "builders of a cluster": (f'{JOB}on = "tcp://h:1"\nbuilders = 3\n', "--builders is of this machine"),
    "devices of a cluster": (f'{JOB}on = "c.yaml"\ndevices = "all"\n', "--devices 'all': of a cluster it names the kind"),
    "a priority that is true": (f"{JOB}priority = true\n", "line 3: priority must be a number, got True"),
    "a priority of nan": (f"{JOB}priority = nan\n", "line 3: priority must be a number, got nan"),
    "evaluations of nan": (f"{JOB}evaluations = nan\n", "line 3: evaluations must be a whole number, got nan"),
    "an infinite budget": (f"{JOB}budget = inf\n", "--budget 'inf' is not a duration"),
    "arabic evaluations": (f'{JOB}evaluations = "\u0663"\n', "evaluations must be a whole number, got '\u0663'"),
    "arabic rows": (f'{JOB}workloads = ["rows=\u0663,cols=2,dtype=float32"]\n', "rows must be a whole number"),
    "a day": (f"{JOB}budget = 2026-01-01\n", "line 3: budget must be a single value"),
    "a bad name": (f'{JOB}name = "a b"\n', "'a b' is not a name for a run"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_bad_job_file_is_named_with_what_is_wrong_in_it(here: Any, tmp_path: Path, name: str) -> None:
    text, sentence = JOBS[name]
    (tmp_path / "job.toml").write_text(text)
    ended = here("search", "job.toml")
    assert ended.code == 2
    assert sentence in ended.sentence
    assert not (tmp_path / "runs").exists()


SHIPPED = sorted((Path(__file__).parents[2] / "runs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_job_is_one_that_can_be_searched(path: Path) -> None:
    for job in read_jobs(path):
        kernel = load_kernel(job["kernel"])
        texts, grids = job.get("workloads", ()), job.get("cover", ())
        assert texts or grids
        assert len(check_workloads(kernel, job["target"], texts, grids)) >= len(texts) + len(grids)
        assert job.get("sampler", "evolution") in plugin_names("sampler")
        assert parse_duration(job["budget"]) > 0


@pytest.mark.parametrize(
    ("constraint", "more", "sentence"),
    [
        ('name="never", holds=lambda p: p["unroll"] > 8', (), "never: on purpose"),
        ('name="small", holds=lambda p: p["unroll"] < 8', ("--fix", "unroll=8"), "small"),
    ],
)
def test_a_constraint_that_leaves_nothing_is_named(
    here: Any, tmp_path: Path, constraint: str, more: tuple[str, ...], sentence: str
) -> None:
    write_kernel(tmp_path / "toy", constraints=f'Constraint({constraint}, reason="on purpose"),')
    ended = here("search", "./toy", "--target", "cpu", "--evaluations", "3", *more)
    assert ended.code == 2
    assert sentence in ended.sentence


def foreign_arch() -> tuple[str, str]:
    """(target, an architecture it compiles for and that does not run here); skips where there is none."""
    for target, arch in (("cuda", "sm_87"), ("cpu", "sapphirerapids")):
        try:
            if find_target(target).runs(arch):
                return target, arch
        except DeviceError:
            continue
    pytest.skip("everything that compiles here runs here")


@pytest.mark.parametrize("command", ["check", "search", "bench"])
def test_a_folder_that_is_no_kernels(here: Any, tmp_path: Path, command: str) -> None:
    (tmp_path / "nothing").mkdir()
    ended = here(command, "./nothing", "--target", "cpu")
    assert ended.code == 2
    assert ended.sentence.startswith("evo: ./nothing is a folder, but no kernel's: it has no kernel.py; ")
    for said in ("template", "cpu.cpp.j2", "docs/writing-a-kernel.md"):
        assert said in ended.sentence


def test_a_search_for_code_that_does_not_run_here(here: Any, tmp_path: Path) -> None:
    target, arch = foreign_arch()
    ended = here("search", "layernorm", "--target", target, "--arch", arch)
    assert ended.code == 2
    assert f"code for {arch} does not run here" in ended.sentence
    assert ended.sentence.endswith(f"evo check layernorm --arch {arch} --target {target}")
    assert not (tmp_path / "runs").exists()


def test_the_advised_check_compiles_and_runs_nothing(here: Any, tmp_path: Path) -> None:
    target, arch = foreign_arch()
    if target != "cpu":
        pytest.skip("the kernel to check is one for the CPU")
    write_kernel(tmp_path / "toy")
    ended = here("check", "./toy", "--target", target, "--arch", arch)
    assert ended.code == 0, ended.out
    assert f"for {arch}: 1 of 1 branches compiled\n" in ended.out
    assert "compiled only: this is " in ended.out


def test_an_option_at_its_least_is_accepted() -> None:
    assert load_kernel("layernorm").workload("cpu", f"{SMALL},eps=0").option("eps") == 0.0


@pytest.mark.parametrize(
    ("function", "out", "said"),
    [
        ("FUNCTIONS = 1", "out", "function.py must define FUNCTION"),
        ("FUNCTION = nothing", "out", "function.py:1, in <module>: fails on import: NameError"),
        (None, "out", "kernel 'toy' has no function.py"),
        (None, "my-out", "'my-out' cannot be imported"),
    ],
)
def test_what_no_export_could_be_made_of_is_told_before_a_check_or_a_search(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str | None, out: str, said: str
) -> None:
    folder = write_kernel(tmp_path / "toy")
    if function is not None:
        (folder / "function.py").write_text(function)
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        store.create_run(replace(SPEC, name="mine", kernel=str(folder)), ENVIRONMENT)
    monkeypatch.setattr("evo.job.opening.open_workers", None)
    monkeypatch.setattr("evo.cli.check.open_workers", None)
    commands = [("search", "./toy", "--target", "cpu", "--export", out), ("resume", "mine", "--export", out)]
    if function is not None:
        commands.append(("check", "./toy", "--target", "cpu"))
    for words in commands:
        ended = here(*words, *(() if words[0] == "check" else ("--db", "lineage.db")))
        assert ended.code == 2, words
        assert said in ended.err.splitlines()[0], words


@pytest.mark.parametrize("words", [("search", "layernorm", "--target", "cpu", "--budget", "10h"), ("resume", "mine")])
def test_an_export_folder_in_use_is_refused_before_anything_is_searched(
    here: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        new_run(store, "mine")
    kept = tmp_path / "taken" / "thesis.tex"
    kept.parent.mkdir()
    kept.write_text("years of work")
    ended = here(*words, "--export", "taken", "--db", "lineage.db")
    assert ended.code == 2
    assert "taken is not empty" in ended.sentence
    assert [run["name"] for run in here("runs", "--db", "lineage.db", "--json").document] == ["mine"]
    assert kept.read_text() == "years of work"
