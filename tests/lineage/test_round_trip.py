"""What is recorded comes back, field by field; what must not be recorded is refused."""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from datetime import datetime, timedelta
from typing import Any

import pytest
import samples as s
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evo.analysis.candidates import read_candidate, read_source
from evo.analysis.runs import find_run
from evo.errors import EngineError, StoreError
from evo.evaluation import Check, Evaluation, Parent, Status
from evo.lineage import RunStatus, Stage
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload


def unset_fields(record: Any, path: str = "") -> list[str]:
    """Fields of a tree of dataclasses that still have their default."""
    found = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default is not dataclasses.MISSING and value == field.default:
            found.append(f"{path}{field.name}")
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if dataclasses.is_dataclass(part):
                found += unset_fields(part, f"{path}{field.name}.")
    return found


def test_the_sample_leaves_no_field_at_its_default() -> None:
    not_stored = {"build.binary.stand_in", "build.binary.triggers_dependents", "device_lost", "load_seconds"}
    assert set(unset_fields(s.same_code(5, original=2))) <= not_stored
    assert set(unset_fields(s.final(0.5))) <= {*not_stored, "build", "same_code_as"}
    assert unset_fields(s.ENVIRONMENT) == []
    assert unset_fields(s.ref(2, Parent(0, "mother"), Parent(1, "father")).proposal) == []


def test_every_field_of_an_evaluation_comes_back(store: Store) -> None:
    run = s.new_run(store)
    recorded = [
        (s.ref(0, operator="random"), s.passed(0)),
        (s.ref(1, 0), s.refused(1)),
        (
            s.ref(2, Parent(0, "mother"), Parent(1, "father"), task=1, operator="crossover"),
            s.passed(2, 0.4, task=1),
        ),
        (s.ref(3, 2, 2), s.same_code(3, original=0)),
        (s.ref(4), s.not_compiled(4)),
        (s.ref(5, 4), dataclasses.replace(s.refused(5), same_code_as=1)),
        *((s.ref(6 + i), s.failed(status)) for i, status in enumerate(Status) if not status.passed),
    ]
    for elapsed, (ref, evaluation) in enumerate(recorded):
        store.add(run, ref, evaluation, elapsed_s=float(elapsed))
    read = store.evaluations(run)
    assert [(e.candidate, e.evaluation) for e in read] == [(r, s.without_artefacts(e)) for r, e in recorded]
    assert [e.elapsed_s for e in read] == list(range(len(recorded)))
    assert store.run(run.name).elapsed_s == len(recorded) - 1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parameters=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)),
        max_size=6,
    ),
    error=st.floats(allow_nan=False),
    log=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
)
def test_any_genome_number_and_text_come_back(
    store: Store, parameters: dict[str, Any], error: float, log: str
) -> None:
    run = s.new_run(store)
    ref = s.ref(0)
    ref = dataclasses.replace(
        ref, proposal=dataclasses.replace(ref.proposal, genome=Genome.of(parameters))
    )
    check = Check(case=log, passed=False, error=error, allowed=-error, torch_error=error / 3, reason=log)
    evaluation = Evaluation(status=Status.WRONG, build=s.build(0), checks=(check,), log=log)
    store.add(run, ref, evaluation, elapsed_s=0.0)
    (read,) = store.evaluations(run)
    assert read.candidate == ref
    assert read.candidate.proposal.genome.digest == ref.proposal.genome.digest
    assert read.evaluation == s.without_artefacts(evaluation)


def test_what_a_database_cannot_hold_is_put_into_words_it_can(store: Store) -> None:
    run = s.new_run(store)
    check = Check(case="nan", passed=False, error=float("nan"), allowed=1.0)
    evaluation = Evaluation(status=Status.WRONG, build=s.build(0), checks=(check,), log="a\0b \udcff \N{SNOWMAN}")
    store.add(run, s.ref(0), evaluation, elapsed_s=0.0)
    read = store.evaluations(run)[0].evaluation
    assert read.checks[0].error is None
    assert read.log == "a\N{REPLACEMENT CHARACTER}b ? \N{SNOWMAN}"


def test_source_and_code_are_compressed_and_stored_once(store: Store) -> None:
    run = s.new_run(store)
    first = s.passed(0)
    store.add(run, s.ref(0), first, elapsed_s=0.0)
    store.add(run, s.ref(1), dataclasses.replace(s.passed(1, 0.4), build=first.build), elapsed_s=0.0)
    stored = s.rows(store, "SELECT sha256, kind, size, length(data), data FROM artefact ORDER BY kind")
    assert [(kind, size) for _, kind, size, _, _ in stored] == [
        ("binary", len(first.build.binary.code)),
        ("source", len(first.build.source.encode())),
    ]
    for _, _, size, length, data in stored:
        assert length < size / 2
        assert len(zlib.decompress(data)) == size
    for e in store.evaluations(run):
        assert s.kept(store, e.public_id) == (first.build.source.encode(), first.build.binary.code)
        assert read_source(store, e.public_id) == first.build.source


def test_what_candidates_of_a_task_have_in_common_is_stored_once(store: Store) -> None:
    """A candidate that is like no other, and a later process that goes on, do not matter."""
    run = s.new_run(store)
    given = [s.passed(order, 0.9, task=order % 2) for order in range(12)]
    odd = s.not_compiled(6)
    given[6] = dataclasses.replace(odd, build=dataclasses.replace(odd.build, source=random.Random(6).randbytes(500).hex()))
    for order, evaluation in enumerate(given[:9]):
        store.add(run, s.ref(order, task=order % 2), evaluation, elapsed_s=0.0)
    store.bases.forget()
    for order, evaluation in enumerate(given[9:], 9):
        store.add(run, s.ref(order, task=order % 2), evaluation, elapsed_s=0.0)
    read = store.evaluations(run)
    assert [e.evaluation for e in read] == [s.without_artefacts(evaluation) for evaluation in given]
    assert [read_source(store, e.public_id) for e in read] == [evaluation.build.source for evaluation in given]
    assert s.rows(store, "SELECT count(*), count(base_id) FROM detail") == [(12, 12 - 5)]
    sources = s.rows(store, "SELECT count(*), count(base_sha) FROM artefact WHERE kind = 'source'")
    assert sources == [(12, 12 - 5)], "the first of a task and of a process, and the odd one"


def test_machine_code_is_stored_of_the_fastest_so_far_and_ptx_of_all(store: Store) -> None:
    run = s.new_run(store)
    for order, ratio in enumerate((0.9, 0.8, 0.8, 0.85, 0.7)):
        store.add(run, s.ref(order), s.passed(order, ratio), elapsed_s=0.0)
    store.add(run, s.ref(5, task=1), s.passed(5, 0.95, task=1), elapsed_s=0.0)
    ptx = dataclasses.replace(s.build(6), arch="compute_90")
    store.add(run, s.ref(6), dataclasses.replace(s.passed(6, 0.95), build=ptx), elapsed_s=0.0)
    stored = [s.kept(store, e.public_id)[1] is not None for e in store.evaluations(run)]
    assert stored == [True, True, False, False, True, True, True]


def test_a_run_comes_back_as_it_was_set_up(store: Store) -> None:
    spec = dataclasses.replace(
        s.SPEC,
        name="first",
        seed=2**63 - 1,
        workloads=(Workload.of({"zeta": 3, "alpha": 2**40}, "float16"),),
        options={"deep": {"list": [1, 2.5, None, True], "text": "µ\ud800\0"}},
    )
    run = store.create_run(spec, s.ENVIRONMENT)
    assert run.spec == store.run("first").spec == spec
    assert run.environment == s.ENVIRONMENT
    assert datetime.fromisoformat(run.created).utcoffset() == timedelta(0)
    assert (run.status, run.elapsed_s) == (RunStatus.RUNNING, 0.0)
    store.set_status(run, RunStatus.FINISHED, reason="time is up", elapsed_s=12.5)
    read = store.run("first")
    assert (read.status, read.stop_reason, read.elapsed_s) == (RunStatus.FINISHED, "time is up", 12.5)
    assert find_run(store, "first").finished is not None
    store.set_status(run, RunStatus.RUNNING, elapsed_s=12.5)
    assert find_run(store, "first").finished is None


def test_names_are_given_or_generated_and_taken_once(store: Store) -> None:
    names = [s.new_run(store).name for _ in range(12)]
    assert len(set(names)) == 12
    assert all(name.startswith("layernorm-") and len(name) < 25 for name in names)
    by_path = dataclasses.replace(s.SPEC, kernel="/somewhere/my kernels/soft max")
    assert store.create_run(by_path, s.ENVIRONMENT).name.startswith("soft-max-")
    s.new_run(store, "mine")
    with pytest.raises(StoreError, match=r"there is a run 'mine' already.*: evo resume mine --db \S+$"):
        s.new_run(store, "mine")
    for name in ("", "latest", "a b", "../x", "-x", "x" * 65, "a/b"):
        with pytest.raises(StoreError, match="is not a name for a run"):
            s.new_run(store, name)
    store.create_run(s.SPEC, dataclasses.replace(s.ENVIRONMENT, driver="581"))
    assert s.rows(store, "SELECT count(*) FROM environment") == [(2,)], "equal ones are one row"


def test_finals_stand_beside_the_search_and_beside_each_other(store: Store) -> None:
    run = s.filled(store)
    for ratio in (0.6, 0.55):
        store.add_final(run, 0, s.final(ratio), elapsed_s=2.0)
    record = read_candidate(store, store.evaluations(run)[0].public_id)
    assert [(t.stage, t.round, t.ratio) for t in record.timings if t.contender == "candidate"] == [
        ("search", 0, 0.5),
        ("final", 1, 0.6),
        ("final", 2, 0.55),
    ]
    assert [(f.round, f.status, f.log, f.seconds, f.gate_seconds, f.timing_seconds) for f in record.finals] == [
        (1, "ok", "raced", 4.0, 1.0, 3.0),
        (2, "ok", "raced", 4.0, 1.0, 3.0),
    ]
    assert [(c.stage, c.round, c.case) for c in record.checks] == [
        (stage, n, case) for stage, n in (("search", 0), ("final", 1), ("final", 2)) for case in ("normal", "large")
    ]
    assert store.evaluations(run)[0].evaluation == s.without_artefacts(s.passed(0))


def test_baselines_come_back_in_full(store: Store) -> None:
    run = s.new_run(store)
    timings = [s.timing(s.LARGE, 1.0, contender="torch"), s.timing(s.LARGE, 0.4, contender="copy")]
    store.add_baselines(run, 1, timings)
    store.add_baselines(run, 1, timings[:1], stage=Stage.FINAL)
    read = s.baselines(store, run.name)
    assert [(t.task, t.stage, t.contender) for t in read] == [
        (1, "search", "torch"),
        (1, "search", "copy"),
        (1, "final", "torch"),
    ]
    assert {k: v for k, v in dataclasses.asdict(read[1]).items() if k not in ("task", "stage", "round")} == (
        dataclasses.asdict(timings[1])
    )
    assert store.evaluations(run) == []


NAN = dataclasses.replace(s.timing(), samples_us=(1.0, math.nan))
FAULTS: list[tuple[Any, Evaluation, str]] = [
    (s.ref(0), s.passed(9, 0.1), "a record does not fit"),
    (s.ref(5, 4), s.passed(5), "a record does not fit"),
    (s.ref(5), s.same_code(5, 3), "a record does not fit"),
    (s.ref(5, 6), s.passed(5), "candidate 5 of run 'r' cannot come from the later 6"),
    (s.ref(5, 5), s.passed(5), "candidate 5 of run 'r' cannot come from the later 5"),
    (dataclasses.replace(s.ref(5), task=2), s.passed(5), "has no task 2"),
    (dataclasses.replace(s.ref(5), order=2**32), s.passed(5), "is outside 0 to"),
    (s.ref(5), dataclasses.replace(s.passed(5), timings=(NAN,)), "a record cannot be stored"),
]


def test_faults_of_evo_are_refused_and_leave_the_database_as_it_was(store: Store, where: str) -> None:
    run = s.filled(store, "r")
    for ref, evaluation, sentence in FAULTS:
        with pytest.raises(EngineError, match=sentence):
            store.add(run, ref, evaluation, elapsed_s=99.0)
    with pytest.raises(EngineError, match="run 'r' has no candidate 3"):
        store.add_final(run, 3, s.final(0.5), elapsed_s=0.0)
    with pytest.raises(EngineError, match="candidate 0 is of task 0 and cannot win 1"):
        store.set_winner(run, 1, 0)
    with pytest.raises(EngineError, match="run 'r' has no task 2"):
        store.set_winner(run, 2, None)
    with Store.open(where, write=False) as reader, pytest.raises(EngineError, match="for reading only"):
        s.new_run(reader)
    assert [e.evaluation for e in store.evaluations(run)] == [s.without_artefacts(s.passed(0))]
    assert store.run("r").elapsed_s == 0.0
    counted = {"candidate": 1, "artefact": 2, "parentage": 0, "build": 1, "detail": 1, "timing": 2, "final": 0}
    assert {table: s.rows(store, f"SELECT count(*) FROM {table}")[0][0] for table in counted} == counted


class TestTransactions:

    def test_all_is_lost_if_anything_fails(self, store: Store) -> None:
        run = s.filled(store, "r")

        def twice() -> None:
            with store.transaction():
                store.add(run, s.ref(1), s.passed(1), elapsed_s=0.0)
                store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)

        def given_up() -> None:
            with store.transaction():
                store.add(run, s.ref(1), s.passed(1), elapsed_s=0.0)
                store.set_winner(run, 0, 1)
                raise KeyError

        with pytest.raises(EngineError, match="a record does not fit"):
            twice()
        with pytest.raises(KeyError):
            given_up()
        assert [e.candidate.order for e in store.evaluations(run)] == [0]
        assert s.rows(store, "SELECT count(*) FROM artefact") == [(2,)]
        store.add(run, s.ref(1), s.passed(1), elapsed_s=0.0)

    def test_it_sees_what_it_has_recorded(self, store: Store) -> None:
        run = s.new_run(store)
        with store.transaction():
            store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
            assert len(store.evaluations(run)) == 1
            store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=0.0)
            store.add_final(run, 1, s.final(0.4), elapsed_s=0.0)
            store.set_winner(run, 0, 1)
        assert find_run(store, run.name).tasks[0].winner == store.evaluations(run)[1].public_id
