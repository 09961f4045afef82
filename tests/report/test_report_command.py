"""evo report: files, and sentences where they cannot be had."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from datetime import date
from pathlib import Path

import pytest

from evo.cli import run
from evo.lineage.store import Store
from evo.testing.toy_kernel import write_kernel

PNG = b"\x89PNG\r\n\x1a\n"


def evo(*words: str | Path) -> int:
    return run([str(w) for w in words])


def test_a_report_is_one_file_and_can_be_written_again_or_where_no_file_is(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report.html"
    for _ in range(2):
        assert evo("report", "one", "--db", database, "--out", out, "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["run"] == "one"
    assert said["bytes"] == out.stat().st_size
    assert "the speed of PyTorch" in said["headline"]
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]
    assert evo("report", "single", "--db", database, "--out", "/dev/null") == 0
    assert Path("/dev/null").is_char_device()


def commands_of(page: Path) -> list[str]:
    plain = re.sub(r"</?span[^>]*>", "", page.read_text())
    return [html.unescape(c) for c in re.findall(r"<code>(evo [^<]*)</code>", plain)]


def test_every_command_of_a_report_names_its_database_unless_that_is_the_one_taken_without(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, out = tmp_path / "it's mine.db", tmp_path / "report.html"
    shutil.copy(database, there)
    assert evo("report", "single", "--db", there, "--out", out) == 0
    named = commands_of(out)
    assert "--builders 8" in named[0], "16 in flight"
    assert [shlex.split(c)[1] for c in named] == ["search", "check", "show", "export"]
    assert all(shlex.split(c)[-2:] == ["--db", str(there)] for c in named)

    monkeypatch.setenv("EVO_DB", str(there))
    assert evo("report", "single", "--out", out) == 0
    assert commands_of(out) == named, "a report is read where EVO_DB is another"
    (tmp_path / "runs").mkdir()
    shutil.copy(database, tmp_path / "runs" / "lineage.db")
    monkeypatch.chdir(tmp_path)
    assert evo("report", "single", "--db", "runs/lineage.db", "--out", out) == 0
    assert all(c.endswith(" --db runs/lineage.db") for c in commands_of(out)), "EVO_DB names another"
    monkeypatch.delenv("EVO_DB")
    assert evo("report", "single", "--out", out) == 0
    assert not any("--db" in c for c in commands_of(out))


def test_the_command_that_searches_again_makes_the_same_record_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_kernel(tmp_path / "toy", ("honest", "wrong"))
    options = "--sampler-option children=4 --start mode=honest,unroll=2 --finalists 2 --sanitize-finals --fix unroll=2"
    assert evo(*f"search ./toy --target cpu --evaluations 2 --cover n=4096,dtype=float32 {options}".split()) == 0
    assert evo("report", "latest", "--out", "report.html") == 0
    again = next(c for c in commands_of(tmp_path / "report.html") if c.startswith("evo search"))
    assert evo(*shlex.split(again)[1:]) == 0
    with Store.open("runs/lineage.db", write=False) as store:
        first, second = (store.run(f"toy-{date.today():%Y%m%d}-{number}") for number in (1, 2))
    drawn = ("gate_seed", "origins")
    assert {k: v for k, v in first.spec.options.items() if k not in drawn} == {
        k: v for k, v in second.spec.options.items() if k not in drawn
    }
    for field in ("kernel", "arch", "sampler", "seed", "max_in_flight", "workloads", "budget"):
        assert getattr(first.spec, field) == getattr(second.spec, field)


def test_figures_are_written_as_svg_and_as_png(database: Path, tmp_path: Path) -> None:
    assert evo("report", "two", "--db", database, "--out", tmp_path / "r.html", "--figures", tmp_path / "figures") == 0
    drawings = sorted(p.stem for p in (tmp_path / "figures").glob("*.svg"))
    assert {"w1-lineage", "w2-lineage", "w1-convergence-seconds", "w2-importance"} <= set(drawings)
    pictures = sorted((tmp_path / "figures").glob("*.png"))
    assert [p.stem for p in pictures] == drawings
    for picture in pictures:
        content = picture.read_bytes()
        assert content.startswith(PNG)
        assert int.from_bytes(content[16:20], "big") > 600, "pixels across"


def test_what_is_not_a_report_is_not_replaced(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "thesis.html"
    precious.write_text("<html>years of work</html>")
    assert evo("report", "one", "--db", database, "--out", precious) == 2
    assert evo("report", "one", "--db", database, "--out", database) == 2
    assert precious.read_text() == "<html>years of work</html>"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("is not a report of evo's" in line for line in said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nobody",), "unknown run 'nobody'"),
        (("",), "unknown run ''"),
        (("one", "--out", "/proc/nothing/report.html"), "cannot write /proc/nothing/report.html"),
        (("one", "--out", "/"), "--out / is a folder"),
        (("one", "--db", "/nowhere/lineage.db"), "there is no database"),
    ],
)
def test_bad_requests_are_one_sentence(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    rest = () if "--db" in words else ("--db", database)
    assert evo("report", *words, *rest, *(() if "--out" in words else ("--out", tmp_path / "r.html"))) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "r.html").exists()
