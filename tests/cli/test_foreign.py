"""Somebody else's database: looking at it runs no kernel.py that is not here as it was recorded."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo.analysis.runs import find_best
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.problem.loading import kernel_digest
from evo.testing.toy_kernel import WORKLOAD, write_kernel
from tests.lineage import samples as s

TIMED = (replace(s.timing(), workload=WORKLOAD.key), replace(s.timing(contender="torch", ratio=1.0), workload=WORKLOAD.key))


def trap(folder: Path) -> Path:
    """A kernel that tells beside its folder that its kernel.py was run."""
    kernel = write_kernel(folder)
    with (kernel / "kernel.py").open("a") as file:
        file.write(f"\nPath({str(folder.with_suffix('.run'))!r}).touch()\n")
    return kernel


def record(db: Path, kernel: str, digest: str) -> str:
    """A finished run with a winner; the winner's id."""
    with Store.open(db, write=True) as store:
        spec = replace(s.SPEC, kernel=kernel, kernel_digest=digest, target="cpu", workloads=(WORKLOAD,), name="theirs")
        run = store.create_run(spec, s.ENVIRONMENT)
        point = {"mode": "honest", "unroll": 2}
        store.add(run, s.ref(0, point=point), replace(s.passed(0), timings=TIMED), elapsed_s=1.0)
        store.add_final(run, 0, replace(s.final(0.5), timings=TIMED[:1]), elapsed_s=2.0)
        store.set_winner(run, 0, 0)
        store.set_status(run, RunStatus.FINISHED, reason="done", elapsed_s=3.0)
        (best,) = find_best(store)
        return best.id


LOOKS = (
    ("best",),
    ("best", "--json"),
    ("show", "theirs"),
    ("show", "CANDIDATE"),
    ("show", "CANDIDATE", "--source"),
    ("runs",),
    ("lineage", "CANDIDATE"),
    ("explain", "CANDIDATE"),
    ("failures", "theirs"),
    ("operators", "theirs"),
    ("importance", "theirs"),
    ("pareto", "theirs"),
    ("report", "theirs", "--out", "page.html"),
    ("export", "theirs", "--format", "t4", "--out", "t4"),
)
RUNS_IT = (
    ("export", "theirs", "--out", "module"),
    ("failures", "theirs", "--template"),
    ("explain", "CANDIDATE", "--from", "template"),
    ("check", "CANDIDATE", "--compile-only"),
    ("sanitize", "CANDIDATE", "--tool", "address"),
)


def asked(here: Any, words: tuple[str, ...], candidate: str) -> Any:
    return here(*(candidate if word == "CANDIDATE" else word for word in words))


@pytest.mark.parametrize("where", ["elsewhere", "changed"])
def test_looking_at_a_database_runs_none_of_its_kernels(here: Any, tmp_path: Path, where: str) -> None:
    """A kernel whose digest is right may lie where somebody else has put it."""
    kernel = trap(tmp_path.parent / f"{tmp_path.name}-theirs" if where == "elsewhere" else tmp_path / "theirs")
    digest = "0" * 64 if where == "changed" else kernel_digest(kernel)
    candidate = record(tmp_path / "runs" / "lineage.db", str(kernel), digest)
    for words in LOOKS:
        ended = asked(here, words, candidate)
        assert ended.code == 0, (words, ended.err)
        assert ended.err.count("--trust") <= 1
    assert "--trust" in here("best").sentence
    for words in RUNS_IT[: 5 if where == "elsewhere" else 2]:  # what runs a candidate takes its kernel as it is now
        ended = asked(here, words, candidate)
        assert ended.code == 2, (words, ended.err)
        assert f"kernel {kernel} is not here as it was recorded" in ended.sentence
        assert "--trust" in ended.sentence
    assert not kernel.with_suffix(".run").exists()
    assert "has no function.py" in here("export", "theirs", "--out", "module", "--trust").err
    assert kernel.with_suffix(".run").exists()


@pytest.mark.parametrize("command", [("best",), ("show", "theirs"), ("report", "theirs", "--out", "page.html")])
def test_with_trust_and_below_the_current_folder_a_kernel_is_run(
    here: Any, tmp_path: Path, command: tuple[str, ...]
) -> None:
    mine, theirs = trap(tmp_path / "mine"), trap(tmp_path.parent / f"{tmp_path.name}-theirs")
    record(tmp_path / "runs" / "lineage.db", "mine", kernel_digest(mine))
    assert here(*command).err == ""
    assert mine.with_suffix(".run").exists()
    record(tmp_path / "other.db", str(theirs), kernel_digest(theirs))
    assert here(*command, "--db", "other.db", "--trust").err == ""
    assert theirs.with_suffix(".run").exists()


@pytest.mark.parametrize("kernel", ["../theirs", "link", "a" * 5000, "nul\0", "gone", "/dev", "."])
def test_a_kernel_that_is_a_link_or_no_name_at_all_is_not_run(here: Any, tmp_path: Path, kernel: str) -> None:
    theirs = trap(tmp_path.parent / "theirs")
    try:
        (tmp_path / "link").symlink_to(theirs)
        record(tmp_path / "runs" / "lineage.db", kernel, kernel_digest(theirs))
        assert here("best").code == 0
        assert here("report", "theirs", "--out", "page.html").code == 0
        assert here("export", "theirs", "--out", "module").code == 2
        assert not theirs.with_suffix(".run").exists()
    finally:
        for path in theirs.iterdir():
            path.unlink()
        theirs.rmdir()


def test_what_a_database_calls_a_workload_names_no_file(here: Any, tmp_path: Path) -> None:
    mine = trap(tmp_path / "mine")
    db = tmp_path / "runs" / "lineage.db"
    record(db, "mine", kernel_digest(mine))
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE task SET dtype = '../../../float32'")
    connection.close()
    assert "unknown dtype of kernel toy on cpu '../../../float32'" in here("export", "theirs", "--out", "module").sentence
    assert "unknown dtype" in here("check", "theirs", "--compile-only").sentence
