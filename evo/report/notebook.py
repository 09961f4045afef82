"""A search in a notebook: one display below the cell, which is drawn anew while it runs, and ends in the lines that a
terminal keeps. IPython is asked only where a notebook runs."""

import contextvars
import io
import sys
import threading
from importlib import import_module
from typing import Any

from rich.console import RenderableType

from evo.report.terminal import Terminal

_EVERY_S = 0.5
_WIDTH = 110
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,monospace">{}</pre>'


def in_notebook() -> bool:
    """Whether the display of this process is a notebook's: that of Jupyter, VS Code or Colab."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class Cell(Terminal):
    """A console whose lines are one display below a notebook's cell."""

    def __init__(self) -> None:
        super().__init__(
            file=io.StringIO(), record=True, force_terminal=True, force_jupyter=False, color_system="truecolor",
            width=_WIDTH, markup=False, emoji=False,
        )  # fmt: skip
        self._text, self._html, self._shown = "", "", ""
        self._display: Any = None
        self._turn = threading.RLock()
        """Lines and screens come from several threads."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self._turn:
            self._text, self._html = self._with(*objects, **options)
            self._show(self._text, self._html)

    def draw(self, body: RenderableType) -> None:
        """Shows a screen below the lines, in place of the last one."""
        with self._turn:
            self._show(*self._with(body))

    def _with(self, *objects: Any, **options: Any) -> tuple[str, str]:
        """The lines and what is printed below them, as text and as HTML."""
        super().print(*objects, **options)
        text = self.export_text(clear=False)
        return self._text + text, self._html + self.export_html(inline_styles=True, code_format="{code}")

    def _show(self, text: str, html: str) -> None:
        if self.quiet or html == self._shown:
            return
        self._shown, data = html, {"text/plain": text, "text/html": _PAGE.format(html)}
        if self._display is None:
            self._display = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


class CellLive:
    """What rich's Live is for a terminal: draws a screen twice a second, so that a notebook does not get every frame."""

    def __init__(self, cell: Cell) -> None:
        self._cell, self._over = cell, threading.Event()
        self._body: RenderableType | None = None
        # The thread's messages belong to the cell that runs: what tells so is a context variable.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._keep,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def update(self, body: RenderableType, *, refresh: bool = False) -> None:
        first, self._body = self._body is None, body
        if first:
            self._draw()

    def _keep(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        if self._body is not None:
            self._cell.draw(self._body)
