"""The notebooks of the documentation run, one from its search to its export, the other to the file that it leaves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.ended import run_python

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "first-search.ipynb"
LACKING = [name for name in ("nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None]

PROGRAM = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], 4)
book.cells.insert(0, nbformat.v4.new_code_cell("import tests.hurried"))
nbclient.NotebookClient(book, timeout=200).execute()
del book.cells[0]
nbformat.write(book, "ran.ipynb")
"""


def text_of(output: dict[str, object]) -> str:
    data = output.get("data")
    found = output.get("text") or output.get("traceback") or (data["text/plain"] if isinstance(data, dict) else "")
    return "".join(found) if isinstance(found, list) else str(found)


def outputs_of(path: Path) -> list[list[dict[str, object]]]:
    return [cell["outputs"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_what_is_stored_is_what_a_reader_sees() -> None:
    defined, searched, best, called, refused, exported, imported = outputs_of(NOTEBOOK)
    assert defined == []
    assert [len(outputs) for outputs in (searched, best, called, refused, exported, imported)] == [1] * 6
    assert len(text_of(searched[0]).splitlines()) <= 6
    assert text_of(called[0]) == text_of(imported[0]) == "True"
    text = NOTEBOOK.read_text()
    assert not [word for word in ("/tmp", "/home", "/work", "/root", "pid ") if word in text]


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKING), reason=f"{' and '.join(LACKING)} not installed")
def test_the_notebook_runs_as_it_is_stored(tmp_path: Path) -> None:
    own = {"EVO_KERNELS_CACHE": str(tmp_path / "kernels"), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = run_python(tmp_path, "-c", PROGRAM, str(NOTEBOOK), **own)
    assert done.returncode == 0, done.stderr
    searched, *rest = outputs_of(tmp_path / "ran.ipynb")[1:]
    (shown,) = [output for output in searched if output["output_type"] == "display_data"]
    lines = text_of(shown).splitlines()
    assert lines[0].startswith(("winner ", "no winner", "not confirmed", "the finals"))
    assert len(lines) <= 6
    assert "run.export('my_add_relu')" in lines[-1]
    assert text_of(rest[1][-1]) == text_of(rest[-1][-1]) == "True"
    assert text_of(rest[2][0]) == "UsageError: budget='soon' is not a duration; write e.g. 60s, 10m or 2h"


KIT = """
import json, sys
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
for cell in cells:
    exec("".join(cell["source"]), globals())
    budget, options = "2s", ["--target", "cpu", "--kernel", "rmsnorm_backward"]
assert len(cells) == 4
"""


@pytest.mark.slow
def test_the_notebook_for_a_rented_gpu_leaves_a_file(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-c", KIT, str(ROOT / "docs" / "rented-gpu.ipynb"), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "runs").glob("evo-kit-*.db")
    assert f"runs/{file.name}: 0." in done.stdout
