"""Tuned files: `evo rebuild` makes the same package again, and `evo check` finds what is not so any more."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evo import cli
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.measure import RaceResult
from evo.problem.loading import load_kernel
from evo.search.tasks import TaskExecutor
from tests.ended import Ended, run_here
from tests.export.exports import listing, manifest_of
from tests.lineage import samples as s
from tests.test_export import add, end, new_run

PAGE = Path(__file__).parents[2] / "docs" / "in-a-repository.md"
SIZES = ("n=5000,dtype=float32", "n=4096,dtype=float32")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a kernel of its own, found by a path, a search of two sizes, its package and its tuned file."""
    root = tmp_path_factory.mktemp("repository")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert cli.run(["new", "mine"]) == 0
        sizes = [word for size in SIZES for word in ("--workload", size)]
        searching = ["search", "mine", "--target", "cpu", "--name", "one", "--evaluations", "4", *sizes]
        assert cli.run(searching) == 0
        assert cli.run(["export", "one", "--out", "exported/mine", "--tuned", "kept/mine.tuned.toml"]) == 0
    return root


@pytest.fixture
def repository(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of it elsewhere, without what git ignores."""
    root = tmp_path / "clone"
    shutil.copytree(searched, root, ignore=shutil.ignore_patterns("runs", "exported"))
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def evo(repository: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    return lambda *words: run_here(capsys, *words)


def edit(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for pattern, new in changes:
        text, number = re.subn(pattern, new, text, flags=re.MULTILINE)
        assert number, pattern
    file.write_text(text)


def test_the_folder_of_a_new_database_ignores_itself(searched: Path, tmp_path: Path) -> None:
    assert (searched / "runs" / ".gitignore").read_text() == "*\n"
    (tmp_path / "own").mkdir()
    for folder in ("own", "made"):
        Store.open(tmp_path / folder / "lineage.db", write=True).close()
    assert not (tmp_path / "own" / ".gitignore").exists()
    assert (tmp_path / "made" / ".gitignore").exists()


def test_what_a_kernels_folder_links_to_is_to_be_committed_too(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(searched)
    source = next(searched.glob("mine/cpu.*"))
    assert "commit " not in run_here(capsys, "export", "one", "--tuned", str(tmp_path / "a.tuned.toml")).out
    source.rename(own := searched / "own_source")
    source.symlink_to("../own_source")
    try:
        told = run_here(capsys, "export", "one", "--tuned", str(tmp_path / "b.tuned.toml")).out
        assert "commit own_source with it" in told
    finally:
        own.replace(source)


def test_a_clone_makes_the_same_package_from_the_file(searched: Path, evo: Callable[..., Ended]) -> None:
    text = Path("kept/mine.tuned.toml").read_text()
    assert 'kernel = "../mine"' in text
    assert str(searched) not in text
    ended = evo("rebuild", "kept/mine.tuned.toml")
    assert ended.code == 0, ended.err
    then, now = (listing(root / "exported" / "mine") for root in (searched, Path()))
    assert {name for name in now if then.pop(name, None) != now[name]} == {"manifest.json"}
    assert not then
    one, other = (manifest_of(root / "exported" / "mine") for root in (searched, Path()))
    assert [v["workload"]["key"] for v in other["variants"]] == list(SIZES)
    for v, w in zip(one["variants"], other["variants"], strict=True):
        assert {n for n in v if v[n] != w[n]} <= {"record", "timing", "same_code_as_measured"}
        if v["timing"] and not v["timing"]["disturbed"]:
            keys = ("median_us", "torch_us", "ratio", "ratio_low", "ratio_high")
            assert [w["timing"][n] for n in keys] == pytest.approx([v["timing"][n] for n in keys], rel=1e-4)
            assert w["record"]["baselines"][1]["clocks"].keys() == {"noise_floor"}


def test_a_result_whose_race_was_disturbed_stays_that_when_the_package_is_made_again(
    repository: Path, evo: Callable[..., Ended]
) -> None:
    figures = r"\1\ntime_us = 9.0\ntorch_us = 12.0\ndisturbed = true\n"
    edit(repository / "kept/mine.tuned.toml", (r"(candidate = .*)\n(?:[a-z_]+ = .*\n)*", figures))
    ended = evo("rebuild", "kept/mine.tuned.toml")
    assert "built for native: 2 right, its time not known (the machine was too busy)" in ended.out
    timings = [v["timing"] for v in manifest_of(Path("exported/mine"))["variants"]]
    assert [(t["disturbed"], t["median_us"], t["torch_us"]) for t in timings] == [(True, 9.0, 12.0)] * 2


def test_a_check_finds_a_wrong_kernel_a_lost_point_and_a_slower_one(
    repository: Path, evo: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, raced = repository / "kept/mine.tuned.toml", list[RaceResult]()
    text = file.read_text()
    figures = r"(candidate = .*)\n(?:[a-z_]+ = .*\n)*", r"\1\ntime_us = 9.0\nspeedup = SURE\ninterval = [LOW, SURE]\n"

    def race(*arguments: Any, **options: Any) -> RaceResult:
        ratio = 0.5  # of twice PyTorch's speed
        timing = s.timing(load_kernel("mine").workload("cpu", SIZES[0]), ratio)
        raced.append(RaceResult(timings=(timing,)))
        return raced[-1]

    monkeypatch.setattr(TaskExecutor, "race", race)

    def verdicts(code: int, *words: str) -> list[str]:
        ended = evo("check", "kept/mine.tuned.toml", "--json", *words)
        assert ended.code == code, ended.err
        return [p["verdict"] for p in ended.document["points"]]

    edit(file, (figures[0], figures[1].replace("SURE", "2.0").replace("LOW", "1.95")))
    assert verdicts(0) == ["as fast"] * 2
    edit(file, ("speedup = 2.0", "speedup = 4.0"), (r"interval = .*", "interval = [3.9, 4.1]"))
    raced.clear()
    assert verdicts(1) == ["slower"] * 2
    assert len(raced) == 4
    edit(file, ("^device = .*", 'device = "another"'))
    assert verdicts(0) == ["right"] * 2
    assert verdicts(0, "--compile-only") == ["compiles"] * 2
    edit(file, ("^threads = .*", "threads = 3"))
    assert verdicts(1) == ["not legal"] * 2
    ended = evo("rebuild", "kept/mine.tuned.toml")
    assert ended.code == 2
    assert "is not in the search space of mine any more (threads=3 is not one of" in ended.sentence
    file.write_text(text)
    edit(repository / "mine" / "cpu.cpp", (r"a\[i\] \+ b\[i\]", "a[i] - b[i]"))
    assert verdicts(1) == ["wrong"] * 2
    ended = evo("rebuild", "kept/mine.tuned.toml")
    assert ended.code == 0
    assert "kernel mine has changed since results were measured" in ended.sentence
    assert {v["standing"] for v in manifest_of(Path("exported/mine"))["variants"]} == {"compiled"}
    edit(repository / "mine" / "cpu.cpp", (r"a\[i\] - b\[i\]", "a[i] -"))
    ended = evo("rebuild", "kept/mine.tuned.toml")
    assert ended.code == 1
    assert "a point does not compile (" in ended.err.splitlines()[-1]


def test_the_file_in_the_documentation_has_the_keys_that_are_written(searched: Path) -> None:
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    texts = shown, (searched / "kept/mine.tuned.toml").read_text()
    (known,), (written, *_) = (tomllib.loads(text)["measured"] for text in texts)
    assert list(known) == list(written)
    (result,) = known["results"]
    assert result["point"] in known["points"]
    assert list(result)[:3] == list(written["results"][0])[:3]
    assert result["speedup"] == pytest.approx(result["torch_us"] / result["time_us"], rel=0.01)


@pytest.mark.parametrize(
    ("pattern", "new", "said"),
    [
        ("^arch = .*", "", "line 3: 'arch' is missing"),
        ("^cover = .*|^(evo = .*)", r"\1\nseed = 3", "line 12: unknown key 'seed'; known: kernel,"),
        ("^point = .*", "point = 7", "line {line}: point must be a text, got 7"),
        ('^point = .*', 'point = "x"', "line {line}: point 'x' is none of"),
        ("^workload = .*", 'workload = "n=-1,dtype=float32"', "line {line}: workload 'n=-1,"),
        ("^kernel = .*", 'kernel = "../gone"', "line 4: no kernel is in the folder '../gone'"),
        (r"^\[\[measured\]\]", "[[measured]", "cannot be read: "),
        (r"^\[\[measured\]\]", "[search]\nkernel = 3\n[[measured]]", "line 3: it needs tables [[measured]]"),
    ],
)
def test_a_broken_file_is_one_sentence_with_the_line(
    repository: Path, evo: Callable[..., Ended], pattern: str, new: str, said: str
) -> None:
    edit(file := repository / "kept/mine.tuned.toml", (pattern, new))
    line = next((n for n, text in enumerate(file.read_text().splitlines(), 1) if text == new), 0)
    for command in ("rebuild", "check"):
        ended = evo(command, "kept/mine.tuned.toml")
        assert ended.code == 2
        assert said.format(line=line) in ended.sentence


def test_results_of_other_devices_and_workloads_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kernel, file = load_kernel("layernorm"), Path("layernorm.tuned.toml")
    on_cpu = [kernel.workload("cpu", f"rows=8,cols={cols},dtype=float32") for cols in (32, 48)]
    on_gpu = [kernel.workload("cuda", "rows=64,cols=1024,dtype=float16")]
    with Store.open("lineage.db", write=True) as store:
        for name, target, arch, workloads in (
            ("both", "cpu", "native", on_cpu), ("gpu", "cuda", "sm_90", on_gpu), ("again", "cpu", "native", on_cpu[1:])
        ):  # fmt: skip
            run = new_run(store, name, target, arch, workloads)
            for order in range(len(workloads)):
                add(store, run, order, order)
            end(store, run, winners=range(len(workloads)))
            assert store.run(name).status is RunStatus.FINISHED

    def export(*names: str) -> list[str]:
        assert cli.run(["export", *names, "--tuned", str(file), "--db", "lineage.db"]) == 0
        return re.findall(r"^(?:device|workload|candidate) = \"(\S+?)[\" ,]", file.read_text(), re.MULTILINE)

    export("both")
    before = export("gpu")
    text = file.read_text()
    assert export("gpu", "both") == before
    assert file.read_text() == text
    after = export("again")
    assert [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [4]
    assert 'kernel = "layernorm"' in text
    assert cli.run(["rebuild", str(file), "--arch", "sm_89"]) == 0
    assert {v["arch"] for v in manifest_of(Path("exported/layernorm"))["variants"]} >= {"native", "sm_89"}
    ended = run_here(capsys, "check", str(file), "--compile-only", "--json")
    assert ended.code == 0, ended.err
    assert [p["verdict"] for p in ended.document["points"]] == ["compiles"] * 3
