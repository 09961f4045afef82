"""A kernel whose arguments have three dtypes and a structure of 128 bytes, from `evo check` to a package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ended import run_python

PICKED = Path(__file__).parents[1] / "picked"
WORKLOAD = "rows=40,cols=33,dtype=float32,weight_dtype="


@pytest.mark.slow
def test_three_dtypes_and_a_structure_go_through_check_search_finals_and_export(here: Any, tmp_path: Path) -> None:
    shutil.copytree(PICKED, tmp_path / "picked")
    checked = here("check", "picked", "--target", "cpu", "--workload", WORKLOAD + "float64", "--cases", "16")
    assert checked.code == 0, checked
    assert "1 of 1 passed the gate and 16 random cases" in checked.out
    searched = here(
        "search", "picked", "--target", "cpu", "--finalists", "1", "--evaluations", "2", "--name", "run",
        "--workload", WORKLOAD + "float64", "--workload", WORKLOAD + "int8",
    )  # fmt: skip
    assert searched.code == 0, searched
    best = here("best", "--json").document
    assert {row["workload"].rpartition("=")[2] for row in best} == {"float64", "int8"}
    assert here("sanitize", best[0]["candidate"], "--tool", "address").code == 0
    assert here("export", "run", "--out", "exported").code == 0
    right = run_python(tmp_path, "-m", "exported", "check", "--cases", "16")
    assert right.returncode == 0, right
    manifest = json.loads((tmp_path / "exported" / "manifest.json").read_text())
    (place,) = (a for a in manifest["kernel"]["arguments"] if a["kind"] == "structure")
    assert (place["bytes"], place["alignment"]) == (128, 64)
    assert {"float32"} == manifest["kernel"]["tolerance"].keys() - {"float64"}, "integers are compared exactly"


def test_a_dtype_that_is_no_choice_of_the_option_is_refused(here: Any, tmp_path: Path) -> None:
    shutil.copytree(PICKED, tmp_path / "picked")
    ended = here("check", "picked", "--target", "cpu", "--workload", WORKLOAD + "float16")
    assert ended.code == 2
    assert "unknown weight_dtype of kernel picked 'float16'; did you mean float64 or float32?" in ended.err


def test_a_candidate_that_reads_its_structure_wrong_is_refused(here: Any, tmp_path: Path) -> None:
    shutil.copytree(PICKED, tmp_path / "picked")
    source = tmp_path / "picked" / "cpu.cpp.j2"
    source.write_text(source.read_text().replace("place.weight[c]", "place.weight[0]"))
    refused = here("check", "picked", "--target", "cpu", "--workload", WORKLOAD + "float64", "--json")
    assert refused.code == 1
    assert "outside the tolerance" in str(refused.document["branches"][0])
