"""Commands run in this process, and how a command ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from evo.cli import run as run_command


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on stderr."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("evo: ")
        return lines[0]

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    capsys.readouterr()
    code = run_command(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return Ended(code, captured.out, captured.err)
