"""Whose processes are on the GPU beside ours."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from evo.targets._cuda_driver import strangers


def test_what_the_same_server_started_is_not_strange() -> None:
    """Children of this test's parent cannot be made here: a process asks about itself and its sibling instead."""
    script = (
        "import os, subprocess, sys\n"
        "from evo.targets._cuda_driver import strangers\n"
        "print(strangers([os.getpid(), int(sys.argv[1]), int(sys.argv[2])]))\n"
    )
    with ExitStack() as stack:
        sibling = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stack.callback(sibling.wait)
        assert sibling.stdin is not None
        stack.callback(sibling.stdin.close)
        found = subprocess.run(
            [sys.executable, "-c", script, str(sibling.pid), "1"], capture_output=True, text=True, check=True
        )
    assert found.stdout.split() == ["1"]  # the first process of all


def test_one_process_alone_has_nobody_beside_it() -> None:
    assert strangers([]) == 0
    assert strangers([os.getpid()]) == 0


def test_numbers_of_another_namespace_tell_nothing() -> None:
    with pytest.raises(LookupError):
        strangers([1])
