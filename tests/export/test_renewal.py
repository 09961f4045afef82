"""`evo renew`: a package gets the launchers of this evo, and keeps what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Importer
from exports import edit_manifest

from evo.cli import run
from evo.errors import UsageError
from evo.export._folder import file_digests
from evo.export._renewal import renew


def older(folder: Path) -> None:
    """As if another evo had written it: a launcher with less in it, one more file, and one fewer."""
    (folder / "_tensors.py").write_text("# an old one\n")
    (folder / "_gone_since.py").write_text("# there is none any more\n")
    (folder / "_choice.py").unlink()
    digests = file_digests(folder)
    del digests["manifest.json"]
    edit_manifest(folder, lambda m: m.update(files=digests))


def test_the_launchers_are_this_evos_and_the_rest_is_as_it_was(copy_of: Path, use: Importer) -> None:
    first = file_digests(copy_of)
    variants = json.loads((copy_of / "manifest.json").read_text())["variants"]
    assert renew(copy_of) == []
    assert file_digests(copy_of) == first
    older(copy_of)
    assert renew(copy_of) == ["_choice.py", "_gone_since.py", "_tensors.py"]
    now = file_digests(copy_of)
    manifest = json.loads((copy_of / "manifest.json").read_text())
    assert {n: d for n, d in now.items() if n != "manifest.json"} == manifest["files"]
    assert manifest["files"] == {n: d for n, d in first.items() if n != "manifest.json"}
    assert manifest["variants"] == variants
    assert manifest["renewed"]["evo_version"]
    assert use(copy_of).explain(torch.randn(3, 96), (96,)).startswith("variant 0 ")


def test_a_file_that_was_changed_is_not_written_over(copy_of: Path) -> None:
    (copy_of / "frontend.py").write_text("mine = 1\n")
    with pytest.raises(UsageError, match=r"frontend\.py is not the file that was exported"):
        renew(copy_of)
    assert (copy_of / "frontend.py").read_text() == "mine = 1\n"


def test_a_kernel_that_is_called_otherwise_now_is_refused(copy_of: Path) -> None:
    edit_manifest(copy_of, lambda m: m["kernel"]["arguments"].pop())
    with pytest.raises(UsageError, match="has another arguments than"):
        renew(copy_of)


def test_other_public_names_are_refused(copy_of: Path) -> None:
    init = copy_of / "__init__.py"
    init.write_text(init.read_text().replace("LayerNorm", "LayerNormed"))
    digests = file_digests(copy_of)
    del digests["manifest.json"]
    edit_manifest(copy_of, lambda m: m.update(files=digests))
    with pytest.raises(UsageError, match="has other public names than"):
        renew(copy_of)


@pytest.mark.parametrize("damage", [{"files": []}, {"files": {"../x": ""}}, {"kernel": None}])
def test_a_damaged_manifest_is_said_to_be(copy_of: Path, damage: dict[str, Any]) -> None:
    edit_manifest(copy_of, lambda m: m.update(damage))
    with pytest.raises(UsageError, match="is damaged"):
        renew(copy_of)


def test_the_command(copy_of: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["renew", str(copy_of)]) == 0
    assert capsys.readouterr().out == f"{copy_of}: nothing has changed\n"
    older(copy_of)
    assert run(["renew", str(copy_of), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[str(copy_of)] == ["_choice.py", "_gone_since.py", "_tensors.py"]
    edit_manifest(copy_of, lambda m: m.update(format_version=1))
    for folder, why in ((tmp_path, f"did you mean {copy_of}?"), (copy_of, "has version 1 of its format")):
        assert run(["renew", str(folder)]) == 2
        assert why in capsys.readouterr().err
