"""Sources that are shipped as differences, and manifests without what follows from the rest: all of it comes back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evo.export import MANIFEST, sha256_of, written
from evo.export.shipped import stored
from evo.runtime.manifest import read_manifest
from evo.runtime.package import DIFFERENCES, Package, Unavailable
from tests.export.exports import edit_manifest

KERNELS = Path(__file__).parent.parent.parent / "kernels"
ODD = ["", "}", "    if (x)", "--- a", "+++ b", "@@ -1,1 +1,1 @@", "-- x", "\\ No newline at end of file", "x\r", "é"]
TEXTS = st.lists(st.lists(st.sampled_from(ODD), max_size=12).map("\n".join), min_size=1, max_size=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KERNELS / "softmax_forward", tmp_path / "softmax"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=TEXTS)
def test_sources_come_back_byte_for_byte_whatever_stands_in_them(folder: Path, texts: list[str]) -> None:
    sources = {f"source_{i}.cu": text for i, text in enumerate(texts)}
    files = stored(sources)
    (folder / DIFFERENCES).unlink(missing_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    digests = {name: sha256_of(data) for name, data in files.items()}
    edit_manifest(folder, lambda manifest: manifest.update(files=digests))
    package = Package("of_odd_sources", [str(folder)])
    assert {name: package.source(name).decode() for name in sources} == sources


def test_alike_sources_are_stored_once_and_a_standard_tool_makes_the_others(folder: Path) -> None:
    empty, *parts = re.split(r"^--- (\S+)\n\+\+\+ (\S+)\n", (folder / DIFFERENCES).read_text(), flags=re.MULTILINE)
    assert empty == ""
    told = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    waiting = {name: (other, f"--- {other}\n+++ {name}\n{part}") for other, name, part in told}
    package = Package("softmax", [str(folder)])
    names = {record["source"] for record in (*package.manifest["variants"], *package.manifest["general"])}
    assert waiting.keys() | {path.name for path in folder.glob("*.cu")} == names
    assert len(waiting) > 30
    while waiting:
        name = next(n for n, (other, _) in waiting.items() if other not in waiting)
        other, part = waiting.pop(name)
        subprocess.run(["patch", "-s", "-o", name, other], input=part, text=True, cwd=folder, check=True)
        assert (folder / name).read_bytes() == package.source(name)


def test_a_changed_difference_is_not_compiled(folder: Path) -> None:
    path = folder / DIFFERENCES
    path.write_text(path.read_text().replace("+using T = bf16;", "+using T = f16;", 1))
    package = Package("softmax", [str(folder)])
    with pytest.raises(Unavailable, match=f"{DIFFERENCES} is not the file that was exported"):
        package.variants[0].source()


def test_a_manifest_that_leaves_nothing_out_says_the_same(folder: Path) -> None:
    """What is left out is a way to write, and nothing that a reader has to look for."""
    manifest = read_manifest(folder / MANIFEST)
    brief = (folder / MANIFEST).read_bytes()
    assert written(manifest) == brief
    whole = json.loads(json.dumps(manifest))
    for record in (*whole["variants"], *whole["general"]):
        for problem in (record, *record.get("points", ())):
            problem["workload"] = problem["workload"]["key"]
    (folder / MANIFEST).write_text(json.dumps(whole))
    assert (folder / MANIFEST).read_bytes() != brief
    assert read_manifest(folder / MANIFEST) == manifest
