"""A time below what memory and arithmetic allow is refused, and an honest one never is."""

from __future__ import annotations

import pytest
import torch

from evo.measure.roofline import Roofline, RooflineGauge
from evo.problem.kernel import Cost
from evo.targets import find_target

RATES = Roofline(memory_bytes_per_s=1e9, cache_bytes_per_s=1e10, flops_per_s=1e12, margin=0.9)


@pytest.mark.parametrize(
    ("cost", "in_cache", "least_us"),
    [
        (Cost(bytes=1_000_000, flops=1), False, 1000.0),
        (Cost(bytes=1_000_000, flops=1), True, 100.0),
        (Cost(bytes=8, flops=2_000_000_000), False, 2000.0),
        (Cost(bytes=0, flops=0), True, 0.0),
    ],
)
def test_the_bound_is_the_slower_of_moving_and_computing_less_a_margin(
    cost: Cost, in_cache: bool, least_us: float
) -> None:
    assert RATES.us(cost, in_cache=in_cache) == pytest.approx(0.9 * least_us)


def test_a_time_below_the_bound_is_refused_with_what_it_would_have_to_move() -> None:
    cost = Cost(bytes=1_000_000, flops=5)
    assert RATES.refusal(900.0, cost, in_cache=False) == ""
    reason = RATES.refusal(10.0, cost, in_cache=False)
    assert reason.startswith("10 us is impossible: moving 1,000,000 bytes and computing 5 operations takes")
    assert reason.endswith("at least 900 us")


@pytest.mark.slow
def test_no_honest_operation_beats_the_roofline_of_this_machine() -> None:
    session = find_target("cpu").open()
    gauge = RooflineGauge(session)
    x = torch.randn(1 << 24)
    y = torch.empty_like(x)
    cost = Cost(bytes=2 * x.numel() * 4, flops=x.numel())
    replay = session.record([lambda: torch.neg(x, out=y)])
    assert gauge.refusal(min(replay.run_us() for _ in range(5)), cost, in_cache=False) == ""
    assert gauge.refusal(1.0, cost, in_cache=True)
