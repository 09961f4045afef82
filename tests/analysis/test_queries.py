"""Questions to the lineage and their answers."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from evo.analysis.candidates import read_candidate, read_source
from evo.analysis.failures import read_failures
from evo.analysis.runs import compare, find_alike, find_best, find_nearly_as_fast, find_run, list_runs, read_history
from evo.errors import StoreError, UnknownNameError
from evo.evaluation import Status
from evo.lineage import StoredRun
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.testing.toy_kernel import write_kernel
from tests.lineage import landscapes as land
from tests.lineage import samples as s


def record(store: Store, run: StoredRun, *evaluations: object) -> list[str]:
    """Adds (ref, evaluation) pairs; their public ids."""
    for elapsed, pair in enumerate(evaluations):
        ref, evaluation = pair  # type: ignore[misc]
        store.add(run, ref, evaluation, elapsed_s=float(elapsed))
    return [public_id(run.uid, pair[0].order) for pair in evaluations]  # type: ignore[index]


@pytest.fixture
def family(store: Store) -> list[str]:
    return land.kin(store)


class TestRuns:
    def test_they_are_named_by_name_unique_prefix_and_latest(self, store: Store) -> None:
        for name in ("first", "second", "secondary"):
            s.new_run(store, name)
        assert [find_run(store, n).name for n in ("first", "f", "second", "seconda", "latest")] == [
            "first", "first", "second", "secondary", "secondary"
        ]  # fmt: skip
        assert [r.name for r in list_runs(store)] == ["secondary", "second", "first"]
        with pytest.raises(StoreError, match=r"'sec' begins the names of 2 runs \(secondary, second, \.\.\.\)"):
            store.run("sec")
        with pytest.raises(UnknownNameError, match=r"unknown run 'frist'; did you mean first\?"):
            store.run("frist")
        with pytest.raises(UnknownNameError):
            store.run("")

    def test_an_empty_database_says_so(self, store: Store) -> None:
        assert list_runs(store) == ()
        assert find_best(store) == ()
        with pytest.raises(StoreError, match="no run has been recorded"):
            find_run(store, "latest")
        with pytest.raises(UnknownNameError, match="unknown candidate 'abc'; known: none"):
            read_candidate(store, "abc")

    def test_a_summary_counts_and_names_the_best_of_each_task(self, store: Store) -> None:
        run = s.new_run(store, "r")
        ids = record(
            store,
            run,
            (s.ref(0), s.passed(0, 0.5)),
            (s.ref(1), s.refused(1)),
            (s.ref(2), s.passed(2, 0.4)),
            (s.ref(3, task=1), s.passed(3, 0.9, task=1)),
            (s.ref(4), s.same_code(4, 2, ratio=0.4)),
            (s.ref(5), s.refused(5)),
        )
        store.set_winner(run, 0, 0)
        summary = find_run(store, "r")
        assert read_candidate(store, ids[4]).same_code_as == ids[2]
        assert summary.counts == {"ok": 3, "wrong": 2, "same_code": 1}
        assert (summary.evaluations, summary.passed) == (6, 4)
        assert [(i.workload, i.dims, i.winner, i.best, i.best_score) for i in summary.tasks] == [
            (s.SMALL.key, {"rows": 1024, "cols": 512}, ids[0], ids[0], 0.5),
            (s.LARGE.key, {"rows": 4096, "cols": 8192}, None, ids[3], 0.9),
        ]
        assert summary.environment == asdict(s.ENVIRONMENT)
        assert (summary.device, summary.options, summary.budget) == ("NVIDIA L4", s.SPEC.options, s.SPEC.budget)
        store.set_winner(run, 0, None)
        assert find_run(store, "r").tasks[0].best == ids[2]

    def test_history_is_the_course_of_the_run(self, store: Store, family: list[str]) -> None:
        points = read_history(store, "kin")
        assert [p.id for p in points] == family
        assert [p.score for p in points] == [0.8, 0.9, 0.6, None, 0.7, 0.3, 0.3]
        assert [p.elapsed_s for p in points] == list(range(7))

    def test_failures_say_why_in_one_line_and_those_that_differ_in_numbers_are_one(self, store: Store) -> None:
        unknown, constant = 'error: identifier "this" is undefined', "constant rows:"
        ids = record(
            store,
            s.new_run(store, "r"),
            (s.ref(0), s.passed(0)),
            (s.ref(1), s.refused(1)),
            (s.ref(2), s.not_compiled(2)),
            (s.ref(3), replace(s.failed(Status.TIMEOUT), log="\nafter 3.5 s at 0x3f\nit is gone")),
            (s.ref(4, task=1), s.refused(4)),
            (s.ref(5), replace(s.failed(Status.TIMEOUT), log="after 5.5 s at 0x5f")),
        )
        found = read_failures(store, "r", task=0).reasons
        assert [(f.first, f.candidates, f.status, f.reason, f.example) for f in found] == [
            (ids[3], 2, "timeout", "after # s at #", "after 3.5 s at 0x3f"),
            (ids[2], 1, "compile_error", f"candidate.cu(#): {unknown}", f"candidate.cu(1): {unknown}"),
            (ids[1], 1, "wrong", f"{constant} # where the reference is #", f"{constant} Infinity where the reference is 0"),
        ]
        assert read_failures(store, "r", task=1).candidates == 1


class TestBest:
    def test_runs_of_a_folder_are_known_by_any_path_to_it_whatever_its_files_were(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write_kernel(tmp_path / "toy")
        kernel = load_kernel(str(folder))
        workload = kernel.example("cpu")
        for order, name in enumerate(("./toy", str(folder), "./other", "layernorm")):
            spec = replace(s.SPEC, kernel=name, target="cpu", workloads=(workload,))
            timed = replace(s.passed(order), timings=(s.timing(workload, 0.5), s.timing(workload, 1.0, contender="torch")))
            record(store, store.create_run(spec, s.ENVIRONMENT), (s.ref(order), timed))
        monkeypatch.chdir(tmp_path)
        assert [best.order for best in find_alike(store, kernel, "cpu", "NVIDIA L4", [workload])] == [0, 1]
        monkeypatch.chdir(folder)
        assert [best.order for best in find_alike(store, kernel, "cpu", "NVIDIA L4", [workload])] == [1]

    def test_figures_that_nothing_disturbed_come_before_all_others(self, store: Store) -> None:
        """A search of a busy machine seems to have found the fastest; so does its final, and a run beside it is quiet."""
        kernel = load_kernel("layernorm")
        names = ("searched busy", "confirmed busy", "quiet")
        runs = [s.new_run(store, name.replace(" ", "_")) for name in names]
        wild = replace(s.passed(0, 0.02), timings=(replace(s.timing(s.SMALL, 0.02), clocks={"disturbed": 6.0}),))
        ids = [record(store, run, (s.ref(n), s.passed(n, 0.9 + n / 100)))[0] for n, run in enumerate(runs)]
        record(store, runs[0], (s.ref(7), replace(wild, build=s.build(7))))
        spoilt = replace(s.timing(s.SMALL, 0.006), protocol="final", clocks={"disturbed": 16.0})
        store.add_final(runs[1], 1, replace(s.final(0.5), timings=(spoilt,)), elapsed_s=9.0)
        store.set_winner(runs[1], 0, 1)
        assert find_run(store, "searched_busy").tasks[0].best == ids[0]
        assert [(b.run, b.disturbed, b.speedup is None) for run in list_runs(store) for b in run.best] == [
            ("quiet", False, False),
            ("confirmed_busy", True, True),
            ("searched_busy", False, False),
        ]
        (best,) = find_best(store)
        assert (best.run, best.ratio) == ("searched_busy", 0.9)
        (busy,) = find_best(store, run="confirmed_busy")
        assert (busy.finals, busy.speedup, busy.speedup_low, busy.winner) == ("too busy to measure", None, None, True)
        alike = find_alike(store, kernel, "cuda", "NVIDIA L4", [kernel.workload("cuda", s.SMALL.key)])
        assert [b.run for b in alike] == ["searched_busy", "quiet", "confirmed_busy"]
        rows = [row for row in compare(store, "confirmed_busy", "quiet").rows if row.workload == s.SMALL.key]
        assert [(row.run, row.speedup is None, row.behind) for row in rows] == [
            ("quiet", False, 1.0),
            ("confirmed_busy", True, None),
        ]

    def test_nearly_as_fast_is_what_has_other_code_in_the_same_task_and_took_little_longer(self, store: Store) -> None:
        run = s.new_run(store, "r")
        ratios = (0.5, 0.56, 0.51, 0.9)
        ids = record(
            store,
            run,
            *((s.ref(n), s.passed(n, ratio)) for n, ratio in enumerate(ratios)),
            (s.ref(4), s.same_code(4, 2, ratio=0.51)),
            (s.ref(5, task=1), s.passed(5, 0.5, task=1)),
        )
        found = {s.genome(0): ids[0], s.genome(2): ids[2], s.genome(1): ids[1]}
        assert list(find_nearly_as_fast(store, [ids[0]]).items()) == list(found.items())
        assert find_nearly_as_fast(store, [ids[0], ids[5]]) == found | {s.genome(5): ids[5]}

    def test_it_is_the_fastest_over_runs_for_each_problem_and_device(self, store: Store) -> None:
        slow, fast = s.new_run(store, "slow"), s.new_run(store, "fast")
        other = store.create_run(s.SPEC, replace(s.ENVIRONMENT, device="NVIDIA H200"))
        softmax = store.create_run(replace(s.SPEC, kernel="softmax"), s.ENVIRONMENT)
        record(store, slow, (s.ref(0), s.passed(0, 0.5)), (s.ref(1, task=1), s.passed(1, 0.2, task=1)))
        record(store, fast, (s.ref(0), s.passed(0, 0.45)), (s.ref(1, task=1), s.passed(1, 0.3, task=1)))
        record(store, other, (s.ref(0), s.passed(0, 0.1)), (s.ref(1), s.refused(1)))
        record(store, softmax, (s.ref(0), s.passed(0, 0.7)))
        found = find_best(store)
        assert [(b.kernel, b.device, b.workload, b.run, b.ratio) for b in found] == [
            ("layernorm", "NVIDIA H200", s.SMALL.key, other.name, 0.1),
            ("layernorm", "NVIDIA L4", s.SMALL.key, "fast", 0.45),
            ("layernorm", "NVIDIA L4", s.LARGE.key, "slow", 0.2),
            ("softmax", "NVIDIA L4", s.SMALL.key, softmax.name, 0.7),
        ]
        assert found[1].parameters == s.genome(0).parameters
        assert (found[1].median_us, found[1].stage, found[1].winner) == (20.1 * 0.45, "search", False)
        assert find_best(store, "softmax") == found[3:]
        assert find_best(store, run="slow", target="cuda")[0].ratio == 0.5
        assert find_best(store, dtype="float16") == find_best(store, workload="ROWS=4096") == found[2:3]
        assert find_best(store, device="h200") == found[:1]
        assert find_best(store, device="H100") == find_best(store, workload="%") == ()
        assert find_best(store, "layernorm", target="cpu") == ()

    def test_the_last_final_counts_and_not_the_lucky_search(self, store: Store) -> None:
        run = s.new_run(store, "r")
        ids = record(store, run, (s.ref(0), s.passed(0, 0.3)), (s.ref(1), s.passed(1, 0.4)))
        store.add_final(run, 0, s.refused_final(), elapsed_s=1.0)
        assert [b.id for b in find_best(store)] == [find_run(store, "r").tasks[0].best] == [ids[1]]
        store.add_final(run, 0, s.final(0.6), elapsed_s=1.0)
        store.add_final(run, 1, s.final(0.7), elapsed_s=1.0)
        store.add_final(run, 1, s.final(0.5), elapsed_s=1.0)
        store.set_winner(run, 0, 1)
        (found,) = find_best(store)
        assert (found.id, found.winner, found.stage, found.protocol) == (ids[1], True, "final", "final")
        assert (found.ratio, found.score, found.median_us) == (0.5, 0.4, 20.1 * 0.5)
        store.set_winner(run, 0, None)
        store.add_final(run, 0, s.final(0.35), elapsed_s=2.0)  # refused before, and passed now
        assert [b.id for b in find_best(store)] == [ids[0]]


class TestCandidate:
    def test_the_record_is_whole(self, store: Store, family: list[str]) -> None:
        run = store.run("kin")
        store.set_winner(run, 0, 5)
        found = read_candidate(store, family[2])
        expected = land.timed(2, 0.6)
        assert (found.id, found.run, found.order, found.task) == (family[2], "kin", 2, 0)
        assert (found.parameters, found.digest) == (s.genome(2).parameters, s.genome(2).digest)
        assert (found.status, found.score, found.log, found.elapsed_s) == ("ok", 0.6, "fine", 2.0)
        assert [(p.id, p.order, p.role, p.score) for p in found.parents] == [
            (family[1], 1, "mother", 0.9),
            (family[0], 0, "father", 0.8),
        ]
        assert [(c.id, c.role, c.operator, c.status) for c in found.children] == [
            (family[3], "parent", "mutation", "wrong")
        ]
        assert (found.build.registers, found.build.spill_bytes, found.build.stack_bytes) == (40, 8, 16)
        assert (found.build.log, found.build.remarks) == ("2 warnings", "ptxas info : Used 40 registers")
        assert found.build.code_hash == expected.build.binary.code_hash
        assert s.kept(store, found.id)[1] == expected.build.binary.code
        assert [asdict(c) for c in found.checks] == [
            {"stage": "search", "round": 0, **asdict(check)} for check in expected.checks
        ]
        assert [asdict(t) for t in found.timings] == [
            {"task": 0, "stage": "search", "round": 0, **asdict(t)} for t in expected.timings
        ]
        assert not found.winner
        assert read_candidate(store, family[5]).winner

    def test_unique_prefixes_are_enough(self, store: Store) -> None:
        run = s.new_run(store)
        with store.transaction():
            for order in range(200):
                store.add(run, s.ref(order), s.failed(Status.TIMEOUT), elapsed_s=0.0)
        names = [p.id for p in read_history(store, run.name)]
        wanted = names[23]
        shortest = next(n for n in range(1, 16) if sum(x.startswith(wanted[:n]) for x in names) == 1)
        assert read_candidate(store, wanted[:shortest]).id == wanted
        assert read_candidate(store, wanted.upper()).id == wanted
        with pytest.raises(StoreError, match=rf"several candidates begin with '{wanted[0]}'.*write more digits"):
            read_candidate(store, wanted[0])
        typed = wanted[:-1] + ("0" if wanted[-1] != "0" else "1")
        with pytest.raises(UnknownNameError, match=re.escape(f"unknown candidate '{typed}'; did you mean {wanted}")):
            read_candidate(store, typed)
        for nonsense in ("", "xyz", "%", "g" * 16):
            with pytest.raises(UnknownNameError):
                read_candidate(store, nonsense)

    def test_what_was_never_built_has_no_source(self, store: Store) -> None:
        (name,) = record(store, s.new_run(store), (s.ref(0), s.failed(Status.RENDER_ERROR)))
        with pytest.raises(StoreError, match=r"has no source: it could not be rendered$"):
            read_source(store, name)
