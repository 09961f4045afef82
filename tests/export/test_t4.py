"""A run as T4: valid by the schema, all candidates in it, failures with their kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo.cli import run
from evo.errors import UnknownNameError, UsageError
from evo.evaluation import Status
from evo.export import find_exporter
from evo.export._winners import export_all_candidates
from evo.lineage.store import Store
from evo.search.run import describe_environment
from evo.targets import find_target
from tests.lineage import samples

EXPORTER = find_exporter("t4")
FAILURES = [s for s in Status if not s.passed and s not in (Status.WRONG, Status.COMPILE_ERROR)]

KINDS = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
TIMES = {"compilation_time", "framework", "search_algorithm", "validation"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "lineage.db", write=True) as opened:
        run = samples.new_run(opened, "recorded")
        opened.add(run, samples.ref(0), samples.passed(0, 0.5), elapsed_s=1.0)
        opened.add(run, samples.ref(1, 0), samples.same_code(1, 0), elapsed_s=2.0)
        opened.add(run, samples.ref(2), samples.refused(2), elapsed_s=3.0)
        opened.add(run, samples.ref(3), samples.not_compiled(3), elapsed_s=4.0)
        opened.add(run, samples.ref(4, task=1), samples.passed(4, 0.8, task=1), elapsed_s=5.0)
        for number, status in enumerate(FAILURES, 5):
            opened.add(run, samples.ref(number), samples.failed(status), elapsed_s=float(number))
        yield opened


@pytest.fixture
def documents(store: Store, tmp_path: Path) -> list[dict[str, Any]]:
    written = export_all_candidates(store, ["recorded"], EXPORTER, tmp_path / "t4")
    return [json.loads(p.read_text()) for p in written if p.name.endswith(".t4.json")]


def test_each_workload_has_a_document_that_the_schema_allows(documents: list[dict[str, Any]]) -> None:
    """T4 results 1.0.0, github.com/odgaard/TuningSchema: what is required, and the types."""
    assert [len(d["results"]) for d in documents] == [4 + len(FAILURES), 1]
    assert {d["schema_version"] for d in documents} == {"1.0.0"}
    for result in (r for d in documents for r in d["results"]):
        assert isinstance(result["configuration"], dict)
        assert isinstance(result["timestamp"], str)
        assert result["invalidity"] in KINDS
        assert isinstance(result["correctness"], float)
        assert isinstance(result["objectives"], list)
        assert all(isinstance(result["times"][name], int | float) for name in TIMES)
        for measurement in result["measurements"]:
            assert isinstance(measurement["name"], str)
            assert isinstance(measurement["value"], float | str)
            assert isinstance(measurement["unit"], str)


def test_a_candidate_has_its_times_in_milliseconds_and_a_duplicate_those_of_the_first(
    documents: list[dict[str, Any]], store: Store
) -> None:
    stored = store.evaluations(store.run("recorded"))[0].evaluation
    timing = next(t for t in stored.timings if t.contender == "candidate")
    result = documents[0]["results"][0]
    assert (result["invalidity"], result["correctness"], result["objectives"]) == ("correct", 1.0, ["time"])
    assert result["measurements"][0] == {"name": "time", "value": timing.median_us / 1e3, "unit": "ms"}
    assert result["times"]["runtimes"] == [t / 1e3 for t in timing.samples_us]
    assert result["times"]["compilation_time"] == result["times"]["compilation"] == stored.build.seconds * 1e3
    assert result["configuration"] == samples.genome(0).parameters
    duplicate = documents[0]["results"][1]
    assert duplicate["measurements"] == result["measurements"]
    assert (duplicate["evo"]["same_code_as"], duplicate["evo"]["parents"]) == (0, [0])


def test_failures_have_their_kind_and_no_times(documents: list[dict[str, Any]]) -> None:
    by_status = {r["evo"]["status"]: r for r in documents[0]["results"][2:]}
    assert {s: r["invalidity"] for s, r in by_status.items()} == {
        "wrong": "correctness",
        "impossible": "correctness",
        "render_error": "compile",
        "compile_error": "compile",
        "compile_timeout": "timeout",
        "timeout": "timeout",
        "load_error": "runtime",
        "launch_error": "runtime",
        "crash": "runtime",
        "illegal_address": "runtime",
        "misaligned_address": "runtime",
        "trap": "runtime",
        "out_of_memory": "runtime",
    }
    for result in by_status.values():
        assert "runtimes" not in result["times"]
        assert isinstance(result["measurements"][0]["value"], str)
        assert result["correctness"] == 0.0


def test_what_is_not_one_run_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown run 'recordad'; did you mean recorded"):
        export_all_candidates(store, ["recordad"], EXPORTER, tmp_path / "t4")
    with pytest.raises(UsageError, match="name one, not 2"):
        export_all_candidates(store, ["recorded", "recorded"], EXPORTER, tmp_path / "t4")
    samples.new_run(store, "empty")
    with pytest.raises(UsageError, match="'empty' has no candidates"):
        export_all_candidates(store, ["empty"], EXPORTER, tmp_path / "t4")


def test_the_command_exports_a_run(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t4"
    assert run(["export", "recorded", "--format", "t4", "--out", str(out), "--db", str(tmp_path / "lineage.db")]) == 0
    assert "3 files for run recorded" in capsys.readouterr().out
    assert len(list(out.glob("*.t4.json"))) == 2


def test_the_release_of_cuda_is_told_where_it_is_recorded(store: Store, tmp_path: Path) -> None:
    """As a field of its own or, of runs of before, among what the driver tells; a CPU has none."""
    told = {}
    for name, change in {
        "own": {"cuda": "13.0"},
        "before": {"cuda": "", "details": {"cuda_driver": "12.9"}},
        "cpu": {"cuda": "", "details": {}},
    }.items():
        run = store.create_run(replace(samples.SPEC, name=name), replace(samples.ENVIRONMENT, **change))
        store.add(run, samples.ref(0), samples.passed(0), elapsed_s=1.0)
        written = export_all_candidates(store, [name], EXPORTER, tmp_path / name)
        path = next(p for p in written if p.name.endswith(".t4.json"))
        told[name] = json.loads(path.read_text())["metadata"]["environment"]["device_query"].get("cuda")
    assert told == {"own": "13.0", "before": "12.9", "cpu": None}
    here = describe_environment(find_target("cpu"), "native")
    assert (here.cuda, here.nvrtc) == ("", "")
