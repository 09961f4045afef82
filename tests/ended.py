"""Commands run in this process or in one of their own, and how a command ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evo.cli import run as run_command

EVO = ("-c", "import tests.hurried, evo.cli; evo.cli.main()")
"""Python's arguments for a command that does not wait for a quiet machine, as in this process (tests/conftest.py)."""


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


def run_python(
    folder: Path, *arguments: str, timeout_s: float = 280.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a process of Python's, in a folder and with more in its environment, has said and ended with."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
