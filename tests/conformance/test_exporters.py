"""Every export format keeps what formats promise; a new exporter file is picked up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo.errors import UsageError
from evo.export import exporter_names, find_exporter
from evo.testing.exporters import ExporterSuite
from tests.export.exports import request_for


class TestExporters(ExporterSuite):
    names = tuple(name for name in exporter_names() if find_exporter(name).holds != "run")
    gpu_only = frozenset({"kernelbench"})


@pytest.mark.parametrize("name", exporter_names())
def test_every_format_says_the_name_of_its_file(name: str) -> None:
    assert find_exporter(name).name == name


TARGETS = {"cuda": "sm_89", "cpu": "native"}
LAYERNORM = "rows=64,cols=96,dtype=float32"
ATTENTION = "batch=1,heads=4,kv_heads=4,q_len=70,kv_len=80,head_dim=64,dtype=float32"
REFUSED = [
    ("module", "cpu", "my-kernel", LAYERNORM, "'my-kernel' cannot be imported"),
    ("module", "cpu", "class", LAYERNORM, "cannot be imported"),
    ("module", "cpu", "größe", LAYERNORM, "cannot be imported"),
    ("module", "cpu", "json", LAYERNORM, "would hide the one"),
    ("huggingface", "cpu", "1st", LAYERNORM, "'1st'"),
    ("kernelbench", "cpu", "out", LAYERNORM, "GPUs only, and these are for cpu"),
    ("kernelbench", "cuda", "out", f"{LAYERNORM},bias=false", "no place for: its problem has weight and bias"),
    ("module", "cuda", "out", f"{ATTENTION[:-2]}16,precision=half", "for research"),
    ("kernelbench", "cuda", "out", f"{ATTENTION[:-2]}16,precision=half", "for research"),
    ("flashinfer-bench", "cpu", "out", f"{ATTENTION},lse=true", "flashinfer-bench has no place for"),
    ("flashinfer-bench", "cpu", "out", f"{ATTENTION},causal=true", "flashinfer-bench has no place for"),
]


@pytest.mark.parametrize(("name", "target", "folder", "text", "reason"), REFUSED)
def test_a_name_or_workload_that_a_format_has_no_place_for_is_refused(
    name: str, target: str, folder: str, text: str, reason: str, tmp_path: Path
) -> None:
    kernel = "layernorm" if text.startswith(LAYERNORM) else "attention"
    with pytest.raises(UsageError, match=reason):
        find_exporter(name).export(request_for(target, TARGETS[target], tmp_path / folder, text, kernel=kernel))
    assert not list(tmp_path.iterdir())
