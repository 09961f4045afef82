"""Two templates of one target, from the check to an imported module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evo
from evo.evaluation import PASSED
from tests.ended import run_here, run_python
from tests.two_templates import write_two_templates

USE = "import torch, exported; x = torch.randn(4096); assert torch.equal(exported.doubled(x), 2 * x)"


@pytest.mark.slow
def test_a_kernel_with_two_templates_is_checked_searched_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, db = write_two_templates(tmp_path / "doubled"), str(tmp_path / "lineage.db")
    monkeypatch.chdir(tmp_path)
    checked = run_here(capsys, "check", str(kernel), "--target", "cpu", "--json")
    assert checked.code == 0, checked.out
    branches = [b["changes"].get("template", "simple") for b in checked.document["branches"]]
    assert sorted(branches) == ["other", "other", "simple"]
    assert all(b["gate"] == b["timed"] == "ok" for b in checked.document["branches"])

    words = ("--target", "cpu", "--evaluations", "7", "--builders", "1", "--seed", "2", "--name", "both", "--db", db)
    searched = run_here(capsys, "search", str(kernel), *words, "--finalists", "3", "--json")
    assert searched.code == 0, searched.err
    with evo.Lineage(db) as lineage:
        tried = [lineage.candidate(entry.id) for entry in lineage.history("both")]
    first = {name: next(c for c in tried if c.parameters["template"] == name) for name in ("simple", "other")}
    assert all(c.status in PASSED for c in tried)
    shown = run_here(capsys, "show", first["other"].id, "--db", db)
    assert "template=other" in shown.out
    changed = run_here(capsys, "diff", first["simple"].id, first["other"].id, "--db", db)
    assert "template" in changed.out

    for name, candidate in first.items():
        out = tmp_path / name / "exported"
        words = ("--format", "module", "--out", str(out), "--db", db, "--refused")
        done = run_here(capsys, "export", candidate.id, *words, "--json")
        assert done.code == 0, done.err
        (variant,) = json.loads((out / "manifest.json").read_text())["variants"]
        assert variant["genome"]["template"] == name
        checked, used = (run_python(out.parent, *words) for words in (("-m", "exported", "check"), ("-c", USE)))
        assert (checked.returncode, used.returncode) == (0, 0), checked.stdout + used.stderr
        print(checked.stdout)
