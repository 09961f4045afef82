"""An earlier export is what a new one begins with: its winners stay where nothing else was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evo.export import find_exporter
from evo.export._earlier import beside, requests_from
from evo.problem.loading import load_kernel
from tests.export.exports import manifest_of, request_for

KERNELS = Path(__file__).parent.parent.parent / "kernels"
ARCHS = ("sm_90", "sm_89")
WHAT_IS_TOLD = ("candidate", "genome", "source_digest", "timing", "launch", "record", "jit")


def _told(folder: Path, arch: str) -> dict[str, Any]:
    """By the workload, as the kernel writes it by now: it may have got options."""
    manifest = manifest_of(folder)
    kernel = load_kernel(manifest["kernel"]["name"])
    variants = (v for v in manifest["variants"] if v["arch"] == arch)
    return {
        kernel.workload("cuda", p["workload"]["key"]).key: ({n: v.get(n) for n in WHAT_IS_TOLD}, p["candidate"], p["timing"])
        for v in variants
        for p in (v, *v["points"])
    }


def test_a_shipped_package_comes_back_with_what_a_newer_run_found_beside_it(tmp_path: Path) -> None:
    earlier = requests_from(KERNELS / "add_rmsnorm", tmp_path)
    (one,) = {r.arch for r in earlier}
    key = earlier[0].items[0].workload.key
    newer = request_for("cuda", "sm_89", tmp_path / "both", key, kernel="add_rmsnorm", run="newer")
    find_exporter("shipped").export(*beside([newer], earlier))
    assert one == "sm_90"
    assert earlier[0].environment["device"].startswith("NVIDIA H")
    before, after = (_told(folder, "sm_90") for folder in (KERNELS / "add_rmsnorm", tmp_path / "both"))
    assert after == before
    of_new = {v["workload"]["key"]: v for v in manifest_of(tmp_path / "both")["variants"] if v["arch"] == "sm_89"}
    assert of_new[key]["record"]["run"] == "newer"
    assert of_new[key]["standing"] == "measured"
    assert {v["standing"] for k, v in of_new.items() if k != key} == {"compiled"}
    assert _told(tmp_path / "both", "sm_89").keys() == _told(KERNELS / "add_rmsnorm", "sm_89").keys()


def test_what_a_newer_run_has_a_winner_for_replaces_the_earlier_one(tmp_path: Path) -> None:
    earlier = requests_from(KERNELS / "softmax_forward", tmp_path)
    keys = [item.workload.key for part in earlier for item in part.items]
    newer = request_for("cuda", earlier[0].arch, tmp_path, keys[0], kernel="softmax", run="newer")
    found = beside([newer], earlier)
    assert [item.workload.key for part in found for item in part.items] == keys
    assert found[0].items == newer.items


@pytest.mark.slow
def test_the_command_takes_folders_and_names_of_packages_beside_runs(here: Any, tmp_path: Path) -> None:
    """A CPU run is added to a package for GPUs: both targets are in the new one, which can be exported again."""
    words = ("--target", "cpu", "--evaluations", "1", "--finalists", "1", "--cold", "--name", "mine")
    assert here("search", "softmax", "--workload", "rows=16,cols=96,dtype=float32", *words).code == 0
    shipped = ("--format", "shipped", "--out")
    done = here("export", "mine", "evo.ready.softmax_forward", *shipped, "mine")
    assert done.code == 0, done.err
    variants = manifest_of(tmp_path / "mine")["variants"]
    assert {v["arch"] for v in variants if v["target"] == "cuda"} == {*ARCHS}
    assert [v["record"]["run"] for v in variants if v["target"] == "cpu"] == ["mine"]
    assert here("export", "mine", *shipped, "mine").code == 0, "a run's name is that, whatever folder lies here"
    assert {v["target"] for v in manifest_of(tmp_path / "mine")["variants"]} == {"cpu"}
    done = here("export", "./mine", *shipped, "again", "--db", "none.db")
    assert done.code == 0, done.err
    own = [next(v for v in manifest_of(tmp_path / f)["variants"]) for f in ("mine", "again")]
    assert own[0]["timing"] == own[1]["timing"] is not None

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"variants": 3}')
    refused = here("export", "./other", *shipped, "again")
    assert refused.code == 2
    assert "other/manifest.json is no manifest of an export" in refused.err
