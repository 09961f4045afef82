"""A time below what memory and arithmetic allow is refused, and an honest one never is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from evo.measure import roofline
from evo.problem.kernel import Cost
from evo.targets import find_target

RATES = {"memory": 1e9, "cache": 1e10, "flops": 1e12}
"""Bytes and operations a second. Half of the bound that follows is still believed on a CPU."""


@pytest.mark.parametrize(
    ("cost", "in_cache", "least_us"),
    [
        (Cost(bytes=1_000_000, flops=1), False, 1000.0),
        (Cost(bytes=1_000_000, flops=1), True, 100.0),
        (Cost(bytes=8, flops=2_000_000_000), False, 2000.0),
        (Cost(bytes=0, flops=0), True, 0.0),
    ],
)
def test_a_time_below_what_moving_and_computing_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, cost: Cost, in_cache: bool, least_us: float
) -> None:
    monkeypatch.setattr(roofline, "_rates", lambda session: tuple(RATES.values()))
    gauge = roofline.Roofline(find_target("cpu").open())
    assert gauge.refusal(0.51 * least_us, cost, in_cache=in_cache) == ""
    if least_us:
        reason = gauge.refusal(0.49 * least_us, cost, in_cache=in_cache)
        assert f"impossible: moving {cost.bytes:,} bytes and computing {cost.flops:,} operations takes" in reason
        assert reason.endswith(f"at least {0.5 * least_us:.3g} us")


def test_rates_that_a_busy_machine_disturbed_refuse_no_honest_operation() -> None:
    session = find_target("cpu").open()
    x = torch.randn(512, 512)
    y = torch.empty_like(x)
    product = Cost(bytes=3 * x.numel() * 4, flops=2 * 512**3)
    replay = session.record([lambda: torch.mm(x, x, out=y)])
    threads, spinning = torch.get_num_threads(), [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spinning) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        gauge = roofline.Roofline(session)
        gauge._rates = (1e6, 1e6, 1e6)
        assert gauge.refusal(min(replay.run_us() for _ in range(9)), product, in_cache=False) == ""
        assert gauge.refusal(1.0, product, in_cache=False), "what cannot be is refused here, too"
    finally:
        for other in others:
            other.kill()
            other.wait()
        replay.close()
    assert torch.get_num_threads() == threads
