"""Every way in which attention is done wrong that is tried, and what is to be said of it; and honest variants."""

from __future__ import annotations

from tests.adversaries.cheats import Cheat

__all__ = ["ALL", "CHEATS", "HONEST"]

_TOLERANCE = "outside the tolerance"
_UNWRITTEN = "NaN or were never written"

CHEATS = (
    # Does not do the work.
    Cheat(name="averages_values"),
    Cheat(name="copies_the_first_value"),
    Cheat(name="ignores_scale"),
    Cheat(name="ignores_the_scale_option", case="scale="),
    Cheat(name="ignores_mask"),
    Cheat(name="first_head_for_all"),
    # Leaves some of it out.
    Cheat(name="drops_last_key"),
    Cheat(name="drops_last_channels_of_q"),
    Cheat(name="drops_last_channels_of_v", reason=_UNWRITTEN),
    Cheat(name="drops_last_query", reason=_UNWRITTEN),
    Cheat(name="forgets_lse", reason="lse: ", case="lse=True"),
    Cheat(name="counts_lse_in_twos", reason="lse: ", case="lse=True"),
    # Is wrong where few look.
    Cheat(name="dense_queries", case="layout="),
    Cheat(name="dense_keys", case="layout="),
    Cheat(name="dense_values", case="layout="),
    Cheat(name="dense_output", reason="", case="layout="),
    Cheat(name="mask_from_the_first_key"),
    Cheat(name="heads_in_turn_share_keys", case="2x4x2x"),
    Cheat(name="no_keys_no_number", reason=_UNWRITTEN, case="65x63"),
    # Is not exact enough, or not for everything.
    Cheat(name="never_rescales"),
    Cheat(name="never_rescales_the_sum"),
    Cheat(name="no_maximum", reason=""),
    Cheat(name="weights_of_16_bits", reason=""),
    Cheat(name="nan_is_zero", reason="NaN or Inf of the reference are lost", case="non_finite"),
    Cheat(name="rounds_the_maximum", reason="", case="huge_scores"),
    Cheat(name="rounds_the_maximum_where_halves_merge", reason="", case="huge_scores"),
    Cheat(name="scores_up_to_a_billion", reason="", case="huge_scores"),
    Cheat(name="clamps_results_at_10000", case="huge"),
    Cheat(name="groups_of_powers_of_two", case="1x6x2"),
    Cheat(name="a_lone_key_is_for_the_first_query", case="3x1"),
    Cheat(name="adds_the_mask", reason=_UNWRITTEN, case="non_finite"),
    # Is right for tensors of fewer than 2^31, or 2^32, elements.
    Cheat(name="int_for_queries", stage="far", reason="", case="far=q_"),
    Cheat(name="int_for_keys", stage="far", reason="", case="far=k_"),
    Cheat(name="int_for_values", stage="far", reason="", case="far=v_"),
    Cheat(name="int_for_output", stage="far", reason="", case="far=o_"),
    Cheat(name="unsigned_bytes_of_keys", stage="far", reason="", case="far=k_"),
    # Touches what is not its own.
    Cheat(name="reads_a_key_more", reason="it depends on memory outside its inputs"),
    Cheat(name="weighs_a_value_more_with_0", reason="it depends on memory outside its inputs"),
    Cheat(name="writes_a_row_more", reason="memory outside output o was written"),
)

HONEST = (
    Cheat(name="honest", stage="", reason=""),
    Cheat(name="honest_online", stage="", reason=""),
)

ALL = (*HONEST, *CHEATS)
