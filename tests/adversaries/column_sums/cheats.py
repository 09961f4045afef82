"""Mistakes with launches that follow one another and the workspace between them; and what is right."""

from __future__ import annotations

from tests.adversaries.cheats import Cheat

ALL = (
    Cheat(name="honest", stage="", reason=""),
    Cheat(name="honest_in_zeros", stage="", reason=""),
    Cheat(name="honest_and_early", stage="", reason="", targets=("cuda",), capability=90),
    Cheat(name="adds_to_what_is_there", reason="it depends on workspace that it has not written"),
    Cheat(name="keeps_earlier_sums", reason="(launch 3, on other data in the same memory)"),
    Cheat(name="writes_past_its_workspace", reason="memory outside workspace partial was written"),
    Cheat(name="writes_past_it_when_timed", stage="drawn", reason="workspace partial was written"),
    Cheat(name="adds_to_it_when_timed", stage="drawn", reason=""),
    Cheat(name="asks_for_too_much", stage="launch", reason="does not fit: out of memory"),
    Cheat(name="asks_for_less_than_nothing", stage="launch", reason="workspace partial cannot have -1 elements"),
    Cheat(name="names_no_entry_point", stage="launch", reason="no symbol 'missing'", targets=("cpu",)),
    Cheat(name="names_no_entry_point", stage="build", reason="no entry point 'missing'", targets=("cuda",)),
    Cheat(name="reads_early", reason="read what launch 1 of a call writes", targets=("cuda",), capability=90),
)
