"""What could not be carried out to the end is refused before anything is spent on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo import cli
from evo.errors import DeviceError
from evo.lineage.store import Store
from evo.problem.kernel import load_kernel
from evo.targets import find_target
from tests.lineage.samples import new_run
from tests.toy_kernel import write_kernel

F32 = "rows=64,cols=256,dtype=float32"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence that a bad request is answered with."""
    assert cli.run(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [sentence] = printed.err.strip().splitlines()
    return sentence


def foreign_arch() -> tuple[str, str]:
    """(target, an architecture it compiles for and that does not run here); skips where there is none."""
    for target, arch in (("cuda", "sm_87"), ("cpu", "sapphirerapids")):
        try:
            if find_target(target).runs(arch):
                return target, arch
        except DeviceError:
            continue
    pytest.skip("everything that compiles here runs here")


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize("command", ["check", "search", "bench"])
def test_a_seed_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, seed: str
) -> None:
    sentence = refused(capsys, command, "layernorm", "--target", "cpu", "--db", str(tmp_path / "db"), "--seed", seed)
    assert sentence == f"evo: --seed must be a whole number from 0 to {2**63 - 1}, got {seed}"


def test_a_seed_that_is_none_in_a_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[search]\nkernel = "layernorm"\nseed = -1\n')
    assert refused(capsys, "search", str(job)).endswith("seed must be a whole number from 0 to 2**63 - 1, got -1")


@pytest.mark.parametrize("command", ["check", "search", "bench"])
def test_a_folder_that_is_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    folder = tmp_path / "nothing"
    folder.mkdir()
    sentence = refused(capsys, command, str(folder), "--target", "cpu", "--db", str(tmp_path / "db"))
    assert sentence.startswith(f"evo: {folder} is a folder, but no kernel's: it has no kernel.py; ")
    for said in ("template", "cpu.cpp.j2", "docs/writing-a-kernel.md"):
        assert said in sentence


def test_options_of_a_kernel_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "check", "layernrm", "--target", "cpu", "--db", str(tmp_path / "db"))
    assert sentence == "evo: unknown kernel or candidate 'layernrm'; did you mean layernorm?"


def test_a_search_for_code_that_does_not_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, arch = foreign_arch()
    db = tmp_path / "lineage.db"
    sentence = refused(capsys, "search", "layernorm", "--target", target, "--arch", arch, "--db", str(db))
    assert f"code for {arch} does not run here" in sentence
    assert sentence.endswith(f"evo check layernorm --arch {arch} --target {target}")
    assert not db.exists()


def test_the_advised_check_compiles_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, arch = foreign_arch()
    if target != "cpu":
        pytest.skip("the kernel to check is one for the CPU")
    write_kernel(tmp_path / "toy")
    code = cli.run(["check", str(tmp_path / "toy"), "--target", target, "--arch", arch, "--db", str(tmp_path / "db")])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"for {arch}: 1 of 1 branches compiled\n" in printed
    assert "compiled only: this is " in printed


@pytest.mark.parametrize("eps", ["nan", "inf", "-inf", "-1", "-1e-5"])
def test_an_option_that_is_no_number_to_compute_with(capsys: pytest.CaptureFixture[str], eps: str) -> None:
    sentence = refused(capsys, "search", "layernorm", "--target", "cpu", "--workload", f"{F32},eps={eps}")
    assert "eps must be " in sentence
    assert eps in sentence


def test_an_option_at_its_least_is_accepted() -> None:
    assert load_kernel("layernorm").workload("cpu", f"{F32},eps=0").option("eps") == 0.0


@pytest.mark.parametrize("more", [["--workload", F32], ["--against", "torch"], ["--seed", "0"], ["--target", "cpu"]])
def test_options_that_an_exported_module_would_ignore(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "__main__.py").write_text("raise SystemExit('it ran')")
    assert refused(capsys, "bench", str(tmp_path), *more).endswith(f"leave out {more[0]}")


def test_an_export_folder_in_use_before_a_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "lineage.db"
    with Store.open(db, write=True) as store:
        new_run(store, "mine")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    sentence = refused(capsys, "resume", "mine", "--export", str(tmp_path / "taken"), "--db", str(db))
    assert str(tmp_path / "taken") in sentence
