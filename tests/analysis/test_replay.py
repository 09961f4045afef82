"""Samplers on recorded spaces: what is read, what is scored, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import signal
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import evo
from evo.analysis.replay import RecordedSpace, Replay, read_space, replay
from evo.analysis.scores import judge, mean_of
from evo.errors import UsageError
from evo.evaluation import Status
from evo.lineage.store import Store
from evo.problem.space import Categorical, Ordinal, Space
from tests.ended import run_here, run_python
from tests.lineage import samples as s

VALUES: dict[str, list[Any]] = {
    "block": [32, 64, 96, 128, 160, 192, 224, 256],
    "tile": [1, 2, 3, 4, 5, 6, 7, 8],
    "unroll": [1, 2, 4],
    "store": ["direct", "shared"],
    "pad": [0],
}


def time_ms(point: dict[str, Any]) -> float | str:
    """A landscape with one best point, and with points that fail."""
    if point["block"] == 32 and point["unroll"] == 4:
        return "RuntimeFailedConfig"
    far = (point["block"] / 128 - 1) ** 2 + (point["tile"] - 5) ** 2 / 64 + (point["unroll"] - 2) ** 2 / 64
    return float(1.0 + far + (point["store"] == "direct") * 0.01)


def points() -> list[dict[str, Any]]:
    return [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def write_cache(path: Path, *, closed: bool = True) -> Path:
    entries = {
        ",".join(map(str, p.values())): {**p, "time": time_ms(p), "compile_time": 900.0, "benchmark_time": 100.0}
        for p in points()
    }
    text = json.dumps({"tune_params_keys": list(VALUES), "tune_params": VALUES, "cache": entries})
    text = text if closed else text[: -len("}}")] + ","
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_results(path: Path) -> Path:
    results = []
    for point in points():
        value = time_ms(point)
        results.append(
            {
                "configuration": point,
                "times": {"compilation": 900.0, "runtimes": [50.0, 50.0]},
                "invalidity": "runtime" if isinstance(value, str) else "correct",
                "measurements": [{"name": "time", "value": value}, {"name": "ratio", "value": 0.5}],
                "objectives": ["time"],
            }
        )
    path.write_text(json.dumps({"schema_version": "1.0.0", "results": results}))
    return path


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_cache(folder / "a.json"),
        lambda folder: write_cache(folder / "a.json.gz"),
        lambda folder: write_cache(folder / "a.json", closed=False),
        lambda folder: write_results(folder / "a.t4.json"),
    ],
    ids=["cache", "compressed", "cache that is appended to", "T4"],
)
def test_every_form_of_a_record_is_the_same_space(tmp_path: Path, write: Any) -> None:
    recorded = read_space(write(tmp_path))
    space = recorded.space(random.Random(1))
    assert type(space) is Space
    assert {p.name: list(p.values) for p in space.parameters} == VALUES
    assert sorted(map(str, space.points())) == sorted(map(str, points()))
    found = replay(tmp_path / next(tmp_path.iterdir()).name, "evolution", {}, 1, 3)
    assert found.improvements[-1][1] == 1.0
    assert found.improvements[0][0] >= 1.0  # seconds: each costs one


def test_a_parameter_that_some_configurations_lack_is_inactive_there() -> None:
    kinds = [{"stages": 2, "ahead": True}, {"stages": 4, "ahead": False}, {}]
    stages, ahead = RecordedSpace((point, 1.0 + i, 1.0) for i, point in enumerate(kinds)).parameters
    assert (type(stages), stages.values) == (Ordinal, ("inactive", 2, 4))
    assert (type(ahead), ahead.values) == (Categorical, (False, True, "inactive"))


def test_a_random_sample_of_a_large_space_is_a_space_of_its_points(tmp_path: Path) -> None:
    rng, names = random.Random(1), "abcdefghij"
    sample = [[rng.randrange(8) for _ in names] for _ in range(600)]
    entries = {",".join(map(str, p)): {"time": 1 + (sum(p) / 40) ** 4, "compile_time": 1000.0} for p in sample}
    text = {"tune_params_keys": list(names), "tune_params": {n: list(range(8)) for n in names}, "cache": entries}
    path = tmp_path / "sample.json"
    path.write_text(json.dumps(text))
    evolution, uniform = (
        judge(path, name, [replay(path, name, {}, 1, seed) for seed in range(3)]).score for name in ("evolution", "random")
    )
    assert evolution > 0.6
    assert abs(uniform) < 0.3


def test_the_score_of_the_best_at_once_is_1_and_of_what_never_improves_below_0(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "a.json")
    at_once = judge(path, "x", [Replay(seed=0, improvements=[(0.0, 1.0)], evaluations=1, sampler_s=0.002)])
    assert at_once.score == pytest.approx(1.0)
    assert (at_once.low, at_once.high, at_once.curve) == (None, None, pytest.approx((1.0,) * 100))
    assert at_once.first_tenth == pytest.approx(1.0)
    assert at_once.proposal_ms == pytest.approx(2.0)
    worst = max(t for t in map(time_ms, points()) if not isinstance(t, str))
    never = judge(path, "x", [Replay(seed=0, improvements=[(0.0, worst)], evaluations=1, sampler_s=0.0)])
    assert never.score < 0


def write_times(path: Path, times: list[float]) -> Path:
    """A space of one parameter."""
    entries = {str(i): {"n": i, "time": t, "compile_time": 900.0, "benchmark_time": 100.0} for i, t in enumerate(times)}
    values = {"n": list(range(len(times)))}
    path.write_text(json.dumps({"tune_params_keys": ["n"], "tune_params": values, "cache": entries}))
    return path


NEAR = [1.0, 1.000001, *(2 + i / 10 for i in range(40))]
"""The second best, which random search is expected to find within the budget, is as good as the best."""
NOISE = [1.0 + i * 1e-6 for i in range(200)]
HANDFUL = [1.0 + i for i in range(60)]
"""Random search has some ten evaluations."""


def test_a_space_in_which_random_search_all_but_finds_the_best_or_has_few_tries_has_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divides = "random search comes within"
    reasons = {"near": divides, "noise": divides, "handful": "the budget is "}
    times = (NEAR, NOISE, HANDFUL)
    spaces = [write_times(tmp_path / f"{name}.json", those) for name, those in zip(reasons, times, strict=True)]
    paths = [str(path) for path in (write_cache(tmp_path / "good.json"), *spaces)]
    asked = ("replay", *paths, "--samplers", "random", "--repeats", "3")
    document = run_here(capsys, *asked, "--json").document
    (of_good, *others), (mean,) = document["scores"], document["means"]
    for one, reason in zip(others, reasons.values(), strict=True):
        assert (one["score"], one["curve"], one["first_tenth"]) == (None, None, None)
        assert one["reason"].startswith(reason)
    assert (of_good["reason"], mean["score"], mean["left_out"]) == ("", of_good["score"], 3)
    told = run_here(capsys, *asked, "--plot", str(tmp_path / "plots"))
    scores = [line.split()[2] for line in told.out.splitlines()[1:6]]
    assert scores == [f"{of_good['score']:.3f}", *["n/a"] * 3, f"{mean['score']:.3f}"]
    assert all(f"{name}.json: n/a, since {reason}" in told.out for name, reason in reasons.items())
    assert "3 spaces of 4 left out of the means" in told.out
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["good.png", "good.svg"]
    alone = run_here(capsys, "replay", paths[1], "--samplers", "random", "--repeats", "2", "--json").document
    assert alone["means"][0]["score"] is None


def test_in_flight_and_seed_decide_a_replay(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "a.json")
    one, again, other = (replay(path, "evolution", {}, n, 0).improvements for n in (1, 1, 6))
    assert one == again
    assert one != other


def test_a_run_of_our_own_is_replayed_after_its_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = str(tmp_path / "lineage.db")
    with Store.open(db, write=True) as store:
        run = s.new_run(store, "recorded")
        for order in range(60):
            found = s.failed(Status.CRASH) if order % 9 == 4 else s.passed(order, 0.5 + order / 60)
            store.add(run, s.ref(order), found, elapsed_s=float(order))
    out = tmp_path / "t4"
    assert run_here(capsys, "export", "recorded", "--format", "t4", "--out", str(out), "--db", db).code == 0
    (record,) = out.glob("*-0-*.t4.json")
    told = run_here(capsys, "replay", str(record), "--samplers", "random", "--repeats", "2", "--json")
    assert told.document["scores"][0]["sampler"] == "random"


def test_the_command_prints_scores_means_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spaces = [str(write_cache(tmp_path / "a.json")), str(write_results(tmp_path / "b.t4.json"))]
    plots = tmp_path / "plots"
    asked = ("replay", *spaces, "--samplers", "evolution,random", "--repeats", "2", "--jobs", "2")
    told = run_here(capsys, *asked, "--sampler-option", "evolution.children=4", "--plot", str(plots))
    rows = [line.split() for line in told.out.splitlines()]
    assert [row[:2] for row in rows[1:7]] == [
        ["a.json", "evolution"], ["a.json", "random"], ["b.t4.json", "evolution"], ["b.t4.json", "random"],
        ["mean", "evolution"], ["mean", "random"],
    ]  # fmt: skip
    assert sorted(p.name for p in plots.iterdir()) == ["a.png", "a.svg", "b-t4.png", "b-t4.svg"]


def test_signals_that_are_ignored_and_those_of_another_thread_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(*_: object) -> Iterator[Any]:
        handlers.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])
        yield from ()

    handlers: list[list[Any]] = []
    monkeypatch.setattr("evo.job.replays._replay_each", look)
    asked = ("replay", str(write_cache(tmp_path / "a.json")), "--samplers", "random")
    before = [signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)]
    try:
        with ThreadPoolExecutor() as threads:
            assert threads.submit(run_here, capsys, *asked).result().code == 0
        assert run_here(capsys, *asked).code == 0
    finally:
        signal.signal(signal.SIGINT, before[0])
    elsewhere, (ignored, heeded) = handlers
    assert elsewhere == [ignored, before[1]] == [signal.SIG_IGN, before[1]]
    assert heeded is not before[1]
    assert signal.getsignal(signal.SIGTERM) is before[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("{none}",), "cannot read {none}: No such file or directory"),
        (("{other}",), "{other} is neither a cache file of Kernel Tuner nor T4 results"),
        (("{flat}",), "{flat}: 0 configurations cannot tell samplers apart"),
        (("{good}", "--samplers", "evolutin"), "unknown sampler 'evolutin'; did you mean evolution?"),
        (("{good}", "--sampler-option", "children=4"), "write SAMPLER.NAME=VALUE"),
        (("{good}", "--sampler-option", "evolution.childen=4"), "did you mean children?"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    files = {name: str(tmp_path / f"{name}.json") for name in ("none", "other", "flat", "good")}
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "flat.json").write_text(json.dumps({"results": []}))
    write_cache(tmp_path / "good.json")
    ended = run_here(capsys, "replay", *(word.format(**files) for word in words))
    assert ended.code == 2
    assert told.format(**files) in ended.err
    assert len(ended.err.splitlines()) == 1


def test_python_and_the_command_find_the_same_and_every_repeat_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plots = write_cache(tmp_path / "a.json"), tmp_path / "plots"
    found = evo.replay(path, ["evolution", "random"], repeats=4, in_flight=2, seed=7, progress=False)
    asked = ("replay", str(path), "--samplers", "evolution,random", "--repeats", "4", "--in-flight", "2", "--seed", "7")
    document = run_here(capsys, *asked, "--json", "--plot", str(plots)).document
    own = json.loads(json.dumps([vars(one) for one in found.scores], default=vars))
    for one in [*own, *document["scores"], *(each for score in [*own, *document["scores"]] for each in score["each"])]:
        for unequal in ("proposal_ms", "sampler_s", "first_tenth"):
            one.pop(unequal, None)
    assert own == document["scores"]
    assert (document["seed"], document["repeats"], document["in_flight"], document["interrupted"]) == (7, 4, 2, False)
    assert document["spaces"]["a.json"]["configurations"] == len(points())
    assert document["spaces"]["a.json"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for score in found.scores:
        assert [one.seed for one in score.each] == [7, 8, 9, 10]
        for one in score.each:
            alone = judge(path, score.sampler, [replay(path, score.sampler, {}, 2, one.seed)])
            assert (one.score, one.curve, one.evaluations) == (alone.score, alone.curve, alone.evaluations)
            assert one.score == pytest.approx(sum(one.curve) / 100)
        assert score.low <= score.score <= score.high
    told = run_here(capsys, *asked)
    figure = (plots / "a.svg").read_text()
    for score, row in zip(found.scores, told.out.splitlines()[1:3], strict=True):
        assert row.split()[1:6] == [score.sampler, *f"{score.score:.3f} {score.low:.3f} to {score.high:.3f}".split()]
        assert f"{score.sampler} {score.score:.3f} ({score.low:.3f} to {score.high:.3f})" in figure
    assert "4 repeats, seed 7, 2 in flight" in told.out


def test_the_interval_of_a_score_is_that_of_means_of_resampled_repeats(tmp_path: Path) -> None:
    """Among times that rise evenly, a mean rank is a mean time, and the bootstrap's interval nearly the normal one."""
    path = write_times(tmp_path / "even.json", [1.0 + i / 1000 for i in range(2000)])
    recorded = read_space(path)
    reached = [1.0 + (i % 10) / 100 for i in range(200)]
    made = [Replay(seed=i, improvements=[(0.0, t)], evaluations=1, sampler_s=0.0) for i, t in enumerate(reached)]
    scored = judge(path, "x", made)
    own = [one.score for one in scored.each]
    assert scored.score == pytest.approx(statistics.fmean(own), rel=0.01)
    half = 1.96 * statistics.stdev(own) / 200**0.5
    assert (scored.low, scored.high) == pytest.approx((scored.score - half, scored.score + half), abs=0.2 * half)
    assert recorded.unscored == ""
    twice = mean_of("x", [scored, scored])
    assert twice.score == scored.score
    assert twice.high - twice.score == pytest.approx((scored.high - scored.score) / 2**0.5)
    assert twice.curve_high[50] - twice.curve[50] == pytest.approx((scored.curve_high[50] - scored.curve[50]) / 2**0.5)


def test_a_script_without_a_guard_replays_once(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "a.json")
    (tmp_path / "script.py").write_text(
        f"import evo\nprint('begun')\nprint(evo.replay({str(path)!r}, 'random', repeats=2, progress=False).seed)\n"
    )
    ended = run_python(tmp_path, "script.py", PYTHONPATH=str(Path(evo.__file__).parents[1]))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "begun\n0\n", "")


def test_replays_are_a_table_where_pandas_is_installed_and_one_sentence_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evo.replay(write_cache(tmp_path / "a.json"), "random", repeats=2, progress=False)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pandas", None)
        with pytest.raises(UsageError, match=r"^df\(\) makes a pandas DataFrame.*pip install"):
            found.df()
    pytest.importorskip("pandas")
    table = found.df()
    assert list(table["seed"]) == [0, 1]
    assert list(table["score"]) == [one.score for one in found.scores[0].each]
    assert set(table["sampler"]) == {"random"}


def test_what_python_cannot_replay_is_one_sentence(tmp_path: Path) -> None:
    path = write_cache(tmp_path / "a.json")
    with pytest.raises(UsageError, match=r"^repeats must be at least 1, got 0$"):
        evo.replay(path, repeats=0)
    with pytest.raises(UsageError, match=r"^seed must be a whole number"):
        evo.replay(path, seed=-1)
    with pytest.raises(UsageError, match=r"^nothing to replay"):
        evo.replay([])


def test_a_sampler_of_ones_own_file_is_replayed_in_processes_with_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, own = write_cache(tmp_path / "a.json"), tmp_path / "mine.py"
    make = "find_sampler('evolution')(space, seed, options)"
    own.write_text(f"from evo.search.samplers import find_sampler\nSAMPLER = lambda space, seed, options: {make}\n")
    words = ("replay", str(path), "--samplers", "./mine.py,evolution", "--repeats", "2", "--json")
    options = ("--sampler-option", "mine.operators=mutation", "--sampler-option", "evolution.operators=mutation")
    document = run_here(capsys, *words, *options).document
    mine, evolution = document["scores"]
    assert (mine["sampler"], mine["curve"], mine["high"]) == ("./mine.py", evolution["curve"], evolution["high"])
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    assert document["samplers"]["./mine.py"] == {"options": {"operators": "mutation"}, "files": {"./mine.py": digest}}
    usual = run_here(capsys, *words).document["scores"][0]
    assert usual["curve"] != mine["curve"]
    own.write_text("SAMPLER = 1 / 0\n")
    assert "mine.py, line 1: ZeroDivisionError: division by zero" in run_here(capsys, *words).sentence
