"""evo import-workloads: FlashInfer-Bench's definitions and workloads become job files, or are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evo.cli import run
from evo.cli.jobs import read_jobs
from evo.export.flashinfer_bench import import_workloads
from evo.problem.loading import load_kernel
from tests.ended import run_here

KERNELS = [load_kernel("layernorm"), load_kernel("attention")]
NORM: dict[str, Any] = {
    "name": "layernorm_h4096",
    "op_type": "layernorm",
    "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 4096}},
    "inputs": {
        "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "float16"},
        "weight": {"shape": ["hidden_size"], "dtype": "float16"},
        "bias": {"shape": ["hidden_size"], "dtype": "float16"},
    },
    "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "float16"}},
    "reference": "def run(hidden_states, weight, bias):\n    eps = 1e-6\n    return hidden_states\n",
}
PREFILL: dict[str, Any] = {
    "name": "single_prefill_causal_h32_kv8_d128",
    "op_type": "single_prefill",
    "axes": {
        **{n: {"type": "var"} for n in ("qo_len", "kv_len")},
        "heads": {"type": "const", "value": 32},
        "kv_heads": {"type": "const", "value": 8},
        "dim": {"type": "const", "value": 128},
    },
    "inputs": {
        "q": {"shape": ["qo_len", "heads", "dim"], "dtype": "bfloat16"},
        "k": {"shape": ["kv_len", "kv_heads", "dim"], "dtype": "bfloat16"},
        "v": {"shape": ["kv_len", "kv_heads", "dim"], "dtype": "bfloat16"},
        "sm_scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"output": {"shape": ["qo_len", "heads", "dim"], "dtype": "bfloat16"}},
    "reference": "def run(q, k, v, sm_scale):\n    return q\n",
}
SCALE = {"sm_scale": {"type": "scalar", "value": 0.125}}


def write(folder: Path, definition: Mapping[str, Any], *axes: Mapping[str, int], inputs: object = None) -> Path:
    """Adds a definition with a workload for each of `axes` to a dataset."""
    place = folder / "definitions" / definition["op_type"] / f"{definition['name']}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(definition))
    lines = folder / "workloads" / f"{definition['name']}.jsonl"
    lines.parent.mkdir(exist_ok=True)
    records = [
        {"definition": definition["name"], "workload": {"axes": a, "inputs": inputs or {}, "uuid": str(i)}}
        for i, a in enumerate(axes)
    ]
    lines.write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def keys(folder: Path, target: str = "cuda") -> list[str]:
    taken, _ = import_workloads(folder, KERNELS, target)
    return [key for t in taken for key in t.workloads]


def reasons(folder: Path, target: str = "cuda") -> list[str]:
    _, refused = import_workloads(folder, KERNELS, target)
    return [r.reason for r in refused]


def test_layernorm_is_taken_with_the_eps_of_its_reference_and_each_size_once(tmp_path: Path) -> None:
    write(tmp_path, NORM, {"batch_size": 7}, {"batch_size": 128}, {"batch_size": 7})
    texts = [f"rows={rows},cols=4096,dtype=float16,eps=1e-06" for rows in (7, 128)]
    assert keys(tmp_path) == [KERNELS[0].workload("cuda", text).key for text in texts]


def test_leading_axes_are_rows_and_what_is_left_out_is_an_option(tmp_path: Path) -> None:
    shape = ["batch_size", "seq", "hidden_size"]
    definition = {
        **NORM,
        "axes": {**NORM["axes"], "seq": {"type": "var"}},
        "inputs": {"x": {"shape": shape, "dtype": "float16"}, "eps": {"shape": None, "dtype": "float32"}},
        "outputs": {"y": {"shape": shape, "dtype": "float16"}},
        "reference": None,
    }
    eps = {"eps": {"type": "scalar", "value": 0.5}}
    write(tmp_path, definition, {"batch_size": 3, "seq": 5}, inputs=eps)
    text = "rows=15,cols=4096,dtype=float16,bias=false,eps=0.5,weight=false"
    assert keys(tmp_path) == [KERNELS[0].workload("cuda", text).key]


def test_a_single_prefill_is_taken_in_its_memory_order(tmp_path: Path) -> None:
    write(tmp_path, PREFILL, {"qo_len": 100, "kv_len": 300}, inputs=SCALE)
    assert keys(tmp_path) == [
        "batch=1,heads=32,kv_heads=8,q_len=100,kv_len=300,head_dim=128,dtype=bfloat16,"
        "additive=false,attn_mask=false,causal=true,layout=bshd,lse=false,mask_axes=qk,precision=float,scale=0.125"
    ]


@pytest.mark.parametrize("op_type", ["gqa_ragged", "gqa_paged", "mla_paged"])
def test_ragged_and_paged_attention_are_refused_by_name(tmp_path: Path, op_type: str) -> None:
    write(tmp_path, {**PREFILL, "op_type": op_type}, {"qo_len": 1, "kv_len": 1}, inputs=SCALE)
    assert keys(tmp_path) == []
    (reason,) = reasons(tmp_path)
    assert reason.startswith(f"{op_type} is not what attention computes: ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op_type": "rmsnorm"}, "no kernel here computes op_type 'rmsnorm'"),
        ({"outputs": {**NORM["outputs"], "mean": {"shape": ["batch_size"], "dtype": "float32"}}}, "asks for 2 outputs"),
        ({"inputs": {**NORM["inputs"], "residual": NORM["inputs"]["hidden_states"]}}, "another input, residual"),
        ({"inputs": {**NORM["inputs"], "bias": {"shape": ["hidden_size"], "dtype": "float32"}}}, "several dtypes"),
        ({"inputs": {**NORM["inputs"], "bias": {"shape": ["batch_size"], "dtype": "float16"}}}, "bias has batch_size"),
        ({"inputs": {"weight": NORM["inputs"]["weight"]}}, "none of its inputs is called hidden_states or input or x"),
        ({"reference": "eps = 1e-5\nf(eps=1e-6)\n"}, "several values of eps"),
        ({"axes": {**NORM["axes"], "hidden_size": {"type": "var"}}}, "does not say how long axis hidden_size is"),
        ({"axes": {**NORM["axes"], "hidden_size": {"value": "7"}}}, "does not say how long axis hidden_size is"),
        ({"axes": {**NORM["axes"], "hidden_size": {"value": 0}}}, "it is empty (hidden_size is 0)"),
        ({"axes": {**NORM["axes"], "hidden_size": {"value": 1 << 20}}}, "cols must be 1 to 65,536, got 1,048,576"),
    ],
)
def test_what_a_kernel_does_not_compute_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    write(tmp_path, {**NORM, **change}, {"batch_size": 7})
    assert keys(tmp_path) == []
    assert reason in reasons(tmp_path)[0]


def test_what_only_a_workload_or_only_a_target_lacks_is_refused_there(tmp_path: Path) -> None:
    write(tmp_path, PREFILL, {"qo_len": 1, "kv_len": 1}, inputs={"sm_scale": {"type": "random"}})
    assert "input sm_scale is not a given number" in reasons(tmp_path)[0]
    write(tmp_path, NORM, {"batch_size": 7})
    assert keys(tmp_path, "cpu") == []
    assert "float16" in reasons(tmp_path, "cpu")[0]


def test_the_command_writes_jobs_that_search_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    write(folder, NORM, {"batch_size": 7}, {"batch_size": 9})
    write(folder, PREFILL, {"qo_len": 64, "kv_len": 64}, inputs=SCALE)
    write(folder, {**NORM, "name": "rms", "op_type": "rmsnorm"}, {"batch_size": 7})
    out = tmp_path / "jobs"
    assert run(["import-workloads", str(folder), "--out", str(out), "--budget", "30s"]) == 0
    printed = capsys.readouterr()
    assert "left out: rms: no kernel here computes op_type 'rmsnorm'" in printed.err
    assert f"evo search {out / 'data-layernorm.toml'}" in printed.out
    job = read_jobs(out / "data-layernorm.toml")[0]
    assert (job["kernel"], job["target"], job["budget"]) == ("layernorm", "cuda", "30s")
    assert [KERNELS[0].workload("cuda", text).dim("rows") for text in job["workloads"]] == [7, 9]
    (text,) = read_jobs(out / "data-attention.toml")[0]["workloads"]
    assert KERNELS[1].workload("cuda", text).dim("heads") == 32
    assert run(["import-workloads", str(folder), "--out", str(tmp_path / "others"), "--kernel", "layernorm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [t["definition"] for t in found["taken"]] == ["layernorm_h4096"]
    assert "rms" in [r["definition"] for r in found["refused"]]
    assert list(found["jobs"]) == [str(tmp_path / "others" / "data-layernorm.toml")]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence of a command that must fail as bad usage."""
    ended = run_here(capsys, "import-workloads", *words)
    assert ended.code == 2
    return ended.sentence


def test_a_job_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", NORM, {"batch_size": 7})
    job = tmp_path / "data-layernorm.toml"
    job.write_text("mine")
    assert f"{job} is there already" in refusal(capsys, str(tmp_path / "data"), "--out", str(tmp_path))
    assert job.read_text() == "mine"


NOT_AS_WRITTEN = "bad.json is not as FlashInfer-Bench writes it"
DAMAGED = [
    ("definitions/bad.json", json.dumps(NORM), "definition 'layernorm_h4096' is stated a second time"),
    ("definitions/bad.json", "[" * 100_000, NOT_AS_WRITTEN),
    ("definitions/bad.json", '{"op_type": "layernorm"}', f"{NOT_AS_WRITTEN} (there is no 'name')"),
    ("workloads/bad.jsonl", "\n{}\n", "bad.jsonl, line 2 is not as FlashInfer-Bench writes it (there is no 'definition')"),
    ("workloads/bad.jsonl", '{"definition": "other", "workload": {"axes": {}}}', "line 1 is not as"),
]


@pytest.mark.parametrize(
    "change", [{"axes": {"hidden_size": 1}}, {"inputs": {"x": 3}}, {"outputs": {"y": {"shape": ["a"], "dtype": []}}}]
)
def test_a_definition_of_another_form_is_left_out_with_the_reason(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, {**NORM, **change}, {"batch_size": 7})
    assert keys(tmp_path) == []
    assert "is not as FlashInfer-Bench writes it" in reasons(tmp_path)[0]


@pytest.mark.parametrize(("file", "text", "sentence"), DAMAGED)
def test_a_damaged_dataset_is_told_of_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, sentence: str
) -> None:
    folder = write(tmp_path / "data", NORM, {"batch_size": 7})
    (folder / file).write_text(text)
    assert sentence in refusal(capsys, str(folder), "--out", str(tmp_path / "jobs"))
    assert not (tmp_path / "jobs").exists()


def test_what_is_no_dataset_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no definition" in refusal(capsys, str(tmp_path))
    assert "is not a folder" in refusal(capsys, str(tmp_path / "absent"))
    assert "unknown target 'tpu'" in refusal(capsys, str(tmp_path), "--target", "tpu")
    write(tmp_path, {**NORM, "op_type": "rmsnorm"}, {"batch_size": 7})
    text = refusal(capsys, str(tmp_path), "--out", str(tmp_path / "jobs"))
    assert "no kernel here computes op_type 'rmsnorm'" in text
    (tmp_path / "definitions" / "latin.json").write_bytes(b"\xff\xfe")
    assert "latin.json is not as FlashInfer-Bench writes it ('utf-8' codec" in refusal(capsys, str(tmp_path))
