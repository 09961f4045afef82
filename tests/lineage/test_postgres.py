"""The server that the tests start ends with them, however they end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from postgres import Server

PATIENCE_S = 60.0
PROGRAM = """
import time
from postgres import start_server
with start_server() as server:
    print(server.pid, server.socket_folder, flush=True)
    time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has asked about yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_test_session_leaves_no_server(server: Server) -> None:
    """server: only here to skip where there can be none."""
    session = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert session.stdout is not None
    number, folder = session.stdout.readline().split()
    pid = int(number)
    assert not gone(pid)
    session.kill()
    session.communicate()
    ends = time.monotonic() + PATIENCE_S
    while not gone(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    shutil.rmtree(folder)  # which nobody was left to do
    Path(folder).with_suffix(".log").unlink()
    assert gone(pid)
