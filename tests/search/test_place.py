"""The place of a search: the devices that measure for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from evo.errors import DeviceError, EvoError
from evo.search.place import choose_devices, search_here
from evo.targets import find_target
from tests.ended import run_python


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ("",)),
        ("all", ("u0", "u1", "u2")),
        ("2,0", ("u2", "u0")),
        ("1", ("u1",)),
        ("3", "there is no device 3 of target cpu: 3 answer"),
        ("0,0", "neither all nor different numbers"),
        ("x", "neither all nor different numbers"),
    ],
)
def test_devices_are_chosen_by_their_indices(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, found: tuple[str, ...] | str
) -> None:
    monkeypatch.setattr(find_target("cpu"), "devices", lambda: {"u0": "L4", "u1": "L4", "u2": "L4"})
    if isinstance(found, tuple):
        assert choose_devices("cpu", asked) == found
    else:
        with pytest.raises(EvoError, match=found):
            choose_devices("cpu", asked)


def test_devices_of_several_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_target("cpu"), "devices", lambda: {"u0": "L4", "u1": "RTX 4090"})
    with pytest.raises(DeviceError, match="times of L4 and RTX 4090 do not compare"):
        choose_devices("cpu", "all")


def test_a_second_search_on_the_cpu_is_warned_of_and_one_whose_process_has_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told = list[str]()
    with search_here("cpu", told.append), search_here("cuda", told.append):
        assert told == []
        with search_here("cpu", told.append):
            assert told == [f"another search on this CPU is running (pid {os.getpid()}): each disturbs the other's times"]
    killed = "import os; from evo.search.place import search_here as s; s('cpu', print).__enter__(); os.abort()"
    ended = run_python(tmp_path, "-c", killed, PYTHONPATH=str(Path(__file__).parents[2]))
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, "")
    with search_here("cpu", told.append):
        assert len(told) == 1
