"""Mistakes of a kernel whose results are positions, bool and bytes; and what is right."""

from __future__ import annotations

from tests.adversaries.cheats import Cheat

_WRONG = "are wrong or were never written"

ALL = (
    Cheat(name="honest", stage="", reason=""),
    Cheat(name="honest_with_the_last_place", stage="", reason=""),
    Cheat(name="honest_with_the_two_exchanged", stage="", reason=""),
    # Of several positions, another than the kernel states.
    Cheat(name="last_of_equal", reason=f"indices: 67 of 67 elements {_WRONG}: 299 at [0] instead of 0", case="constant"),
    Cheat(name="lowest_lane_first", reason=_WRONG),  # two equal outliers may show it before repeated numbers do
    Cheat(name="last_nan", reason=_WRONG, case="repeated"),
    # Another position.
    Cheat(name="counts_from_1", reason=f"indices: 67 of 67 elements {_WRONG}"),
    Cheat(name="skips_the_last_column", reason=""),
    Cheat(name="ignores_nan", reason="", case="non_finite"),
    Cheat(name="minus_one_for_nan", reason=f"{_WRONG}: -1 at", case="non_finite"),
    Cheat(name="place_of_another", reason=f"place: 67 of 67 elements {_WRONG}"),
    Cheat(name="one_place_twice", reason="which stands there more than once", case="constant"),
    Cheat(name="the_two_exchanged", reason=f"largest_two: 134 of 134 elements {_WRONG}"),
    Cheat(name="place_past_the_end", reason="at [", case="non_finite"),
    Cheat(name="wrong_index_when_timed", stage="chance", reason="indices: 1 of "),
    # Other bytes than were asked for.
    Cheat(name="writes_32_of_64_bits", reason=f"indices: 67 of 67 elements {_WRONG}: -"),
    Cheat(name="one_32_bit_array", reason=f"indices: 67 of 67 elements {_WRONG}"),
    Cheat(name="true_is_two", reason="2 at ["),
    Cheat(name="nan_has_a_sign", reason="1 at [", case="non_finite"),
    # Leaves some of it as it was.
    Cheat(name="unwritten_last_index", reason=f"indices: 1 of 67 elements {_WRONG}"),
    Cheat(name="unwritten_last_peak", reason=f"peaks: 1 of 20100 elements {_WRONG}: 255 at [66, 299] instead of 0"),
    Cheat(name="writes_true_alone", reason=f"peaks: 20033 of 20100 elements {_WRONG}: 255 at [0, "),
    Cheat(name="unwritten_last_sign", reason=f"signs: 1 of 20100 elements {_WRONG}"),
    Cheat(name="unwritten_last_sign_when_timed", stage="chance", reason="signs: 1 of "),
    Cheat(name="keeps_the_larger_index", reason="(launch 5, over the result of other data)"),
    Cheat(name="writes_a_sign_too_far", reason=""),
)
