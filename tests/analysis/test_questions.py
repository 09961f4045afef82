"""What broke, what helped, what matters, which run was better, and what can be traded."""

from __future__ import annotations

from dataclasses import replace

import optuna
import pytest

from evo.analysis.failures import failure_totals, read_failures
from evo.analysis.importance import read_importance, undersampled
from evo.analysis.operators import read_operators
from evo.analysis.pareto import read_pareto
from evo.analysis.runs import compare
from evo.lineage import RunStatus, Stage
from evo.lineage.store import Store
from evo.problem.space import Categorical, Constraint, Space, Value
from tests.lineage import landscapes as land
from tests.lineage import samples as s

CHOICES: dict[str, tuple[Value, ...]] = {
    "path": ("registers", "shared"), "threads": (128, 256, 512, 1024), "vector": (1, 2, 4, 8), "hints": ("none", "stream"),
    "stages": (1, 2),
}  # fmt: skip
"""Values in `land.searched`."""


def test_a_run_without_candidates_has_empty_answers(store: Store) -> None:
    land.small_run(store, "r")
    report = read_failures(store, "r")
    assert (report.candidates, report.refused, report.kinds, report.values, report.rules) == (0, 0, (), (), ())
    assert read_operators(store, "r") == read_pareto(store, "r") == []


class TestFailures:
    def test_values_and_rules_that_broke_are_found_with_their_cost(self, store: Store) -> None:
        land.searched(store, "r", 400)
        report = read_failures(store, "r")
        (kind,) = report.kinds
        assert (kind.status, kind.candidates, report.refused) == ("compile_error", report.refused, report.refused)
        assert kind.seconds == pytest.approx(0.5 * report.refused)
        assert [r.reason for r in report.reasons] == ['candidate.cu(#): error: identifier "this" is undefined']
        first = report.rules[0]
        assert first.kind == "new"
        assert set(first.rule.split(" and ")) == {"threads=1024", "path=registers"}
        assert (first.avoided, first.passed_lost, first.good_lost, first.best_lost) == (report.refused, 0, 0, False)
        assert first.more == first.avoided
        assert all(rule.more == 0 for rule in report.rules[1:]), "the first leaves nothing to avoid"
        alone = next(r for r in report.rules if r.rule == "threads=1024")
        assert alone.avoided == report.refused
        assert alone.passed_lost > 0
        values = {(v.parameter, v.value): v for v in report.values}
        worst, hints, stages = values["threads", 1024], values["hints", "none"], values["stages", 1]
        assert (worst.elsewhere_refused, worst.elsewhere_share, worst.frequent) == (0, 0.0, True)
        assert worst.candidates + worst.elsewhere == 400
        assert abs(hints.z) < 3
        assert stages.candidates + stages.elsewhere < 400, "only those that have the parameter are compared"
        assert (stages.refused, stages.frequent, stages.structural) == (0, False, None)

    def test_equal_code_is_refused_for_the_reason_of_the_first(self, store: Store) -> None:
        run = s.new_run(store)
        store.add(run, s.ref(0), s.refused(0), elapsed_s=1.0)
        again = replace(s.refused(1), checks=(), log="equal to candidate 0", same_code_as=0)
        store.add(run, s.ref(1), again, elapsed_s=2.0)
        (reason,) = read_failures(store, run.name).reasons
        assert reason.candidates == 2
        assert "candidate 0" not in reason.reason

    def test_what_the_template_says_now_is_judged_by_what_happened(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        land.searched(store, "r", 200)
        space = Space(
            parameters=tuple(Categorical(name=n, values=v, structural=n == "path") for n, v in CHOICES.items()),
            constraints=(Constraint(name="wide", holds=lambda p: p["threads"] != 1024, reason="too many threads"),),
            default={name: some[0] for name, some in CHOICES.items()},
        )
        monkeypatch.setattr("evo.analysis.failures.present_space", lambda *_: space)
        report = read_failures(store, "r", template=True)
        rule = next(r for r in report.rules if r.kind == "existing")
        assert (rule.rule, rule.avoided) == ("wide", report.refused)
        assert rule.passed_lost > 0
        assert {v.structural for v in report.values if v.parameter == "path"} == {True}
        assert {v.structural for v in report.values if v.parameter != "path"} == {False}

    def test_over_all_runs_they_are_counted_by_device(self, store: Store) -> None:
        land.searched(store, "one", 100)
        land.searched(store, "two", 100, seed=1)
        totals = {t.status: t for t in failure_totals(store)}
        assert sum(t.candidates for t in totals.values()) == 200
        assert (totals["ok"].runs, totals["ok"].device) == (2, "NVIDIA L4")
        assert sum(t.share for t in totals.values()) == pytest.approx(1.0)
        assert failure_totals(store, "softmax") == []


class TestOperators:
    def test_credit_is_by_what_was_improved_and_spent(self, store: Store) -> None:
        run = land.small_run(store, "r")
        tried = [
            (land.ref(0, {"a": 0}, operator="random"), land.timed(0, 0.8), 1.0),
            (land.ref(1, {"a": 1}, 0), land.timed(1, 0.4), 2.0),
            (land.ref(2, {"a": 2}, 0), land.timed(2, 0.6), 9.0),
            (land.ref(3, {"a": 3}, 1, 2), land.timed(3, 0.5), 10.0),
            (land.ref(4, {"a": 4}, 1), s.refused(4), 10.0),
        ]
        for ref, evaluation, elapsed_s in tried:
            store.add(run, ref, evaluation, elapsed_s=elapsed_s)
        found = read_operators(store, "r", windows=2)
        assert [(c.operator, c.window) for c in found] == [
            ("mutation", None), ("mutation", 0), ("mutation", 1), ("random", None), ("random", 0)
        ]  # fmt: skip
        whole, early, late = found[:3]
        assert (whole.trials, whole.passed, whole.compared, whole.better, whole.improvements) == (4, 3, 4, 2, 1)
        assert whole.success == 0.5
        assert whole.gain == pytest.approx(2.0)
        assert (early.gain, late.gain) == (pytest.approx(2.0), 1.0)
        assert whole.seconds == pytest.approx(1.5 * 3 + 0.25), "the builds were cached and cost nothing"
        assert whole.gain_rate == pytest.approx(100 * 0.6931471805599453 / whole.seconds)
        assert early.gain_rate is not None
        assert late.gain_rate == 0.0
        assert (found[3].success, found[3].gain) == (None, 1.0)

    def test_a_disturbed_time_is_nobodys_best(self, store: Store) -> None:
        run = land.small_run(store, "r")
        lucky = land.timed(1, 0.1)
        lucky = replace(lucky, timings=tuple(replace(t, clocks={**t.clocks, "disturbed": 3.0}) for t in lucky.timings))
        for order, evaluation in enumerate((land.timed(0, 0.8), lucky, land.timed(2, 0.4))):
            store.add(run, land.ref(order, {"a": order}), evaluation, elapsed_s=1.0)
        (whole, *_) = read_operators(store, "r", windows=1)
        assert (whole.trials, whole.improvements, whole.gain) == (3, 1, pytest.approx(2.0))


class TestImportance:
    def test_what_decides_comes_first_and_shares_sum_to_one(self, store: Store) -> None:
        land.searched(store, "r", 400)
        found = read_importance(store, "r")
        assert found[0].parameter == "vector"
        assert found[0].importance > 0.5
        assert sum(i.importance or 0.0 for i in found) == pytest.approx(1.0)
        stages = next(i for i in found if i.parameter == "stages")
        assert stages.conditional
        assert stages.candidates < stages.timed
        assert {i.workload for i in found} == {s.SMALL.key}

    def test_the_shares_are_those_of_optuna(self, store: Store) -> None:
        land.searched(store, "r", 100)
        study = optuna.create_study()
        for tried in store.evaluations(store.run("r")):
            point = tried.candidate.proposal.genome.parameters
            if tried.evaluation.score is not None:
                choices = {name: optuna.distributions.CategoricalDistribution(CHOICES[name]) for name in point}
                trial = optuna.create_trial(params=point, distributions=choices, value=tried.evaluation.score)
                study.add_trial(trial)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.1)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
        assert {i.parameter: pytest.approx(i.importance) for i in read_importance(store, "r")} == shares

    def test_of_too_little_nothing_is_said(self, store: Store) -> None:
        land.walked(store, [land.START, {**land.START, "vector": 2}], "r")
        for record in read_importance(store, "r"):
            assert record.importance is None
            assert record.note == "only 2 candidates were timed, 20 are needed"

    def test_a_parameter_that_never_changed_has_none(self, store: Store) -> None:
        run = land.small_run(store, "r")
        with store.transaction():
            for order in range(40):
                point: land.Point = {"fixed": 1, "free": order % 4}
                store.add(run, land.ref(order, point), land.timed(order, 0.5 + 0.1 * (order % 4)), elapsed_s=0.0)
        found = {i.parameter: i for i in read_importance(store, "r")}
        assert (found["fixed"].importance, found["fixed"].note) == (None, "one value only")
        assert (found["free"].importance, found["free"].note) == (1.0, "")
        assert undersampled(list(found.values())) == [], "all values were tried alike"


class TestComparison:
    def test_runs_stand_side_by_side(self, store: Store) -> None:
        land.walked(store, [land.START, {**land.START, "vector": 4}], "slow")
        run = store.create_run(replace(s.SPEC, name="fast", workloads=(s.SMALL,), seed=8), s.ENVIRONMENT)
        for order, value in enumerate((1.0, 0.7, 0.4)):
            store.add(run, land.ref(order, {"a": order}), land.timed(order, value), elapsed_s=float(order + 1))
        store.add(run, land.ref(3, {"a": 3}), s.refused(3), elapsed_s=4.0)
        found = compare(store, "slow", "fast", "slow")
        first, second = found.rows
        assert (first.run, second.run) == ("fast", "slow")
        assert first.speedup == pytest.approx(2.5)
        assert (first.candidates, first.passed, first.failures) == (4, 3, 1)
        assert first.candidates_per_s == pytest.approx(1.0)
        assert first.reached_s == {"1.1x": 2.0, "1.3x": 2.0, "1.5x": 3.0, "2.0x": 3.0}
        assert second.reached_s["2.0x"] is None
        assert second.behind == pytest.approx(2.5 * 0.9 / 1.6)
        assert (second.tie, first.behind, first.tie) == (False, 1.0, True)
        assert [(x.name, x.values) for x in found.settings] == [("seed", {"slow": -7, "fast": 8})]

    def test_who_is_behind_is_no_tie_unless_the_interval_of_that_holds_one(self, store: Store) -> None:
        for name, ratio in (("slow", 0.5), ("near", 0.5 / land.SPREAD), ("fast", 0.5 / land.SPREAD**1.7)):
            run = store.create_run(replace(s.SPEC, name=name, workloads=(s.SMALL,)), s.ENVIRONMENT)
            store.add(run, s.ref(0), land.timed(0, ratio), elapsed_s=1.0)
        rows = compare(store, "slow", "near", "fast").rows
        assert [(r.run, r.tie) for r in rows] == [("fast", True), ("near", True), ("slow", False)]
        assert rows[0].speedup_low < rows[2].speedup_high, "their own intervals overlap"

    def test_the_seconds_are_those_of_the_search_and_the_noise_floor_that_of_the_final(self, store: Store) -> None:
        for name in ("one", "two"):
            run = store.create_run(replace(s.SPEC, name=name, workloads=(s.SMALL,)), s.ENVIRONMENT)
            for order in range(4):
                store.add(run, land.ref(order, {"a": order}), land.timed(order, 0.5), elapsed_s=order / 2 + 0.5)
            twin = replace(s.timing(s.SMALL, 0.5, contender="twin"), protocol="final", clocks={"noise_floor": 0.01})
            store.add_baselines(run, 0, [twin], stage=Stage.FINAL)
            store.set_status(run, RunStatus.FINISHED, elapsed_s=60.0)
        first, second = compare(store, "one", "two").rows
        assert (first.search_s, first.candidates_per_s, first.noise_floor) == (2.0, 2.0, 0.01)
        assert second.behind_low < 1.0 < second.behind_high

    def test_a_run_in_which_nothing_passed_has_a_row(self, store: Store) -> None:
        run = land.small_run(store, "r")
        store.add(run, s.ref(0), s.refused(0), elapsed_s=1.0)
        land.small_run(store, "q")
        rows = compare(store, "r", "q").rows
        assert [(r.run, r.speedup, r.candidates, r.failures) for r in rows] == [("q", None, 0, 0), ("r", None, 1, 1)]


class TestPareto:
    def test_only_what_nothing_beats_is_there(self, store: Store) -> None:
        run = land.small_run(store, "r")
        figures = [(0.5, 40, 0), (0.4, 60, 0), (0.6, 40, 0), (0.4, 64, 16), (0.9, 20, 0), (0.4, 60, 0)]
        for order, (value, registers, spills) in enumerate(figures):
            evaluation = land.timed(order, value)
            binary = replace(evaluation.build.binary, registers=registers, spill_bytes=spills)
            built = replace(evaluation.build, binary=binary)
            store.add(run, land.ref(order, {"a": order}), replace(evaluation, build=built), elapsed_s=0.0)
        front = read_pareto(store, "r", ["time", "registers", "spills"])
        assert [(p.order, p.registers, p.equal, p.fastest) for p in front] == [
            (1, 60, 1, True), (0, 40, 0, False), (4, 20, 0, False)
        ]  # fmt: skip
        assert front[0].smem_bytes == 1024 + 49152
        assert [p.order for p in read_pareto(store, "r", ["time"])] == [1]
        (whole, *_) = read_pareto(store, "r")
        assert whole.error == pytest.approx(1e-7 / 1e-5)
