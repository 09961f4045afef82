"""Whatever a candidate does to its process, it harms no other, and nothing is left running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from evo.errors import DeviceError, KernelError
from evo.evaluation import Build, Evaluation, Status
from evo.executors import ExecutorConfig, InFlight, _device
from evo.executors._device import Device, Job, prepare_device
from evo.executors._device import session as session_of_process
from evo.executors._worker import MOST_KILLED, Worker
from evo.executors.local import LocalExecutor
from evo.job.job import check_workloads
from evo.measure import Incumbent, TaskData, gate
from evo.problem.genome import Genome
from evo.problem.kernel import Tensors
from evo.problem.loading import kernel_digest, load_kernel
from evo.targets import find_target
from evo.testing.toy_kernel import TEMPLATE, WORKLOAD, build_request, measure_request, write_kernel
from tests.executors.processes import PATIENCE_S, compilers, descendants, wait_until

MODES = ("honest", "wrong", "compile_bomb", "hang", "spin", "tell_time")


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


def measure(executor: LocalExecutor, kernel: Path, build: Build, mode: str = "honest") -> Evaluation:
    return executor.measure(measure_request(kernel, build, mode)).result(PATIENCE_S)


def is_not_blamed_beside(executor: LocalExecutor, kernel: Path, honest: Build, broken: Build, mode: str) -> None:
    incumbent = Incumbent(genome=Genome.of({"mode": mode, "unroll": 1}), build=broken, ratio=1e6)
    asked = replace(measure_request(kernel, honest), incumbent=incumbent)
    measured = executor.measure(asked).result(PATIENCE_S)
    assert measured.status is Status.OK, measured.log
    assert [t.contender for t in measured.timings] == ["candidate", "torch"]


def test_an_incumbent_that_does_not_load_is_no_fault_of_the_candidate(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    broken = replace(honest, binary=replace(honest.binary, code=b"no library", code_hash="another"))
    is_not_blamed_beside(executor, kernel, honest, broken, "honest")


_ARMED = '''
{% if p.mode == "aborts" %}
    if (n == 4096 && std::fopen("@ARMED@", "r")) std::abort();
{% elif p.mode == "hangs" %}
    if (n == 4096 && std::fopen("@ARMED@", "r")) pause();
{% endif %}
'''


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aborts", "hangs"])
def test_an_incumbent_that_breaks_beside_it_is_no_fault_of_the_candidate(
    executor: LocalExecutor, tmp_path: Path, mode: str
) -> None:
    armed, anchor = tmp_path / "armed", "    const float factor"
    assert anchor in TEMPLATE
    template = TEMPLATE.replace(anchor, _ARMED.replace("@ARMED@", str(armed)) + anchor, 1)
    folder = write_kernel(tmp_path / "toy", ("honest", mode), template=template)
    builds = {m: executor.build(build_request(folder, m)).result(PATIENCE_S) for m in ("honest", mode)}
    assert measure(executor, folder, builds[mode], mode).status is Status.OK
    armed.touch()
    is_not_blamed_beside(executor, folder, builds["honest"], builds[mode], mode)


def test_a_build_that_takes_too_long_is_ended_with_its_compiler(executor: LocalExecutor, kernel: Path) -> None:
    bomb = executor.build(build_request(kernel, "compile_bomb"))
    (work,) = wait_until(lambda: [w for w in executor.in_flight() if w.left_s is not None], "it is being built")
    assert (work.stage, work.genome.parameters["mode"], work.workload) == ("build", "compile_bomb", WORKLOAD)
    assert 0 <= work.left_s <= 6
    build = bomb.result(PATIENCE_S)
    assert build.status is Status.COMPILE_TIMEOUT
    assert build.log == "the build took longer than 6 s"
    assert build.seconds >= 6
    wait_until(lambda: not compilers(), "the compiler has ended")
    assert executor.build(build_request(kernel, unroll=4)).result(PATIENCE_S).status is Status.OK


@pytest.mark.slow
def test_on_a_device_of_its_own_a_spare_process_takes_over_and_neighbours_are_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for such a device: only the executor is told that nothing shares the cores."""
    anchor, late = "    const float factor", '    if ({{ 1 if p.mode == "late" else 0 }} && n == 4096) std::abort();\n'
    assert anchor in TEMPLATE
    modes = ("honest", "wrong", "abort", "late")
    folder = write_kernel(tmp_path / "toy", modes, template=TEMPLATE.replace(anchor, late + anchor, 1))
    monkeypatch.setattr(find_target("cpu"), "shares_cores", False)
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path, gate_floor_s=6))
    try:
        builds = {m: opened.build(build_request(folder, m)).result(PATIENCE_S) for m in modes}
        crowd = ["honest", "wrong", "abort", "late", "honest", "abort", "honest"]
        futures = [opened.measure(measure_request(folder, builds[m], m)) for m in crowd]
        found = [f.result(PATIENCE_S) for f in futures]
        spare = opened._devices[0]._spare
    finally:
        opened.close()
    expected = {"honest": Status.OK, "wrong": Status.WRONG, "abort": Status.TRAP, "late": Status.TRAP}
    assert [m.status for m in found] == [expected[m] for m in crowd]
    assert [bool(m.timings) for m in found] == [m == "honest" for m in crowd]
    assert found[3].timing_seconds > 0
    assert spare.ended  # closed with the rest


@pytest.mark.slow
def test_two_devices_measure_at_once_and_both_are_renewed(
    tmp_path: Path, kernel: Path, honest: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for both: only the executor is told that nothing shares the cores."""
    monkeypatch.setattr(find_target("cpu"), "shares_cores", False)
    config = ExecutorConfig(builders=1, cache_dir=tmp_path, devices=("", ""), measure_timeout_s=6, gate_floor_s=6)
    opened = LocalExecutor("cpu", config)

    def both_at_work() -> set[int]:
        """The devices' processes."""
        futures = [opened.measure(measure_request(kernel, hangs, "hang", timed=False)) for _ in range(2)]
        wait_until(lambda: [work.stage for work in opened.in_flight()] == ["gate", "gate"], "both devices are busy")
        found = {device._worker.pid for device in opened._devices if device._worker is not None}
        assert [f.result(PATIENCE_S).status for f in futures] == [Status.TIMEOUT] * 2
        return found

    try:
        hangs = opened.build(build_request(kernel, "hang")).result(PATIENCE_S)
        first = both_at_work()
        assert measure(opened, kernel, honest).status is Status.OK
        opened.renew_device()
        second = both_at_work()
        assert len(first) == len(second) == 2
        assert not first & second
    finally:
        opened.close()


@pytest.mark.slow
def test_a_device_that_cannot_be_used_is_left_out_while_there_is_another(
    tmp_path: Path, kernel: Path, honest: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_target("cpu"), "shares_cores", False)
    start = LocalExecutor._start_device

    def start_or_lose(executor: LocalExecutor, name: str) -> Worker:
        worker = start(executor, name)
        if name == "lost":
            worker.kill()
        return worker

    monkeypatch.setattr(LocalExecutor, "_start_device", start_or_lose)
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path, devices=("lost", "")))
    try:
        futures = [opened.measure(measure_request(kernel, honest)) for _ in range(4)]
        assert [f.result(PATIENCE_S).status for f in futures] == [Status.OK] * 4
        wait_until(lambda: opened.devices == 1, "the other is left out")
    finally:
        opened.close()


@pytest.mark.slow
def test_what_is_under_way_is_said_with_its_stage_and_with_when_it_is_ended(
    executor: LocalExecutor, kernel: Path, honest: Build
) -> None:
    assert measure(executor, kernel, honest).status is Status.OK
    assert executor.in_flight() == ()

    def at(stage: str) -> InFlight | None:
        return next((work for work in executor.in_flight() if work.stage == stage and work.left_s is not None), None)

    hung = executor.build(build_request(kernel, "hang")).result(PATIENCE_S)
    measured = executor.measure(measure_request(kernel, hung, "hang"))
    gated = wait_until(lambda: at("gate"), "it is in the gate")
    later = wait_until(lambda: (w := at("gate")) and w.seconds > 1 and w, "it is there for a second")
    verdict = measured.result(PATIENCE_S)
    assert verdict.status is Status.TIMEOUT
    assert verdict.log == "the device process gave no result within 6 s (and again, alone in a fresh process)"
    assert verdict.seconds == verdict.gate_seconds > 6
    for work in (gated, later):
        assert (work.genome.parameters["mode"], work.workload) == ("hang", WORKLOAD)
        assert 0 <= work.left_s <= 6
    assert executor.in_flight() == ()


def test_a_renewed_device_is_another_process(executor: LocalExecutor, kernel: Path, honest: Build) -> None:
    assert measure(executor, kernel, honest).status is Status.OK
    before = {p.pid for p in descendants()}
    executor.renew_device()
    assert measure(executor, kernel, honest).status is Status.OK
    after = {p.pid for p in descendants()}
    assert len(before - after) == len(after - before) == 1
    executor.renew_device()
    wrong = executor.build(build_request(kernel, "wrong")).result(PATIENCE_S)
    asked = [("honest", honest), ("wrong", wrong), ("honest", honest)]  # at once: each has its own answer
    found = [executor.measure(measure_request(kernel, build, mode, timed=False)) for mode, build in asked]
    assert [f.result(PATIENCE_S).status for f in found] == [Status.OK, Status.WRONG, Status.OK]


def prepare_dead_device(scratch: Path) -> None:
    prepare_device("cpu", scratch, 1 << 28)
    session = session_of_process()

    def fall_silent() -> None:
        raise RuntimeError("fell off the bus\nand more")

    session.synchronize = fall_silent  # type: ignore[method-assign]


def prepare_full_device(scratch: Path) -> None:
    prepare_device("cpu", scratch, 1 << 28)

    def allocate(*_: object) -> Tensors:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.03 GiB.\nand more")

    gate.allocate_outputs = allocate


def prepare_no_device(scratch: Path) -> None:
    os.abort()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (prepare_dead_device, "does not answer: fell off the bus$"),
        (prepare_full_device, r"has no memory for the data of .* GiB are free: end what else uses it, or"),
        (prepare_no_device, r"the device cannot be used \(its process died \(SIGABRT\)"),
    ],
    ids=["it does not answer", "others fill it", "its processes die"],
)
def test_a_device_that_fails_in_two_fresh_processes_ends_the_work(
    executor: LocalExecutor,
    kernel: Path,
    honest: Build,
    tmp_path: Path,
    prepare: Callable[[Path], None],
    reason: str,
) -> None:
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker(tmp_path, prepare, (tmp_path,), candidates=True))
        return started[-1]

    device = Device(start, ExecutorConfig(builders=1, cache_dir=tmp_path), host_code=True)
    job = Job(request=measure_request(kernel, honest), future=Future())
    device.post(job)
    device.finish(retires=lambda: False)
    device.close()
    with pytest.raises(DeviceError, match=reason):
        job.future.result(PATIENCE_S)
    assert len(started) == 2


def test_an_error_of_python_in_a_process_where_a_candidate_ran_is_the_candidates(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "odd"))
    text = (folder / "kernel.py").read_text()
    broken = '    if point["mode"] == "odd" and not COMPILING:\n        raise RuntimeError("the heap is broken")\n'
    (folder / "kernel.py").write_text(text.replace("    if COMPILING:\n", broken + "    if COMPILING:\n", 1))
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path / "cache", gate_floor_s=30))
    found = {}
    for mode in ("odd", "honest"):
        build = opened.build(build_request(folder, mode)).result(PATIENCE_S)
        found[mode] = opened.measure(measure_request(folder, build, mode, timed=False)).result(PATIENCE_S)
    opened.close()
    assert found["odd"].status is Status.CRASH
    assert "the heap is broken (and again, alone in a fresh process)" in found["odd"].log
    assert found["honest"].status is Status.OK


def compiling_builder() -> psutil.Process | None:
    """The builder that a compiler works for, which is called so."""
    for compiler in compilers():
        try:
            builder = next((p for p in compiler.parents() if p.name() == "evo-builder"), None)
        except psutil.NoSuchProcess:
            continue
        if builder is not None:
            return builder
    return None


def test_a_builder_that_is_killed_is_replaced_and_the_build_made_again(
    executor: LocalExecutor, kernel: Path
) -> None:
    future, killed = executor.build(build_request(kernel, "compile_bomb")), list[psutil.Process]()

    def another() -> psutil.Process | None:
        return None if (builder := compiling_builder()) in killed else builder

    for _ in range(MOST_KILLED):
        killed.append(wait_until(another, "another builder compiles"))
        killed[-1].kill()
    build = future.result(PATIENCE_S)
    assert build.status is Status.CRASH
    assert build.log == f"the builder died (SIGKILL) while it compiled this, {MOST_KILLED} times"
    wait_until(lambda: not compilers(), "the compilers have ended with their builders")
    assert executor.build(build_request(kernel, unroll=8)).result(PATIENCE_S).status is Status.OK


def test_a_kernel_whose_files_have_changed_is_neither_built_nor_measured_and_no_candidate_is_blamed(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    kernel = write_kernel(tmp_path / "toy", MODES)
    template, digest = kernel / "cpu.cpp.j2", kernel_digest(kernel)

    def build(mode: str) -> Build:
        return executor.build(replace(build_request(kernel, mode), kernel_digest=digest)).result(PATIENCE_S)

    built, text = build("honest"), template.read_text()
    assert built.status is Status.OK
    template.write_text("{% if")
    with pytest.raises(KernelError, match="were changed or deleted while they were in use"):
        build("wrong")
    with pytest.raises(KernelError, match="were changed or deleted while they were in use"):
        executor.measure(replace(measure_request(kernel, built), kernel_digest=digest)).result(PATIENCE_S)
    template.write_text(text)
    assert build("wrong").status is Status.OK
    measured = executor.measure(replace(measure_request(kernel, built), kernel_digest=digest)).result(PATIENCE_S)
    assert measured.status is Status.OK


def test_a_kernel_that_is_edited_while_its_candidate_is_compiled_is_not_judged_by_either_form(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    kernel = write_kernel(tmp_path / "toy", MODES)
    template, digest = kernel / "cpu.cpp.j2", kernel_digest(kernel)
    future = executor.build(replace(build_request(kernel, "compile_bomb"), kernel_digest=digest))
    compiler = wait_until(compilers, "a compiler runs")[0]
    template.write_text(template.read_text() + "\n")
    compiler.kill()
    with pytest.raises(KernelError, match="were changed or deleted while they were in use"):
        future.result(PATIENCE_S)


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


@pytest.mark.parametrize("at", ["compiling", "measuring"])
def test_closing_ends_every_process_and_cancels_what_was_asked(kernel: Path, tmp_path: Path, at: str) -> None:
    others = {p.pid for p in descendants()}
    opened = LocalExecutor("cpu", ExecutorConfig(builders=2, cache_dir=tmp_path))
    if at == "measuring":
        spin = opened.build(build_request(kernel, "spin")).result(PATIENCE_S)
        asked: list[Future[Any]] = [opened.measure(measure_request(kernel, spin, "spin")) for _ in range(2)]
        wait_until(
            lambda: any(p.cpu_times().user > 0.5 for p in descendants() if p.pid not in others), "the candidate spins"
        )
        asked.append(opened.build(build_request(kernel)))
    else:
        asked = [opened.build(build_request(kernel, "compile_bomb"))]
        wait_until(compilers, "a compiler runs")
    opened.close()
    wait_until(lambda: not [p for p in descendants() if p.pid not in others], "all processes have ended")
    assert all(future.cancelled() for future in asked)


def test_workers_are_reached_by_no_interrupt_of_the_terminal_and_do_not_outlive_a_killed_search(
    kernel: Path, tmp_path: Path
) -> None:
    """^C goes to every process of the foreground group; compilers that died of it would be blamed on candidates."""
    command = [sys.executable, "-m", "tests.executors.test_local", str(kernel), str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout.readline() == "started\n"
    for _ in range(10):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert process.stdout.readline() == "spinning\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    assert all(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers)
    process.kill()
    assert "Traceback" not in process.communicate()[1]
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not alive


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


def test_data_of_workloads_that_memory_does_not_hold_together_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = find_target("cpu").open()
    monkeypatch.setattr(_device, "_state", _device._State(target="cpu"))
    monkeypatch.setattr(_device, "session", lambda: opened)  # the process's own turns gradients off
    sizes = check_workloads(load_kernel("layernorm"), "cpu", ["rows=8,cols=8,dtype=float32", "rows=8,cols=9,dtype=float32"])
    data = [TaskData(kernel="layernorm", target="cpu", workload=size) for size in sizes]
    first, second = (weakref.ref(_device._harness(d)) for d in data)
    assert _device._harness(data[0]) is first()
    assert _device._harness(data[1]) is second()
    monkeypatch.setattr(find_target("cpu"), "free_bytes", lambda: 0)
    assert _device._harness(data[1]) is second()
    assert first() is None
    assert _device._harness(data[0]) is not None
    assert second() is None


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalExecutor]:
    """An executor with a folder for temporary files of its own, tmp_path/tmp."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path / "cache"))
    yield opened
    opened.close()


def test_an_executor_that_winds_down_drops_builds_and_ends_what_it_measures(opened: LocalExecutor, tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "compile_bomb"))
    build = opened.build(build_request(folder)).result(PATIENCE_S)
    measured = opened.measure(measure_request(folder, build))
    wait_until(lambda: [w for w in opened.in_flight() if w.stage in ("gate", "timing")], "it is being measured")
    waiting = [opened.build(build_request(folder, "compile_bomb", unroll)) for unroll in (1, 2)]
    opened.wind_down()
    assert all(future.cancelled() for future in waiting)
    assert measured.result(PATIENCE_S).status is Status.OK
    assert opened.build(build_request(folder)).cancelled()
    assert opened.losses == 0


def test_a_build_that_runs_is_dropped_when_its_executor_winds_down(opened: LocalExecutor, tmp_path: Path) -> None:
    building = opened.build(build_request(write_kernel(tmp_path / "toy", ("compile_bomb",)), "compile_bomb"))
    wait_until(compilers, "it is being compiled")
    opened.wind_down()
    wait_until(building.cancelled, "it is dropped")
    wait_until(lambda: not compilers(), "its compiler is ended")


@pytest.mark.parametrize("cleaned", ["files", "folders", "all"])
def test_temporary_files_that_are_cleaned_away_cost_no_candidate(
    opened: LocalExecutor, tmp_path: Path, cleaned: str
) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "other"))
    build = opened.build(build_request(folder)).result(PATIENCE_S)
    assert measure(opened, folder, build).status is Status.OK
    if cleaned == "files":
        for path in [p for p in (tmp_path / "tmp").rglob("*") if p.is_file()]:
            path.unlink()
    else:
        shutil.rmtree(tmp_path / "tmp")
        if cleaned == "folders":
            (tmp_path / "tmp").mkdir()
    built = opened.build(build_request(folder, "other")).result(PATIENCE_S)
    assert built.status is Status.OK, built.log
    measured = measure(opened, folder, build)
    assert measured.status is Status.OK, measured.log
    opened.renew_device()  # another process is started, which needs the server
    assert measure(opened, folder, build).status is Status.OK
    assert opened.losses == 0


@pytest.mark.parametrize("cleaned", [False, True], ids=["killed", "its files cleaned away"])
def test_a_compiler_that_something_outside_ends_is_no_fault_of_the_candidate(
    opened: LocalExecutor, tmp_path: Path, cleaned: bool
) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "compile_bomb"))
    building = opened.build(build_request(folder, "compile_bomb"))
    wait_until(compilers, "it is being compiled")
    if cleaned:
        shutil.rmtree(tmp_path / "tmp")
    for process in compilers():  # a compiler that finds its files gone ends by itself
        process.terminate() if cleaned else process.kill()
    wait_until(compilers, "it is compiled once more")
    assert not building.done()


def test_workers_go_on_in_a_folder_that_was_removed_and_with_a_server_that_was_killed(tmp_path: Path) -> None:
    write_kernel(tmp_path / "toy")
    (tmp_path / "here").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", REMOVED, str(tmp_path)],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.stdout.split() == ["ok", "ok", "ok", "ok"], ended.stderr
    assert ended.stderr == ""
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(("pymp-", "evo-"))]


REMOVED = """
import os, sys, psutil
from multiprocessing import forkserver
from pathlib import Path
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.testing.toy_kernel import build_request, measure_request
place = Path(sys.argv[1])
opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=place / "cache"))
psutil.Process(forkserver._forkserver._forkserver_pid).kill()  # while it still imports, and the first worker waits for it
os.rmdir(place / "here")
build = opened.build(build_request(place / "toy")).result()
print(build.status)
print(opened.measure(measure_request(place / "toy", build)).result().status)
server = psutil.Process(forkserver._forkserver._forkserver_pid)
server.kill()
build = opened.build(build_request(place / "toy", unroll=2)).result()
print(build.status)
print(opened.measure(measure_request(place / "toy", build)).result().status)
opened.close()
"""
