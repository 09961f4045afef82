"""Mistakes with offsets that no small, dense tensor shows; and what is right."""

from __future__ import annotations

from tests.adversaries.cheats import Cheat

ALL = (
    Cheat(name="honest", stage="", reason=""),
    Cheat(name="honest_by_pointers", stage="", reason=""),
    Cheat(name="batch_stride_is_int", stage="far", reason="", case="far=x_batch"),
    Cheat(name="head_stride_is_int", stage="far", reason="", case="far=x_head"),
    Cheat(name="row_stride_is_int", stage="far", reason="", case="far=x_row"),
    Cheat(name="offset_is_unsigned", stage="far", reason="", case="far=x_"),
    Cheat(name="bytes_are_unsigned", stage="far", reason="", case="far=x_"),
    Cheat(name="steps_are_int", stage="far", reason="", case="far=x_row"),
    Cheat(name="mask_offset_is_int", stage="far", reason="", case="far=mask_"),
    Cheat(name="mask_offset_is_unsigned", stage="far", reason="", case="far=mask_"),
    Cheat(name="mask_column_is_int", stage="far", reason="", case="far=mask_col"),
    Cheat(name="output_offset_is_int", stage="far", reason="", case="far=y_"),
    Cheat(name="output_offset_is_unsigned", stage="far", reason="NaN or were never written", case="far=y_"),
)
