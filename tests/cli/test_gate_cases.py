"""A kernel whose `validate` refuses most sizes is gated as any other; one whose gate lacks cases is never confirmed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.adversaries.trial import FOLDER

FLAT = FOLDER / "flat"
PLANTED = "loses_nan_and_wrong_for_widths_of_no_power_of_two"


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
    assert "was refused: wrong" in late.out


def test_a_winner_of_a_gate_without_nan_is_named_and_not_confirmed(here: Any, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for template in FLAT.glob("*.j2"):
        shutil.copy(template, folder)
    (folder / "kernel.py").write_text(
        "from dataclasses import replace\nfrom evo.problem.kernel import load_kernel\n"
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
