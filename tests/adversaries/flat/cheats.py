"""Mistakes of a kernel whose rows lie one behind the other in one dimension; and what is right."""

from __future__ import annotations

from tests.adversaries.cheats import Cheat

ALL = (
    Cheat(name="honest", stage="", reason=""),
    Cheat(name="honest_by_rows", stage="", reason="", targets=("cpu",)),
    Cheat(name="loses_nan", reason="", case="non_finite"),
    Cheat(name="loses_inf", reason="", case="non_finite"),
    Cheat(name="wrong_for_widths_of_no_power_of_two", reason=""),
    Cheat(name="wrong_for_odd_widths", reason=""),
    Cheat(name="loses_nan_and_wrong_for_widths_of_no_power_of_two", reason=""),
    Cheat(name="wrong_for_one_row", reason="", case="=1"),
    Cheat(name="wrong_for_many_rows", reason=""),
    Cheat(name="wrong_for_one_column", reason="", case="cols=1"),
    Cheat(name="aligned_only", reason="", case="offset="),
    Cheat(name="wrong_beyond_8192_columns", stage="drawn", reason=""),
    Cheat(name="counts_rows_in_16_bits", stage="drawn", reason=""),
    Cheat(name="counts_columns_in_16_bits", stage="drawn", reason=""),
)
