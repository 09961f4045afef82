"""SQLite files that a disk has spoilt."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

PAGE = 4096


def leaf_pages(path: Path, table: str) -> list[int]:
    """Numbers of the pages that hold a table's rows, without the first and the root."""
    raw = sqlite3.connect(path)
    try:
        (root,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    finally:
        raw.close()
    data, found, waiting = path.read_bytes(), [], [root]
    while waiting:
        page = waiting.pop(0)
        start = (page - 1) * PAGE
        if data[start] in (5, 2):  # the inside of a tree of rows, or of keys
            cells = int.from_bytes(data[start + 3 : start + 5], "big")
            for i in range(cells):
                at = start + int.from_bytes(data[start + 12 + 2 * i : start + 14 + 2 * i], "big")
                waiting.append(int.from_bytes(data[at : at + 4], "big"))
            waiting.append(int.from_bytes(data[start + 8 : start + 12], "big"))
        else:
            found.append(page)
    return found


def spoil(path: Path, pages: list[int]) -> None:
    rng = random.Random(1)
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(rng.randbytes(PAGE))
