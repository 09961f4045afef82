"""Outside targets, languages and the run time, no module knows a device by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import evo

ROOT = Path(evo.__file__).parent
DEVICE = re.compile(r"cuda|cpu|\.?cu|\.?cpp|cuda_cpp|nvcc|\(?(sm\|compute\)|sm_|compute_).*", re.IGNORECASE)
"""A text that is a device, a language or an architecture, and no sentence that speaks of one."""
PLUG_IN = re.compile(r"evo\.targets\.(cuda|cpu|_c\w+|languages\.\w+)")
ROOMS = ("targets", "runtime", "testing")
FIELDS = {
    "report/sentences.py": {"cuda", "CUDA", "sm_mhz"},  # what a run records of its environment, in words
    "export/t4.py": {"cuda", "e.cuda"},  # of that format, and of the record of a machine
    "export/flashinfer_bench.py": {"cuda"},
    "cli/export.py": {"cuda"},  # the default of an option
    "cli/doctor.py": {"torch.version.cuda", "CUDA "},  # what PyTorch is built with
}
"""By file, fields of records, defaults and what is said: nothing branches on a device there."""


def named(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what names a device: literals but docstrings and help, and attributes of torch that are a device's."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    help_texts = {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg in ("help", "metavar")
        for node in ast.walk(keyword.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in help_texts:
            text = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
            if DEVICE.fullmatch(text.strip()):
                yield node.lineno, text
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and PLUG_IN.fullmatch(node.module or ""):
            yield node.lineno, f"from {node.module}"


@pytest.mark.parametrize("room", sorted({p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py")} - {*ROOMS}))
def test_no_module_outside_targets_languages_and_the_run_time_names_a_device(room: str) -> None:
    place = ROOT / room
    found = []
    for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        found += [f"{name}:{line}: {text}" for line, text in named(file) if text not in FIELDS.get(name, ())]
    assert found == []


def test_a_name_of_a_device_is_seen_wherever_code_may_branch_on_it(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    lines = ['x == "cuda"', '{"cpu": 1}[x]', 'x.startswith("sm_")', 'x.suffix == ".cu"', "torch.cuda.synchronize()"]
    lines += ['re.match(r"(sm|compute)_", x)', "from evo.targets.languages.cpp import FLAGS"]
    file.write_text("\n".join([*lines, 'f(help="cuda")', 'g("run with --target cpu")']))
    assert sorted(line for line, _ in named(file)) == [1, 2, 3, 4, 5, 6, 7]
