"""What a gate cannot see: a candidate that is right here and now, by an access, a value or an order that is not its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from evo import cli
from evo.errors import DeviceError
from evo.lineage import Environment
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.sanitize import Report, choose_tools, sanitize
from evo.targets import find_target
from evo.targets._sanitizers import find_compute_sanitizer, read_report
from evo.testing.toy_kernel import build_request, write_kernel
from tests.ended import EVO, run_here, run_python
from tests.landscape import random_search
from tests.lineage import samples as s

pytestmark = pytest.mark.slow

BODIES = {
    "honest": "",
    "writes beyond": "y[n] = 0;",
    "writes before": "y[-1] = 0;",
    "reads beyond": "volatile float next = x[n]; (void)next;",
    "reads before": "volatile float next = x[-1]; (void)next;",
    "overflow": "volatile int most = 2147483647; volatile int sum = most + 1; (void)sum;",
    "stack unset": "float some[4]; if (n < 0) some[1] = 1; y[0] += 1e-30f * some[1];",
    "heap unset": "volatile float* h = (volatile float*)std::malloc(4 * n); y[0] += 1e-30f * h[0]; std::free((void*)h);",
    "crash": "*(volatile int*)8 = 1;",
    "wrong": "y[n - 1] = 3;",
    "spins": "for (volatile int on = 1; on;) {}",
    "spins under the tool": "#ifdef __SANITIZE_ADDRESS__\nfor (volatile int on = 1; on;) {}\n#endif",
}

TEMPLATE = """
#include <cstdlib>
extern "C" void twice(const float* x, float* y, long long n) {
    for (long long i = 0; i < n; ++i) y[i] = 2 * x[i];
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    branches = "".join(f'{{% if p.mode == "{mode}" %}}\n    {body}\n{{% endif %}}\n' for mode, body in BODIES.items())
    folder = tmp_path_factory.mktemp("kernels") / "toy"
    return str(write_kernel(folder, tuple(BODIES), template=f"{TEMPLATE}{branches}}}\n"))


def run_tool(toy: str, mode: str, tool: str, limit_s: float = 60.0) -> Report:
    (report,) = sanitize(build_request(Path(toy), mode), [tool], limit_s).reports
    return report


@pytest.mark.parametrize("tool", choose_tools("cpu", "all"))
def test_an_honest_candidate_is_clean(toy: str, tool: str) -> None:
    report = run_tool(toy, "honest", tool)
    assert report.clean, report


FOUND = {
    "writes beyond": ("address", r"heap-buffer-overflow candidate\.cpp:\d+ in twice \| y\[n\] = 0;"),
    "writes before": ("address", r"heap-buffer-overflow candidate\.cpp:\d+ in twice"),
    "reads beyond": ("address", r"heap-buffer-overflow candidate\.cpp:\d+ in twice"),
    "crash": ("address", "SEGV"),
    "overflow": ("undefined", r"signed integer overflow: 2147483647 \+ 1 cannot be represented"),
    "stack unset": ("initcheck", "normal 5: y depends on memory that was never written"),
    "heap unset": ("initcheck", "normal 5: y depends on memory that was never written"),
}


@pytest.mark.parametrize("mode", FOUND)
def test_a_fault_that_leaves_the_result_right_is_found_by_its_tool(toy: str, mode: str) -> None:
    tool, pattern = FOUND[mode]
    report = run_tool(toy, mode, tool)
    assert report.errors >= 1
    assert any(re.search(pattern, m) for m in report.messages), report.messages
    assert not report.clean


def test_a_wrong_output_is_refused_as_the_gate_refuses_it(toy: str) -> None:
    report = run_tool(toy, "wrong", "undefined")
    assert not report.errors
    assert not report.clean
    assert report.wrong[0].startswith("normal 5: y: ")


def test_a_candidate_that_kills_its_process_or_never_ends_is_reported_with_the_case(toy: str) -> None:
    (died,) = run_tool(toy, "crash", "undefined").messages
    (endless,) = run_tool(toy, "spins", "undefined", limit_s=5.0).messages
    assert "the process died" in died
    assert "no end within" in endless
    assert "at case normal 5" in died
    assert "at case normal 5" in endless


def test_without_compute_sanitizer_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if not Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        with pytest.raises(DeviceError, match=r"compute-sanitizer was not found .*install the CUDA toolkit"):
            find_compute_sanitizer()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "compute-sanitizer").write_text("")
    assert find_compute_sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")


REPORTS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at twice+0x120 in candidate.cu:7
=========     by thread (31,0,0) in block (0,0,0)
=========     Access at 0x7f1a0a000fa4 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1a0a000000 of size 4,004 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at twice+0x120 in candidate.cu:7
=========     by thread (30,0,0) in block (0,0,0)
=========     Access at 0x7f1a0a000fa4 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1a0a000000 of size 4,004 bytes
=========
========= Error: Race reported between Write access at twice+0x170 in candidate.cu:5
=========     and Read access at twice+0x1f0 in candidate.cu:7 [2048 hazards]
=========
========= Target application returned an error
========= ERROR SUMMARY: 32 errors
"""


def test_reports_of_compute_sanitizer_are_told_in_a_line_for_each_kind() -> None:
    assert read_report(REPORTS, 86) == (
        32,
        [
            "Invalid __global__ write of size 4 bytes; at twice+0x120 in candidate.cu:7; by thread (31,0,0) in block"
            " (0,0,0); Access at 0x7f1a0a000fa4 is out of bounds; and is 1 bytes after the nearest allocation at"
            " 0x7f1a0a000000 of size 4,004 bytes (and 1 more like it)",
            "Error: Race reported between Write access at twice+0x170 in candidate.cu:5; and Read access at twice+0x1f0 in"
            " candidate.cu:7 [2048 hazards]",
        ],
    )
    assert read_report("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 86) == (1, [])
    assert read_report("========= ERROR SUMMARY: 0 errors\n", 0) == (0, [])
    assert read_report("========= COMPUTE-SANITIZER\n", 1) == (None, [])


@pytest.mark.parametrize("output", ["", "========= ERRORS IN ALL: 3\n", "========= ERROR SUMMARY: 0 errors\n"])
def test_errors_that_only_the_exit_code_of_compute_sanitizer_tells_of_are_errors(output: str) -> None:
    count, _ = read_report(output, 86)
    assert count == 1


@pytest.mark.parametrize(
    ("body", "tool", "said"),
    [
        ("volatile int most = 2147483647; volatile int sum = most + 1; (void)sum;", "undefined",
         r"signed integer overflow: .* cpu\.cpp:\d+:\d+ \| volatile int most"),
        ('overflow();', "undefined", r"signed integer overflow: .* odd\.hpp:4:\d+$"),
        ("y[n] = 0;", "address", r"heap-buffer-overflow cpu\.cpp:\d+ in twice \| y\[n\] = 0;"),
    ],
)  # fmt: skip
def test_an_error_counts_in_whichever_file_the_tool_sees_it(tmp_path: Path, body: str, tool: str, said: str) -> None:
    """A template without Jinja keeps its own name and lines."""
    kernel = write_kernel(tmp_path / "plain")
    (kernel / "cpu.cpp.j2").unlink()
    (kernel / "odd.hpp").write_text(
        "static void overflow() {\n    volatile int most = 2147483647;\n"
        "    volatile int sum;\n    sum = most + 1;\n    (void)sum;\n}\n"
    )
    text = TEMPLATE.replace("#include", '#include "odd.hpp"\n#include', 1)
    (kernel / "cpu.cpp").write_text(f"{text}    (void)unroll; (void)mode;\n{body}\n}}\n".replace(
        "#include", "enum { honest };\n#define unroll 1\n#define mode honest\n#include", 1))
    report = run_tool(str(kernel), "honest", tool)
    assert report.errors >= 1
    assert any(re.search(said, message) for message in report.messages), report.messages


@pytest.fixture(scope="module")
def recorded(toy: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A database whose run has an honest layernorm and a toy that overflows; their identifiers."""
    db = str(tmp_path_factory.mktemp("recorded") / "lineage.db")
    names = []
    with Store.open(db, write=True) as store:
        for kernel, given in (("layernorm", None), (toy, {"mode": "overflow", "unroll": 1})):
            problem = load_kernel(kernel)
            space = problem.space("cpu", problem.example("cpu"), find_target("cpu").limits("native"))
            run = store.create_run(random_search(kernel, 1), Environment(device="here", arch="native"))
            store.add(run, s.ref(0, point=given or space.complete(space.default)), s.passed(0), elapsed_s=0.0)
            store.set_winner(run, 0, 0)
            names.append(public_id(run.uid, 0))
    return db, names


def test_a_recorded_layernorm_is_clean_and_that_its_source_has_changed_is_told(
    recorded: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    db, (honest, _) = recorded
    assert cli.run(["sanitize", honest[:10], "--tool", "address", "--db", db, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert [(t["tool"], t["clean"]) for t in record["tools"]] == [("address", True)]
    assert len(record["cases"]) > 10
    assert any("offset" in c for c in record["cases"])
    assert "has changed since" in record["remarks"][0]


def test_the_winner_of_a_run_with_a_fault_is_exit_code_1_and_a_line_that_says_where(
    recorded: tuple[str, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    db, _ = recorded
    monkeypatch.setenv("COLUMNS", "500")
    assert cli.run(["sanitize", "toy-", "--tool", "undefined", "--db", db]) == 1
    out = capsys.readouterr().out
    assert re.search("undefined  (3 errors|1 error)", out)
    assert "signed integer overflow" in out
    assert all(len(line) < 400 for line in out.splitlines())
    assert cli.run(["sanitize", "toy-", "--tool", "undefined", "--db", db, "--json"]) == 1
    assert "LD_PRELOAD=" in json.loads(capsys.readouterr().out)[0]["tools"][0]["command"]


def test_a_bad_request_is_one_sentence_and_exit_code_2(
    recorded: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    db, (honest, _) = recorded
    ended = run_here(capsys, "sanitize", honest, "--tool", "memcheck", "--db", db)
    assert (ended.code, ended.out) == (2, "")
    assert "unknown sanitizer for target cpu 'memcheck'; known: address, all" in ended.sentence


def test_a_finalist_with_a_fault_that_the_gate_does_not_see_is_refused_where_that_is_asked_for(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, options = partial(run_here, capsys), ("--sanitize-finals", "--name", "sanitized")
    assert here(*search_for(toy, "reads before", tmp_path), *options).code == 1
    shown = here("show", "sanitized", "--db", str(tmp_path / "lineage.db")).out
    assert " was refused: wrong: under address: heap-buffer-overflow " in shown


def search_for(toy: str, mode: str, folder: Path) -> list[str]:
    search = ["search", toy, "--target", "cpu", "--evaluations", "1", "--finalists", "1", "--fix", "unroll=1"]
    return [*search, "--fix", f"mode={mode}", "--db", str(folder / "lineage.db")]


def test_a_winner_that_reads_beyond_its_input_is_refused_though_what_it_reads_is_thrown_away(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = partial(run_here, capsys)
    assert here(*search_for(toy, "reads beyond", tmp_path), "--name", "beyond").code == 1
    shown = here("show", "beyond", "--db", str(tmp_path / "lineage.db")).out
    assert " was refused: wrong: under address: heap-buffer-overflow " in shown
    assert " | volatile float next = x[" in shown


def test_an_honest_winner_is_checked_and_nothing_is_said_of_it(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_here(capsys, *search_for(toy, "honest", tmp_path))
    assert ended.code == 0
    assert "memory errors" not in ended.out


def test_the_checker_of_a_winner_ends_with_a_command_that_is_killed(toy: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = [sys.executable, "-m", "evo", *search_for(toy, "spins under the tool", tmp_path), "--sanitize-finals"]
    with psutil.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, stdout=subprocess.DEVNULL) as command:
        until, checkers = time.monotonic() + 60, []
        while not checkers:
            assert command.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
            found = command.children(recursive=True)
            with suppress(psutil.Error):  # one that has just ended
                checkers = [p for p in found if any("make_calls" in word for word in p.cmdline())]
        command.kill()
        _, alive = psutil.wait_procs(found, timeout=30)
    assert not alive
    assert not list((tmp_path / "tmp").iterdir())


def without_libasan(folder: Path, instead: str) -> str:
    """A PATH with a g++ that names `instead` as the place of libasan."""
    real, fake = shutil.which("g++"), folder / "bin" / "g++"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f'#!/bin/sh\ncase "$*" in -print-file-name=*) echo {instead} ;; *) exec {real} "$@" ;; esac\n')
    fake.chmod(0o755)
    return os.pathsep.join([str(fake.parent), os.environ["PATH"]])


def test_a_missing_tool_is_told_once_and_before_a_search_whose_finalists_are_to_be_sanitized(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = without_libasan(tmp_path, "libasan.so")
    words = [sys.executable, "-m", "evo", *search_for(toy, "honest", tmp_path), "--sanitize-finals"]
    done = subprocess.run(words, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert re.match(r"evo: finalists cannot be sanitized: \S+ has no libasan\.so, which sanitizing on a CPU needs", line)
    assert "candidate" not in done.stdout
    assert json.loads(run_here(capsys, "runs", "--db", str(tmp_path / "lineage.db"), "--json").out) == []


@pytest.mark.parametrize(
    ("mode", "libasan", "options", "told"),
    [
        ("reads beyond", "libasan.so", (), "has no libasan.so, which sanitizing on a CPU needs"),
        ("honest", "broken.so", ("--sanitize-finals",), "the process died"),
        ("spins under the tool", "", (), "no end within 5 s at case normal 5"),
    ],
    ids=["is missing", "fails for a finalist", "takes too long"],
)
def test_a_tool_refuses_no_candidate_where_it(
    toy: str, tmp_path: Path, mode: str, libasan: str, options: tuple[str, ...], told: str
) -> None:
    """The winner is told as not checked."""
    (tmp_path / "broken.so").write_text("no library")
    where = str(tmp_path / libasan) if libasan == "broken.so" else libasan
    path = without_libasan(tmp_path, where) if libasan else os.environ["PATH"]
    ended = run_python(tmp_path, *EVO, *search_for(toy, mode, tmp_path), *options, PATH=path, COLUMNS="300")
    assert ended.returncode == 0, ended
    assert "; not all could be checked" in ended.stdout
    shown = run_python(tmp_path, *EVO, "show", "latest", "--db", str(tmp_path / "lineage.db"), COLUMNS="300")
    (remark,) = (line for line in shown.stdout.splitlines() if "not checked for memory errors" in line)
    assert told in remark
