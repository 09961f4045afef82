"""A job is one, whoever asks for it, and what no search can be is none."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from evo.errors import UsageError
from evo.job.job import choose_target, make_job, plan_run
from evo.job.opening import configure
from evo.job.values import own_files, read_sampler_options
from evo.problem.loading import load_kernel
from evo.search.loop import Budget
from evo.search.place import Place
from evo.testing.toy_kernel import write_kernel

TYPED = {
    "target": "cpu",
    "workloads": ["n=5,dtype=float32"],
    "budget": "1m",
    "patience": 7,
    "sampler_options": {"evolution.population": "9"},
    "seed": 3,
    "fix": ["unroll=4"],
    "on": "local",
    "log": "l.jsonl",
}
SAID = TYPED | {
    "budget": 60.0, "sampler_options": {"population": 9}, "fix": {"unroll": 4}, "log": Path("l.jsonl"), "start": (),
}  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_kernel(tmp_path / "toy")


def test_the_options_of_a_command_and_the_arguments_of_python_make_the_same_job(toy: Path) -> None:
    told: list[str] = []
    db = str(toy.parent / "none.db")
    typed, said = (make_job(kernel, o) for kernel, o in ((str(toy), TYPED), (load_kernel(str(toy)), SAID)))
    assert typed == replace(said, fixed={"unroll": "4"})
    assert typed.kernel is load_kernel(str(toy))
    assert typed.budget == Budget(seconds=60.0, patience=7)
    one, other = (configure(job, db, told.append) for job in (typed, said))
    assert other.options["fixed"] == {"unroll": 4}
    assert replace(one, options={}) == replace(other, options={})
    assert one.kernel_digest == load_kernel(str(toy)).digest
    assert told == []


def test_a_job_stays_as_it_was_made_and_says_what_it_cannot_be(toy: Path) -> None:
    job = make_job(toy, {"target": "cpu"})
    assert job.budget == Budget(seconds=60.0)
    with pytest.raises(FrozenInstanceError):
        job.seed = 4  # type: ignore[misc]
    wrong: dict[str, dict[str, Any]] = {
        "unknown target": {"target": "tpu"},
        "unknown sampler": {"sampler": "luck"},
        "seed must be": {"seed": -1},
        "finalists must be at least 1": {"finalists": 0},
        "is not a name for a run": {"name": "a/b"},
    }
    for said, fields in wrong.items():
        with pytest.raises(UsageError, match=said):
            replace(job, **fields)
    assert plan_run(replace(job, arch="native", place=Place(builders=5))).max_in_flight == 10


@pytest.mark.parametrize(
    ("kernel", "arch", "target"),
    [
        ("softmax", "x86-64-v3", "cpu"),
        ("softmax", "native", "cpu"),
        ("softmax", "sm_89", "cuda"),
        ("softmax", None, "cuda"),
        ("two", "native", "cuda"),  # of CUDA alone: its own target says what is wrong with the architecture
    ],
)
def test_an_architecture_chooses_its_target_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, kernel: str, arch: str | None, target: str
) -> None:
    monkeypatch.setattr("evo.job.job.answers", lambda name: True)
    problem = load_kernel("softmax")
    if kernel == "two":
        problem = replace(problem, dtypes={"cuda": ("float16",)}, workloads={"cuda": problem.workloads["cuda"][:1]})
    assert choose_target(problem, None, arch, Place()) == target


def test_a_target_that_is_named_asks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evo.job.job.targets_by_rank", None)  # which loads all of them
    assert choose_target(load_kernel("softmax"), "cpu", "native", Place()) == "cpu"


@pytest.mark.parametrize(
    ("on", "executor"),
    [("local", "local"), ("tcp://h:8786", "dask"), ("tls://h:8786", "dask"), ("night/c.yaml", "dask"), ("c.yml", "dask")],
)
def test_where_work_runs_names_its_executor(on: str, executor: str) -> None:
    place = Place(on=on)
    assert (place.executor, place.is_elsewhere) == (executor, executor != "local")
    assert any("without TLS" in remark for remark in place.remarks) is on.startswith("tcp://")


def test_a_list_of_operators_keeps_the_path_and_the_digest_of_an_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("OPERATOR = None\n")
    monkeypatch.chdir(tmp_path)
    options = read_sampler_options({"operators": ["mutation", "./mine.py"], "population": "9"})
    assert options == {"operators": f"mutation,{tmp_path / 'mine.py'}", "population": 9}
    assert list(own_files("evolution", options)) == [f"{tmp_path / 'mine.py'}"]
