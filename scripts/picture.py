"""docs/search.svg: a real search's live screen, as it stood late in the search, and what is printed at its end.

    python scripts/picture.py docs/search.svg layernorm --workload rows=4096,cols=4096,dtype=float16 --budget 20s

The arguments after the picture's path are those of `evo search`. The search writes its database wherever they or EVO_DB
say.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from evo.cli import run, search
from evo.problem.kernel import Workload
from evo.report import progress
from evo.report.progress import LiveScreen
from evo.report.terminal import Terminal
from evo.search.loop import Budget, Progress

_WIDTH = 112
_LATE = 0.7
"""Share of the budget after which the live screen is kept."""


class _Kept(LiveScreen):
    """Keeps what it showed late in the search; it is drawn on a terminal of its own."""

    body: Any = None

    def __init__(self, console: Console, title: str, workloads: tuple[Workload, ...], budget: Budget) -> None:
        super().__init__(Console(width=_WIDTH, force_terminal=True, file=sys.stderr), title, workloads, budget)

    def update(self, progress: Progress) -> None:
        super().update(progress)
        if progress.building + progress.measuring and (self.body is None or self._time_left(progress)[0] < _LATE):
            _Kept.body = self._live.renderable


def main() -> int:
    out, *arguments = sys.argv[1:]
    picture = Terminal(record=True, width=_WIDTH, force_terminal=True, file=io.StringIO(), color_system="truecolor")
    with patch.object(search, "make_console", lambda: picture), patch.object(progress, "LiveScreen", _Kept):
        code = run(["search", *arguments])
    ended = picture.export_text(styles=True).rstrip()  # forgets what was recorded
    picture.print(Text(f"$ {shlex.join(('evo', 'search', *arguments))}", style="bold"), soft_wrap=True)
    picture.print(_Kept.body)
    picture.print(Text("… when the time is up:\n", style="dim"))
    picture.print(Text.from_ansi(ended))
    # No font is fetched from elsewhere: a page may forbid it.
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code", "DejaVu Sans Mono")
    Path(out).write_text(picture.export_svg(title="evo", code_format=form))
    return code


if __name__ == "__main__":
    sys.exit(main())
