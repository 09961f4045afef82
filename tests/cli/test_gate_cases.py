"""A kernel whose `validate` refuses most sizes is gated as any other; one whose gate lacks cases is never confirmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adversaries.trial import FOLDER

FLAT = FOLDER / "flat"
PLANTED = "loses_nan_and_wrong_for_widths_of_no_power_of_two"

_COMMANDS = """
import sys
import tests.hurried
from evo.cli import run
for number, words in enumerate(sys.argv[1:]):
    print(end="\\0" if number else "", flush=True)
    assert run(words.split()) == 0
"""
"""Commands in one process, which starts once."""


def test_what_only_rare_sizes_show_is_refused_by_check_and_by_finals(here: Any) -> None:
    checked = here("check", str(FLAT), "--target", "cpu", "--json")
    assert checked.code == 1
    gates = {branch["genome"]["cheat"]: branch["gate"] for branch in checked.document["branches"]}
    assert {cheat for cheat, gate in gates.items() if gate == "ok"} == {"honest", "honest_by_rows"}
    assert gates[PLANTED] == "wrong"
    searched = here("search", str(FLAT), "--target", "cpu", "--fix", f"cheat={PLANTED}", "--evaluations", "1")
    assert "no candidate passed the gate" in searched.out
    late = here("search", str(FLAT), "--target", "cpu", "--fix", "cheat=counts_rows_in_16_bits", "--evaluations", "1")
    assert "unconfirmed: the finals have no winner" in late.out
    assert " 1 of them refused by the finals" in late.out


def test_a_winner_of_a_gate_without_nan_is_named_and_not_confirmed(here: Any, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for template in FLAT.glob("*.j2"):
        shutil.copy(template, folder)
    (folder / "kernel.py").write_text(
        "from dataclasses import replace\nfrom evo.problem.loading import load_kernel\n"
        f'KERNEL = replace(load_kernel({str(FLAT)!r}), data=("normal",))\n'
    )
    said = "not confirmed: the gate has no case of these kinds: nan, inf, outliers"
    searched = here("search", "plain", "--target", "cpu", "--fix", "cheat=honest", "--evaluations", "1", "--name", "one")
    assert searched.code == 0
    assert said in searched.out
    assert " confirmed: " not in f" {searched.out}".replace("not confirmed: ", "")
    (best,) = here("best", "--json").document
    assert (best["winner"], best["finals"]) == (True, said)
    assert said in here("export", "one", "--out", "out").err  # it has no frontend that an export could be called by


@pytest.mark.slow
def test_cases_that_cannot_be_run_are_told_also_where_all_others_passed(tmp_path: Path) -> None:
    """Views of float32 that span 2^32 elements, beside as much, take 32 GiB of address space, those of bytes 8 GiB. A grid
    has at most 65,535 blocks along its second and third axis."""
    shutil.copytree(FOLDER / "strided", tmp_path / "wide", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "wide" / "kernel.py").write_text(
        "from dataclasses import replace\nfrom evo.problem.loading import load_kernel\nfrom evo.problem.space import *\n"
        f"KERNEL = replace(load_kernel({str(FOLDER / 'strided')!r}), space=Space(\n"
        '    parameters=(Categorical(name="cheat", values=("honest",), structural=True, why="one"),),\n'
        '    default={"cheat": "honest"}))\n'
    )

    searching = "search wide --target cpu --evaluations 1 --name one"
    words = ("check wide --target cpu --cases 2", searching, "show one", "check one --cases 2 --json")
    limited = ["sh", "-c", f"ulimit -v {24 << 20}; exec {sys.executable} -c '{_COMMANDS}' \"$@\"", "sh", *words]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "500"}
    done = subprocess.run(limited, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    checked, searched, shown, document = done.stdout.split("\0")
    beyond = "batch=65536,heads=1,rows=1,cols=1,dtype=float32,data=normal"
    assert f"2 cases not run: a grid that cannot be launched is left to PyTorch; the first: {beyond}\n" in checked
    assert "the winner was not checked for offsets beyond 32 bits along x_batch, x_head, x_row, y_batch," in shown
    assert "; not all could be checked\n" in searched
    assert "the winner was not checked for memory errors: " in shown, "a sanitizer takes more"
    (workload,) = json.loads(document)["workloads"]
    far = {case.partition(",far=")[2] for case, reason in workload["left_out"].items() if reason == "no memory"}
    assert far == {f"{tensor}_{axis}" for tensor in "xy" for axis in ("batch", "head", "row")}
    assert sum(",far=mask_" in case["case"] for case in workload["cases"]) == 8
    assert (workload["passed"], workload["not_run"]) == (True, [])
