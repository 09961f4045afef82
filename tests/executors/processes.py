"""Waiting for processes, and finding those that a test has started."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

PATIENCE_S = 200.0
"""Longest wait of a test for anything at all: the machine may be busy."""


def descendants() -> list[psutil.Process]:
    """Workers and the processes that they started: grandchildren, forked from a server that outlives every pool."""
    own = psutil.Process().pid
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.ppid() != own:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(happened: Callable[[], T], what: str) -> T:
    """The answer, once it is true: asked again, it may have passed."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)
    return found


def compilers() -> list[psutil.Process]:
    found = []
    for process in descendants():
        try:
            if process.name().startswith("cc1plus") or process.name().startswith("clang"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
