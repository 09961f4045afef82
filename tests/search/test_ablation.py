"""`evo explain --measure`: what lies between two genomes is built, gated and timed in one race."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo.analysis.explanation import edits_between
from evo.cli import run as run_command
from evo.errors import UsageError
from evo.evaluation import Build, Evaluation, Status, Timing
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.measure import RaceRequest, RaceResult, Request
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.problem.space import Point
from evo.search.check import Ablation, measure_ablation
from evo.search.tasks import TaskExecutor
from evo.targets import find_target
from evo.testing.toy_kernel import TEMPLATE, WORKLOAD, write_kernel
from tests.ended import run_here
from tests.lineage import samples as s

pytestmark = pytest.mark.slow

MODE, UNROLL = {"mode": ("honest", "exact")}, {"unroll": (1, 4)}
_NOT_ALONE = (
    'Constraint(name="pair", holds=lambda p: p["mode"] != "honest" or p["unroll"] != 4,'
    ' reason="they need each other"),'
)


def ablated(folder: Path, start: Point, end: Point, executor: Any) -> Ablation:
    one, other = Genome.of(start), Genome.of(end)
    task = TaskExecutor(
        problem=load_kernel(str(folder)),
        executor=executor,
        kernel=str(folder),
        target="cpu",
        arch="native",
        workload=WORKLOAD,
        seed=1,
    )
    return measure_ablation(task, one, other, edits_between(one, other))


def measured(folder: Path, start: Point, end: Point) -> Ablation:
    with closing(LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=folder / "cache"))) as executor:
        return ablated(folder, start, end, executor)


def test_each_edit_is_taken_out_and_all_are_made_in_turn(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "exact"))
    found = ablated(folder, {"mode": "honest", "unroll": 1}, {"mode": "exact", "unroll": 4}, Noisy(0))
    assert [w.change for w in found.without] == [MODE, UNROLL]
    assert all(w.gain and w.timing and not w.reason for w in found.without)
    assert sorted((step.changes for step in found.path), key=str) == [(MODE,), (UNROLL,)]
    assert found.path[-1].timing == found.end, "the last step is the candidate itself, which ran once"
    for gain in (found.gain, *(step.gain for step in found.path)):
        assert 0 < gain.low <= gain.gain <= gain.high
        assert gain.tie == (gain.low <= 1 <= gain.high)
    assert found.reference.contender == "torch"


def test_edits_that_are_not_legal_alone_are_made_together(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "exact"), constraints=_NOT_ALONE)
    found = ablated(folder, {"mode": "honest", "unroll": 1}, {"mode": "exact", "unroll": 4}, Noisy(0))
    without_mode, without_unroll = found.without
    assert without_mode.gain is None
    assert without_mode.reason == "not legal: pair: they need each other"
    assert without_unroll.gain is not None
    assert [step.changes for step in found.path] == [(MODE,), (UNROLL,)]


def test_what_is_wrong_on_the_way_is_not_timed(tmp_path: Path) -> None:
    """Taken out, the edit leaves a kernel that computes something else."""
    broken = '{{ 3 if p.mode == "exact" and p.unroll == 1 else 2 }}'
    template = TEMPLATE.replace('{{ 3 if p.mode == "wrong" else 2 }}', broken)
    folder = write_kernel(tmp_path / "toy", ("honest", "exact"), template=template)
    found = measured(folder, {"mode": "honest", "unroll": 1}, {"mode": "exact", "unroll": 4})
    without_mode, without_unroll = found.without
    assert without_unroll.gain is None
    assert without_unroll.reason.startswith("wrong: normal 5: ")
    assert without_mode.gain is not None
    assert [step.changes for step in found.path] == [(MODE, UNROLL)]


def test_an_end_that_cannot_be_timed_is_said(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "wrong"))
    with pytest.raises(UsageError, match="the candidate cannot be timed here: wrong: normal 5: "):
        measured(folder, {"mode": "honest", "unroll": 1}, {"mode": "wrong", "unroll": 1})
    with pytest.raises(UsageError, match="where it begins cannot be timed here: not legal: unroll=3 is not one of"):
        measured(folder, {"mode": "honest", "unroll": 3}, {"mode": "honest", "unroll": 1})


class Noisy:
    """An executor on whose machine something disturbs so many of twelve rounds of each race; then those of the last."""

    target = find_target("cpu")

    def __init__(self, *disturbed: int) -> None:
        self._disturbed, self.races = disturbed, 0

    def build(self, request: Request) -> Future[Build]:
        return _done(s.build(0))

    def measure(self, request: Request) -> Future[Evaluation]:
        return _done(Evaluation(status=Status.OK))

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        spoilt = self._disturbed[min(self.races, len(self._disturbed) - 1)]
        self.races += 1
        clocks = {"disturbed": float(spoilt), "discarded": 0.0 if spoilt else 4.0}
        names = [name for name, *_ in request.contenders]
        own = [_timing(name, 20.0 - 5 * i - 0.1 * self.races, clocks) for i, name in enumerate(names)]
        return _done(RaceResult(timings=(*own, replace(_timing("torch", 30.0, clocks), ratio=None)), seconds=1.5))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _timing(name: str, us: float, clocks: dict[str, float]) -> Timing:
    return replace(s.timing(WORKLOAD, us / 30, contender=name), median_us=us, samples_us=(us,) * 12, clocks=clocks)


def noisy(folder: Path, *disturbed: int) -> Ablation:
    write_kernel(folder, ("honest", "exact"))
    executor = Noisy(*disturbed)
    found = ablated(folder, {"mode": "honest", "unroll": 1}, {"mode": "honest", "unroll": 4}, executor)
    assert executor.races == found.races
    assert found.seconds == 1.5 * found.races
    return found


@pytest.mark.parametrize(
    ("disturbed", "races", "spoilt", "us"), [((0,), 1, False, 14.9), ((12, 0), 2, False, 14.8), ((6, 12), 2, True, 14.9)]
)
def test_a_race_that_was_disturbed_is_held_once_more_and_the_better_one_counts(
    tmp_path: Path, disturbed: tuple[int, ...], races: int, spoilt: bool, us: float
) -> None:
    found = noisy(tmp_path / "toy", *disturbed)
    assert (found.races, found.disturbed, found.end.median_us) == (races, spoilt, us)
    assert found.discarded_rounds == (0 if spoilt else 4)


def test_a_disturbed_race_is_marked_from_the_headline_on(
    tmp_path: Path, recorded: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    db, winner = recorded
    for disturbed, marks in (((12,), 6), ((0,), 0)):
        found = noisy(tmp_path / f"noisy{marks}", *disturbed)
        monkeypatch.setattr("evo.cli.analysis.measure_edits", lambda *_, found=found, **__: found)
        words = ["explain", winner, "--measure", "--from", "mode=exact", "--db", db]
        out = run_here(capsys, *words).out
        headline = next(line for line in out.splitlines() if line.startswith("timed again"))
        assert headline.endswith("too busy !") is bool(marks)
        assert sum(line.count(" !") for line in out.splitlines()) == marks
        assert ("its speed-up is not known" in out) is bool(marks)
        assert ("4 disturbed rounds taken again" in headline) is not bool(marks)
        record = run_here(capsys, *words, "--json").document
        assert {e["gain"] for e in record["edits"]} == {None}, "the run has not measured where it begins"
        document = record["measured"]
        assert (document["disturbed"], document["races"]) == (bool(marks), 2 if marks else 1)
        assert len(document["path"]) == len(document["without"]) == 1
        assert {"gain", "low", "high"} <= set(document["gain"])


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[str, str]:
    """The database of a run of a toy kernel, and its winner."""
    folder = write_kernel(tmp_path / "toy", ("honest", "exact"))
    kernel: Kernel = load_kernel(str(folder))
    db = tmp_path / "lineage.db"
    spec = replace(
        s.SPEC, kernel=str(folder), kernel_digest=kernel.digest, target="cpu", arch="native", workloads=(WORKLOAD,)
    )
    environment = replace(s.ENVIRONMENT, device=find_target("cpu").device().name, arch="native")
    with Store.open(db, write=True) as store:
        run = store.create_run(spec, environment)
        for order, point in enumerate(({"mode": "honest", "unroll": 1}, {"mode": "exact", "unroll": 8})):
            evaluation = replace(s.passed(order), timings=(s.timing(WORKLOAD, 0.8 - 0.3 * order),))
            store.add(run, s.ref(order, point=point), evaluation, elapsed_s=0.0)
        return str(db), public_id(run.uid, 1)


def test_the_command_tells_the_story_of_one_race(
    recorded: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    db, winner = recorded
    shown = run_here(capsys, "explain", winner, "--measure", "--from", "mode=exact", "--seed", "3", "--db", db)
    assert (shown.code, shown.err) == (0, "")
    assert len(shown.out.splitlines()) <= 10
    assert "timed again from the template's default with mode=exact" in shown.out
    assert "unroll: 1 -> 8" in shown.out


def test_a_template_that_is_gone_or_values_that_cannot_be_are_said(
    recorded: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    db, winner = recorded
    assert run_command(["explain", winner, "--from", "unroll=3", "--db", db]) == 2
    assert "parameter unroll has no value '3'" in capsys.readouterr().err
    assert run_command(["explain", winner, "--from", "unrol=1", "--db", db]) == 2
    assert "unknown parameter 'unrol'" in capsys.readouterr().err
    folder = Path(db).parent / "toy"
    folder.rename(folder.with_name("moved"))
    assert run_command(["explain", winner, "--measure", "--db", db]) == 2
    assert "unknown kernel" in capsys.readouterr().err
    assert run_command(["explain", winner, "--db", db]) == 0, "what is recorded can still be told"
