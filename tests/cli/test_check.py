"""evo check: every branch of a kernel as a search would meet it; and a recorded candidate, built anew and gated again on
fresh data, or on those of the verdict to be repeated."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from evo.errors import UsageError
from evo.evaluation import Evaluation, Status
from evo.executors import ExecutorConfig, InFlight
from evo.executors.local import LocalExecutor
from evo.lineage import Environment, gate_seeds
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.measure import Request
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.space import Point
from evo.report import progress as screen
from evo.report.progress import CheckLines
from evo.search.check import check_kernel
from evo.search.loop import Search, StopReason
from evo.search.tasks import TaskExecutor
from evo.testing.toy_kernel import write_kernel
from tests.cli.test_new import fill_in
from tests.ended import Ended
from tests.landscape import Hanging, LandscapeExecutor, opened, random_search

KERNEL = load_kernel("layernorm")
OWN = KERNEL.example("cpu")

# -- the branches of a kernel ---------------------------------------------------------------------------------

BRANCHES = """
extern "C" void twice(const float* x, float* y, long long n) {
    for (long long i = 0; i < n; ++i) y[i] = 2 * x[i];
{% if p.mode == "wrong" %}
    y[n - 1] = 3;
{% elif p.mode == "wrong_when_timed" %}
    if (n == 4096) for (int i = 0; i < n; ++i) y[i] = 3;
{% elif p.mode == "breaks_when_timed" %}
    if (n == 4096) __builtin_trap();
{% endif %}
}
"""
MODES = ("honest", "wrong", "wrong_when_timed", "breaks_when_timed")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel(tmp_path_factory.mktemp("check") / "toy", MODES, template=BRANCHES)


def test_a_branch_is_refused_for_what_it_does_at_the_size_that_is_timed(kernel: Path, here: Any) -> None:
    ended = here("check", str(kernel), "--target", "cpu", "--json")
    assert (ended.code, ended.err) == (1, "")
    document = ended.document
    found = {b["changes"].get("mode", "honest"): (b["gate"], b["cases"], b["timed"]) for b in document["branches"]}
    assert found == {
        "honest": ("ok", 8, "ok"),  # three of its own; five that every finalist meets
        "wrong": ("wrong", 2, "not run"),  # the first, and a smaller one
        "wrong_when_timed": ("ok", 8, "wrong"),
        "breaks_when_timed": ("ok", 8, "trap"),
    }
    assert document["not_timed"] == []
    ended = here("check", str(kernel), "--target", "cpu")
    assert ended.code == 1
    (line,) = [line for line in ended.out.splitlines() if " mode=wrong_when_timed " in line]
    assert line.split()[-3:] == ["8", "ok", "wrong"]
    assert "4 of 4 branches compiled, 3 of 4 passed the gate, 1 of 4 at the size that is timed (seed " in ended.out
    (kernel / "cpu.cpp.j2").write_text("{% if %}")
    ended = here("check", str(kernel), "--target", "cpu")
    assert (ended.code, ended.err) == (1, "")
    assert ended.out.count("cpu.cpp.j2, line 1: Expected an expression") == 1
    assert " default and 3 more: " in ended.out


SPACIOUS = """
#define TILE 32
#define PER 32
__global__ void __launch_bounds__(1024) folded(float* y, const float* x, int n) {
    __shared__ float held[TILE][TILE];
    int i = blockIdx.x * 256 + threadIdx.x;
    float v[PER], sum = 0;
    for (int j = 0; j < PER; ++j) v[j] = x[(i + j) % n];
    held[threadIdx.x % TILE][0] = v[0];
    __syncthreads();
    for (int j = 0; j < PER; ++j) sum = sum * v[j] + v[PER - 1 - j];
    if (i < n) y[i] = sum + held[0][0];
}
"""


def test_points_at_the_ends_of_the_space_and_some_others_are_compiled_too(here: Any, tmp_path: Path) -> None:
    (tmp_path / "own.cu").write_text(SPACIOUS)
    assert here("new", "folded", "--cu", "own.cu").code == 0
    kernel = tmp_path / "folded" / "kernel.py"
    fill_in(tmp_path / "folded", "x", {})
    words = ("check", "folded", "--arch", "sm_89", "--compile-only", "--seed", "4")
    kernel.write_text(kernel.read_text().replace("threads=256", 'threads=32 * point["TILE"]'))
    ended = here(*words, "--json")
    assert ended.code == 0, "a candidate that fails is none of a kernel's mistakes"
    samples = {tuple(s["changes"].items()): s["faults"] for s in ended.document["samples"]}
    assert len(samples) == 12
    assert () not in samples, "the default is a branch"
    assert [[(name, value)] for name in ("TILE", "PER") for value in (8, 128)] == [[*k] for k in list(samples)[:4]]
    assert "folded' uses too much shared data" in samples[("TILE", 128),][0]
    assert samples[("TILE", 8),] == []
    assert re.fullmatch(r"spills [\d,]+ bytes of registers", samples[("PER", 128),][0])
    shown = here(*words, "--samples", "4")
    assert "4 other points, ends of the space and random ones (seed 4): " in shown.out
    assert re.search(r"^the gate has \d+ cases for n=1048576,dtype=float32: ", shown.out, re.MULTILINE)
    assert here(*words, "--samples", "0", "--json").document["samples"] == []
    wide = here(*words, "--samples", "40", "--json").document["samples"]
    large = next(s["faults"] for s in wide if s["changes"] == {"TILE": 64, "PER": 8})
    assert large == ["asks for 2,048 threads a block, and sm_89 has 1,024"]


def test_a_parameter_that_changes_the_result_is_named(here: Any, tmp_path: Path) -> None:
    assert here("new", "mine").code == 0
    for file, place, instead in (
        ("kernel.py", 'Ordinal(name="chunk"', 'Ordinal(name="shift", values=(1, 3, 4)), Ordinal(name="chunk"'),
        ("kernel.py", "65536))))", '65536))), default={"shift": 3})'),
        ("cpu.cpp", "+ b[", "+ (shift - 3) + b["),
    ):
        text = (tmp_path / "mine" / file).read_text()
        assert place in text, text
        (tmp_path / "mine" / file).write_text(text.replace(place, instead))
    words = ("check", "mine", "--target", "cpu", "--workload", "n=1003,dtype=float32")
    checked = here(*words)
    assert checked.code == 0, checked
    assert "every value of shift that was tried, but 3, is refused by the gate: if shift changes the result" in checked.out
    assert "every value of chunk" not in checked.out
    assert "shift=1: refused by the gate: " in checked.out
    assert "every value" not in here(*words, "--compile-only").out


class Small(LandscapeExecutor):
    """An executor on a machine where the data of no timing fit."""

    asked: list[bool]

    def measure(self, request: Request) -> Future[Evaluation]:
        self.asked.append(request.time)
        if not request.time:
            return super().measure(request)
        refused: Future[Evaluation] = Future()
        refused.set_exception(UsageError("the data do not fit"))
        return refused


def task_for(executor: LandscapeExecutor) -> TaskExecutor:
    return TaskExecutor(
        problem=KERNEL, executor=executor, kernel="layernorm", target="cpu", arch="native", workload=OWN, seed=1
    )


def test_a_workload_whose_data_do_not_fit_is_gated_all_the_same() -> None:
    executor = Small(1)
    executor.asked = []
    with closing(executor):
        branches, untimed = check_kernel(task_for(executor), [OWN], timed=frozenset({OWN}), gate=True)
    assert untimed == {OWN: "the data do not fit"}
    assert executor.asked == [True, *[False] * sum(b.measurement is not None for b in branches)]
    assert not any(b.timed for b in branches)

# -- what it waits for ----------------------------------------------------------------------------------------


def test_a_check_of_a_kernel_knows_which_branch_it_waits_for() -> None:
    executor, waited_for = Hanging(), list[tuple[int, int, InFlight, Point]]()

    def tell(done: int, count: int, work: InFlight | None, changes: Point) -> None:
        if work is not None:
            waited_for.append((done, count, work, changes))
            executor.seen.set()

    points = task_for(executor).space.branches()
    with closing(executor):
        check_kernel(task_for(executor), [OWN], timed=frozenset({OWN}), gate=True, observe=tell)
    ((done, count, work, changes),) = waited_for
    point = work.genome.parameters
    assert point in points
    assert changes == {name: value for name, value in point.items() if points[0].get(name) != value}
    assert work.genome.digest == executor.measured[0]
    assert count == len(points)
    assert done < count


def test_what_a_check_waits_for_is_said_on_stderr_once_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    genome, changes = Genome.of({"mode": "honest"}), {"mode": "honest"}
    tell = CheckLines("branches")
    for done, seconds in ((0, 0.2), (3, 0.5), (3, 0.7), (3, 4.0)):
        work = InFlight(genome=genome, workload=OWN, stage="gate", seconds=seconds, left_s=30 - seconds)
        tell(done, 18, work, changes)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "evo: 3 of 18 branches done\n"
        f"evo: 3 of 18 branches done; waiting for {OWN} with mode=honest: in the gate for 4 s; without a result it is"
        " ended in 26 s\n"
    )


# -- a recorded candidate -------------------------------------------------------------------------------------

SMALLEST_BETWEEN = "n=71,dtype=float32,data=normal"
TEMPLATE = """
extern "C" void twice(const float* x, float* y, long long n) {
    for (long long i = 0; i < n; ++i) y[i] = 2 * x[i];
{% if p.mode == "picky" %}
    // Right on half of all data: what was found on some may be looked for in vain on others.
    if (n == 64 && x[0] > 0) y[63] = 3;
{% elif p.mode == "wrong" %}
    y[n - 1] = 3;
{% elif p.mode == "between" %}
    if (n > 70 && n < 900) y[n - 1] = 3;
{% endif %}
}
"""


@dataclass(frozen=True)
class Recorded:
    db: str
    folder: Path
    evaluations: dict[str, Evaluation]
    """The evaluation of each mode."""
    names: dict[str, str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run of four candidates, without finals."""
    home = tmp_path_factory.mktemp("run")
    folder = write_kernel(home / "toy", ("honest", "picky", "wrong", "between"), template=TEMPLATE)
    spec, db = random_search(str(folder)), str(home / "lineage.db")
    spec = replace(spec, options={**spec.options, "fixed": {"unroll": 1}})
    executor = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=home / "cache"))
    with closing(executor), Store.open(db, write=True) as store:
        run = store.create_run(spec, Environment(device="here", arch="native"))
        assert Search(opened(run, store, executor), lambda progress: None).run() is StopReason.EXHAUSTED
        stored = {e.candidate.proposal.genome.parameters["mode"]: e for e in store.evaluations(run)}
    evaluations = {mode: e.evaluation for mode, e in stored.items()}
    names = {mode: public_id(run.uid, e.candidate.order) for mode, e in stored.items()}
    return Recorded(db, folder, evaluations, names)


@pytest.fixture
def check(recorded: Recorded, here: Any) -> Callable[..., Ended]:
    """The check of the candidate of a mode."""
    return lambda mode, *more: here("check", recorded.names[mode], "--db", recorded.db, *more)


def test_the_recorded_seed_repeats_the_verdict_to_the_last_digit(recorded: Recorded, check: Callable[..., Ended]) -> None:
    fresh = check("picky", "--json").document
    (verdict,) = fresh["recorded"]
    ended = check("picky", "--json", "--seed", str(verdict["seed"]))
    record = ended.document
    then = recorded.evaluations["picky"]
    assert (ended.code, ended.err) == (0 if then.status is Status.OK else 1, "")
    now, own = record["workloads"][0]["cases"], [c for c in then.checks if "data=" not in c.case]
    assert [(c["case"], c["error"], c["passed"], c["reason"], c["seed"]) for c in now if "data=" not in c["case"]] == [
        (c.case, c.error, c.passed, c.reason, c.seed) for c in own
    ]
    assert record["remarks"] == []
    assert fresh["seed"] != verdict["seed"]
    assert {c["seed"] for c in fresh["workloads"][0]["cases"]}.isdisjoint({c.seed for c in then.checks} - {0})


def test_a_candidate_that_passes_is_exit_code_0_with_a_line_a_case(check: Callable[..., Ended]) -> None:
    ended = check("honest", "--seed", "4")
    assert ended.code == 0
    for case in ("normal 5", "normal 64", "normal 1001"):
        (line,) = [line for line in ended.out.splitlines() if f" {case} " in line]
        assert " ok " in line
    for said in ("passed (", "seed 4)", "to repeat it:  evo check"):
        assert said in ended.out


def test_a_wrong_candidate_is_exit_code_1_with_the_reason_and_what_was_not_run(check: Callable[..., Ended]) -> None:
    ended = check("wrong", "--json")
    assert ended.code == 1
    (result,) = ended.document["workloads"]
    assert [c["case"] for c in result["cases"]] == ["normal 5", "n=1,dtype=float32,data=normal"]
    assert not any(c["passed"] for c in result["cases"])
    assert "y: " in result["cases"][0]["reason"]
    own, drawn = result["not_run"][:2], result["not_run"][2:]
    assert own == ["normal 64", "normal 1001"]
    assert drawn, "what every finalist meets"
    assert all("data=" in name for name in drawn)
    assert result["left_out"] == {}


def test_random_cases_find_what_lies_between_the_kernels_own(check: Callable[..., Ended]) -> None:
    assert check("between").code == 0
    ended = check("between", "--cases", "30", "--seed", "4")
    assert ended.code == 1
    *_, first, smallest = [line for line in ended.out.splitlines() if " refused: y: " in line]
    assert "data=normal" in first
    assert f" {SMALLEST_BETWEEN} " in smallest
    (alone,) = [line for line in ended.out.splitlines() if line.startswith("to repeat the last alone:  evo check ")]
    command, verdict = alone.split(), ended.out.splitlines()[-1]
    again = command[command.index("--seed") : command.index("--db")]
    assert again == ["--seed", "4", "--case", SMALLEST_BETWEEN]
    alone_again = check("between", *again)
    assert alone_again.code == 1
    assert smallest.split() in [line.split() for line in alone_again.out.splitlines()]
    assert check("between", "--cases", "30", "--seed", "4").out.splitlines()[-1] == verdict
    honest = check("honest", "--cases", "70")
    assert honest.code == 0
    assert "data=" not in honest.out
    workloads = check("honest", "--cases", "70", "--json").document["workloads"]
    drawn = sum("data=" in c["case"] for w in workloads for c in w["cases"])
    assert drawn == 70 + 2  # and one of the timed size with each gate


def test_a_kernel_is_gated_on_more_cases_too_and_told_how_a_refusal_is_repeated(recorded: Recorded, here: Any) -> None:
    words = ("check", str(recorded.folder), "--target", "cpu", "--seed", "4")
    for more, passed in (((), ["honest", "between"]), (("--cases", "70"), ["honest"])):
        branches = here(*words, *more, "--json").document["branches"]
        gates = {b["genome"]["mode"]: b["gate"] for b in branches}
        assert len(branches) == len(gates), "each is told once"
        assert [mode for mode in passed if gates[mode] != "ok"] == []
        assert gates["wrong"] == "wrong"
        assert (gates["between"] == "ok") is ("between" in passed)
    ended = here(*words, "--cases", "30")
    assert "random cases" in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("to repeat the last refusal:  evo check ")]
    again = shlex.split(line.partition("evo ")[2])
    assert again[-2:] == ["--case", SMALLEST_BETWEEN]
    gates = {b["genome"]["mode"]: b["gate"] for b in here(*again, "--json").document["branches"]}
    assert gates["between"] == "wrong"


def test_a_case_that_cannot_be_is_one_sentence(check: Callable[..., Ended]) -> None:
    for case, said in {
        "n=5,dtype=float32,data=nomal": "unknown distribution of kernel toy 'nomal'; did you mean normal?",
        "n=5,dtype=float32,offset=x": "offset 'x' is neither a number of elements nor several as 0.3.1",
        "n=-1,dtype=float32": "n must be 0 to 1,048,576, got -1",
    }.items():
        ended = check("honest", "--case", case)
        assert ended.code == 2
        assert said in ended.sentence


def test_a_template_that_changed_since_is_said_in_a_line(recorded: Recorded, check: Callable[..., Ended]) -> None:
    template = recorded.folder / "cpu.cpp.j2"
    before = template.read_text()
    template.write_text("// changed\n" + before)
    try:
        ended = check("honest", "--compile-only", "--json")
    finally:
        template.write_text(before)
    assert ended.code == 0
    (remark,) = ended.document["remarks"]
    assert "has changed since" in remark
    assert "--source" in remark


def test_what_is_recorded_with_a_candidate_is_no_option_of_its_check(check: Callable[..., Ended], here: Any) -> None:
    ended = check("honest", "--arch", "native")
    assert ended.code == 2
    assert ended.sentence.startswith("evo: --arch is recorded with candidate")


# -- where the seeds come from --------------------------------------------------------------------------------


def search(tmp_path: Path, gate_seed: int) -> tuple[list[str], set[int]]:
    """What was proposed, and the seeds that data were to be drawn with."""
    spec = random_search("layernorm")
    spec = replace(spec, options={**spec.options, "gate_seed": gate_seed})
    seeds: set[int] = set()

    def note(request: Request, found: Any) -> Any:
        if isinstance(found, Evaluation):
            seeds.add(request.seed)
        return found

    executor = LandscapeExecutor(1, change=note)
    with closing(executor), Store.open(tmp_path / f"{gate_seed}.db", write=True) as store:
        run = store.create_run(spec, Environment(device="a landscape", arch="none"))
        assert Search(opened(run, store, executor), lambda progress: None).run() is StopReason.EVALUATIONS
        return [e.candidate.proposal.genome.to_json() for e in store.evaluations(run)], seeds


def test_what_draws_the_data_does_not_decide_what_is_proposed(tmp_path: Path) -> None:
    proposed, seeds = search(tmp_path, 77)
    assert seeds == {77}
    again, others = search(tmp_path, 78)
    assert others == {78}
    assert again == proposed


def test_every_run_draws_its_data_with_a_seed_of_its_own_that_is_kept_with_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        environment = Environment(device="here", arch="none")
        drawn = []
        for name in ("one", "two"):
            planned = random_search("layernorm", name=name)
            store.create_run(planned, environment)
            kept = store.run(name).spec
            drawn.append(gate_seeds(kept.options, kept.seed))
            assert drawn[-1] == gate_seeds(planned.options, planned.seed)
    assert drawn[0] != drawn[1]
    assert len({*drawn[0].values(), *drawn[1].values()}) == 4
