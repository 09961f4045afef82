"""A search in a notebook: one display, some frames of it, and in the end the lines alone."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evo.errors import EngineError, EvoError, UsageError
from evo.report.notebook import Cell, in_notebook
from evo.report.progress import LiveScreen
from evo.search.loop import Budget, Progress


class Display:
    """What IPython's `display` returns, and the data that it got."""

    def __init__(self) -> None:
        self.frames: list[dict[str, str]] = []
        self.made = 0

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Display:
        assert raw
        assert display_id
        self.made += 1
        self.frames.append(data)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.frames.append(data)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Display:
    found, module = Display(), ModuleType("IPython.display")
    module.display = found.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def test_a_search_has_one_display_that_ends_in_its_lines(shown: Display) -> None:
    cell = Cell()
    screen = LiveScreen(cell, "evo search <k>", ["4096"], Budget(seconds=9))
    cell.say("run it is resumed")
    with screen:
        screen.say("starting")
        for finished in range(200):
            screen.update(Progress(finished=finished, elapsed_s=1.0))
            time.sleep(0.003)
    assert shown.made == 1
    assert 3 <= len(shown.frames) <= 6, "not a frame for each update"
    assert "starting" in shown.frames[1]["text/plain"]
    assert "evo search &lt;k&gt;" in shown.frames[1]["text/html"]
    assert "candidates, " in shown.frames[-1]["text/plain"]
    cell.say("winner <abc>", "bold")
    assert shown.frames[-1]["text/plain"] == "run it is resumed\nwinner <abc>\n"
    assert '<span style="font-weight: bold">winner &lt;abc&gt;</span>' in shown.frames[-1]["text/html"]
    before = len(shown.frames)
    time.sleep(0.6)
    assert len(shown.frames) == before, "nothing draws any more"


def test_a_quiet_cell_shows_nothing(shown: Display) -> None:
    cell = Cell()
    cell.quiet = True
    cell.say("winner")
    assert shown.frames == []


@pytest.mark.parametrize(("kind", "expected"), [("ZMQInteractiveShell", True), ("TerminalInteractiveShell", False)])
def test_a_notebook_is_known_by_its_shell(kind: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shell: Any = type("Shell", (type(kind, (), {}),), {})()  # Colab's is of a class of its own
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
    assert "IPython" not in sys.modules


def test_ipython_shows_a_line_for_a_mistake_and_the_traceback_for_a_fault_of_evo() -> None:
    assert UsageError("no such \x1b[2J run")._render_traceback_() == ["UsageError: no such \\x1b[2J run"]
    assert EvoError("nothing passed")._render_traceback_() == ["EvoError: nothing passed"]
    with pytest.raises(EngineError) as raised:
        raise EngineError("unlikely")
    assert raised.value._render_traceback_()[0].startswith("Traceback")
    assert not hasattr(ValueError("x"), "_render_traceback_")
