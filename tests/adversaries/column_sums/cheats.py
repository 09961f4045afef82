"""Mistakes with launches that follow one another and the workspace between them; and what is right."""

from __future__ import annotations

from tests.adversaries.cheats import Cheat

_WROTE = "wrote an output, workspace or an input before the kernel before it had ended"

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
    Cheat(name="honest_and_all_early", stage="", reason="", targets=("cuda",), capability=90),
    Cheat(name="reads_early", reason="read what launch 1 of a call writes", targets=("cuda",), capability=90),
    Cheat(name="writes_output_early", reason=_WROTE, targets=("cuda",), capability=90),
    Cheat(name="writes_workspace_early", reason=_WROTE, targets=("cuda",), capability=90),
    # The block that ends last adds the sums of all.
    Cheat(name="honest_finish", stage="", reason="", targets=("cuda",)),
    Cheat(name="finish_one_short", reason="blocks at a time", targets=("cuda",)),
    Cheat(name="finish_two_short", reason="blocks at a time", targets=("cuda",)),
    Cheat(name="finish_without_fence", stage="drawn", reason="without a fence", targets=("cuda",)),
    # In an order that chance makes.
    Cheat(name="sums_by_atomics", reason="another result when launched again", targets=("cuda",)),
)
