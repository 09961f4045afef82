"""What broke is told apart by the device's own words and by how a process ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evo.evaluation import Status
from evo.executors._faults import exit_status, exit_text, ran_out_of_memory
from evo.executors._pace import Pace
from evo.executors._presence import Presence
from evo.targets import classify


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered", Status.ILLEGAL_ADDRESS),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", Status.ILLEGAL_ADDRESS),
        ("CUDA_ERROR_MISALIGNED_ADDRESS (716): misaligned address", Status.MISALIGNED_ADDRESS),
        ("CUDA_ERROR_ILLEGAL_INSTRUCTION (715): an illegal instruction was encountered", Status.TRAP),
        ("CUDA_ERROR_ASSERT (710): device-side assert triggered", Status.TRAP),
        ("CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure", Status.TRAP),
        ("CUDA_ERROR_HARDWARE_STACK_ERROR (714): hardware stack error", Status.TRAP),
        ("CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", Status.OUT_OF_MEMORY),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", Status.OUT_OF_MEMORY),
        ("CUDA_ERROR_LAUNCH_TIMEOUT (702): the launch timed out and was terminated", Status.TIMEOUT),
        ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701): too many resources requested", Status.LAUNCH_ERROR),
        ("CUDA_ERROR_INVALID_VALUE (1): invalid argument", Status.LAUNCH_ERROR),
    ],
)
def test_a_message_of_the_device_has_a_status(message: str, status: Status) -> None:
    assert classify(message, Status.LAUNCH_ERROR) is status


@pytest.mark.parametrize(
    ("exitcode", "status", "text"),
    [
        (-signal.SIGSEGV, Status.ILLEGAL_ADDRESS, "SIGSEGV"),
        (-signal.SIGBUS, Status.ILLEGAL_ADDRESS, "SIGBUS"),
        (-signal.SIGABRT, Status.TRAP, "SIGABRT"),
        (-signal.SIGILL, Status.TRAP, "SIGILL"),
        (-signal.SIGFPE, Status.TRAP, "SIGFPE"),
        (-signal.SIGKILL, Status.CRASH, "SIGKILL"),
        (0, Status.CRASH, "exit code 0"),
        (3, Status.CRASH, "exit code 3"),
        (-63, Status.CRASH, "signal 63"),
    ],
)
def test_the_end_of_a_process_has_a_status(exitcode: int, status: Status, text: str) -> None:
    assert exit_status(exitcode) is status
    assert exit_text(exitcode) == text


def test_a_compiler_without_memory_is_told_from_one_with_an_error() -> None:
    assert ran_out_of_memory("cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes")
    assert ran_out_of_memory("g++: fatal error: Killed signal terminated program cc1plus")
    assert ran_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    assert not ran_out_of_memory("candidate.cpp:3:1: error: expected ';'")


def test_a_limit_follows_the_median_between_its_floor_and_its_ceiling() -> None:
    pace = Pace(floor_s=2, ceiling_s=30)
    assert pace.limit_s() == 30
    pace.note(0.01)
    assert pace.limit_s() == 2
    for _ in range(2):
        pace.note(0.5)
    assert pace.limit_s() == pytest.approx(10)
    for _ in range(9):
        pace.note(9)
    assert pace.limit_s() == 30


def test_the_floor_of_a_limit_is_higher_while_others_are_in_the_way() -> None:
    crowd = [True]
    pace = Pace(floor_s=0.1, ceiling_s=30, crowded=lambda: bool(crowd))
    assert pace.limit_s() == 30
    pace.note(0.001)
    assert pace.limit_s() == pytest.approx(1)
    crowd.clear()
    assert pace.limit_s() == pytest.approx(0.1)


def test_a_command_knows_of_others_on_its_device_until_they_end_however_they_do(tmp_path: Path) -> None:
    mine, other, elsewhere = (Presence(tmp_path) for _ in range(3))
    assert not mine.others()
    for presence, device in ((mine, "0000:18:00.0"), (mine, "0000:18:00.0"), (elsewhere, "0000:2a:00.0")):
        presence.join(device)
    assert not mine.others()
    other.join("0000:18:00.0")
    assert mine.others()
    assert not elsewhere.others()
    assert other.others()
    other.close()
    assert not mine.others()
    code = "import sys, time; from pathlib import Path; from evo.executors._presence import Presence;"
    code += " kept = Presence(Path(sys.argv[1])); kept.join('0000:18:00.0'); print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "here\n"
        assert mine.others()
        killed.kill()
        killed.wait()
    assert not mine.others()
    (folder,) = tmp_path.glob("*18-00.0")
    assert len(list(folder.iterdir())) == 1  # its own
    mine.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("what", ["a link", "a file", "open to all"])
def test_a_folder_that_somebody_else_may_have_made_is_left_alone(what: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "command-thesis.tex").write_text("years of work")
    folder = tmp_path / f"evo-{os.getuid()}-0000-18-00.0"
    if what == "a link":
        folder.symlink_to(theirs)
    elif what == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    presence = Presence(tmp_path)
    presence.join("0000:18:00.0")
    assert not presence.others()
    presence.close()
    assert (theirs / "command-thesis.tex").exists()
