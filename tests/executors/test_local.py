"""Whatever a candidate does to its process, it harms no other, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, ExecutorConfig, Incumbent, MeasureRequest, RaceRequest, RaceResult
from evo.executors.local import LocalExecutor
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.progress import InFlight
from tests.toy_kernel import TEMPLATE, write_kernel

T = TypeVar("T")

MODES = (
    "honest",
    "wrong",
    "compile_error",
    "compile_bomb",
    "no_entry",
    "segfault",
    "abort",
    "exit",
    "spin",
    "tell_time",
    "remembers",
)
WORKLOAD = Workload.of({"n": 4096}, "float32")
AGAIN = " (and again, alone in a fresh process)"
PATIENCE_S = 200.0
"""How long a test waits for anything at all: the machine may be busy."""


def build_request(kernel: Path, mode: str = "honest", unroll: int = 1) -> BuildRequest:
    genome = Genome.of({"mode": mode, "unroll": unroll})
    return BuildRequest(kernel=str(kernel), target="cpu", arch="native", genome=genome, workload=WORKLOAD)


def measure_request(kernel: Path, build: Build, mode: str = "honest", *, timed: bool = True) -> MeasureRequest:
    genome = Genome.of({"mode": mode, "unroll": 1})
    return MeasureRequest(
        kernel=str(kernel), target="cpu", genome=genome, workload=WORKLOAD, build=build, seed=1, time=timed
    )


def descendants() -> list[psutil.Process]:
    """Workers and what they started. They are grandchildren, forked from a server that outlives every pool."""
    own = psutil.Process().pid
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.ppid() != own:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(happened: Callable[[], T], what: str) -> T:
    """What it is that has happened: asked once more, it may have passed."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)
    return found


def compilers() -> list[psutil.Process]:
    found = []
    for process in descendants():
        try:
            if process.name().startswith("cc1plus") or process.name().startswith("clang"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel(tmp_path_factory.mktemp("kernels") / "toy", MODES)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """Short limits, which an honest candidate keeps with a factor of a hundred to spare."""
    opened = LocalExecutor(
        "cpu",
        ExecutorConfig(
            builders=1,
            cache_dir=tmp_path_factory.mktemp("cache"),
            build_timeout_s=6,
            measure_timeout_s=6,
            build_floor_s=6,
            gate_floor_s=6,
            timing_floor_s=6,
        ),
    )
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def honest(executor: LocalExecutor, kernel: Path) -> Build:
    build = executor.build(build_request(kernel)).result(PATIENCE_S)
    assert build.status is Status.OK, build.log
    return build


def measure(executor: LocalExecutor, kernel: Path, build: Build, mode: str = "honest") -> Measurement:
    return executor.measure(measure_request(kernel, build, mode)).result(PATIENCE_S)


def test_an_honest_candidate_is_gated_and_timed(executor: LocalExecutor, kernel: Path, honest: Build) -> None:
    measured = measure(executor, kernel, honest)
    assert measured.status is Status.OK, measured.log
    assert [c.case for c in measured.checks] == ["normal 5", "normal 64", "normal 1001", "timed"]
    assert {t.contender for t in measured.timings} == {"candidate", "torch"}
    assert all(t.median_us > 0 for t in measured.timings)


def test_a_incumbent_that_does_not_load_is_no_fault_of_the_candidate(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    assert honest.binary is not None
    broken = replace(honest, binary=replace(honest.binary, code=b"no library", code_hash="another"))
    incumbent = Incumbent(genome=Genome.of({"mode": "honest", "unroll": 1}), build=broken, ratio=1e6)
    asked = replace(measure_request(kernel, honest), incumbent=incumbent)
    measured = executor.measure(asked).result(PATIENCE_S)
    assert measured.status is Status.OK, measured.log
    assert [t.contender for t in measured.timings] == ["candidate", "torch"]


_ARMED = '''
{% if p.mode == "aborts" %}
    if (n == 4096 && std::fopen("@ARMED@", "r")) std::abort();
{% elif p.mode == "hangs" %}
    if (n == 4096 && std::fopen("@ARMED@", "r")) for (volatile int on = 1; on;) {}
{% endif %}
'''


@pytest.mark.parametrize("mode", ["aborts", "hangs"])
def test_a_incumbent_that_breaks_beside_it_is_no_fault_of_the_candidate(
    executor: LocalExecutor, tmp_path: Path, mode: str
) -> None:
    armed, anchor = tmp_path / "armed", "    const float factor"
    assert anchor in TEMPLATE
    template = TEMPLATE.replace(anchor, _ARMED.replace("@ARMED@", str(armed)) + anchor, 1)
    folder = write_kernel(tmp_path / "toy", ("honest", mode), template=template)
    builds = {m: executor.build(build_request(folder, m)).result(PATIENCE_S) for m in ("honest", mode)}
    assert measure(executor, folder, builds[mode], mode).status is Status.OK
    armed.touch()
    incumbent = Incumbent(genome=Genome.of({"mode": mode, "unroll": 1}), build=builds[mode], ratio=1e6)
    asked = replace(measure_request(folder, builds["honest"]), incumbent=incumbent)
    measured = executor.measure(asked).result(PATIENCE_S)
    assert measured.status is Status.OK, measured.log
    assert [t.contender for t in measured.timings] == ["candidate", "torch"]


def test_a_candidate_that_is_only_to_be_gated_carries_no_time(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    measured = executor.measure(measure_request(kernel, honest, timed=False)).result(PATIENCE_S)
    assert measured.status is Status.OK
    assert not measured.timings


def test_a_wrong_candidate_carries_the_reason_and_no_time(executor: LocalExecutor, kernel: Path) -> None:
    build = executor.build(build_request(kernel, "wrong")).result(PATIENCE_S)
    measured = measure(executor, kernel, build, "wrong")
    assert measured.status is Status.WRONG
    assert not measured.timings
    assert measured.log == "normal 5: y: 5 of 5 elements are outside the tolerance"


def test_a_build_that_fails_carries_the_compilers_words(executor: LocalExecutor, kernel: Path) -> None:
    build = executor.build(build_request(kernel, "compile_error")).result(PATIENCE_S)
    assert build.status is Status.COMPILE_ERROR
    assert "this candidate does not compile" in build.log
    assert "#error" in build.source
    assert executor.build(build_request(kernel, unroll=2)).result(PATIENCE_S).status is Status.OK


def test_a_build_that_takes_too_long_is_ended_with_its_compiler(executor: LocalExecutor, kernel: Path) -> None:
    build = executor.build(build_request(kernel, "compile_bomb")).result(PATIENCE_S)
    assert build.status is Status.COMPILE_TIMEOUT
    assert build.log == "the build took longer than 6 s"
    assert build.seconds >= 6
    wait_until(lambda: not compilers(), "the compiler has ended")
    assert executor.build(build_request(kernel, unroll=4)).result(PATIENCE_S).status is Status.OK


def test_a_library_without_the_entry_point_is_a_load_error(executor: LocalExecutor, kernel: Path) -> None:
    build = executor.build(build_request(kernel, "no_entry")).result(PATIENCE_S)
    measured = measure(executor, kernel, build, "no_entry")
    assert measured.status is Status.LOAD_ERROR
    assert "'twice'" in measured.log


@pytest.mark.parametrize(
    ("mode", "verdicts"),
    [
        ("segfault", {(Status.ILLEGAL_ADDRESS, f"the device process died (SIGSEGV){AGAIN}")}),
        ("abort", {(Status.TRAP, f"the device process died (SIGABRT){AGAIN}")}),
        ("spin", {(Status.TIMEOUT, "no result within 6 s")}),
        # What other libraries do at exit may wait for threads that are gone.
        (
            "exit",
            {
                (Status.CRASH, f"the device process died (exit code 0){AGAIN}"),
                (Status.TIMEOUT, "no result within 6 s"),
                (Status.TIMEOUT, f"no result within 6 s{AGAIN}"),
            },
        ),
    ],
    ids=["segfault", "abort", "spin", "exit"],
)
def test_a_candidate_that_breaks_the_device_process_costs_only_its_own_evaluation(
    executor: LocalExecutor, kernel: Path, honest: Build, mode: str, verdicts: set[tuple[Status, str]]
) -> None:
    build = executor.build(build_request(kernel, mode)).result(PATIENCE_S)
    before = executor.measure(measure_request(kernel, honest, timed=False))
    broken = executor.measure(measure_request(kernel, build, mode))
    after = executor.measure(measure_request(kernel, honest))
    assert before.result(PATIENCE_S).status is Status.OK
    verdict = broken.result(PATIENCE_S)
    assert (verdict.status, verdict.log) in verdicts
    assert verdict.seconds == verdict.gate_seconds > (6 if verdict.status is Status.TIMEOUT else 0)
    assert not verdict.checks
    assert not verdict.timings
    measured = after.result(PATIENCE_S)
    assert measured.status is Status.OK, measured.log
    assert measured.timings


def test_what_is_under_way_is_said_with_its_stage_and_with_when_it_is_ended(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    assert measure(executor, kernel, honest).status is Status.OK
    assert executor.in_flight() == ()
    bomb = executor.build(build_request(kernel, "compile_bomb"))

    def at(stage: str) -> InFlight | None:
        return next((work for work in executor.in_flight() if work.stage == stage and work.left_s is not None), None)

    building = wait_until(lambda: at("build"), "it is being built")
    assert bomb.result(PATIENCE_S).status is Status.COMPILE_TIMEOUT
    hung = executor.build(build_request(kernel, "spin")).result(PATIENCE_S)
    measured = executor.measure(measure_request(kernel, hung, "spin"))
    gated = wait_until(lambda: at("gate"), "it is in the gate")
    later = wait_until(lambda: (w := at("gate")) and w.seconds > 1 and w, "it is there for a second")
    assert measured.result(PATIENCE_S).status is Status.TIMEOUT
    for work, mode in ((building, "compile_bomb"), (gated, "spin"), (later, "spin")):
        assert work is not None
        assert (work.genome.parameters["mode"], work.workload) == (mode, WORKLOAD)
        assert work.left_s is not None
        assert 0 <= work.left_s <= 6
    assert executor.in_flight() == ()


def test_a_contender_that_breaks_a_race_is_an_empty_result_with_the_reason(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    broken = executor.build(build_request(kernel, "abort")).result(PATIENCE_S)

    def request(*contenders: tuple[str, str, Build]) -> RaceRequest:
        return RaceRequest(
            kernel=str(kernel),
            target="cpu",
            workload=WORKLOAD,
            contenders=tuple((n, Genome.of({"mode": m, "unroll": 1}), b) for n, m, b in contenders),
            baselines=("copy",),
            seed=1,
        )

    lost = executor.race(request(("a", "honest", honest), ("b", "abort", broken))).result(PATIENCE_S)
    assert not lost.timings
    assert lost.log == f"trap: the device process died (SIGABRT){AGAIN}"
    assert lost.seconds > 0
    held = executor.race(request(("a", "honest", honest))).result(PATIENCE_S)
    assert [t.contender for t in held.timings] == ["a", "torch", "copy"]
    assert not held.refused


def test_a_contender_that_is_wrong_is_left_out_of_the_race(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    wrong = executor.build(build_request(kernel, "wrong")).result(PATIENCE_S)
    genomes = {m: Genome.of({"mode": m, "unroll": 1}) for m in ("honest", "wrong")}
    result = executor.race(
        RaceRequest(
            kernel=str(kernel),
            target="cpu",
            workload=WORKLOAD,
            contenders=(("a", genomes["honest"], honest), ("b", genomes["wrong"], wrong)),
            baselines=(),
            seed=1,
        )
    ).result(PATIENCE_S)
    assert [t.contender for t in result.timings] == ["a", "torch"]
    assert result.refused == (("b", "y: 4096 of 4096 elements are outside the tolerance (in a timed call)"),)


LOST_S = 3
BREAKS_ONCE = r"""
    if ({{ 1 if p.mode == "breaks_once" else 0 }} && n == 4096 && std::remove("@LOG@.whole") == 0) {
        timespec while_it_hangs = {@LOST_S@, 0};
        nanosleep(&while_it_hangs, nullptr);
        std::abort();
    }
"""
"""Where it is timed, in the first process."""


def test_what_was_lost_with_a_process_is_no_measure_of_how_long_timing_takes(tmp_path: Path) -> None:
    anchor = "    const float factor"
    template = TEMPLATE.replace(anchor, BREAKS_ONCE.replace("@LOST_S@", str(LOST_S)) + anchor)
    kernel = write_kernel(tmp_path / "toy", ("breaks_once",), template=template)
    whole = kernel / "log.txt.whole"
    whole.touch()
    executor = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path / "cache"))
    try:
        build = executor.build(build_request(kernel, "breaks_once")).result(PATIENCE_S)
        request = measure_request(kernel, build, "breaks_once")
        found = executor.measure(request).result(PATIENCE_S)
        noted = list(executor._pace(request, "timing")._seconds)
    finally:
        executor.close()
    assert found.status is Status.OK, found.log
    assert not whole.exists()
    assert len(noted) == 1
    assert found.timing_seconds <= noted[0] < found.seconds - LOST_S


def test_code_that_is_not_to_be_loaded_is_refused_by_the_gate_and_left_out_of_a_race(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    remembers = executor.build(build_request(kernel, "remembers")).result(PATIENCE_S)
    assert honest.binary is not None
    releases = replace(honest, binary=replace(honest.binary, triggers_dependents=True))  # as a GPU's code can
    reasons = {
        "variables": "the code has 4 bytes of variables that live from call to call",
        "releases": "the code lets the kernel after it start before it has ended",
    }
    others = {"variables": ("remembers", remembers), "releases": ("honest", releases)}
    for name, (mode, build) in others.items():
        gated = executor.measure(measure_request(kernel, build, mode)).result(PATIENCE_S)
        assert gated.status is Status.LOAD_ERROR
        assert gated.log.startswith(reasons[name])
        assert not gated.device_lost

    def race(contenders: dict[str, tuple[str, Build]]) -> RaceResult:
        entries = tuple((n, Genome.of({"mode": m, "unroll": 1}), b) for n, (m, b) in contenders.items())
        return executor.race(
            RaceRequest(
                kernel=str(kernel), target="cpu", workload=WORKLOAD, contenders=entries, baselines=("copy",), seed=1
            )
        ).result(PATIENCE_S)

    for held, timed in (({"a": ("honest", honest), **others}, ["a", "torch", "copy"]), (others, ["torch", "copy"])):
        result = race(held)
        assert [t.contender for t in result.timings] == timed
        assert {name: reason[: len(reasons[name])] for name, reason in result.refused} == reasons


def test_a_renewed_device_is_another_process(executor: LocalExecutor, kernel: Path, honest: Build) -> None:
    assert measure(executor, kernel, honest).status is Status.OK
    before = {p.pid for p in descendants()}
    executor.renew_device()
    assert measure(executor, kernel, honest).status is Status.OK
    after = {p.pid for p in descendants()}
    assert len(before - after) == 2  # one for the gate, one for timing
    assert len(after - before) == 2


def compiling_builder() -> psutil.Process | None:
    """The builder that a compiler works for: above that, and below the server of workers."""
    for compiler in compilers():
        try:
            above = [p for p in compiler.parents() if p.pid == os.getpid() or p.name().startswith("python")]
        except psutil.NoSuchProcess:
            continue
        if len(above) > 2 and above[2].pid == os.getpid():
            return above[0]
    return None


def test_a_builder_that_is_killed_is_replaced_and_the_build_made_again(
    executor: LocalExecutor, kernel: Path
) -> None:
    future = executor.build(build_request(kernel, "compile_bomb"))
    first = wait_until(compiling_builder, "a compiler runs")
    assert first is not None
    first.kill()

    def another() -> psutil.Process | None:
        return None if (builder := compiling_builder()) == first else builder

    second = wait_until(another, "another builder compiles")
    assert second is not None
    second.kill()
    build = future.result(PATIENCE_S)
    assert build.status is Status.CRASH
    assert build.log == "the builder died (SIGKILL) while it compiled this, twice"
    wait_until(lambda: not compilers(), "the compilers have ended with their builders")
    assert executor.build(build_request(kernel, unroll=8)).result(PATIENCE_S).status is Status.OK


def test_a_builder_computes_nothing_with_pytorchs_threads(executor: LocalExecutor, kernel: Path, honest: Build) -> None:
    """They would take the cores from candidates and compilers, from every builder's team."""
    future = executor.build(build_request(kernel, "compile_bomb"))
    builder = wait_until(compiling_builder, "a compiler runs")
    assert builder is not None
    threads = builder.num_threads()
    future.result(PATIENCE_S)
    assert threads == 2  # its main thread, and the one that ends it with the command, however many cores there are


def test_nothing_is_compiled_while_a_candidate_runs(executor: LocalExecutor, kernel: Path) -> None:
    log = kernel / "log.txt"
    build = executor.build(build_request(kernel, "tell_time")).result(PATIENCE_S)
    log.unlink()
    futures = []
    for unroll in (2, 4, 8):
        futures.append(executor.measure(measure_request(kernel, build, "tell_time")))
        futures.append(executor.build(build_request(kernel, "wrong", unroll)))
        futures.append(executor.build(build_request(kernel, "tell_time", unroll)))
    results = [f.result(PATIENCE_S) for f in futures]
    assert all(r.status is Status.OK for r in results)
    events = [(float(time_s), event) for event, time_s in map(str.split, log.read_text().splitlines())]
    calls = [t for t, event in events if event == "call"]
    begins = sorted(t for t, event in events if event == "begin")
    ends = sorted(t for t, event in events if event == "end")
    assert len(begins) == len(ends) == 6
    assert len(calls) > 100
    for begin, end in zip(begins, ends, strict=True):
        assert begin < end
        assert not [t for t in calls if begin < t < end]


def test_closing_ends_every_process_and_cancels_what_was_asked(kernel: Path, tmp_path: Path) -> None:
    others = {p.pid for p in descendants()}
    opened = LocalExecutor("cpu", ExecutorConfig(builders=2, cache_dir=tmp_path))
    spin = opened.build(build_request(kernel, "spin")).result(PATIENCE_S)
    running = opened.measure(measure_request(kernel, spin, "spin"))
    queued = opened.measure(measure_request(kernel, spin, "spin"))
    held = opened.build(build_request(kernel))
    wait_until(
        lambda: any(p.cpu_times().user > 0.5 for p in descendants() if p.pid not in others), "the candidate spins"
    )
    opened.close()
    wait_until(lambda: not [p for p in descendants() if p.pid not in others], "all processes have ended")
    for future in (running, queued, held):
        assert future.cancelled()


def test_closing_ends_the_compiler_too(kernel: Path, tmp_path: Path) -> None:
    others = {p.pid for p in descendants()}
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path))
    future = opened.build(build_request(kernel, "compile_bomb"))
    wait_until(compilers, "a compiler runs")
    opened.close()
    wait_until(lambda: not [p for p in descendants() if p.pid not in others], "all processes have ended")
    assert future.cancelled()


def test_workers_do_not_outlive_a_killed_search(kernel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.executors.test_local", str(kernel), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["started\n", "spinning\n"]
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 2
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not alive


def test_an_interrupt_of_the_terminal_reaches_no_worker(kernel: Path, tmp_path: Path) -> None:
    """^C goes to every process of the foreground group; compilers that died of it would be blamed on candidates."""
    command = [sys.executable, "-m", "tests.executors.test_local", str(kernel), str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    for _ in range(10):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert process.stdout.readline() == "spinning\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    assert all(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers)
    process.kill()
    assert "Traceback" not in process.communicate()[1]


def _spin_for_ever(kernel: Path, cache: Path) -> None:
    """Starts a candidate that spins; said on stdout when it does. Interrupts are not for this process."""
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=cache))
    build = opened.build(build_request(kernel, "spin")).result(PATIENCE_S)
    future = opened.measure(measure_request(kernel, build, "spin"))
    wait_until(lambda: any(p.cpu_times().user > 2 for p in descendants()), "the candidate spins")
    print("spinning", flush=True)
    future.result()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    print("started", flush=True)
    _spin_for_ever(Path(sys.argv[1]), Path(sys.argv[2]))
