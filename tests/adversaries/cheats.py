"""Mistakes of a LayerNorm template, and what refuses each; and variants that are right, whose names begin with honest."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALL", "CHEATS", "HONEST", "Cheat", "names_for"]

_TOLERANCE = "outside the tolerance"
_UNWRITTEN = "NaN or were never written"
_LOST = "NaN or Inf of the reference are lost"
_OUTSIDE = "it depends on memory outside its inputs"
_TIMED = "in a timed call"


_DRAWN = (
    "wrong_without_bias_for_many_rows",
    "wrong_without_weight_for_many_rows",
    "wrong_with_weight_alone",
    "wrong_between_two_sizes",
    "wrong_beyond_the_small_sizes",
    "wrong_where_x_and_y_are_not_alike",
    "wrong_where_weight_is_not_aligned",
    "wrong_at_8_bytes",
    "wrong_where_many_rows_are_not_aligned",
    "wrong_for_another_eps",
    "wrong_for_a_large_eps_and_many_rows",
    "loses_nan_of_many_rows",
    "loses_inf_of_many_rows",
    "loses_minus_inf",
    "wrong_for_two_outliers",
    "wrong_for_large_weights",
    "wrong_for_large_results",
    "wrong_for_huge_numbers_in_many_rows",
    "wrong_for_tiny_numbers_in_many_rows",
    "wrong_behind_a_constant_row",
    "wrong_behind_a_row_with_nan",
)


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """A way of being wrong that a template can get into by accident.

    stage: where it must be refused: build, load, launch, gate (a case of the kernel's own), drawn (one of those, or a random
    one), timed, chance (a random case or the timing), neighbour, far (a case that only a winner meets, or a fault there).
    reason: part of the recorded reason. case: part of the case's name, if only one kind of case can show it. capability: the
    least compute capability, times ten, that has such a thing.
    """

    name: str
    stage: str = "gate"
    reason: str = _TOLERANCE
    case: str = ""
    targets: tuple[str, ...] = ("cpu", "cuda")
    capability: int = 0


CHEATS = (
    # Does not do the work.
    Cheat(name="writes_nothing", reason=_UNWRITTEN),
    Cheat(name="zeros"),
    Cheat(name="copies_input"),
    Cheat(name="fixed_statistics"),
    Cheat(name="sample_variance", reason=""),  # by a thousandth: which of the two rules sees it depends on the data
    Cheat(name="statistics_of_row_0"),
    Cheat(name="ignores_weight"),
    Cheat(name="ignores_bias"),
    Cheat(name="ignores_eps", case="eps="),
    # Leaves some of it out.
    Cheat(name="unwritten_last_element", reason="1 of"),
    Cheat(name="unwritten_last_row", reason=_UNWRITTEN),
    Cheat(name="uncounted_last_element"),
    # Is not exact enough, or not for everything.
    Cheat(name="raw_moments", reason=""),
    Cheat(name="half_accumulation"),
    Cheat(name="nan_is_zero", reason=_LOST, case="non_finite"),
    Cheat(name="loses_inf", reason=_LOST, case="non_finite"),
    Cheat(name="truncates", reason="as if not rounded to nearest", targets=("cuda",)),  # of 16 bits
    Cheat(name="flushes_denormals", case="tiny", targets=("cuda",)),  # denormal in float16
    Cheat(name="aligned_only", reason="1 of", case="offset="),
    Cheat(name="tuned_columns", stage="gate", reason="1 of", targets=("cpu",)),
    Cheat(name="tuned_columns", stage="neighbour", reason="", targets=("cuda",)),
    # Touches what is not its own.
    Cheat(name="changes_x", reason="input x was changed"),
    Cheat(name="changes_weight", reason="input weight was changed"),
    Cheat(name="writes_element_before", reason="memory outside output y was written"),
    Cheat(name="writes_element_after", reason="memory outside output y was written"),
    Cheat(name="writes_beside_input", reason="memory outside input x was written"),
    Cheat(name="reads_element_before", reason=f"(launch 2, in other memory); {_OUTSIDE}"),
    Cheat(name="reads_vector_after", reason=_OUTSIDE),
    Cheat(name="reads_weight_after", reason=_OUTSIDE),
    Cheat(name="reads_its_output", reason=_UNWRITTEN),
    Cheat(name="uninitialised_shared", reason="shared memory that it has not written", targets=("cuda",)),
    Cheat(name="reads_early", reason="read an input or wrote an output before", targets=("cuda",), capability=90),
    Cheat(name="writes_output_early", reason="wrote an output, workspace or", targets=("cuda",), capability=90),
    # Is right for tensors of fewer than 2^31, or 2^32, elements.
    Cheat(name="row_offset_is_int", stage="far", reason="", targets=("cuda",)),
    Cheat(name="row_offset_is_unsigned", stage="far", reason=_UNWRITTEN, case="far=rows", targets=("cuda",)),
    Cheat(name="output_offset_is_unsigned", stage="far", reason=_UNWRITTEN, case="far=rows", targets=("cuda",)),
    # Is not the same every time.
    Cheat(name="race", reason=""),
    Cheat(name="last_bit_wanders", reason="result differs between repeats (launch 2, in other memory)"),
    Cheat(name="right_at_first", reason="(launch 2, in other memory)"),
    Cheat(name="right_after_the_first", reason="right when launched again"),
    Cheat(name="right_for_one_pointer", reason="(launch 2, in other memory)"),
    Cheat(name="caches_by_pointer", reason="(launch 3, on other data in the same memory)"),
    Cheat(name="keeps_the_larger", reason="(launch 5, over the result of other data)"),
    # Is right in the gate, but not at the size that is timed: 96 rows are what only timings have.
    Cheat(name="unwritten_last_row_when_timed", stage="drawn", reason=""),  # where that row is to be NaN, it differs later
    Cheat(name="caches_by_pointer_when_timed", stage="timed", reason=_TIMED),
    Cheat(name="wrong_now_and_then_when_timed", stage="timed", reason=_TIMED, targets=("cpu",)),
    Cheat(name="wrong_now_and_then_when_timed", stage="chance", reason="", targets=("cuda",)),
    Cheat(name="right_for_the_first_set", stage="timed", reason=_TIMED, targets=("cpu",)),
    Cheat(
        name="reads_early_when_timed",
        stage="timed",
        reason="read an input or wrote an output before",
        targets=("cuda",),
        capability=90,
    ),
    Cheat(name="changes_x_when_timed", stage="drawn", reason="input x was changed"),
    Cheat(name="writes_far_when_timed", stage="drawn", reason="output y was written"),
    Cheat(name="overlaps_itself", stage="load", reason="start before it has ended", targets=("cuda",), capability=90),
    # Is wrong only where no case of the kernel's own looks: random ones of a finalist, at the latest, find it.
    *(Cheat(name=name, stage="drawn", reason="") for name in _DRAWN),
    # Is wrong for sizes beyond the timed one, or for what no distribution of one outlier a row has.
    *(
        Cheat(name=name, stage="drawn", reason="", targets=("cpu",))  # columns are compiled in elsewhere
        for name in (
            "wrong_beyond_8192_columns",
            "counts_columns_in_16_bits",
            "wrong_for_one_width",
            "wrong_for_a_tail_of_three",
            "wrong_for_one_column",
        )
    ),
    Cheat(name="counts_rows_in_16_bits", stage="drawn", reason=""),
    Cheat(name="wrong_for_one_number_of_rows", stage="drawn", reason=""),
    Cheat(name="drops_a_second_outlier_of_its_sign", stage="drawn", reason="", case="outlier"),
    Cheat(name="clamps_at_1e4", stage="drawn", reason=""),
    Cheat(name="wrong_between_two_columns", stage="drawn", reason="", targets=("cpu",)),
    Cheat(name="wrong_for_odd_columns_of_many_rows", stage="drawn", reason="", targets=("cpu",)),
    Cheat(name="wrong_for_one_thread", stage="drawn", reason="", targets=("cpu",)),
    Cheat(name="writes_beyond_the_guard", reason="memory outside output y was written"),
    Cheat(name="reads_beyond_the_guard", reason=_OUTSIDE),
    Cheat(name="reads_far_before", reason=_OUTSIDE),
    # Harms those after it.
    Cheat(name="takes_the_threads", stage="launch", reason="threads", targets=("cpu",)),
    Cheat(name="rounds_upward", stage="launch", reason="rounds", targets=("cpu",)),
    # Does not run.
    Cheat(name="does_not_compile", stage="build", reason="this candidate does not compile"),
    Cheat(name="has_no_entry_point", stage="load", reason="layernorm", targets=("cpu",)),
    Cheat(name="has_no_entry_point", stage="build", reason="no entry point", targets=("cuda",)),
    Cheat(name="too_much_shared_memory", stage="launch", reason="bytes of shared memory", targets=("cuda",)),
)

HONEST = (
    Cheat(name="honest", stage="", reason=""),
    Cheat(name="honest_backwards", stage="", reason=""),
    Cheat(name="honest_in_float", stage="", reason=""),
    Cheat(name="honest_in_parallel", stage="", reason="", targets=("cpu",)),
    Cheat(name="honest_with_a_team_of_its_own", stage="", reason="", targets=("cpu",)),
    Cheat(name="honest_and_patient", stage="", reason="", targets=("cuda",), capability=90),
)

ALL = (*HONEST, *CHEATS)


def names_for(target: str, capability: int, cheats: tuple[Cheat, ...] = ALL) -> tuple[Cheat, ...]:
    """What can be tried on a target; `capability` is 0 where it is no GPU."""
    return tuple(c for c in cheats if target in c.targets and (target != "cuda" or capability >= c.capability))
